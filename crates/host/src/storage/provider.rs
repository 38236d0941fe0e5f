//! Providers of host snapshots: views of a file system, or of a volume, at one point in time.
//!
//! | provider | dataset | one point in time for several datasets | place of a snapshot |
//! |---|---|---|---|
//! | [`Zfs`] | a file system or volume of a pool, by its name | of one pool, since ZFS 0.8; before, a dataset with its descendants | in the pool |
//! | [`Btrfs`] | a subvolume, by its folder | no | a read-only subvolume in `.holdfast/snapshots` of the dataset |
//! | [`Lvm`] | a volume in a thin pool, `GROUP/VOLUME` | no: one volume after the other | an inactive thin snapshot, in the pool |
//! | [`Reflink`] | a folder on XFS or btrfs | no: one file after the other | a folder of clones in `.holdfast/snapshots` of the dataset |
//!
//! A snapshot has a *record*: a small text of Holdfast. ZFS stores it as a property of the snapshot, which is set at
//! creation, and LVM in tags. For the other providers it is a file next to the snapshot. Snapshots of other programs
//! have no record, but are listed, too.

pub(crate) mod btrfs;
mod error;
mod folder;
mod incoming;
mod leftovers;
mod locate;
mod lvm;
mod mount;
mod mounts;
mod probe;
mod reflink;
mod replica;
mod transfer;
pub(crate) mod zfs;

use std::fmt;
use std::path::{Path, PathBuf};

pub use crate::storage::file_system::clone_file;
pub use btrfs::{Btrfs, BtrfsSide};
pub use error::ProviderError;
pub use folder::SNAPSHOT_FOLDER;
pub use incoming::{Incoming, StreamCheck, StreamRefusal};
pub use leftovers::{ProviderLeftover, ProviderLeftoverKind};
pub use locate::{DatasetPath, Located, locate};
pub use lvm::Lvm;
#[cfg(feature = "hostile")]
pub(crate) use lvm::{SPECIMEN as LVM_SPECIMEN, parse_volumes as lvm_volumes};
pub use mount::{mount, unmount};
pub use mounts::Mounts;
pub use probe::{can_clone_to, is_probe, why_not as why_no_reflink};
pub use reflink::Reflink;
pub use replica::{
    KeepMethod, KeepRequest, PartialReceive, REPLICA_TAG, ReceiveRequest, ReplicaAbilities, ReplicaBase,
    ReplicaDataset, ReplicaScope, ReplicaSide, ReplicaSnapshot, SendRequest, SenderTrust, StreamCompression,
    StreamForm,
};
pub use transfer::is_in_transfer;
pub use zfs::{DeviceErrors, PoolDevice, PoolRoom, PoolState, TemporaryClone, TemporaryCloneKind, Zfs, ZfsSide};
pub use zfs::{SendError, SendQuery, volume_device};

/// Result of a call to a provider.
pub type ProviderResult<T> = std::result::Result<T, ProviderError>;

/// A kind of provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProviderKind {
    /// ZFS.
    Zfs,
    /// btrfs.
    Btrfs,
    /// Clones of files.
    Reflink,
    /// Thin volumes of LVM.
    Lvm,
}

impl ProviderKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Zfs, Self::Btrfs, Self::Reflink, Self::Lvm];

    /// The keyword, which is the prefix of a dataset's name.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Zfs => "zfs",
            Self::Btrfs => "btrfs",
            Self::Reflink => "reflink",
            Self::Lvm => "lvm",
        }
    }

    /// Whether its datasets are folders, with their paths as names.
    pub const fn has_folders(self) -> bool {
        match self {
            Self::Btrfs | Self::Reflink => true,
            Self::Zfs | Self::Lvm => false,
        }
    }

    /// The kind with this keyword.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }
}

/// The unit of host snapshots.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dataset {
    /// The provider.
    pub provider: ProviderKind,
    /// The name at the provider: `tank/vm`, `vg0/web1`, or the path of the folder.
    pub name: String,
}

impl Dataset {
    /// Parses the displayed form.
    pub fn parse(text: &str) -> Option<Self> {
        let (provider, name) = text.split_once(':')?;
        Some(Self {
            provider: ProviderKind::from_word(provider)?,
            name: name.to_owned(),
        })
    }
}

/// `zfs:tank/vm`, `btrfs:/srv/vms`, `lvm:vg0/web1`.
impl fmt::Display for Dataset {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.provider.word(), self.name)
    }
}

/// The full name of a host snapshot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostSnapshotName {
    /// The dataset.
    pub dataset: Dataset,
    /// The name in the dataset.
    pub name: String,
}

impl HostSnapshotName {
    /// Parses the displayed form.
    pub fn parse(text: &str) -> Option<Self> {
        let (dataset, name) = text.rsplit_once('@')?;
        Some(Self {
            dataset: Dataset::parse(dataset)?,
            name: name.to_owned(),
        })
    }
}

/// `zfs:tank/vm@daily`.
impl fmt::Display for HostSnapshotName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}@{}", self.dataset, self.name)
    }
}

/// A host snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshot {
    /// The name.
    pub name: HostSnapshotName,
    /// The creation time, in seconds since 1970-01-01 UTC.
    pub time_s: i64,
    /// An identity that a later snapshot of the same name does not have: ZFS's GUID, or a UUID. Empty if only the
    /// creation time distinguishes them.
    pub identity: String,
    /// Bytes that the removal would free; none if that is expensive to determine.
    pub used_bytes: Option<u64>,
    /// Bytes that the snapshot refers to.
    pub referenced_bytes: Option<u64>,
    /// Number of holds. The snapshot can be removed only after all are released.
    pub hold_count: u64,
    /// Holdfast's record of the snapshot.
    pub record: Option<String>,
}

impl HostSnapshot {
    /// Whether `other`, of the same name, is the same snapshot and not a later one.
    pub fn is_still(&self, other: &Self) -> bool {
        self.identity == other.identity && (!self.identity.is_empty() || self.time_s == other.time_s)
    }

    /// The error for a later snapshot under this name.
    fn replaced(&self) -> ProviderError {
        ProviderError::Replaced {
            what: self.name.to_string(),
        }
    }
}

/// The name and the record of a host snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotedSnapshot {
    /// The name.
    pub name: HostSnapshotName,
    /// Holdfast's record of the snapshot.
    pub record: Option<String>,
}

impl NotedSnapshot {
    fn new(dataset: Dataset, name: String, record: Option<String>) -> Self {
        Self {
            name: HostSnapshotName { dataset, name },
            record,
        }
    }
}

/// A dataset, and its space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetState {
    /// The dataset.
    pub dataset: Dataset,
    /// The folder; none for a volume, or if the dataset is not mounted.
    pub folder: Option<PathBuf>,
    /// Whether the dataset is a volume, with a device.
    pub is_volume: bool,
    /// Used bytes, including snapshots and descendants.
    pub used_bytes: Option<u64>,
    /// Referenced bytes.
    pub referenced_bytes: Option<u64>,
    /// Bytes that only the snapshots use.
    pub snapshots_bytes: Option<u64>,
    /// Compression ratio in percent: 150 for 1.5 to 1.
    pub compression_percent: Option<u64>,
    /// Bytes available to the dataset.
    pub available_bytes: Option<u64>,
    /// The snapshot from which the dataset was cloned.
    pub origin: Option<String>,
}

/// The contents of a host snapshot to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshotScope {
    /// The dataset.
    pub dataset: Dataset,
    /// Whether all datasets below it are included, at the same point in time.
    pub is_tree: bool,
    /// Only these files below the dataset's folder, if the provider supports a selection; all files if empty.
    pub files: Vec<PathBuf>,
}

impl HostSnapshotScope {
    /// The whole of a dataset.
    pub fn all_of(dataset: Dataset) -> Self {
        Self {
            dataset,
            is_tree: false,
            files: Vec::new(),
        }
    }
}

/// The name, time and record of host snapshots that are created together.
#[derive(Debug, Clone, Copy)]
pub struct HostSnapshotLabel<'a> {
    /// The name of all of them.
    pub name: &'a str,
    /// The point in time of all of them, in seconds since 1970-01-01 UTC.
    pub time_s: i64,
    /// The record.
    pub record: &'a str,
}

/// The contents of a host snapshot, mounted or activated for reading. Dropping the view unmounts or deactivates it.
pub struct View {
    folder: PathBuf,
    cleanup: Option<Box<dyn FnOnce() + Send>>,
}

impl View {
    fn permanent(folder: PathBuf) -> Self {
        Self { folder, cleanup: None }
    }

    /// The folder with the files; for a volume, the device.
    pub fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Some(cleanup) = self.cleanup.take() {
            cleanup();
        }
    }
}

/// A file system or volume manager that creates, lists, holds and removes host snapshots.
pub trait Provider: Send + Sync {
    /// The kind of provider.
    fn kind(&self) -> ProviderKind;

    /// All datasets that the provider can list, by name. Datasets that are folders cannot be listed.
    fn datasets(&self) -> ProviderResult<Vec<DatasetState>>;

    /// The state of a dataset.
    fn dataset(&self, name: &str) -> ProviderResult<DatasetState>;

    /// The host snapshots of a dataset, the oldest first.
    fn snapshots(&self, dataset: &str) -> ProviderResult<Vec<HostSnapshot>>;

    /// Adds the used space of snapshots, which may take long to determine.
    fn measure(&self, _snapshots: &mut [HostSnapshot]) -> ProviderResult<()> {
        Ok(())
    }

    /// Divides `wanted` into as few groups as possible, each of which can be created at one point in time.
    fn groups(&self, wanted: &[HostSnapshotScope]) -> ProviderResult<Vec<Vec<HostSnapshotScope>>>;

    /// Does the work that is possible before the point in time, and checks that the snapshots can be created.
    fn prepare(&self, wanted: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()>;

    /// Creates the host snapshots of a group at one point in time: either all of them, or none.
    fn create(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()>;

    /// Makes created host snapshots durable, with this record.
    fn commit(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()>;

    /// Undoes `prepare`, and `create` if the snapshots were not committed and have no final name yet.
    fn abandon(&self, _wanted: &[HostSnapshotScope], _cut: &HostSnapshotLabel<'_>) {}

    /// Lists the host snapshots of a dataset with their records, quickly. ZFS omits snapshots without a record, which
    /// other programs created.
    fn noted(&self, dataset: &str) -> ProviderResult<Vec<NotedSnapshot>>;

    /// Whether another process may be creating host snapshots of a dataset. They have no record before the commit.
    fn is_making(&self, _dataset: &str) -> bool {
        false
    }

    /// Lists the leftovers of killed processes in a dataset. Changes nothing.
    fn leftovers(&self, _dataset: &str) -> ProviderResult<Vec<ProviderLeftover>> {
        Ok(Vec::new())
    }

    /// Removes a leftover, if it still is a leftover.
    fn remove_leftover(&self, leftover: &ProviderLeftover) -> ProviderResult<()> {
        Err(ProviderError::NotFound {
            what: leftover.place.display().to_string(),
        })
    }

    /// The names of the clones of a host snapshot, which depend on it.
    fn clones(&self, _snapshot: &HostSnapshotName) -> ProviderResult<Vec<String>> {
        Ok(Vec::new())
    }

    /// Removes the host snapshot with this name.
    fn destroy(&self, snapshot: &HostSnapshotName) -> ProviderResult<()>;

    /// Removes this host snapshot, but not a later one with the same name: the identity is compared immediately
    /// before the removal.
    fn destroy_this(&self, snapshot: &HostSnapshot) -> ProviderResult<()> {
        let present = self.snapshots(&snapshot.name.dataset.name)?;
        let present = present.into_iter().find(|one| one.name == snapshot.name);
        let present = present.ok_or_else(|| ProviderError::NotFound {
            what: snapshot.name.to_string(),
        })?;
        if !snapshot.is_still(&present) {
            return Err(snapshot.replaced());
        }
        self.destroy(&snapshot.name)
    }

    /// Holds a host snapshot: it cannot be removed until the hold `tag` is released.
    fn hold(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()>;

    /// The tags of the holds of a host snapshot; none if the file system counts holds but cannot list them
    /// (zfs-fuse).
    fn hold_tags(&self, snapshot: &HostSnapshotName) -> ProviderResult<Option<Vec<String>>>;

    /// Releases a hold.
    fn release(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()>;

    /// Makes the contents of a host snapshot readable. Objects that are created for this are named after `label`.
    fn view(&self, snapshot: &HostSnapshotName, label: &str) -> ProviderResult<View>;

    /// Clones a host snapshot to a writable dataset.
    fn clone_to(&self, snapshot: &HostSnapshotName, name: &str) -> ProviderResult<DatasetState>;
}
