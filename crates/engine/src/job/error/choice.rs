//! A name does not select a snapshot to remove or unprotect.

use holdfast_repo::SnapshotId;

/// Why a name does not say which snapshot is to be removed or unprotected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotChoiceError {
    /// A snapshot that is to be removed must be named so that the name means it tomorrow as well.
    #[error("this name means the newest snapshot of {machine}, which is {id} today")]
    NotExact {
        /// The snapshot.
        id: SnapshotId,
        /// Its machine.
        machine: String,
    },
    /// A snapshot that is to be unprotected is not protected.
    #[error("snapshot {id} of {machine} is not protected")]
    NotProtected {
        /// The snapshot.
        id: SnapshotId,
        /// Its machine.
        machine: String,
    },
    /// A machine has no protected snapshot.
    #[error("no snapshot of {machine} is protected")]
    NoneProtected {
        /// The machine.
        machine: String,
    },
    /// A machine has several protected snapshots.
    #[error("{machine} has several protected snapshots: {}", ids.join(", "))]
    SeveralProtected {
        /// The machine.
        machine: String,
        /// The starts of their ids.
        ids: Vec<String>,
    },
}
