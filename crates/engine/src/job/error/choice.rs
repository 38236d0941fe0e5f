//! A name does not select a snapshot to remove or unprotect.

use holdfast_repo::SnapshotId;

/// Why a name does not select a snapshot to remove or unprotect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotChoiceError {
    /// A snapshot to remove must be named so that the name means the same snapshot later.
    #[error("this name selects the newest snapshot of {machine}, which is now {id}")]
    NotExact {
        /// The snapshot.
        id: SnapshotId,
        /// Its machine.
        machine: String,
    },
    /// A snapshot to unprotect is not protected.
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
        /// The first digits of their ids.
        ids: Vec<String>,
    },
}
