//! Backups with a list of the ranges that may have changed: they read only these, and the snapshot equals that of a
//! full read.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_block::{BlockDevice, DirtyBitmap, ExtentList, MemoryDevice};
use holdfast_repo::store::{MemoryStore, ObjectKind, Store};
use holdfast_repo::{BackupReport, Parent, RepairRequest, Repository, SnapshotId, SourceData};

use crate::common::{Disk, Rig, Watch, names_of, request, source};

const KIB: u64 = 1024;

/// A device that counts the bytes that are read and the bytes whose extents are queried.
struct Counted {
    inner: MemoryDevice,
    read_bytes: AtomicU64,
    asked_bytes: AtomicU64,
}

impl Counted {
    fn new(bytes: &[u8]) -> Self {
        Self {
            inner: MemoryDevice::from_bytes(bytes),
            read_bytes: AtomicU64::new(0),
            asked_bytes: AtomicU64::new(0),
        }
    }

    fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }
}

impl BlockDevice for Counted {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.read_bytes.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        self.inner.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        let list = self.inner.extents(range.clone(), extent_count_max)?;
        self.asked_bytes.fetch_add(list.end() - range.start, Ordering::Relaxed);
        Ok(list)
    }
}

fn back_up(repository: &Repository, data: SourceData<'_>, parent: Parent, threads: usize) -> BackupReport {
    static TIME: AtomicU64 = AtomicU64::new(1);
    let time_ms = i64::try_from(TIME.fetch_add(1, Ordering::Relaxed)).unwrap();
    let request = request("machine", time_ms, vec![source("vda", data)], parent, threads);
    repository.backup(request, &Watch::default()).unwrap()
}

fn assert_reads_as(repository: &Repository, snapshot: SnapshotId, bytes: &[u8], what: &str) {
    let device = repository.open_disk(snapshot, Some("vda")).unwrap();
    let mut found = vec![1; bytes.len()];
    assert_eq!(device.size_bytes(), bytes.len() as u64);
    device.read_at(&mut found, 0).unwrap();
    assert!(found == bytes, "{what}");
}

/// Writes at random offsets, and marks the changed sectors.
fn write_somewhere(disk: &mut Disk, changed: &mut DirtyBitmap, count: u64) {
    let before = disk.bytes.clone();
    disk.scatter(count, 20 * KIB);
    for (number, (old, new)) in before.chunks(512).zip(disk.bytes.chunks(512)).enumerate() {
        if old != new {
            let start = number as u64 * 512;
            changed.set(start..start + new.len() as u64);
        }
    }
}

#[test]
fn only_possibly_changed_ranges_are_read() {
    for (granularity, threads) in [(512, 0), (4096, 2), (65_536, 0), (65_536, 2)] {
        let rig = Rig::new(granularity + threads as u64);
        let mut disk = Disk::new(5 * 1024 * KIB + 77, 3);
        disk.fill(100 * KIB, 3000 * KIB);
        let first = Counted::new(&disk.bytes);
        let mut last = back_up(&rig.repository, SourceData::Disk(&first), Parent::None, threads)
            .snapshot
            .id;
        for round in 0..6 {
            let mut changed = DirtyBitmap::new(disk.bytes.len() as u64, granularity).unwrap();
            write_somewhere(&mut disk, &mut changed, round * 2);
            // Bits of unchanged ranges do no harm.
            changed.set(4000 * KIB..4001 * KIB);
            let device = Counted::new(&disk.bytes);
            let data = SourceData::Changes {
                device: &device,
                changed: &changed,
            };
            let report = back_up(&rig.repository, data, Parent::Named(last), threads);
            let what = format!("granularity {granularity}, {threads} threads, round {round}");
            assert_reads_as(&rig.repository, report.snapshot.id, &disk.bytes, &what);
            let may_read = changed.iter().map(|range| range.end - range.start + 2 * 4096).sum();
            assert!(
                device.read_bytes() <= may_read,
                "{what}: {} of {may_read}",
                device.read_bytes()
            );
            let asked = device.asked_bytes.load(Ordering::Relaxed);
            assert!(asked < 5000 * KIB, "{what}: queried {asked} bytes");
            let statistics = report.snapshot.statistics();
            let counted =
                statistics.zero_bytes + statistics.unchanged_bytes + statistics.known_bytes + statistics.new_bytes;
            assert_eq!(counted, disk.bytes.len() as u64, "{what}");
            last = report.snapshot.id;
        }
    }
}

#[test]
fn without_a_parent_everything_is_read() {
    let rig = Rig::new(5);
    let mut disk = Disk::new(700 * KIB, 3);
    disk.fill(0, 700 * KIB);
    let device = Counted::new(&disk.bytes);
    let changed = DirtyBitmap::new(700 * KIB, 4096).unwrap();
    let data = SourceData::Changes {
        device: &device,
        changed: &changed,
    };
    let report = back_up(&rig.repository, data, Parent::None, 1);
    assert_eq!(device.read_bytes(), 700 * KIB);
    assert_reads_as(&rig.repository, report.snapshot.id, &disk.bytes, "no parent");
}

/// A disk that has grown: the backup reads what the parent does not have, even if the bitmap marks it as unchanged.
#[test]
fn ranges_beyond_the_parent_are_read() {
    let rig = Rig::new(6);
    let mut disk = Disk::new(300 * KIB + 5, 3);
    disk.fill(0, 300 * KIB);
    let small = Counted::new(&disk.bytes);
    let parent = back_up(&rig.repository, SourceData::Disk(&small), Parent::None, 0)
        .snapshot
        .id;
    let mut larger = Disk::new(3000 * KIB, 4);
    larger.fill(304 * KIB, 2000 * KIB);
    larger.bytes[..disk.bytes.len()].copy_from_slice(&disk.bytes);
    let device = Counted::new(&larger.bytes);
    let changed = DirtyBitmap::new(3000 * KIB, 65_536).unwrap();
    let data = SourceData::Changes {
        device: &device,
        changed: &changed,
    };
    let report = back_up(&rig.repository, data, Parent::Named(parent), 2);
    assert_reads_as(&rig.repository, report.snapshot.id, &larger.bytes, "grown");
    assert!(device.read_bytes() >= 2690 * KIB && device.read_bytes() <= 2700 * KIB);
}

/// Offset of a byte in the first frame of a pack, whose header has 64 bytes.
const FIRST_FRAME: usize = 70;

/// Packs of the parent with data or maps are damaged or missing: the ranges in them are read again, and the new
/// snapshot is complete.
#[test]
fn ranges_that_the_parent_lost_are_read() {
    let mut disk = Disk::new(9 << 20, 8);
    disk.fill(0, 8 << 20);
    let store = {
        let rig = Rig::new(7);
        back_up(
            &rig.repository,
            SourceData::Disk(&Counted::new(&disk.bytes)),
            Parent::None,
            0,
        );
        rig.store
    };
    for pack in names_of(&store, ObjectKind::Pack) {
        for is_gone in [true, false] {
            let copy = MemoryStore::new();
            for (name, bytes) in store.objects() {
                copy.put(&name, &bytes).unwrap();
            }
            if is_gone {
                copy.delete(&pack).unwrap();
            } else {
                let mut bytes = copy.get(&pack, u64::MAX).unwrap();
                // In the first frame, because a damaged directory loses nothing.
                bytes[FIRST_FRAME] ^= 1;
                copy.damage(&pack, &bytes);
            }
            let shared: Arc<dyn Store> = Arc::new(copy.clone());
            let opened = Repository::open(shared, crate::common::PASSWORD, crate::common::environment(9)).unwrap();
            let repository = opened.repository;
            let request = RepairRequest {
                percent: 100,
                thread_count: 1,
            };
            let plan = repository.plan_repair(request, &Watch::default()).unwrap();
            repository.repair(&plan, 1, &Watch::default()).unwrap();
            let parent = repository.snapshots().unwrap().0[0].id;
            let device = Counted::new(&disk.bytes);
            let changed = DirtyBitmap::new(9 << 20, 65_536).unwrap();
            let data = SourceData::Changes {
                device: &device,
                changed: &changed,
            };
            let report = back_up(&repository, data, Parent::Named(parent), 2);
            assert_reads_as(
                &repository,
                report.snapshot.id,
                &disk.bytes,
                &format!("{pack} {is_gone}"),
            );
            assert!(device.read_bytes() > 0, "{pack} {is_gone}");
        }
    }
}
