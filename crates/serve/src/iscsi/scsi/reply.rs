//! The result of a command.

use super::sense::{Failure, ScsiStatus, Sense};

/// The data of a command for the initiator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DataIn {
    Bytes(Vec<u8>),
    /// Bytes of the device, which are read directly into the buffer to be sent.
    Device {
        offset: u64,
        length: u64,
    },
}

impl DataIn {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Device { length, .. } => *length,
        }
    }
}

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandResult {
    pub(crate) status: ScsiStatus,
    pub(crate) sense: Option<Sense>,
    pub(crate) data: DataIn,
}

impl CommandResult {
    pub(crate) fn good(data: DataIn) -> Self {
        Self {
            status: ScsiStatus::Good,
            sense: None,
            data,
        }
    }

    pub(crate) fn status(status: ScsiStatus) -> Self {
        Self {
            status,
            ..Self::good(DataIn::Bytes(Vec::new()))
        }
    }

    pub(crate) fn check(sense: Sense) -> Self {
        Self {
            sense: Some(sense),
            ..Self::status(ScsiStatus::CheckCondition)
        }
    }
}

impl From<Failure> for CommandResult {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Check(sense) => Self::check(sense),
            Failure::Reserved => Self::status(ScsiStatus::ReservationConflict),
        }
    }
}

/// The first `length` bytes of `data`.
pub(super) fn truncated(mut data: Vec<u8>, length: usize) -> Vec<u8> {
    data.truncate(length);
    data
}
