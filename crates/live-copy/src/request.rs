//! What a sender asks of a receiver before the first frame: a line of JSON, and a line as the answer.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Limit of the line of a request.
pub(crate) const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Limit of the line of an answer.
pub(crate) const READY_BYTES_MAX: u64 = 64 << 10;

/// The target that a receiver is to fill.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiveRequest {
    /// A file that will be created, or a block device: an absolute path at the receiver.
    pub target: PathBuf,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Bytes of the disk that are expected to take space.
    pub expected_bytes: u64,
    /// What happens to a target that exists.
    pub existing: ExistingTarget,
    /// What happens to an interrupted copy.
    pub interrupted: InterruptedCopy,
}

/// What happens to a target that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExistingTarget {
    /// The copy is refused.
    Refuse,
    /// A file is replaced when the copy is complete; a block device is overwritten at once.
    Replace,
}

/// What happens to an interrupted copy to the same target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InterruptedCopy {
    /// It continues, if it is of the same source.
    Continue,
    /// It is deleted.
    Delete,
}

/// The answer of a receiver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Answer {
    /// Frames may follow.
    Ready {},
    /// The target cannot be used.
    Refused { kind: RefusalKind, reason: String },
}

/// Why a target cannot be used, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalKind {
    /// It exists.
    Exists,
    /// It has not enough space, or is too small.
    NoSpace,
    /// It is used by another process.
    Locked,
    /// It holds an interrupted copy of something else.
    OtherCopy,
    /// It is not allowed, or not a file or block device.
    NotAllowed,
    /// The sides do not understand each other.
    OtherVersion,
    /// The system refuses it.
    #[serde(other)]
    Io,
}
