//! A device that is offered to clients, and what they may do with it.

use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut};

/// The device of an export. The variant decides what clients may do.
#[derive(Clone)]
pub enum ExportDevice {
    /// Clients can read.
    ReadOnly(Arc<dyn BlockDevice>),
    /// Clients can read and write.
    Writable(Arc<dyn BlockDeviceMut>),
}

impl ExportDevice {
    pub(crate) fn reader(&self) -> &dyn BlockDevice {
        match self {
            Self::ReadOnly(device) => &**device,
            Self::Writable(device) => &**device,
        }
    }

    pub(crate) fn writer(&self) -> Option<&dyn BlockDeviceMut> {
        match self {
            Self::ReadOnly(_) => None,
            Self::Writable(device) => Some(&**device),
        }
    }
}

/// The meaning of [`ExtentKind::Absent`](holdfast_block::ExtentKind::Absent) for the device of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Absent {
    /// A lower layer may hold data: reported to clients as data.
    #[default]
    MayHoldData,
    /// There is no lower layer: reported as a hole that reads as zero.
    ReadsAsZero,
}
