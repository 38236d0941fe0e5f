//! Snapshots that are removed while a job reads them.
//!
//! Most readers do not prevent the removal of a snapshot. Once gc has deleted its packs they are missing, which is
//! damage only if the snapshot still exists. Long jobs pause gc instead.

use holdfast_block::Error as DeviceError;
use holdfast_image::Error as ImageError;
use holdfast_repo::{Error as RepositoryError, GcPause, Repository, SnapshotId};

use crate::job::{Error, Progress};

/// Prevents gc from deleting the data of snapshots that are removed from now on. None if the repository is read-only:
/// then no gc can run on it from this host.
pub(crate) fn keep_readable<'a>(repository: &'a Repository, progress: &dyn Progress) -> Option<GcPause<'a>> {
    repository
        .pause_gc()
        .map_err(|error| {
            progress.note(&format!(
                "gc may delete the data of snapshots that are removed during this job: {error}"
            ));
        })
        .ok()
}

impl Error {
    /// Returns this error of a job that read `snapshot`, or "no such snapshot" if the snapshot was removed meanwhile.
    pub(crate) fn unless_removed(self, repository: &Repository, snapshot: SnapshotId) -> Self {
        if !self.is_missing_pack() {
            return self;
        }
        match repository.snapshot(snapshot) {
            Err(error @ RepositoryError::NoSnapshot { .. }) => error.into(),
            _ => self,
        }
    }

    fn is_missing_pack(&self) -> bool {
        match self {
            Self::Repository(error) => matches!(error, RepositoryError::MissingPack { .. }),
            Self::Device(DeviceError::Layer(error)) | Self::Image(ImageError::Device(DeviceError::Layer(error))) => {
                matches!(
                    error.downcast_ref::<RepositoryError>(),
                    Some(RepositoryError::MissingPack { .. })
                )
            }
            _ => false,
        }
    }
}
