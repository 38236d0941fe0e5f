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
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An object of the repository is not as it was written: damaged, exchanged, or forged.
    #[error("{object} is damaged at byte {offset}: {detail}")]
    Damaged {
        /// The object.
        object: ObjectName,
        /// Byte offset in the object.
        offset: u64,
        /// A description of the problem.
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
    /// There is no repository in the store.
    #[error("{store} is not a repository")]
    NotARepository {
        /// The store's description.
        store: String,
    },
    /// The store is not empty.
    #[error("{store} already holds a repository")]
    AlreadyARepository {
        /// The store's description.
        store: String,
    },
    /// No key slot could be opened with the given credential.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The snapshot does not exist (any more).
    #[error("there is no snapshot {id}")]
    NoSnapshot {
        /// The snapshot.
        id: SnapshotId,
    },
    /// The snapshot is protected from removal.
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
        /// The requested disk.
        disk: String,
        /// The existing disks.
        disks: Vec<String>,
    },
    /// Data of a snapshot is in no pack and in no relocation: it is lost.
    #[error("pack {pack} is missing")]
    MissingPack {
        /// The pack.
        pack: crate::id::PackId,
    },
    /// Another process runs an exclusive operation on the repository.
    #[error("{what} is running: {who}")]
    Locked {
        /// The operation.
        what: &'static str,
        /// The process, its host, and the start time.
        who: String,
    },
    /// This writer was considered dead, and gc may have deleted what it wrote; nothing was committed.
    #[error("writer {writer} was revoked while it worked; its snapshot was not committed")]
    Revoked {
        /// The writer.
        writer: WriterId,
    },
    /// The device of a backup or restore failed.
    #[error("{role} {name}")]
    Device {
        /// "source" or "target".
        role: &'static str,
        /// The disk's name.
        name: String,
        /// The device's error.
        source: holdfast_block::Error,
    },
    /// The source stream of a backup failed.
    #[error("source {name}")]
    Stream {
        /// The disk's name.
        name: String,
        /// The stream's error.
        source: std::io::Error,
    },
    /// The source of a copy is unreadable in the other repository.
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
    /// Something was lost; objects that may help to restore it are not deleted until the loss is explained or
    /// accepted.
    #[error(
        "something was lost, and nothing is deleted that may bring it back: {}",
        crate::losses::describe(losses)
    )]
    Loss {
        /// The losses.
        losses: Vec<crate::losses::Loss>,
    },
    /// A limit of the format was exceeded.
    #[error("{what}: {value} is over the limit of {limit}")]
    Limit {
        /// The limited quantity.
        what: &'static str,
        /// The requested value.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// The operation was cancelled by its caller.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Decoded bytes of `object`, beginning at `start`, are invalid.
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

    /// Whether a single object is unusable while others may be intact: it is damaged, or claims a later version, which
    /// a damaged version byte does as well.
    pub(crate) fn is_about_one_object(&self) -> bool {
        self.is_damage() && !matches!(self, Self::Loss { .. })
            || matches!(self, Self::FutureVersion { .. } | Self::Key(KeyError::Version { .. }))
    }

    /// Whether the medium permanently failed to read the data.
    pub(crate) fn is_unreadable(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_of_medium())
    }

    /// Whether stored data is lost or wrong.
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
