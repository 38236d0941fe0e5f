//! The request, the progress interface and the report of a backup.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::atomic::AtomicBool;

use holdfast_block::{BlockDevice, DirtyBitmap};

use crate::backup::copy_memory::CopyMemory;
use crate::format::manifest::{DiskRecord, DiskStatistics, Manifest};
use crate::id::SnapshotId;
use crate::progress::stage::{NoStageTimer, StageTimer};
use crate::repository::Repository;

/// What is backed up as one disk.
pub struct Source<'a> {
    /// The disk's name within the machine.
    pub name: String,
    /// Where its bytes come from.
    pub data: SourceData<'a>,
    /// What to keep with the disk: its format, where it was.
    pub notes: BTreeMap<String, String>,
}

/// Where the bytes of a disk come from.
pub enum SourceData<'a> {
    /// A device that does not change meanwhile.
    Disk(&'a dyn BlockDevice),
    /// A device with a bitmap of the ranges that may differ from the disk of this name in the parent.
    ///
    /// What is clean is taken from there without being read, unless the parent cannot be used at that place.
    Changes {
        /// The device; it does not change meanwhile.
        device: &'a dyn BlockDevice,
        /// Where it may differ. A wrong bitmap makes a wrong snapshot: the caller is responsible for it.
        changed: &'a DirtyBitmap,
    },
    /// A stream, read to its end.
    Stream(&'a mut dyn Read),
    /// A disk, or a stream, of a snapshot in another repository.
    Stored(StoredDisk<'a>),
}

/// A disk of a snapshot in another repository. Its figures, how it was cut, and what was kept with it stay what they are.
#[derive(Clone, Copy)]
pub struct StoredDisk<'a> {
    /// The repository that it is in.
    pub repository: &'a Repository,
    /// The disk.
    pub disk: &'a DiskRecord,
    /// The disk of the other repository of which the parent's disk of this name is an exact copy; shared data is taken
    /// from the parent. The caller is responsible for its correctness.
    pub base: Option<&'a DiskRecord>,
    /// Called before so many bytes are read from the other repository, to limit the rate.
    pub pace: &'a (dyn Fn(u64) + Sync),
    /// What copies between the two repositories have learnt until now.
    pub memory: &'a CopyMemory,
}

/// Which snapshot a backup is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parent {
    /// The newest snapshot of the same machine.
    #[default]
    Newest,
    /// A certain one.
    Named(SnapshotId),
    /// None: every block is looked up.
    None,
}

/// What to back up.
pub struct BackupRequest<'a> {
    /// The machine.
    pub machine: String,
    /// The instant, in milliseconds since 1970-01-01 UTC.
    pub time_ms: i64,
    /// Words to find the snapshot by.
    pub tags: Vec<String>,
    /// Which snapshot to compare with.
    pub parent: Parent,
    /// The host and the program, for the manifest.
    pub host: String,
    /// The program that asks.
    pub program: String,
    /// What to keep with the snapshot.
    pub notes: BTreeMap<String, String>,
    /// The disks.
    pub sources: Vec<Source<'a>>,
    /// Threads for each of reading and compressing; with none, everything is done by the caller, in a fixed order.
    pub thread_count: usize,
}

/// Receives the progress of a backup, and may cancel it.
pub trait BackupProgress: Sync {
    /// So many more bytes of disk are done.
    fn advance(&self, bytes: u64);

    /// Something good to know.
    fn note(&self, message: String);

    /// Something that did not stop the backup, but that a person should know.
    fn warn(&self, message: String);

    /// Set to stop the backup: nothing is committed, and what was stored is found again by the next one.
    fn cancelled(&self) -> &AtomicBool;

    /// Measures the time that the backup spends in its stages; measures nothing by default.
    fn timer(&self) -> &dyn StageTimer {
        &NoStageTimer
    }
}

/// What a backup did.
#[derive(Debug, Clone)]
pub struct BackupReport {
    /// The snapshot, as committed.
    pub snapshot: Manifest,
    /// What was found on all disks together. What is said of disks that were copied is what was found when they were backed up;
    /// here is what was found when they were copied, and what was read is counted as it is stored.
    pub statistics: DiskStatistics,
    /// Bytes that the repository has grown by, everything counted.
    pub stored_bytes: u64,
    /// Packs that were written.
    pub pack_count: u64,
}

/// The newest of `manifests`, which are sorted by time, that is not later than `now_ms`. One of the future, from a clock that was wrong
/// once, is the last choice.
pub(super) fn newest_before(mut manifests: Vec<Manifest>, now_ms: i64) -> Option<Manifest> {
    match manifests.iter().rposition(|manifest| manifest.time_ms <= now_ms) {
        Some(place) => Some(manifests.swap_remove(place)),
        None => manifests.pop(),
    }
}
