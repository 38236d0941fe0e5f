//! The target that a disk is written to.

use std::path::{Path, PathBuf};

use holdfast_block::BlockDeviceMut;
use holdfast_image::Format;
use holdfast_repo::{DiskRecord, Repository, TargetState};

use crate::job::{Counting, Error, Job, Result};

/// A disk that was restored.
#[derive(Debug, Clone)]
pub struct RestoredDisk {
    /// Its name.
    pub name: String,
    /// The target path; none for a stream.
    pub target: Option<PathBuf>,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes that the target already had.
    pub equal_bytes: u64,
    /// Zero bytes, written or not.
    pub zero_bytes: u64,
}

/// The target that a disk is written to.
pub(crate) struct DiskTarget<'a> {
    /// The path of the target.
    pub(crate) path: &'a Path,
    /// The opened target.
    pub(crate) device: &'a dyn BlockDeviceMut,
    /// The target's content before the restore.
    pub(crate) state: TargetState,
    /// The format, if it is an image.
    pub(crate) format: Option<Format>,
}

impl DiskTarget<'_> {
    /// Writes a disk; all of it is durable when this returns.
    pub(crate) fn write(&self, repository: &Repository, disk: &DiskRecord, job: Job<'_>) -> Result<RestoredDisk> {
        self.check_size(disk)?;
        let restored = self
            .transfer(repository, disk, job)
            .inspect_err(|_| self.warn_of_mixture(job))?;
        self.warn_of_spare(disk, job);
        Ok(restored)
    }

    /// Counts what [`DiskTarget::write`] would write, with a device that discards writes.
    pub(crate) fn count(&self, repository: &Repository, disk: &DiskRecord, job: Job<'_>) -> Result<RestoredDisk> {
        self.check_size(disk)?;
        self.transfer(repository, disk, job)
    }

    fn transfer(&self, repository: &Repository, disk: &DiskRecord, job: Job<'_>) -> Result<RestoredDisk> {
        let request = holdfast_repo::RestoreRequest {
            target: self.device,
            target_name: self.path.display().to_string(),
            state: self.state,
            thread_count: job.thread_count,
        };
        let report = repository.restore(&repository.device(disk), &request, &job.watch(Counting::Bytes))?;
        Ok(RestoredDisk {
            name: disk.name.clone(),
            target: Some(self.path.to_owned()),
            size_bytes: disk.size_bytes,
            written_bytes: report.written_bytes,
            equal_bytes: report.equal_bytes,
            zero_bytes: report.zero_bytes,
        })
    }

    /// Refuses a target that is too small, before anything is written.
    pub(crate) fn check_size(&self, disk: &DiskRecord) -> Result<()> {
        let target_bytes = self.device.size_bytes();
        if target_bytes >= disk.size_bytes {
            return Ok(());
        }
        Err(Error::TargetTooSmall {
            path: self.path.to_owned(),
            target_bytes,
            disk_bytes: disk.size_bytes,
        })
    }

    /// Warns that bytes behind the end of the disk do not belong to it.
    pub(crate) fn warn_of_spare(&self, disk: &DiskRecord, job: Job<'_>) {
        let spare_bytes = self.device.size_bytes().saturating_sub(disk.size_bytes);
        // A new image has whole sectors; its last one is padded with zeroes.
        if spare_bytes > 0 && self.state != TargetState::Zeroed {
            job.progress.warning(&format!(
                "{} is larger than disk {}: its last {spare_bytes} bytes were left as they were",
                self.path.display(),
                disk.name
            ));
        }
    }

    /// Warns about an incomplete restore in place: an incomplete new file was deleted, but an existing target now has
    /// neither its old nor its new content.
    pub(crate) fn warn_of_mixture(&self, job: Job<'_>) {
        if self.state != TargetState::Zeroed {
            job.progress.warning(&format!(
                "{} holds a part of the snapshot over what it held before: restore again before it is used",
                self.path.display()
            ));
        }
    }
}
