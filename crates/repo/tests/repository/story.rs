//! The whole life cycle on small disks: backup, restore, change, forget and gc.

use holdfast_block::{BlockDevice, BlockDeviceMut, MemoryDevice, SeededRandom};
use holdfast_repo::store::{ObjectKind, ObjectName, Store, StoreError};
use holdfast_repo::{Error, GcRequest, Parent, RestoreRequest, TargetState};

use crate::common::{Disk, Rig};

const KIB: u64 = 1024;

#[test]
fn disks_of_all_sizes_are_restored_unchanged() {
    let rig = Rig::new(1);
    for size in [0, 1, 511, 4096, 4097, 100 * KIB + 3, 3 * 1024 * KIB + 77] {
        let mut disk = Disk::new(size, size + 99);
        disk.scatter(5, 9000);
        let report = rig.backup("odd", &disk, Parent::Newest);
        rig.assert_restores(report.snapshot.id, &disk);
    }
}

#[test]
fn the_number_of_threads_does_not_affect_the_result() {
    let mut disk = Disk::new(40 * 1024 * KIB, 5);
    disk.fill(0, 9 * 1024 * KIB);
    disk.scatter(60, 30_000);
    let stored: Vec<_> = [0, 1, 3]
        .into_iter()
        .map(|threads| {
            let rig = Rig::new(7).with_threads(threads);
            let report = rig.backup("m", &disk, Parent::Newest);
            rig.assert_restores(report.snapshot.id, &disk);
            (report.snapshot.statistics(), report.stored_bytes)
        })
        .collect();
    assert!(stored.windows(2).all(|pair| pair[0] == pair[1]), "{stored:?}");
}

#[test]
fn only_changed_data_takes_space() {
    let rig = Rig::new(2);
    let mut disk = Disk::new(80 * 1024 * KIB, 11);
    disk.fill(0, 20 * 1024 * KIB);
    let first = rig.backup("db", &disk, Parent::Newest);
    let again = rig.backup("db", &disk, Parent::Newest);
    assert_eq!(again.snapshot.statistics().unchanged_bytes, 20 * 1024 * KIB);
    assert!(again.stored_bytes < 4096, "{}", again.stored_bytes);
    for block in [3u64, 700, 701, 4000] {
        disk.fill(block * 4096, 4096);
    }
    let changed = rig.backup("db", &disk, Parent::Newest);
    assert_eq!(changed.snapshot.statistics().new_bytes, 4 * 4096);
    assert!(changed.stored_bytes < 4 * 4096 + 4096, "{}", changed.stored_bytes);
    // Another machine with the same disk: all chunks are found by content, except those around the four changed blocks.
    let other = rig.backup("copy", &disk, Parent::Newest);
    let found = other.snapshot.statistics();
    assert!(
        found.new_bytes <= 4 * 512 * KIB && found.known_bytes >= 18 * 1024 * KIB,
        "{found:?}"
    );
    for (report, restores) in [(&first, false), (&changed, true), (&other, true)] {
        if restores {
            rig.assert_restores(report.snapshot.id, &disk);
        }
    }
}

#[test]
fn a_disk_that_grows_shrinks_and_is_emptied_is_stored_correctly() {
    let rig = Rig::new(3);
    let mut random = SeededRandom::new(77);
    let mut points = Vec::new();
    for size in [
        70 * 1024 * KIB,
        130 * 1024 * KIB + 5,
        64 * 1024 * KIB,
        12_345,
        0,
        65 * 1024 * KIB,
    ] {
        let mut disk = Disk::new(size, 1);
        if size > 0 {
            disk.scatter(20, 50_000);
            disk.fill(random.below(size), 1000.min(size));
        }
        points.push((rig.backup("m", &disk, Parent::Newest).snapshot.id, disk));
    }
    for (snapshot, disk) in &points {
        rig.assert_restores(*snapshot, disk);
    }
}

#[test]
fn restoring_in_place_writes_only_differences() {
    let rig = Rig::new(4);
    let mut disk = Disk::new(10 * 1024 * KIB + 100, 1);
    disk.fill(0, 6 * 1024 * KIB);
    let snapshot = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let target = MemoryDevice::from_bytes(&disk.bytes);
    target.write_at(&[1; 10], 5000).unwrap();
    target.write_at(&[1; 10], 9 * 1024 * KIB).unwrap();
    target.write_at(&[9], disk.bytes.len() as u64 - 1).unwrap();
    let device = rig.repository.open_disk(snapshot, None).unwrap();
    let request = RestoreRequest {
        target: &target,
        target_name: "target".into(),
        state: TargetState::Similar,
        thread_count: 2,
    };
    let report = rig.repository.restore(&device, &request, &rig.progress).unwrap();
    assert!(target.to_bytes() == disk.bytes);
    assert!(report.written_bytes < 3 * 1024 * KIB, "{report:?}");
    assert_eq!(device.size_bytes(), disk.bytes.len() as u64);
}

/// The most important test of gc: snapshots share and release data in every way, and the remaining ones are always
/// readable.
#[test]
fn gc_reclaims_exactly_the_unused_chunks() {
    let rig = Rig::new(5);
    let mut disk = Disk::new(30 * 1024 * KIB, 21);
    disk.fill(0, 16 * 1024 * KIB);
    let mut points = Vec::new();
    for day in 0..12u64 {
        disk.scatter(120, 4096);
        disk.fill(day * 1024 * KIB, 300 * KIB);
        points.push((rig.backup("m", &disk, Parent::Newest).snapshot.id, disk.clone()));
    }
    let gc = GcRequest {
        repack_below_percent: 60,
        thread_count: 0,
    };
    let nothing = rig.repository.gc(gc).unwrap();
    assert_eq!(nothing.deleted_pack_count, 0, "{nothing:?}");
    let before = rig.repository.statistics().unwrap();
    for keep in [11usize, 7, 3, 0] {
        // All but every fourth snapshot are removed step by step.
        let forgotten: Vec<_> = (0..12).filter(|day| day % 4 != 3 && *day / 4 == keep / 4).collect();
        for day in forgotten {
            if rig.repository.snapshot(points[day].0).is_ok() {
                rig.repository.forget(points[day].0, "test").unwrap();
            }
        }
        let report = rig.repository.gc(gc).unwrap();
        assert!(report.waiting_for.is_empty(), "{report:?}");
        for (snapshot, disk) in points.iter().skip(3).step_by(4) {
            rig.assert_restores(*snapshot, disk);
        }
    }
    let after = rig.repository.statistics().unwrap();
    assert!(after.stored_bytes < before.stored_bytes, "{before:?} {after:?}");
    assert!(after.dead_bytes <= after.unique_bytes, "{after:?}");
    let again = rig.repository.gc(gc).unwrap();
    assert_eq!(
        (again.deleted_pack_count, again.rewritten_bytes),
        (0, 0),
        "a second gc finds nothing: {again:?}"
    );
    // The next backup uses relocated chunks of its parent.
    let last = &points[11].1;
    let report = rig.backup("m", last, Parent::Newest);
    assert_eq!(
        report.snapshot.statistics().new_bytes,
        0,
        "{:?}",
        report.snapshot.statistics()
    );
    rig.assert_restores(report.snapshot.id, last);
    for (snapshot, _) in points.iter().skip(3).step_by(4) {
        rig.repository.forget(*snapshot, "test").unwrap();
    }
    rig.repository.forget(report.snapshot.id, "test").unwrap();
    rig.repository.gc(gc).unwrap();
    let empty = rig.repository.statistics().unwrap();
    assert_eq!((empty.pack_count, empty.snapshot_count), (0, 0));
}

/// A completely full store: committed snapshots stay readable, and removing snapshots frees space again.
#[test]
fn a_full_store_keeps_its_content_and_can_be_emptied() {
    for capacity in [1_500_000, 1_500_777, 1_640_000] {
        let rig = Rig::with_capacity(6, capacity).with_threads(0);
        let mut disk = Disk::new(4 * 1024 * KIB, 3);
        let mut points = Vec::new();
        let error = loop {
            disk.fill((points.len() as u64 % 2) * 300 * KIB, 300 * KIB);
            match rig.try_backup("m", &disk, Parent::Newest) {
                Ok(report) => points.push((report.snapshot.id, disk.clone())),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Store(StoreError::NoSpace { .. })), "{error}");
        // Uses the remaining space, so that not even a marker fits.
        for length in [4096, 512, 64, 8, 1] {
            while rig.store.put(&filler_object(&rig), &vec![0; length]).is_ok() {}
        }
        let (last, rest) = points.split_last().unwrap();
        for (snapshot, _) in rest {
            rig.repository.forget(*snapshot, "full").unwrap();
        }
        let gc = GcRequest {
            repack_below_percent: 0,
            thread_count: 0,
        };
        let report = rig.repository.gc(gc).unwrap();
        assert!(report.freed_bytes > 0, "{report:?}");
        rig.assert_restores(last.0, &last.1);
        let next = rig.backup("m", &disk, Parent::Newest);
        rig.assert_restores(next.snapshot.id, &disk);
    }
}

/// The name of an object that only takes space.
fn filler_object(rig: &Rig) -> ObjectName {
    let number = rig.store.objects().len();
    ObjectName::new(ObjectKind::Protected, &format!("stone-{number}")).expect("a name of letters and digits")
}
