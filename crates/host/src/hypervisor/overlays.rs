//! Overlays of disks, and their commit into the image below while the machine runs.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use crate::hypervisor::error::Result;

/// A hypervisor that tracks the backing chains of its machines' disks, so that all changes of them must be made
/// through it.
///
/// Machines are given by name or UUID, disks by target.
pub trait Overlays: Send + Sync {
    /// The overlays that belong to snapshots of the hypervisor.
    fn snapshot_files(&self, machine: &str) -> Result<Vec<PathBuf>>;

    /// Creates a new overlay on each named disk, all at one point in time. The image below is no longer written. The
    /// overlays are recorded only in the machine's configuration. `others` are the disks of the machine that are
    /// unchanged.
    fn begin_overlays(&self, machine: &str, overlays: &[(String, PathBuf)], others: &[String]) -> Result<()>;

    /// Starts to commit everything above `base` into it, limited to `rate` bytes per second. The machine continues to
    /// run, and its writes go to both images.
    fn begin_commit(&self, machine: &str, disk: &str, base: &Path, rate: Option<NonZeroU64>) -> Result<()>;

    /// Removes the rate limit of a commit.
    fn unthrottle_commit(&self, machine: &str, disk: &str) -> Result<()>;

    /// The progress of the commit of a disk; none if no commit runs.
    fn commit_progress(&self, machine: &str, disk: &str) -> Result<Option<CommitProgress>>;

    /// Switches the machine to the base, after a complete commit.
    fn pivot(&self, machine: &str, disk: &str) -> Result<()>;

    /// Cancels a commit. The machine continues to use its overlay.
    fn abandon_commit(&self, machine: &str, disk: &str) -> Result<()>;
}

/// The progress of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommitProgress {
    /// Bytes committed.
    pub done_bytes: u64,
    /// Bytes to commit in total. The number grows while the machine writes.
    pub total_bytes: u64,
}

impl CommitProgress {
    /// Whether the base contains all data, so that the machine can be switched to it.
    pub fn is_complete(self) -> bool {
        self.total_bytes > 0 && self.done_bytes == self.total_bytes
    }
}
