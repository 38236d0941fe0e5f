//! Removal of damaged and lost snapshots: by identity, and never by accident.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_block::MemoryDevice;
use holdfast_repo::store::{ObjectKind, ObjectName, Store};
use holdfast_repo::{AcceptedLoss, Error, GcRequest, Parent, ScrubRequest, SnapshotId, Source, SourceData};

use crate::common::{Disk, HookedStore, Rig, request};

const GC: GcRequest = GcRequest {
    repack_below_percent: 0,
    thread_count: 0,
};

fn object(id: SnapshotId) -> ObjectName {
    ObjectName::new(ObjectKind::Snapshot, &id.to_string()).unwrap()
}

fn findings(rig: &Rig) -> Vec<String> {
    let full = ScrubRequest {
        percent: 100,
        thread_count: 1,
    };
    let report = rig.repository.scrub(full, &rig.progress).unwrap();
    report.findings.into_iter().map(|finding| finding.object).collect()
}

fn with_snapshots(seed: u64) -> (Rig, [SnapshotId; 2], Disk) {
    let rig = Rig::new(seed);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 19);
    let first = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    disk.fill(0, 1 << 18);
    let second = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    (rig, [first, second], disk)
}

/// A snapshot can be removed by its id with any damage of its object, and gc frees its space.
#[test]
fn a_damaged_or_lost_snapshot_can_be_removed_by_id() {
    for damage in ["lost", "truncated", "flipped", "of a later version"] {
        let (rig, [first, second], disk) = with_snapshots(51);
        let name = object(first);
        let mut bytes = rig.store.objects()[&name].to_vec();
        match damage {
            "lost" => rig.store.delete(&name).unwrap(),
            "truncated" => rig.store.damage(&name, &bytes[..20]),
            "flipped" => {
                *bytes.last_mut().unwrap() ^= 1;
                rig.store.damage(&name, &bytes);
            }
            _ => {
                bytes[8] = 99;
                rig.store.damage(&name, &bytes);
            }
        }
        assert_eq!(findings(&rig), [name.to_string()], "{damage}");
        // Commands that select from the list of snapshots cannot select it.
        let (listed, _) = rig.repository.snapshots().unwrap();
        assert_eq!(listed.iter().map(|manifest| manifest.id).collect::<Vec<_>>(), [second]);

        rig.repository.forget(first, "it cannot be read").unwrap();
        assert_eq!(
            findings(&rig),
            Vec::<String>::new(),
            "{damage}: the snapshot still counts as lost"
        );
        let report = rig.repository.gc(GC).unwrap();
        assert!(report.deleted_pack_count > 0, "{damage}: {report:?}");
        assert_eq!(findings(&rig), Vec::<String>::new(), "{damage}");
        rig.assert_restores(second, &disk);
        // It cannot be removed twice.
        let again = rig.repository.forget(first, "again");
        assert!(
            matches!(again, Err(Error::NoSnapshot { id }) if id == first),
            "{damage}: {again:?}"
        );
    }
}

#[test]
fn a_protected_snapshot_stays_even_when_it_cannot_be_read() {
    let (rig, [first, _], _) = with_snapshots(52);
    rig.repository.protect(first).unwrap();
    let bytes = rig.store.objects()[&object(first)].to_vec();
    rig.store.delete(&object(first)).unwrap();
    let refused = rig.repository.forget(first, "test");
    assert!(matches!(refused, Err(Error::Protected { .. })), "{refused:?}");
    rig.store.damage(&object(first), &bytes[..30]);
    let refused = rig.repository.forget(first, "test");
    assert!(matches!(refused, Err(Error::Protected { .. })), "{refused:?}");
    rig.repository.unprotect(first).unwrap();
    rig.repository.forget(first, "test").unwrap();
}

/// Several holders may need a snapshot at the same time; each one releases its own hold, independent of the protection
/// by a user.
#[test]
fn a_held_snapshot_is_kept() {
    let (rig, [first, second], _) = with_snapshots(54);
    let refused = |what: &str| {
        let refused = rig.repository.forget(first, "test");
        assert!(matches!(refused, Err(Error::Protected { .. })), "{what}: {refused:?}");
        assert_eq!(rig.repository.protected().unwrap(), [first].into());
    };
    rig.repository.hold(first, 7).unwrap();
    rig.repository.hold(first, 8).unwrap();
    refused("two");
    rig.repository.protect(first).unwrap();
    rig.repository.release(first, 7).unwrap();
    rig.repository.unprotect(first).unwrap();
    refused("one");
    // The holds are no unknown files, and are kept as long as the snapshot exists.
    assert_eq!(findings(&rig), [""; 0]);
    rig.repository.gc(GC).unwrap();
    assert_eq!(rig.repository.holder_count(first).unwrap(), 1);
    rig.repository.release_all(first).unwrap();
    rig.repository.forget(first, "test").unwrap();
    // gc removes holds without a snapshot.
    rig.repository.hold(second, 9).unwrap();
    rig.store.delete(&object(second)).unwrap();
    // A lost snapshot may come back, and is still protected then.
    assert!(matches!(rig.repository.gc(GC), Err(Error::Loss { .. })));
    assert_eq!(rig.repository.protected().unwrap(), [second].into());
    rig.repository
        .accept_loss(&AcceptedLoss::Snapshots(vec![second]), &rig.progress)
        .unwrap();
    rig.repository.gc(GC).unwrap();
    assert!(rig.repository.protected().unwrap().is_empty());
    assert!(rig.repository.hold(second, 9).is_err());
}

/// Regression: the record of the removal of a damaged snapshot was deleted after a day, while its packs were still kept
/// for a writer: then the copy of its manifest counted as a lost snapshot, and repair would have restored it.
#[test]
fn a_removed_snapshot_stays_removed_while_a_copy_exists() {
    let (rig, [first, _], _) = with_snapshots(53);
    rig.store.damage(&object(first), b"damaged");
    rig.repository.forget(first, "it cannot be read").unwrap();
    let records = |rig: &Rig| {
        let names = rig.store.objects().into_keys();
        names.filter(|name| name.kind() == ObjectKind::Forgotten).count()
    };
    // Each read of the clock advances it by one second.
    let two_days = 2 * 24 * 3600;
    for _ in 0..two_days {
        (rig.environment.now_ms)();
    }
    rig.store.advance_clock(Duration::from_secs(two_days));
    // A running writer delays the deletion of the packs.
    let device = MemoryDevice::from_bytes(&[1; 4096]);
    let held = HookedStore::new(&rig.store, ObjectKind::Pack, {
        let gc = rig.open(54);
        move || {
            let report = gc.gc(GC).unwrap();
            assert_eq!(
                (report.waiting_for.len(), report.deleted_pack_count),
                (1, 0),
                "{report:?}"
            );
        }
    });
    let writer = rig.open_on(held, 55);
    let source = Source {
        name: "vda".to_owned(),
        data: SourceData::Disk(&device),
        notes: BTreeMap::new(),
    };
    writer
        .backup(request("other", 1, vec![source], Parent::None, 0), &rig.progress)
        .unwrap();
    assert_eq!(records(&rig), 1, "the packs still exist");
    assert_eq!(findings(&rig), Vec::<String>::new());
    rig.repository.gc(GC).unwrap();
    assert_eq!(records(&rig), 0);
    assert_eq!(findings(&rig), Vec::<String>::new());
}

#[test]
fn an_unknown_snapshot_cannot_be_removed() {
    let (rig, _, _) = with_snapshots(54);
    let nothing: SnapshotId = "00112233445566778899aabbccddeeff".parse().unwrap();
    let refused = rig.repository.forget(nothing, "test");
    assert!(matches!(refused, Err(Error::NoSnapshot { .. })), "{refused:?}");
    let left = rig.store.objects().into_keys();
    assert!(left.into_iter().all(|name| !name.name().starts_with("0011")));
}
