//! Errors of the repository.

use crate::id::{SnapshotId, WriterId};
use crate::key::KeyError;
use crate::store::{ObjectName, StoreError};
use crate::wire::Malformed;

/// Result of an operation on a repository.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a repository.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store could not do what was asked.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An object of the repository is not what was written: damaged, exchanged, or forged.
    #[error("{object} is damaged at byte {offset}: {detail}")]
    Damaged {
        /// The object.
        object: ObjectName,
        /// Where in the object, in bytes.
        offset: u64,
        /// What does not hold.
        detail: String,
    },
    /// An object was written by a later release of Holdfast.
    #[error("{object} has format version {found}; this program reads up to version {supported}")]
    FutureVersion {
        /// The object.
        object: ObjectName,
        /// Its version.
        found: u32,
        /// The latest version that this program knows.
        supported: u32,
    },
    /// There is no repository at the store.
    #[error("{store} is not a repository")]
    NotARepository {
        /// The store, as it describes itself.
        store: String,
    },
    /// There is something at the store already.
    #[error("{store} already holds a repository")]
    AlreadyARepository {
        /// The store, as it describes itself.
        store: String,
    },
    /// No key slot opens with what was given.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// There is no such snapshot (any more).
    #[error("there is no snapshot {id}")]
    NoSnapshot {
        /// The snapshot.
        id: SnapshotId,
    },
    /// The snapshot is kept from being removed.
    #[error("snapshot {id} is protected")]
    Protected {
        /// The snapshot.
        id: SnapshotId,
    },
    /// The snapshot has no such disk.
    #[error("snapshot {id} has no disk \"{disk}\"; it has {}", disks.join(", "))]
    NoDisk {
        /// The snapshot.
        id: SnapshotId,
        /// What was asked for.
        disk: String,
        /// What there is.
        disks: Vec<String>,
    },
    /// Data of a snapshot is in no pack and in no relocation: it is lost.
    #[error("pack {pack} is missing")]
    MissingPack {
        /// The pack.
        pack: crate::id::PackId,
    },
    /// Another process has the repository for an exclusive operation.
    #[error("{what} is running: {who}")]
    Locked {
        /// What runs.
        what: &'static str,
        /// Where, and since when.
        who: String,
    },
    /// This writer was taken for dead, and the space of what it wrote may be given back; nothing was committed.
    #[error("writer {writer} was revoked while it worked; its snapshot was not committed")]
    Revoked {
        /// The writer.
        writer: WriterId,
    },
    /// The device that is backed up, or restored to, failed.
    #[error("{role} {name}")]
    Device {
        /// "source" or "target".
        role: &'static str,
        /// The disk's name.
        name: String,
        /// The device's error.
        source: holdfast_block::Error,
    },
    /// The stream that is backed up failed.
    #[error("source {name}")]
    Stream {
        /// The disk's name.
        name: String,
        /// The stream's error.
        source: std::io::Error,
    },
    /// What is copied from another repository cannot be read there.
    #[error("disk {disk} of the snapshot that is copied")]
    Origin {
        /// The disk's name.
        disk: String,
        /// The other repository's error.
        source: Box<Error>,
    },
    /// The target is too small.
    #[error("the target has {target_bytes} bytes, the disk has {disk_bytes}")]
    TargetTooSmall {
        /// Size of the target in bytes.
        target_bytes: u64,
        /// Size of the disk in bytes.
        disk_bytes: u64,
    },
    /// Something was lost, and what may bring it back is not deleted until that is explained or accepted.
    #[error(
        "something was lost, and nothing is deleted that may bring it back: {}",
        crate::losses::describe(losses)
    )]
    Loss {
        /// What was lost.
        losses: Vec<crate::losses::Loss>,
    },
    /// A limit of the format.
    #[error("{what}: {value} is over the limit of {limit}")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// The operation was cancelled by its caller.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Decoded bytes of `object` that begin at `start` make no sense.
    pub(crate) fn malformed(object: &ObjectName, start: u64, what: &'static str, malformed: Malformed) -> Self {
        Self::Damaged {
            object: object.clone(),
            offset: start,
            detail: format!("{what} {} (byte {} of it)", malformed.problem, malformed.position),
        }
    }

    pub(crate) fn damaged(object: &ObjectName, offset: u64, detail: impl Into<String>) -> Self {
        Self::Damaged {
            object: object.clone(),
            offset,
            detail: detail.into(),
        }
    }

    /// Whether one object cannot be used while others may well be: it is damaged, or says that a later release wrote it,
    /// which is also what a damaged byte in the right place says.
    pub(crate) fn is_about_one_object(&self) -> bool {
        self.is_damage() && !matches!(self, Self::Loss { .. })
            || matches!(self, Self::FutureVersion { .. } | Self::Key(KeyError::Version { .. }))
    }

    /// Whether the medium failed to give what it has, for good.
    pub(crate) fn is_unreadable(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_of_medium())
    }

    /// Whether bytes that were stored are lost or wrong.
    pub fn is_damage(&self) -> bool {
        if let Self::Origin { source, .. } = self {
            return source.is_damage();
        }
        matches!(
            self,
            Self::Damaged { .. }
                | Self::MissingPack { .. }
                | Self::Loss { .. }
                | Self::Store(
                    StoreError::ShortObject { .. } | StoreError::TooLarge { .. } | StoreError::NotAnObject { .. }
                )
                | Self::Key(
                    KeyError::Damaged { .. } | KeyError::WrongKeyOrDamaged { .. } | KeyError::WrongPurpose { .. }
                )
        )
    }
}
