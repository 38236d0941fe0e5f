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

/// A source that is backed up as one disk.
pub struct Source<'a> {
    /// The disk's name within the machine.
    pub name: String,
    /// The content of the disk.
    pub data: SourceData<'a>,
    /// Notes to store with the disk: its format, its original path.
    pub notes: BTreeMap<String, String>,
}

/// The source of a disk's bytes.
pub enum SourceData<'a> {
    /// A device that does not change during the backup.
    Disk(&'a dyn BlockDevice),
    /// A device with a bitmap of the ranges that may differ from the disk of this name in the parent.
    ///
    /// Clean ranges are taken from the parent without being read, unless the parent is unusable there.
    Changes {
        /// The device; it must not change during the backup.
        device: &'a dyn BlockDevice,
        /// The ranges that may differ. The caller must guarantee that the bitmap is correct; otherwise the
        /// snapshot is wrong.
        changed: &'a DirtyBitmap,
    },
    /// A stream, read to its end.
    Stream(&'a mut dyn Read),
    /// A disk, or a stream, of a snapshot in another repository.
    Stored(StoredDisk<'a>),
}

/// A disk of a snapshot in another repository. Its statistics, content kind and notes are kept.
#[derive(Clone, Copy)]
pub struct StoredDisk<'a> {
    /// The source repository.
    pub repository: &'a Repository,
    /// The disk.
    pub disk: &'a DiskRecord,
    /// The disk of the other repository of which the parent's disk of this name is an exact copy; shared data is taken
    /// from the parent. The caller is responsible for its correctness.
    pub base: Option<&'a DiskRecord>,
    /// Called before this many bytes are read from the source repository, to limit the rate.
    pub pace: &'a (dyn Fn(u64) + Sync),
    /// Locations that earlier copies between the two repositories found.
    pub memory: &'a CopyMemory,
}

/// The snapshot to compare a backup with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parent {
    /// The newest snapshot of the same machine.
    #[default]
    Newest,
    /// This snapshot.
    Named(SnapshotId),
    /// None: every block is looked up.
    None,
}

/// What to back up.
pub struct BackupRequest<'a> {
    /// The name of the machine.
    pub machine: String,
    /// The point in time, in milliseconds since 1970-01-01 UTC.
    pub time_ms: i64,
    /// Tags of the snapshot.
    pub tags: Vec<String>,
    /// The snapshot to compare with.
    pub parent: Parent,
    /// The host, for the manifest.
    pub host: String,
    /// The program, for the manifest.
    pub program: String,
    /// Notes to store with the snapshot.
    pub notes: BTreeMap<String, String>,
    /// The disks.
    pub sources: Vec<Source<'a>>,
    /// Number of threads for each of reading and compressing; with 0 the caller does everything, in a fixed order.
    pub thread_count: usize,
}

/// Receives the progress of a backup, and may cancel it.
pub trait BackupProgress: Sync {
    /// Reports that this many more bytes of disk are done.
    fn advance(&self, bytes: u64);

    /// Reports information for the user.
    fn note(&self, message: String);

    /// Reports a problem that did not stop the backup.
    fn warn(&self, message: String);

    /// Set to stop the backup: nothing is committed, and the next backup reuses what was stored.
    fn cancelled(&self) -> &AtomicBool;

    /// Measures the time that the backup spends in its stages; measures nothing by default.
    fn timer(&self) -> &dyn StageTimer {
        &NoStageTimer
    }
}

/// The result of a backup.
#[derive(Debug, Clone)]
pub struct BackupReport {
    /// The snapshot, as committed.
    pub snapshot: Manifest,
    /// Statistics of all disks. For copied disks, the manifest keeps the statistics of the original backup; these here
    /// are those of the copy, with bytes read as they are stored.
    pub statistics: DiskStatistics,
    /// Bytes by which the repository has grown, including all objects.
    pub stored_bytes: u64,
    /// Number of packs written.
    pub pack_count: u64,
}

/// The newest of `manifests`, which are sorted by time, that is not later than `now_ms`. A snapshot in the future, made
/// with a wrong clock, is only used if there is no other.
pub(super) fn newest_before(mut manifests: Vec<Manifest>, now_ms: i64) -> Option<Manifest> {
    match manifests.iter().rposition(|manifest| manifest.time_ms <= now_ms) {
        Some(place) => Some(manifests.swap_remove(place)),
        None => manifests.pop(),
    }
}
