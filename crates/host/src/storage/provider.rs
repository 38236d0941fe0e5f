//! Who can make host snapshots: views of a file system, or of a volume, at one instant.
//!
//! | provider | what a dataset is | one instant for several datasets | where a snapshot is |
//! |---|---|---|---|
//! | [`Zfs`] | a file system or volume of a pool, by its name | of one pool, since ZFS 0.8; a dataset with all below it before | in the pool |
//! | [`Btrfs`] | a subvolume, by its folder | no | a read-only subvolume in `.holdfast/snapshots` of the dataset |
//! | [`Lvm`] | a volume in a thin pool, `GROUP/VOLUME` | no: volume after volume | a thin snapshot that sleeps, in the pool |
//! | [`Reflink`] | a folder on XFS or btrfs | no: file after file | a folder of clones in `.holdfast/snapshots` of the dataset |
//!
//! A snapshot carries a *record*: a small text of ours. ZFS keeps it as a property of the snapshot, from the moment on at which it is
//! made, and LVM in tags; for the others it is a file beside the snapshot. Others' snapshots have none, and are listed all the same.

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
pub use folder::OURS;
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
    KeepMethod, KeepRequest, PackWhen, PartialReceive, REPLICA_TAG, ReceiveRequest, ReplicaAbilities, ReplicaBase,
    ReplicaDataset, ReplicaSide, ReplicaSnapshot, SendRequest, SenderTrust, StreamForm,
};
pub use transfer::is_in_transfer;
pub use zfs::{DeviceErrors, LeftClone, LeftCloneKind, PoolDevice, PoolRoom, PoolState, Zfs, ZfsSide};
pub use zfs::{SendError, SendQuery, volume_device};

/// Result of asking a provider.
pub type ProviderResult<T> = std::result::Result<T, ProviderError>;

/// Which provider.
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
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Zfs, Self::Btrfs, Self::Reflink, Self::Lvm];

    /// The word for it, before the colon of a dataset's name.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Zfs => "zfs",
            Self::Btrfs => "btrfs",
            Self::Reflink => "reflink",
            Self::Lvm => "lvm",
        }
    }

    /// Whether its datasets are folders, and are called by their paths.
    pub const fn has_folders(self) -> bool {
        match self {
            Self::Btrfs | Self::Reflink => true,
            Self::Zfs | Self::Lvm => false,
        }
    }

    /// The one of a word.
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }
}

/// Something of which host snapshots are made as a whole.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dataset {
    /// Whose it is.
    pub provider: ProviderKind,
    /// Its name there: `tank/vm`, `vg0/web1`, or the path of its folder.
    pub name: String,
}

impl Dataset {
    /// One as it is displayed.
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

/// A host snapshot, by its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostSnapshotName {
    /// What it is of.
    pub dataset: Dataset,
    /// Its own name.
    pub name: String,
}

impl HostSnapshotName {
    /// One as it is displayed.
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
    /// Its name.
    pub name: HostSnapshotName,
    /// When it was made, in seconds since 1970-01-01 UTC.
    pub time_s: i64,
    /// What tells it from another of the same name, made later: ZFS's GUID, a UUID. Empty where only its time does.
    pub identity: String,
    /// Bytes that would be free without it; none where that is not known cheaply.
    pub used_bytes: Option<u64>,
    /// Bytes that it refers to.
    pub referenced_bytes: Option<u64>,
    /// How many hold it: it cannot be removed before all have let go.
    pub hold_count: u64,
    /// Our record of it.
    pub record: Option<String>,
}

impl HostSnapshot {
    /// Whether `other`, of the same name, is this one still, and not another one that has been given its name.
    pub fn is_still(&self, other: &Self) -> bool {
        self.identity == other.identity && (!self.identity.is_empty() || self.time_s == other.time_s)
    }

    /// What is there now under its name is another one.
    fn replaced(&self) -> ProviderError {
        ProviderError::Replaced {
            what: self.name.to_string(),
        }
    }
}

/// A host snapshot, with no more than what is noted of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotedSnapshot {
    /// It.
    pub name: HostSnapshotName,
    /// Our record of it.
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

/// A dataset, and the room that it takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetState {
    /// Which.
    pub dataset: Dataset,
    /// Where its files are; none for a volume, and for what is not mounted.
    pub folder: Option<PathBuf>,
    /// Whether it is a volume: a disk of its own.
    pub is_volume: bool,
    /// Bytes that it takes, with all its snapshots and what is below it.
    pub used_bytes: Option<u64>,
    /// Bytes that it refers to.
    pub referenced_bytes: Option<u64>,
    /// Bytes that only its snapshots take.
    pub snapshots_bytes: Option<u64>,
    /// How much smaller its data is by compression, in hundredths: 150 for 1.5 to 1.
    pub compression_percent: Option<u64>,
    /// Bytes that are free for it.
    pub available_bytes: Option<u64>,
    /// What it was cloned from.
    pub origin: Option<String>,
}

/// The contents of a host snapshot to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshotScope {
    /// The dataset.
    pub dataset: Dataset,
    /// Whether all datasets below it are included, at the same point in time.
    pub is_tree: bool,
    /// Only these files below the dataset's folder, where the provider supports that; all files if empty.
    pub files: Vec<PathBuf>,
}

impl HostSnapshotScope {
    /// All of a dataset.
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
    /// Their point in time, in seconds since 1970-01-01 UTC.
    pub time_s: i64,
    /// The record.
    pub record: &'a str,
}

/// The contents of a host snapshot, mounted or activated for reading. Dropping it undoes that.
pub struct View {
    folder: PathBuf,
    cleanup: Option<Box<dyn FnOnce() + Send>>,
}

impl View {
    fn lasting(folder: PathBuf) -> Self {
        Self { folder, cleanup: None }
    }

    /// The folder with its files; for a volume its device.
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
    /// Which one it is.
    fn kind(&self) -> ProviderKind;

    /// All datasets that the provider can list, by name. It cannot list folders.
    fn datasets(&self) -> ProviderResult<Vec<DatasetState>>;

    /// One of them.
    fn dataset(&self, name: &str) -> ProviderResult<DatasetState>;

    /// The host snapshots of a dataset, the oldest first.
    fn snapshots(&self, dataset: &str) -> ProviderResult<Vec<HostSnapshot>>;

    /// Adds the space that they take, where that takes time to find out.
    fn measure(&self, _snapshots: &mut [HostSnapshot]) -> ProviderResult<()> {
        Ok(())
    }

    /// Divides `wanted` into as few groups as possible, each of which can be created at one point in time.
    fn groups(&self, wanted: &[HostSnapshotScope]) -> ProviderResult<Vec<Vec<HostSnapshotScope>>>;

    /// Does the work that can be done before the point in time, and checks that creation is possible.
    fn prepare(&self, wanted: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()>;

    /// Creates the host snapshots of a group at one point in time: all of them, or none.
    fn create(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()>;

    /// Makes created host snapshots durable, with this record.
    fn commit(&self, group: &[HostSnapshotScope], label: &HostSnapshotLabel<'_>) -> ProviderResult<()>;

    /// Undoes `prepare`, and `create` where it is not committed and has no name yet.
    fn abandon(&self, _wanted: &[HostSnapshotScope], _cut: &HostSnapshotLabel<'_>) {}

    /// The host snapshots of a dataset with what is noted of them, and no more: quickly. ZFS leaves those out of which nothing is noted,
    /// which other programs created.
    fn noted(&self, dataset: &str) -> ProviderResult<Vec<NotedSnapshot>>;

    /// Whether another process may be creating host snapshots of a dataset, where they have no note before the commit.
    fn is_making(&self, _dataset: &str) -> bool {
        false
    }

    /// Lists what killed processes left in a dataset. Changes nothing.
    fn leftovers(&self, _dataset: &str) -> ProviderResult<Vec<ProviderLeftover>> {
        Ok(Vec::new())
    }

    /// Removes a leftover, if it still is one.
    fn remove_leftover(&self, leftover: &ProviderLeftover) -> ProviderResult<()> {
        Err(ProviderError::NotThere {
            what: leftover.place.display().to_string(),
        })
    }

    /// What needs a host snapshot: clones of it, by their names.
    fn clones(&self, _snapshot: &HostSnapshotName) -> ProviderResult<Vec<String>> {
        Ok(Vec::new())
    }

    /// Removes a host snapshot, whichever has this name.
    fn destroy(&self, snapshot: &HostSnapshotName) -> ProviderResult<()>;

    /// Removes this host snapshot, and not another one that has been given its name since it was looked at: that is compared right
    /// before it goes.
    fn destroy_this(&self, snapshot: &HostSnapshot) -> ProviderResult<()> {
        let present = self.snapshots(&snapshot.name.dataset.name)?;
        let present = present.into_iter().find(|one| one.name == snapshot.name);
        let present = present.ok_or_else(|| ProviderError::NotThere {
            what: snapshot.name.to_string(),
        })?;
        if !snapshot.is_still(&present) {
            return Err(snapshot.replaced());
        }
        self.destroy(&snapshot.name)
    }

    /// Holds a host snapshot: it cannot be removed until the hold `tag` is released.
    fn hold(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()>;

    /// Releases a hold.
    fn release(&self, snapshot: &HostSnapshotName, tag: &str) -> ProviderResult<()>;

    /// Makes the contents of a host snapshot readable. What has to be created for that is named after `label`.
    fn view(&self, snapshot: &HostSnapshotName, label: &str) -> ProviderResult<View>;

    /// A writable dataset that shares all with a host snapshot.
    fn clone_to(&self, snapshot: &HostSnapshotName, name: &str) -> ProviderResult<DatasetState>;
}
