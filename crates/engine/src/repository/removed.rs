//! Snapshots that are removed while a job reads them.
//!
//! Readers keep no snapshot from being removed. Once gc has deleted its packs they are missing, which is damage only where the snapshot
//! is still there.

use holdfast_block::Error as DeviceError;
use holdfast_image::Error as ImageError;
use holdfast_repo::{Error as RepositoryError, Repository, SnapshotId};

use crate::job::Error;

impl Error {
    /// This error of a job that read `snapshot`; that there is no such snapshot where it was removed meanwhile.
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
