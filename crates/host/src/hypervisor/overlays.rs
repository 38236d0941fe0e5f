//! Disks on overlays, and the way back: what is in an overlay goes into the image below, while the machine runs.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use crate::hypervisor::error::Result;

/// A hypervisor that keeps track of what its machines' disks are based on, and has to be the one who changes that.
///
/// Machines are named by their name or UUID, disks by their target.
pub trait Overlays: Send + Sync {
    /// The overlays that belong to snapshots of the hypervisor itself.
    fn snapshot_files(&self, machine: &str) -> Result<Vec<PathBuf>>;

    /// Puts each disk that is named on a new overlay, all at one instant; what they were on is not written any more. Nobody but
    /// the machine's configuration knows of it. `others` are the machine's disks that stay as they are.
    fn begin_overlays(&self, machine: &str, overlays: &[(String, PathBuf)], others: &[String]) -> Result<()>;

    /// Begins to bring everything above `base` down into it, at most so many bytes each second; the machine runs on, and writes
    /// go to both.
    fn begin_commit(&self, machine: &str, disk: &str, base: &Path, rate: Option<NonZeroU64>) -> Result<()>;

    /// Lets a commit go on as fast as it can.
    fn hurry_commit(&self, machine: &str, disk: &str) -> Result<()>;

    /// How far the commit of a disk is; none where there is none.
    fn commit_progress(&self, machine: &str, disk: &str) -> Result<Option<CommitProgress>>;

    /// Puts the machine onto the base, which holds everything by now.
    fn pivot(&self, machine: &str, disk: &str) -> Result<()>;

    /// Ends a commit without result: the machine stays on its overlay.
    fn abandon_commit(&self, machine: &str, disk: &str) -> Result<()>;
}

/// How far a commit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommitProgress {
    /// Bytes that are done.
    pub done_bytes: u64,
    /// Bytes that are to be done, which become more as the machine writes.
    pub total_bytes: u64,
}

impl CommitProgress {
    /// Whether the base holds everything, so that the machine can go over.
    pub fn is_complete(self) -> bool {
        self.total_bytes > 0 && self.done_bytes == self.total_bytes
    }
}
