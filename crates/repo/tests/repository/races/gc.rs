//! Races of gc with readers, with healing backups and with another gc; and of the threads of a restore.

use std::collections::BTreeMap;
use std::sync::Arc;

use holdfast_block::{BlockDevice, Fault, FaultRule, FaultyDevice, MemoryDevice, RequestKind};
use holdfast_repo::store::{ObjectKind, Store};
use holdfast_repo::{
    Error, GcRequest, Liveness, Parent, Repository, RestoreRequest, ScrubRequest, Source, SourceData, TargetState,
};

use super::{REWRITE_ALL, WEEK_AND_MORE, another, request_of_another};
use crate::common::{Disk, HookedStore, PASSWORD, Rig, Watch, environment, request, source};

/// Regression: gc rewrote a pack of an open disk, and the next read failed with "pack is missing", although the
/// snapshot still existed and opening it again would have helped.
#[test]
fn an_open_disk_stays_readable_while_gc_moves_its_chunks() {
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

/// Regression: three of four writer threads had failed on a full disk, each holding the memory of a frame; the last
/// decoder waited for memory, and the last writer for a frame: the restore never ended.
#[test]
fn a_restore_to_a_full_target_ends() {
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

/// Regression: gc with a limit of 100 percent rewrote completely used packs in every run.
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

/// Regression: gc had marked an unneeded pack, and was about to delete it. A backup healed an old snapshot with chunks
/// of this pack, and completed. gc checked again, but only snapshots that it did not know, and deleted the pack.
#[test]
fn chunks_that_repair_a_snapshot_during_gc_are_kept() {
    let rig = Rig::new(25);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let old = rig.backup("old", &disk, Parent::Newest).snapshot.id;
    let objects = rig.store.objects();
    let is_large = |bytes: &[u8]| bytes.len() > 1 << 18;
    let (damaged, bytes) = objects.iter().find(|(_, bytes)| is_large(bytes)).unwrap();
    // A backup that does not find the pack stores the same data again.
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

    let other = another(&rig, 94, Liveness::Alive);
    let hooked = HookedStore::new(&rig.store, ObjectKind::Condemned, move || {
        let device = MemoryDevice::from_bytes(&[7; 4096]);
        let source = Source {
            name: "vda".to_owned(),
            data: SourceData::Disk(&device),
            notes: BTreeMap::new(),
        };
        let request = request("other", 1, vec![source], Parent::None, 0);
        other.backup(request, &Watch::default()).unwrap();
    });
    let gc = Repository::open(Arc::new(hooked), PASSWORD, environment(93))
        .unwrap()
        .repository;
    let report = gc.gc(REWRITE_ALL).unwrap();
    assert_eq!(report.waiting_for, Vec::<String>::new());
    crate::common::assert_restores(&another(&rig, 92, Liveness::Alive), old, &disk.bytes);
}

/// Regression: a gc slept for more than a week, on a host whose processes are not visible to others. Another gc
/// replaced it, and deleted the pack that the first one had written and not yet recorded. The first one woke up,
/// followed its relocations, and deleted the old packs: existing snapshots were lost.
#[test]
fn a_replaced_gc_deletes_no_used_packs() {
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
        let hooked = HookedStore::new(&rig.store, kind, move || {
            store.advance_clock(WEEK_AND_MORE);
            let request = GcRequest {
                repack_below_percent: percent,
                thread_count: 0,
            };
            other.gc(request).unwrap();
            // The removed content is stored again, reusing the chunks that are left.
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
        let new = ids.lock().unwrap().expect("the other process created a snapshot");
        crate::common::assert_restores(&reader, new, &removed);
        assert!(slept.is_ok() || matches!(slept, Err(Error::Revoked { .. })), "{case}");
        rig.repository.gc(REWRITE_ALL).unwrap();
        crate::common::assert_restores(&another(&rig, 88, Liveness::Unknown), new, &removed);
    }
}
