//! Races that once caused damage, each replayed in full.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Disk, Hooked, PASSWORD, Rig, SeededBytes, Watch, environment, request, source};
use holdfast_block::{BlockDevice, Fault, FaultRule, FaultyDevice, MemoryDevice, RequestKind};
use holdfast_repo::store::{ObjectKind, Store};
use holdfast_repo::{
    BackupReport, Error, FindingKind, GcRequest, JobProgress, Liveness, Parent, ProcessIdentity, Processes,
    RepairRequest, Repository, RestoreRequest, ScrubRequest, Selection, Source, SourceData, TargetState, VerifyDepth,
    VerifyRequest,
};

const REWRITE_ALL: GcRequest = GcRequest {
    repack_below_percent: 100,
    thread_count: 0,
};

/// Another process on the repository of `rig`, that sees all other processes as `others`.
struct Other(Option<Liveness>);

impl Processes for Other {
    fn this(&self) -> ProcessIdentity {
        ProcessIdentity {
            host: "other".into(),
            boot: "other".into(),
            namespace: "other".into(),
            process: 1,
            started: 1,
        }
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        match self.0 {
            Some(others) if *process != self.this() => others,
            _ => Liveness::Alive,
        }
    }
}

fn another(rig: &Rig, seed: u64, others: Liveness) -> Repository {
    let mut environment = environment(seed);
    environment.processes = Arc::new(Other(Some(others)));
    environment.randomness = Arc::new(SeededBytes::new(seed));
    let store: Arc<dyn Store> = Arc::new(rig.store.clone());
    Repository::open(store, PASSWORD, environment).unwrap().repository
}

/// A disk was open, gc rewrote the pack under it, and the next read failed: "pack is missing". The snapshot was alive all the
/// time, and opening it again would have helped.
#[test]
fn an_open_disk_is_read_on_while_gc_moves_its_bytes() {
    let rig = Rig::new(21);
    let mut disk = Disk::new(3 << 20, 1);
    disk.fill(0, 3 << 20);
    let old = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    disk.fill(0, 1 << 20);
    let kept = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let device = rig.repository.open_disk(kept, None).unwrap();
    let to_restore = rig.repository.open_disk(kept, None).unwrap();
    let mut bytes = vec![0; 3 << 20];
    device.read_at(&mut bytes[..4096], 0).unwrap();

    let gc = another(&rig, 99, Liveness::Alive);
    gc.forget(old, "test").unwrap();
    let report = gc.gc(REWRITE_ALL).unwrap();
    assert!(
        report.rewritten_bytes > 0 && report.deleted_pack_count > 0,
        "{report:?}"
    );

    device.read_at(&mut bytes, 0).unwrap();
    assert!(bytes == disk.bytes);
    let target = MemoryDevice::new(3 << 20);
    let request = RestoreRequest {
        target: &target,
        target_name: "target".into(),
        state: TargetState::Unknown,
        thread_count: 2,
    };
    rig.repository
        .restore(&to_restore, &request, &Watch::default())
        .unwrap();
    assert!(target.to_bytes() == disk.bytes);
}

/// Three of four writers had failed on a full disk, each with the memory of a frame; the last decoder waited for memory, and the last writer for a
/// frame: the restore never ended.
#[test]
fn a_restore_to_a_target_that_is_full_ends() {
    let rig = Rig::new(30);
    let mut disk = Disk::new(48 << 20, 1);
    disk.fill(0, 48 << 20);
    let id = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let source = rig.repository.open_disk(id, None).unwrap();
    for first in (1..12).cycle().take(60) {
        let target = FaultyDevice::new(MemoryDevice::new(48 << 20));
        target.add(FaultRule::from_nth(RequestKind::Write, first, Fault::NoSpace));
        let request = RestoreRequest {
            target: &target,
            target_name: "target".into(),
            state: TargetState::Unknown,
            thread_count: 2,
        };
        let error = rig
            .repository
            .restore(&source, &request, &Watch::default())
            .unwrap_err();
        assert!(matches!(error, Error::Device { role: "target", .. }), "{error}");
    }
}

/// Gc with a limit of 100 percent rewrote packs that were alive as a whole, each time, for nothing.
#[test]
fn fully_used_packs_are_not_rewritten() {
    let rig = Rig::new(22);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    rig.backup("m", &disk, Parent::Newest);
    let report = rig.repository.gc(REWRITE_ALL).unwrap();
    assert_eq!(
        (report.rewritten_bytes, report.deleted_pack_count),
        (0, 0),
        "{report:?}"
    );
}

/// A stream during which another process acts.
struct Meanwhile<'a> {
    bytes: &'a [u8],
    act: Option<Box<dyn FnOnce() + 'a>>,
}

impl Read for Meanwhile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(act) = self.act.take() {
            act();
        }
        self.bytes.read(buffer)
    }
}

/// Backs up a disk, and a stream in the middle of which `act` happens.
fn back_up_while(rig: &Rig, disk: &Disk, act: impl FnOnce()) -> holdfast_repo::Result<BackupReport> {
    let device = MemoryDevice::from_bytes(&disk.bytes);
    let mut stream = Meanwhile {
        bytes: &disk.bytes,
        act: Some(Box::new(act)),
    };
    let sources = vec![
        source("vda", SourceData::Disk(&device)),
        source("memory", SourceData::Stream(&mut stream)),
    ];
    rig.repository
        .backup(request("m", 1, sources, Parent::Newest, 0), &rig.progress)
}

/// A writer was wrongly taken for dead, "certainly". Gc deleted what it referred to, and the mark in the place of its
/// snapshot as well, because no writer could need it. Then a writer came, and committed a snapshot that could not be read.
#[test]
fn a_writer_that_was_taken_for_dead_never_commits() {
    let rig = Rig::new(23);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let first = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let gc = another(&rig, 98, Liveness::Dead);
    let result = back_up_while(&rig, &disk, || {
        gc.forget(first, "test").unwrap();
        let report = gc.gc(REWRITE_ALL).unwrap();
        assert_eq!(report.cleared_writers.len(), 1, "{report:?}");
        let again = gc.gc(REWRITE_ALL).unwrap();
        assert!(again.cleared_writers.is_empty(), "it was cleared once: {again:?}");
    });
    assert!(matches!(result, Err(Error::Revoked { .. })), "{result:?}");
    assert!(rig.repository.snapshots().unwrap().0.is_empty());
    for kind in [ObjectKind::Writer, ObjectKind::Snapshot] {
        rig.store.list(kind, &mut |name, _| panic!("{name} is left")).unwrap();
    }
}

/// The same, but more than a month passed between two steps of the writer, when it had looked for its announcement: the mark was gone
/// as well, and its snapshot was committed without its data.
#[test]
fn a_writer_whose_mark_went_before_its_commit_takes_the_commit_back() {
    let rig = Rig::new(27);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let gc = another(&rig, 96, Liveness::Dead);
    let store = rig.store.clone();
    let hooked = Hooked::new(&rig.store, ObjectKind::Snapshot, move || {
        gc.gc(REWRITE_ALL).unwrap();
        store.advance_clock(MONTH_AND_MORE);
        let report = gc.gc(REWRITE_ALL).unwrap();
        assert!(report.cleared_writers.is_empty(), "it was cleared before: {report:?}");
    });
    let device = MemoryDevice::from_bytes(&disk.bytes);
    let backup = request_of_another(vec![source("vda", SourceData::Disk(&device))]);
    let result = rig.open_on(hooked, 95).backup(backup, &Watch::default());
    assert!(matches!(result, Err(Error::Revoked { .. })), "{result:?}");
    assert!(rig.repository.snapshots().unwrap().0.is_empty());
    for kind in [ObjectKind::Writer, ObjectKind::Snapshot] {
        rig.store.list(kind, &mut |name, _| panic!("{name} is left")).unwrap();
    }
    rig.repository.gc(REWRITE_ALL).expect("nothing counts as lost");
}

/// A forget slept before it put its record, and the snapshot was protected meanwhile. Gc ran between the put and the
/// moment in which the forget finds its announcement gone, and ended it: a protected snapshot was deleted.
#[test]
fn gc_does_not_end_a_forget_that_a_protection_has_passed() {
    let rig = Rig::new(28);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let id = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let (store, other) = (rig.store.clone(), another(&rig, 94, Liveness::Unknown));
    let gc = another(&rig, 93, Liveness::Unknown);
    let hooked = Hooked::new(&rig.store, ObjectKind::Forgotten, move || {
        store.advance_clock(WEEK_AND_MORE);
        other.protect(id).unwrap();
    });
    let hooked = hooked.and_after(move || drop(gc.gc(REWRITE_ALL).unwrap()));
    let result = rig.open_on(hooked, 92).forget(id, "test");
    assert!(matches!(result, Err(Error::Locked { .. })), "{result:?}");
    crate::common::assert_restores(&another(&rig, 91, Liveness::Unknown), id, &disk.bytes);
}

/// The same, and the forget never woke up: the snapshot is there again after a month.
#[test]
fn a_protected_snapshot_is_restored_after_an_interrupted_forget() {
    let rig = Rig::new(29);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let id = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let (store, other) = (rig.store.clone(), another(&rig, 94, Liveness::Unknown));
    let hooked = Hooked::new(&rig.store, ObjectKind::Forgotten, move || {
        store.advance_clock(WEEK_AND_MORE);
        other.protect(id).unwrap();
    });
    let hooked = hooked.and_after(|| panic!("the process ends here"));
    let forgetting = rig.open_on(hooked, 92);
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| forgetting.forget(id, "test")));
    assert!(died.is_err());

    let reader = another(&rig, 91, Liveness::Unknown);
    reader.gc(REWRITE_ALL).unwrap();
    assert!(reader.snapshots().unwrap().0.is_empty(), "its forget may be alive");
    rig.store.advance_clock(MONTH_AND_MORE);
    reader.gc(REWRITE_ALL).unwrap();
    crate::common::assert_restores(&reader, id, &disk.bytes);
}

/// The announcement of a writer at work was damaged, and repair removed the unreadable object. Gc knew of no writer then, and
/// deleted what it referred to; and it committed a snapshot that could not be read.
#[test]
fn a_writer_whose_announcement_is_gone_does_not_commit() {
    let rig = Rig::new(24);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let first = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let other = another(&rig, 97, Liveness::Alive);
    let result = back_up_while(&rig, &disk, || {
        let objects = rig.store.objects();
        let names = objects.keys().filter(|name| name.kind() == ObjectKind::Writer);
        names.for_each(|name| rig.store.damage(name, b"damaged"));
        other.forget(first, "test").unwrap();
        assert!(other.gc(REWRITE_ALL).unwrap_err().is_damage(), "gc waits for repair");
        let request = RepairRequest {
            percent: 0,
            thread_count: 1,
        };
        let plan = other.plan_repair(request, &Watch::default()).unwrap();
        other.repair(&plan, 1, &Watch::default()).unwrap();
        let report = other.gc(REWRITE_ALL).unwrap();
        assert!(report.deleted_pack_count > 0, "{report:?}");
    });
    assert!(matches!(result, Err(Error::Revoked { .. })), "{result:?}");
    assert!(rig.repository.snapshots().unwrap().0.is_empty());
}

/// Gc had marked, and was about to delete a pack that no snapshot needed. A backup healed an old snapshot out of just that
/// pack, and ended. Gc looked again, but only at snapshots that were new to it, and deleted the pack.
#[test]
fn chunks_that_repair_a_snapshot_during_gc_are_kept() {
    let rig = Rig::new(25);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let old = rig.backup("old", &disk, Parent::Newest).snapshot.id;
    let objects = rig.store.objects();
    let is_large = |bytes: &[u8]| bytes.len() > 1 << 18;
    let (damaged, bytes) = objects.iter().find(|(_, bytes)| is_large(bytes)).unwrap();
    // A backup that does not see the pack stores the same data once more.
    rig.store.delete(damaged).unwrap();
    let twice = rig.backup("twice", &disk, Parent::None).snapshot.id;
    let mut bytes = bytes.to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    rig.store.put(damaged, &bytes).unwrap();
    rig.repository.forget(twice, "test").unwrap();
    let full = ScrubRequest {
        percent: 100,
        thread_count: 1,
    };
    assert!(rig.repository.scrub(full, &rig.progress).unwrap().has_damage());

    let healer = another(&rig, 94, Liveness::Alive);
    let hooked = Hooked::new(&rig.store, ObjectKind::Condemned, move || {
        let device = MemoryDevice::from_bytes(&[7; 4096]);
        let source = Source {
            name: "vda".to_owned(),
            data: SourceData::Disk(&device),
            notes: BTreeMap::new(),
        };
        let request = request("other", 1, vec![source], Parent::None, 0);
        healer.backup(request, &Watch::default()).unwrap();
    });
    let gc = Repository::open(Arc::new(hooked), PASSWORD, environment(93))
        .unwrap()
        .repository;
    let report = gc.gc(REWRITE_ALL).unwrap();
    assert_eq!(report.waiting_for, Vec::<String>::new());
    crate::common::assert_restores(&another(&rig, 92, Liveness::Alive), old, &disk.bytes);
}

const MONTH_AND_MORE: Duration = Duration::from_secs(31 * 24 * 3600);
const WEEK_AND_MORE: Duration = Duration::from_secs(8 * 24 * 3600);

/// A gc slept for more than a week in the middle, on a host that no other process sees. Another gc took its place, and deleted the pack
/// that the first had written and not yet said anything of. The first woke up, led there by relocations, and deleted the old
/// packs: snapshots that were alive all the time were lost.
#[test]
fn a_gc_that_slept_and_was_replaced_does_no_harm() {
    let kinds = [
        ObjectKind::Writer,
        ObjectKind::Condemned,
        ObjectKind::Pack,
        ObjectKind::Index,
        ObjectKind::Relocation,
    ];
    for (kind, percent) in kinds.into_iter().flat_map(|kind| [(kind, 0), (kind, 100)]) {
        let rig = Rig::new(26);
        let mut disk = Disk::new(3 << 20, 1);
        disk.fill(0, 3 << 20);
        let old = rig.backup("m", &disk, Parent::Newest).snapshot.id;
        let removed = disk.bytes.clone();
        disk.fill(0, 1 << 20);
        let kept = rig.backup("m", &disk, Parent::Newest).snapshot.id;
        rig.repository.forget(old, "test").unwrap();
        let other = another(&rig, 91, Liveness::Unknown);
        let store = rig.store.clone();
        let (again, ids) = (removed.clone(), Arc::new(std::sync::Mutex::new(None)));
        let new = Arc::clone(&ids);
        let hooked = Hooked::new(&rig.store, kind, move || {
            store.advance_clock(WEEK_AND_MORE);
            let request = GcRequest {
                repack_below_percent: percent,
                thread_count: 0,
            };
            other.gc(request).unwrap();
            // What was removed is stored again, of what is left of it.
            let device = MemoryDevice::from_bytes(&again);
            let sources = vec![source("vda", SourceData::Disk(&device))];
            let backup = request_of_another(sources);
            let report = other.backup(backup, &Watch::default()).unwrap();
            *new.lock().unwrap() = Some(report.snapshot.id);
        });
        let slept = rig.open_on(hooked, 90).gc(REWRITE_ALL);
        let case = format!("{kind}, {percent}: {slept:?}");
        let reader = another(&rig, 89, Liveness::Unknown);
        crate::common::assert_restores(&reader, kept, &disk.bytes);
        let new = ids.lock().unwrap().expect("the other one made a snapshot");
        crate::common::assert_restores(&reader, new, &removed);
        assert!(slept.is_ok() || matches!(slept, Err(Error::Revoked { .. })), "{case}");
        rig.repository.gc(REWRITE_ALL).unwrap();
        crate::common::assert_restores(&another(&rig, 88, Liveness::Unknown), new, &removed);
    }
}

fn request_of_another(sources: Vec<Source<'_>>) -> holdfast_repo::BackupRequest<'_> {
    request("other", 7, sources, Parent::None, 0)
}

/// A stream that takes a day for each half mebibyte of it.
struct Slow<'a> {
    bytes: &'a [u8],
    passed: usize,
    day: Box<dyn FnMut() + 'a>,
}

impl Read for Slow<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        const PER_DAY: usize = 512 << 10;
        let length = self.bytes.read(buffer)?;
        let days = (self.passed + length) / PER_DAY - self.passed / PER_DAY;
        self.passed += length;
        (0..days).for_each(|_| (self.day)());
        Ok(length)
    }
}

/// A backup that took longer than a week was taken for dead by a gc on another host while it wrote: first backups over a slow
/// line never ended.
#[test]
fn a_backup_that_takes_weeks_is_not_taken_for_dead() {
    let rig = Rig::new(27);
    let bytes = holdfast_block::SeededRandom::new(3).bytes(14 << 20);
    let gc = another(&rig, 87, Liveness::Unknown);
    let mut days = 0;
    let mut stream = Slow {
        bytes: &bytes,
        passed: 0,
        day: Box::new(|| {
            days += 1;
            rig.store.advance_clock(Duration::from_secs(24 * 3600));
            (0..24 * 3600).for_each(|_| {
                (rig.environment.now_ms)();
            });
            let report = gc.gc(REWRITE_ALL).unwrap();
            assert!(report.cleared_writers.is_empty(), "day {days}: {report:?}");
        }),
    };
    let sources = vec![source("memory", SourceData::Stream(&mut stream))];
    let backup = request("m", 1, sources, Parent::Newest, 0);
    let id = rig.repository.backup(backup, &rig.progress).unwrap().snapshot.id;
    drop(stream);
    assert!(days > 20, "{days}");
    crate::common::assert_restores(&rig.repository, id, &bytes);
    rig.store
        .list(ObjectKind::Writer, &mut |name, _| panic!("{name} is left"))
        .unwrap();
}

/// Gc took a writer for dead by the clocks of two hosts.
#[test]
fn a_clock_years_ahead_does_not_expire_leases() {
    let rig = Rig::new(28);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let mut ahead = environment(86);
    ahead.processes = Arc::new(Other(Some(Liveness::Unknown)));
    ahead.now_ms = Arc::new(|| 4_000_000_000_000);
    let gc = Repository::open(Arc::new(rig.store.clone()), PASSWORD, ahead)
        .unwrap()
        .repository;
    let report = back_up_while(&rig, &disk, || {
        let report = gc.gc(REWRITE_ALL).unwrap();
        assert!(report.cleared_writers.is_empty(), "{report:?}");
    });
    let device = rig
        .repository
        .open_disk(report.unwrap().snapshot.id, Some("vda"))
        .unwrap();
    let mut bytes = vec![1; disk.bytes.len()];
    device.read_at(&mut bytes, 0).unwrap();
    assert!(bytes == disk.bytes);
}

/// A watch that does something else once the job knows how much there is to do.
struct Begun<'a> {
    act: Mutex<Option<Box<dyn FnOnce() + Send + 'a>>>,
    cancelled: AtomicBool,
}

impl<'a> Begun<'a> {
    fn new(act: impl FnOnce() + Send + 'a) -> Self {
        Self {
            act: Mutex::new(Some(Box::new(act))),
            cancelled: AtomicBool::new(false),
        }
    }
}

impl JobProgress for Begun<'_> {
    fn advance(&self, _bytes: u64) {}

    fn cancelled(&self) -> &AtomicBool {
        &self.cancelled
    }

    fn total(&self, _total: u64) {
        let act = self.act.lock().unwrap().take();
        if let Some(act) = act {
            act();
        }
    }
}

/// Two snapshots with data of their own. The first one is removed, and gc deletes its packs, while the repository is checked; so is a pack
/// of the second one if `loses` says so.
fn check_while_one_is_removed<T>(
    loses: bool,
    check: impl FnOnce(&Rig, [holdfast_repo::SnapshotId; 2], &Begun<'_>) -> T,
) -> T {
    let rig = Rig::new(31);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let removed = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let packs = |rig: &Rig| {
        let names = rig.store.objects().into_keys();
        names.filter(|name| name.kind() == ObjectKind::Pack).collect::<Vec<_>>()
    };
    let before = packs(&rig);
    disk.fill(0, 1 << 20);
    let kept = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let other = another(&rig, 85, Liveness::Alive);
    let begun = Begun::new(|| {
        other.forget(removed, "test").unwrap();
        assert!(other.gc(REWRITE_ALL).unwrap().deleted_pack_count > 0);
        if loses {
            let own = packs(&rig).into_iter().filter(|pack| !before.contains(pack));
            own.for_each(|pack| rig.store.delete(&pack).unwrap());
        }
    });
    check(&rig, [removed, kept], &begun)
}

const ALL_AT_FULL_DEPTH: VerifyRequest<'_> = VerifyRequest {
    snapshots: Selection::All,
    depth: VerifyDepth::Full,
    compare: None,
    thread_count: 2,
};

/// A prune and a gc ran while the repository was verified: the packs of the snapshots that were removed counted as lost.
#[test]
fn a_snapshot_removed_during_a_check_is_not_lost() {
    check_while_one_is_removed(false, |rig, _, begun| {
        let report = rig.repository.verify(&ALL_AT_FULL_DEPTH, begun).unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
        assert_eq!((report.snapshot_count, report.logical_bytes), (1, 1 << 20));
    });
    check_while_one_is_removed(false, |rig, [removed, _], begun| {
        let request = VerifyRequest {
            snapshots: Selection::Some(vec![removed]),
            ..ALL_AT_FULL_DEPTH
        };
        let result = rig.repository.verify(&request, begun);
        assert!(
            matches!(result, Err(Error::NoSnapshot { id }) if id == removed),
            "{result:?}"
        );
    });
    check_while_one_is_removed(false, |rig, _, begun| {
        let full = ScrubRequest {
            percent: 100,
            thread_count: 1,
        };
        let report = rig.repository.scrub(full, begun).unwrap();
        assert!(!report.has_damage(), "{:?}", report.findings);
    });
}

/// A verify took longer than the day for which the record of a removal is kept. It reported the removed snapshot as lost.
#[test]
fn a_removal_that_is_older_than_its_record_is_no_loss() {
    let rig = Rig::new(32);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let removed = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    disk.fill(0, 1 << 20);
    rig.backup("m", &disk, Parent::Newest);
    let other = another(&rig, 87, Liveness::Alive);
    let begun = Begun::new(|| {
        other.forget(removed, "test").unwrap();
        other.gc(REWRITE_ALL).unwrap();
        rig.store.advance_clock(Duration::from_secs(25 * 3600));
        other.gc(REWRITE_ALL).unwrap();
        let names = rig.store.objects().into_keys();
        assert_eq!(names.filter(|name| name.kind() == ObjectKind::Forgotten).count(), 0);
    });
    let report = rig.repository.verify(&ALL_AT_FULL_DEPTH, &begun).unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
    assert_eq!(report.snapshot_count, 1);
}

#[test]
fn shared_chunks_are_lost_even_if_a_snapshot_is_removed_during_a_check() {
    let is_of = |findings: &[holdfast_repo::Finding], kept| {
        let missing: Vec<_> = findings.iter().filter(|one| one.kind == FindingKind::Missing).collect();
        let mut touched = missing.iter().flat_map(|one| &one.touches);
        !missing.is_empty()
            && missing.iter().all(|one| !one.touches.is_empty())
            && touched.all(|one| one.snapshot == kept)
    };
    check_while_one_is_removed(true, |rig, [_, kept], begun| {
        let report = rig.repository.verify(&ALL_AT_FULL_DEPTH, begun).unwrap();
        assert!(is_of(&report.findings, kept), "{:?}", report.findings);
    });
    check_while_one_is_removed(true, |rig, [_, kept], begun| {
        let full = ScrubRequest {
            percent: 100,
            thread_count: 1,
        };
        let report = rig.repository.scrub(full, begun).unwrap();
        assert!(is_of(&report.findings, kept), "{:?}", report.findings);
    });
}
