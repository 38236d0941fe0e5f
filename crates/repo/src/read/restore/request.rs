//! The request and the report of a restore.

use holdfast_block::BlockDeviceMut;

/// What the target holds before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetState {
    /// Zeroes only: a new sparse file. Zeroes are not written.
    Zeroed,
    /// Anything, and all of it is written over.
    Unknown,
    /// Mostly the same: the target is read, and only what differs is written. Where the target has what the print of a
    /// stored block says, the repository is not even read.
    Similar,
}

/// What to restore, and how.
pub struct RestoreRequest<'a> {
    /// Where the bytes go; at least as large as the disk.
    pub target: &'a dyn BlockDeviceMut,
    /// Its name, for messages.
    pub target_name: String,
    /// What it holds before.
    pub state: TargetState,
    /// Threads that compute at the same time; with none, everything is done by the caller, in a fixed order.
    pub thread_count: usize,
}

/// What a restore did, in bytes of the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoreReport {
    /// Bytes written to the target.
    pub written_bytes: u64,
    /// Bytes that the target had already.
    pub equal_bytes: u64,
    /// Bytes of zero, written or not.
    pub zero_bytes: u64,
    /// Bytes of frames that were decoded.
    pub decoded_bytes: u64,
}
