//! Snapshots copied between repositories: the result, the amount of data that is read, and cases in which one of the
//! two fails, is full, is damaged, or is cleaned up during the copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use holdfast_block::{BlockDevice as _, MemoryDevice};
use holdfast_repo::store::{Fault, FaultPlan, FaultSpan, FaultStore, ObjectKind, ObjectName, Store as _};
use holdfast_repo::{
    BackupReport, CopyMemory, DiskContent, Error, GcRequest, Manifest, Parent, RepairRequest, Repository, Result,
    Selection, SourceData, StoredDisk, VerifyDepth, VerifyRequest,
};

use crate::common::{Disk, HookedStore, Rig, Watch, assert_gc_is_thorough, assert_restores, names_of, request, source};

const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;
const GC: GcRequest = GcRequest {
    repack_below_percent: 90,
    thread_count: 0,
};

/// Copies a snapshot; `base` is a snapshot of the source and its copy in the target.
fn copy(
    from: &Repository,
    to: &Repository,
    manifest: &Manifest,
    base: Option<(&Manifest, &Manifest)>,
    thread_count: usize,
) -> Result<BackupReport> {
    let (pace, memory) = (|_| (), CopyMemory::default());
    let sources = manifest.disks.iter().map(|disk| {
        let base = base.and_then(|(there, _)| there.disk(Some(&disk.name)).ok());
        let stored = StoredDisk {
            repository: from,
            disk,
            base,
            pace: &pace,
            memory: &memory,
        };
        source(&disk.name, SourceData::Stored(stored))
    });
    let parent = base.map_or(Parent::None, |(_, here)| Parent::Named(here.id));
    let request = request(
        &manifest.machine,
        manifest.time_ms,
        sources.collect(),
        parent,
        thread_count,
    );
    to.backup(request, &Watch::default())
}

/// Backs up a machine with a disk and a stream on two days; returns the snapshots and their content.
fn two_days(rig: &Rig, size: u64) -> Vec<(Manifest, [Vec<u8>; 2])> {
    let mut disk = Disk::new(size, 3);
    disk.fill(0, size / 2);
    disk.fill(size / 4 * 3, size / 8);
    let mut days = Vec::new();
    for day in 0..2 {
        let device = MemoryDevice::from_bytes(&disk.bytes);
        let mut memory = Disk::new(700 * KIB + 13, 8 + day);
        memory.fill(0, 600 * KIB);
        let mut stream = &memory.bytes[..];
        let sources = vec![
            source("vda", SourceData::Disk(&device)),
            source("memory", SourceData::Stream(&mut stream)),
        ];
        let time_ms = i64::try_from(day).unwrap();
        let request = request("m", time_ms, sources, Parent::Newest, 2);
        let report = rig.repository.backup(request, &rig.progress).unwrap();
        days.push((report.snapshot, [disk.bytes.clone(), memory.bytes.clone()]));
        // Changes a part of a chunk, a whole block, and the partial block at the end.
        disk.fill(MIB + 8 * KIB, 12 * KIB);
        disk.fill(size / 2 + 40 * KIB, 4 * KIB);
        disk.fill(size - 100, 100);
    }
    days
}

fn assert_reads(repository: &Repository, snapshot: &Manifest, expected: &[Vec<u8>; 2]) {
    for (name, bytes) in ["vda", "memory"].into_iter().zip(expected) {
        let device = repository.open_disk(snapshot.id, Some(name)).unwrap();
        let mut found = vec![1; bytes.len()];
        device.read_at(&mut found, 0).unwrap();
        assert!(found == *bytes, "{name} has other content");
    }
    let request = VerifyRequest {
        snapshots: Selection::All,
        depth: VerifyDepth::Full,
        compare: None,
        thread_count: 0,
    };
    let report = repository.verify(&request, &Watch::default()).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn copies_read_the_same_under_any_keys_and_only_differences_are_read() {
    let from = Rig::new(1);
    let size = 70 * MIB + 777;
    let days = two_days(&from, size);
    for (has_same_keys, threads) in [(false, 0), (false, 3), (true, 0), (true, 2)] {
        let to = if has_same_keys {
            Rig::with_keys_of(2, &from)
        } else {
            Rig::new(2)
        };
        assert_eq!(to.repository.has_same_fingerprints(&from.repository), has_same_keys);
        let first = copy(&from.repository, &to.repository, &days[0].0, None, threads).unwrap();
        assert_reads(&to.repository, &first.snapshot, &days[0].1);
        let base = Some((&days[0].0, &first.snapshot));
        let second = copy(&from.repository, &to.repository, &days[1].0, base, threads).unwrap();
        assert_reads(&to.repository, &second.snapshot, &days[1].1);
        for (copied, (original, _)) in [&first, &second].into_iter().zip(&days) {
            assert_eq!(
                copied.snapshot.statistics(),
                original.statistics(),
                "the statistics of the backup are kept"
            );
            let content = |manifest: &Manifest| manifest.disks.iter().map(|disk| disk.content).collect::<Vec<_>>();
            assert_eq!(content(&copied.snapshot), [DiskContent::Blocks, DiskContent::Stream]);
            assert_eq!(content(&copied.snapshot), content(original));
        }
        let (found, again) = (first.statistics, second.statistics);
        assert!(
            found.read_bytes > 20 * MIB && again.read_bytes < 2 * MIB,
            "{found:?} {again:?}"
        );
        assert!(
            again.unchanged_bytes > 40 * MIB && again.new_bytes < 2 * MIB,
            "{again:?}"
        );
        assert_eq!(found.known_bytes, 0, "no chunk is transferred twice");
        // All of the disk without a base: chunks that the target knows by name are not read, and none is stored.
        let whole = copy(&from.repository, &to.repository, &days[1].0, None, threads).unwrap();
        assert_reads(&to.repository, &whole.snapshot, &days[1].1);
        assert_eq!(whole.statistics.new_bytes, 0);
        assert_eq!(
            whole.statistics.read_bytes == 0,
            has_same_keys,
            "{:?}",
            whole.statistics
        );
        // A backup into a target with the same keys finds the chunks of the copy.
        let own = to.backup("other", &disk_of(&days[0].1[0]), Parent::None);
        assert_eq!(own.statistics.new_bytes < MIB, has_same_keys, "{:?}", own.statistics);
    }
}

fn disk_of(bytes: &[u8]) -> Disk {
    let mut disk = Disk::new(0, 1);
    disk.bytes = bytes.to_vec();
    disk
}

#[test]
fn disks_of_boundary_sizes_are_copied() {
    let from = Rig::new(1);
    let to = Rig::new(2);
    for size in [0, 1, 4096, 4097, 64 * MIB, 64 * MIB + 1] {
        let mut disk = Disk::new(size, size);
        disk.scatter(4, 9000);
        let made = from.backup("odd", &disk, Parent::Newest);
        let copied = copy(&from.repository, &to.repository, &made.snapshot, None, 2).unwrap();
        assert_restores(&to.repository, copied.snapshot.id, &disk.bytes);
    }
}

/// A disk that grows and shrinks: unchanged ranges are taken from the copy of the previous day, up to the last whole
/// block.
#[test]
fn disks_that_change_their_size_are_copied_from_their_base() {
    let from = Rig::new(1);
    let to = Rig::new(2);
    let mut last: Option<(Manifest, Manifest)> = None;
    for size in [30 * MIB + 100, 90 * MIB + 5000, 66 * MIB + 1, 20 * MIB + 5] {
        let mut disk = Disk::new(size, 7);
        disk.fill(0, 25 * MIB);
        let made = from.backup("m", &disk, Parent::Newest);
        let base = last.as_ref().map(|(there, here)| (there, here));
        let copied = copy(&from.repository, &to.repository, &made.snapshot, base, 2).unwrap();
        assert_restores(&to.repository, copied.snapshot.id, &disk.bytes);
        assert!(
            base.is_none() || copied.statistics.read_bytes < MIB,
            "{:?}",
            copied.statistics
        );
        last = Some((made.snapshot, copied.snapshot));
    }
}

#[test]
fn a_survey_predicts_the_bytes_that_a_copy_reads() {
    let from = Rig::new(1);
    let days = two_days(&from, 40 * MIB);
    let (pace, memory) = (|_| (), CopyMemory::default());
    for to in [Rig::new(2), Rig::with_keys_of(3, &from)] {
        let mut surveyor = to.repository.surveyor().unwrap();
        let mut planned = 0;
        for disk in &days[0].0.disks {
            let stored = StoredDisk {
                repository: &from.repository,
                disk,
                base: None,
                pace: &pace,
                memory: &memory,
            };
            planned += surveyor.survey_disk(&stored).unwrap().read_bytes;
        }
        drop(surveyor);
        let copied = copy(&from.repository, &to.repository, &days[0].0, None, 2).unwrap();
        assert_eq!(copied.statistics.read_bytes, planned);
    }
}

/// If either side fails at any step, no incomplete snapshot is committed, and the next copy is complete.
#[test]
fn a_failure_at_any_operation_commits_no_incomplete_copy() {
    let from = Rig::new(1);
    let days = two_days(&from, 3 * MIB + 5);
    let (manifest, expected) = &days[1];
    for is_source in [false, true] {
        for fault in [Fault::Crash, Fault::Io, Fault::NoSpace] {
            if is_source && fault == Fault::NoSpace {
                continue;
            }
            let mut step = 0;
            loop {
                step += 1;
                let to = Rig::with_keys_of(2, &from);
                let case = format!("{fault:?} at {step} of source: {is_source}");
                let failing = if is_source { &from } else { &to };
                let faulty = |plan| FaultStore::new(Arc::new(failing.store.clone()), plan, step);
                // The first operations only open the repository.
                let whole = faulty(None);
                failing.open_on(whole.clone(), 50);
                let plan = FaultPlan {
                    operation: whole.operation_count() + step,
                    fault,
                    span: FaultSpan::Once,
                };
                let store = faulty(Some(plan));
                let opened = failing.open_on(store.clone(), 50 + step);
                let result = if is_source {
                    copy(&opened, &to.repository, manifest, None, 0)
                } else {
                    copy(&from.repository, &opened, manifest, None, 0)
                };
                let count = to.repository.snapshots().unwrap().0.len();
                match &result {
                    Ok(_) => assert_eq!(count, 1, "{case}"),
                    Err(Error::Origin { .. }) => assert!(is_source && count == 0, "{case}"),
                    // A commit that reports an error may nevertheless be complete.
                    Err(_) => assert!(!is_source && count <= 1, "{case}: {result:?}"),
                }
                let again = copy(&from.repository, &to.repository, manifest, None, 0).unwrap();
                assert_reads(&to.repository, &again.snapshot, expected);
                if !store.has_failed() {
                    break;
                }
            }
            assert!(step > 10, "{step}");
        }
    }
}

/// A second copy finds the chunks that the cancelled one stored: it does not store them again, and with the same keys
/// it does not even read them.
#[test]
fn a_cancelled_copy_is_continued() {
    let from = Rig::new(1);
    let mut disk = Disk::new(200 * MIB, 5);
    disk.fill(0, 200 * MIB);
    let made = from.backup("m", &disk, Parent::Newest).snapshot;
    for to in [Rig::new(2), Rig::with_keys_of(3, &from)] {
        let watch = Watch::default();
        let (read_bytes, memory) = (AtomicU64::new(0), CopyMemory::default());
        let pace = |bytes| {
            if read_bytes.fetch_add(bytes, Ordering::Relaxed) > 80 * MIB {
                watch.cancelled.store(true, Ordering::Relaxed);
            }
        };
        let stored = StoredDisk {
            repository: &from.repository,
            disk: &made.disks[0],
            base: None,
            pace: &pace,
            memory: &memory,
        };
        let request = request("m", 0, vec![source("vda", SourceData::Stored(stored))], Parent::None, 2);
        let stopped = to.repository.backup(request, &watch).unwrap_err();
        assert!(matches!(stopped, Error::Cancelled), "{stopped:?}");
        let whole = copy(&from.repository, &to.repository, &made, None, 2).unwrap();
        let found = whole.statistics;
        assert!(found.known_bytes > 40 * MIB && found.new_bytes < 160 * MIB, "{found:?}");
        let is_alike = to.repository.has_same_fingerprints(&from.repository);
        assert_eq!(found.read_bytes < 90 * MIB, is_alike, "{found:?}");
        assert_restores(&to.repository, whole.snapshot.id, &disk.bytes);
        assert_gc_is_thorough(&to.repository, GC, "went on");
    }
}

/// The configuration is the only object with the keys for recognising chunks, apart from the key slots.
#[test]
fn a_lost_configuration_is_restored_with_its_fingerprints() {
    let from = Rig::new(1);
    let with_keys_of = Rig::with_keys_of(2, &from);
    with_keys_of.store.delete(&ObjectName::config()).unwrap();
    let opened = with_keys_of.open(5);
    assert!(opened.has_same_fingerprints(&from.repository));
    let request = RepairRequest {
        thread_count: 1,
        percent: 100,
    };
    let plan = opened.plan_repair(request, &Watch::default()).unwrap();
    opened.repair(&plan, 1, &Watch::default()).unwrap();
    let config = with_keys_of.store.get(&ObjectName::config(), u64::MAX).unwrap();
    assert!(!config.is_empty());
    assert!(with_keys_of.open(6).has_same_fingerprints(&from.repository));
}

/// Damages one byte in the middle of every data pack. Returns the number of these packs.
fn damage_data(rig: &Rig) -> usize {
    let packs = names_of(&rig.store, ObjectKind::Pack);
    let is_data = |bytes: &[u8]| bytes[10] == 1;
    let mut count = 0;
    for name in packs {
        let mut bytes = rig.store.get(&name, u64::MAX).unwrap();
        if is_data(&bytes) {
            bytes[100] ^= 1;
            rig.store.damage(&name, &bytes);
            count += 1;
        }
    }
    count
}

#[test]
fn damaged_chunks_are_not_copied_unless_the_target_has_them() {
    let from = Rig::new(1);
    let days = two_days(&from, 6 * MIB);
    let (strange, with_keys_of) = (Rig::new(2), Rig::with_keys_of(3, &from));
    let whole = copy(&from.repository, &with_keys_of.repository, &days[0].0, None, 2).unwrap();
    assert!(damage_data(&from) > 0);
    for threads in [0, 2] {
        let error = copy(&from.repository, &strange.repository, &days[0].0, None, threads).unwrap_err();
        assert!(error.is_damage(), "{error:?}");
        assert!(
            matches!(&error, Error::Origin { disk, .. } if disk == "vda"),
            "{error:?}"
        );
        assert!(strange.repository.snapshots().unwrap().0.is_empty());
    }
    let again = copy(&from.repository, &with_keys_of.repository, &days[0].0, None, 2).unwrap();
    assert_eq!(again.statistics.read_bytes, 0);
    assert_reads(&with_keys_of.repository, &again.snapshot, &days[0].1);
    // Data that is shared with a base is taken from the copy of the base.
    let (there, here) = (&days[0].0, &whole.snapshot);
    copy(
        &from.repository,
        &with_keys_of.repository,
        there,
        Some((there, here)),
        2,
    )
    .unwrap();
}

/// Calls `ruined` with each pack to change its end; its second argument is the offset of the directory.
fn damage_directories(rig: &Rig, ruined: &dyn Fn(&mut [u8], usize)) {
    const TRAILER_BYTES: usize = 80;
    for name in names_of(&rig.store, ObjectKind::Pack) {
        let mut bytes = rig.store.get(&name, u64::MAX).unwrap();
        let at = bytes.len() - TRAILER_BYTES + 24;
        let start = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        ruined(&mut bytes, usize::try_from(start).unwrap());
        rig.store.damage(&name, &bytes);
    }
}

/// What can be restored can be copied, even if the frames are only known from their table in the index.
#[test]
fn packs_without_their_directories_are_copied() {
    type Ruin = fn(&mut [u8], usize);
    let damages: [Ruin; 2] = [
        |bytes, start| bytes[start..].fill(0),
        |bytes, _| *bytes.last_mut().unwrap() ^= 0xff,
    ];
    for (damage, threads) in damages.into_iter().zip([0, 2]) {
        let from = Rig::new(1);
        let days = two_days(&from, 6 * MIB);
        let (strange, with_keys_of) = (Rig::new(2), Rig::with_keys_of(3, &from));
        damage_directories(&from, &damage);
        let damaged = from.open(4);
        let (pace, memory) = (|_| (), CopyMemory::default());
        for to in [&strange, &with_keys_of] {
            let mut surveyor = to.repository.surveyor().unwrap();
            let mut planned = 0;
            for disk in &days[0].0.disks {
                let stored = StoredDisk {
                    repository: &damaged,
                    disk,
                    base: None,
                    pace: &pace,
                    memory: &memory,
                };
                planned += surveyor.survey_disk(&stored).unwrap().read_bytes;
            }
            drop(surveyor);
            let first = copy(&damaged, &to.repository, &days[0].0, None, threads).unwrap();
            assert_reads(&to.repository, &first.snapshot, &days[0].1);
            assert_eq!(first.statistics.read_bytes, planned);
            let base = Some((&days[0].0, &first.snapshot));
            let second = copy(&damaged, &to.repository, &days[1].0, base, threads).unwrap();
            assert_reads(&to.repository, &second.snapshot, &days[1].1);
            // The same pieces have the same names again.
            let again = copy(&damaged, &to.repository, &days[0].0, None, threads).unwrap();
            assert_reads(&to.repository, &again.snapshot, &days[0].1);
            assert_eq!(again.statistics.new_bytes, 0);
        }
    }
}

/// During the copy, between two reads, gc in the source moves the chunks and deletes their old packs.
#[test]
fn gc_of_the_source_moves_chunks_during_a_copy() {
    let from = Rig::new(1).with_threads(0);
    let mut disk = Disk::new(30 * MIB, 5);
    disk.fill(0, 30 * MIB);
    let old = from.backup("m", &disk, Parent::Newest).snapshot;
    disk.fill(0, 20 * MIB);
    let new = from.backup("m", &disk, Parent::Newest).snapshot;
    let to = Rig::new(2);
    let cleaner = from.open(77);
    let done = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&done);
    let act = move || {
        cleaner.forget(old.id, "test").unwrap();
        let report = cleaner.gc(GC).unwrap();
        assert!(report.rewritten_bytes > 0, "{report:?}");
        flag.store(true, Ordering::Relaxed);
    };
    let opened = to.open_on(HookedStore::new(&to.store, ObjectKind::Writer, act), 78);
    // The reader has loaded the old locations.
    let reader = from.open(79);
    reader
        .open_disk(new.id, None)
        .unwrap()
        .read_at(&mut [0; 4096], 29 * MIB)
        .unwrap();
    let copied = copy(&reader, &opened, &new, None, 0).unwrap();
    assert!(done.load(Ordering::Relaxed));
    assert_restores(&to.repository, copied.snapshot.id, &disk.bytes);
    assert_gc_is_thorough(&to.repository, GC, "copied");
}

/// While a copy runs, gc keeps removed snapshots.
#[test]
fn a_snapshot_removed_from_the_source_during_a_copy_is_copied() {
    let from = Rig::new(1).with_threads(0);
    let mut disk = Disk::new(5 * MIB, 5);
    disk.fill(0, 5 * MIB);
    let made = from.backup("m", &disk, Parent::Newest).snapshot;
    let to = Rig::new(2);
    let pause = from.repository.pause_gc().unwrap();
    let other = from.open(7);
    other.forget(made.id, "test").unwrap();
    assert_eq!(other.gc(GC).unwrap().waiting_for.len(), 1);
    let copied = copy(&from.repository, &to.repository, &made, None, 2).unwrap();
    assert_restores(&to.repository, copied.snapshot.id, &disk.bytes);
    drop(pause);
    let report = other.gc(GC).unwrap();
    assert!(
        report.waiting_for.is_empty() && report.deleted_pack_count > 0,
        "{report:?}"
    );
    let lost = copy(&from.repository, &to.repository, &made, None, 2).unwrap_err();
    assert!(lost.is_damage(), "{lost:?}");
}
