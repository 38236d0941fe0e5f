//! The request and the report of a restore.

use holdfast_block::BlockDeviceMut;

/// The previous content of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetState {
    /// Zeroes only: a new sparse file. Zeroes are not written.
    Zeroed,
    /// Unknown; all of it is overwritten.
    Unknown,
    /// Mostly the same: the target is read, and only differences are written. If a block of the target matches the
    /// print of the stored block, the repository is not even read.
    Similar,
}

/// Options of a restore.
pub struct RestoreRequest<'a> {
    /// The target; at least as large as the disk.
    pub target: &'a dyn BlockDeviceMut,
    /// Its name, for messages.
    pub target_name: String,
    /// Its previous content.
    pub state: TargetState,
    /// Number of computing threads; with 0 the caller does everything, in a fixed order.
    pub thread_count: usize,
}

/// The result of a restore, in bytes of the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoreReport {
    /// Bytes written to the target.
    pub written_bytes: u64,
    /// Bytes that the target already had.
    pub equal_bytes: u64,
    /// Bytes of zero, written or not.
    pub zero_bytes: u64,
    /// Bytes of frames that were decoded.
    pub decoded_bytes: u64,
}
