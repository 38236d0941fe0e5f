//! Where the content of restored disks comes from: a repository, or host snapshots.

use std::path::Path;

use holdfast_block::BlockDevice;
use holdfast_repo::{DiskRecord, Repository};

use super::target::{DiskTarget, RestoredDisk};
use crate::job::{Job, Result};

/// The disks of a point in time.
pub(crate) trait StoredContents: Sync {
    /// Opens a disk for reading.
    fn device(&self, record: &DiskRecord) -> Result<Box<dyn BlockDevice + '_>>;

    /// Writes a disk to a target; all of it is durable when this returns.
    fn write(&self, record: &DiskRecord, target: &DiskTarget<'_>, job: Job<'_>) -> Result<RestoredDisk>;

    /// The path of a disk in a clone of its dataset, which exists when it is needed.
    fn cloned(&self, _record: &DiskRecord) -> Option<&Path> {
        None
    }

    /// Whether a new file in `folder` can share the blocks of a disk.
    fn can_share(&self, _record: &DiskRecord, _folder: &Path) -> bool {
        false
    }

    /// Creates a new file that shares the blocks of a disk.
    fn share(&self, _record: &DiskRecord, _path: &Path) -> Result<()> {
        unreachable!("only what can be shared is planned to be")
    }
}

impl StoredContents for Repository {
    fn device(&self, record: &DiskRecord) -> Result<Box<dyn BlockDevice + '_>> {
        Ok(Box::new(self.device(record)))
    }

    fn write(&self, record: &DiskRecord, target: &DiskTarget<'_>, job: Job<'_>) -> Result<RestoredDisk> {
        target.write(self, record, job)
    }
}
