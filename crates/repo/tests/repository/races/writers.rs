//! Races of writers with processes that consider them dead or remove their announcement.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice, MemoryDevice};
use holdfast_repo::store::{ObjectKind, Store};
use holdfast_repo::{Error, Liveness, Parent, RepairRequest, Repository, SourceData};

use super::{MONTH_AND_MORE, Other, REWRITE_ALL, another, back_up_while, request_of_another};
use crate::common::{Disk, HookedStore, PASSWORD, Rig, Watch, environment, request, source};

/// Regression: gc wrongly considered a writer dead for certain. It deleted the data of the writer, and also the mark in
/// the place of its snapshot, because no writer could need the mark. Then the writer continued, and committed a
/// snapshot that could not be read.
#[test]
fn a_writer_considered_dead_does_not_commit() {
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
        assert!(
            again.cleared_writers.is_empty(),
            "the writer was cleared twice: {again:?}"
        );
    });
    assert!(matches!(result, Err(Error::Revoked { .. })), "{result:?}");
    assert!(rig.repository.snapshots().unwrap().0.is_empty());
    for kind in [ObjectKind::Writer, ObjectKind::Snapshot] {
        rig.store.list(kind, &mut |name, _| panic!("{name} is left")).unwrap();
    }
}

/// Regression: as above, but more than a month passed between two steps of the writer, after it had checked its
/// announcement: the mark was deleted as well, and the snapshot was committed without its data.
#[test]
fn a_writer_whose_mark_was_deleted_before_its_commit_reverts_it() {
    let rig = Rig::new(27);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let gc = another(&rig, 96, Liveness::Dead);
    let store = rig.store.clone();
    let hooked = HookedStore::new(&rig.store, ObjectKind::Snapshot, move || {
        gc.gc(REWRITE_ALL).unwrap();
        store.advance_clock(MONTH_AND_MORE);
        let report = gc.gc(REWRITE_ALL).unwrap();
        assert!(
            report.cleared_writers.is_empty(),
            "the writer was cleared twice: {report:?}"
        );
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

/// Regression: the announcement of a running writer was damaged, and repair removed the unreadable object. Then gc did
/// not know the writer and deleted its data, and the writer committed a snapshot that could not be read.
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

/// A stream that takes a day for each 512 KiB.
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

/// Regression: gc on another host considered a backup dead that took longer than a week: first backups over a slow
/// network never completed.
#[test]
fn a_backup_that_takes_weeks_is_not_considered_dead() {
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

/// Regression: gc considered a writer dead because it compared the clocks of two hosts.
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
