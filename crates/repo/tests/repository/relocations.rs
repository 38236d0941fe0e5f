//! Each relocation is stored in two objects: if one of them is lost or damaged, no data is lost.

use std::sync::Arc;

use holdfast_repo::store::{MemoryStore, ObjectKind, ObjectName, Store};
use holdfast_repo::{
    FindingKind, GcRequest, Parent, RepairAction, RepairRequest, Repository, ScrubRequest, Selection, SnapshotId,
    VerifyDepth, VerifyRequest,
};

use crate::common::{Disk, PASSWORD, Rig, environment};

const GC: GcRequest = GcRequest {
    repack_below_percent: 99,
    thread_count: 0,
};
const FULL: ScrubRequest = ScrubRequest {
    percent: 100,
    thread_count: 1,
};

fn relocations(store: &MemoryStore) -> Vec<ObjectName> {
    let names = store.objects().into_keys();
    names.filter(|name| name.kind() == ObjectKind::Relocation).collect()
}

/// A repository with a snapshot whose data and map are relocated.
fn moved(seed: u64) -> (Rig, SnapshotId, Disk) {
    let rig = Rig::new(seed);
    let mut disk = Disk::new(2 << 20, 1);
    disk.fill(0, 2 << 20);
    let old = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    disk.fill(0, 1 << 20);
    let kept = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    rig.repository.forget(old, "test").unwrap();
    let report = rig.repository.gc(GC).unwrap();
    assert!(report.rewritten_bytes > 0, "{report:?}");
    assert!(!relocations(&rig.store).is_empty());
    (rig, kept, disk)
}

fn reopen(store: &MemoryStore) -> Repository {
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    Repository::open(shared, PASSWORD, environment(900)).unwrap().repository
}

fn kinds_found(repository: &Repository) -> Vec<(String, FindingKind)> {
    let request = VerifyRequest {
        snapshots: Selection::All,
        depth: VerifyDepth::Full,
        compare: None,
        thread_count: 1,
    };
    let verified = repository
        .verify(&request, &crate::common::Watch::default())
        .unwrap()
        .findings;
    let scrubbed = repository
        .scrub(FULL, &crate::common::Watch::default())
        .unwrap()
        .findings;
    assert_eq!(verified, scrubbed, "verify and scrub say the same");
    verified
        .into_iter()
        .map(|finding| (finding.object, finding.kind))
        .collect()
}

#[test]
fn one_of_two_relocation_objects_is_sufficient() {
    let (rig, kept, disk) = moved(41);
    let names = relocations(&rig.store);
    assert!(names.len() >= 2 && names.len().is_multiple_of(2), "{names:?}");
    for name in names {
        for kind in [FindingKind::Single, FindingKind::Damaged] {
            let store = rig.store.duplicate();
            if kind == FindingKind::Single {
                store.delete(&name).unwrap();
            } else {
                let mut bytes = store.objects()[&name].to_vec();
                *bytes.last_mut().unwrap() ^= 1;
                store.damage(&name, &bytes);
            }
            let repository = reopen(&store);
            crate::common::assert_restores(&repository, kept, &disk.bytes);
            assert_eq!(kinds_found(&repository), [(name.to_string(), kind)]);
            let request = RepairRequest {
                percent: 100,
                thread_count: 1,
            };
            let plan = repository.plan_repair(request, &rig.progress).unwrap();
            let actions: Vec<_> = plan.actions.iter().map(|(action, _)| action.clone()).collect();
            let object = name.to_string();
            assert_eq!(actions, [RepairAction::RestoreRelocation { object }]);
            repository.repair(&plan, 1, &rig.progress).unwrap();
            assert_eq!(kinds_found(&repository), []);
            assert_eq!(relocations(&store), relocations(&rig.store));
            crate::common::assert_restores(&reopen(&store), kept, &disk.bytes);
        }
    }
}

/// The writer of a relocation died between its two objects: no action of a user is needed.
#[test]
fn gc_adds_the_missing_second_relocation_object() {
    let (rig, kept, disk) = moved(42);
    let whole = relocations(&rig.store);
    let copies = whole
        .iter()
        .filter(|name| name.name().split('.').next_back() == Some("copy"));
    copies.for_each(|name| rig.store.delete(name).unwrap());
    let repository = reopen(&rig.store);
    let report = repository
        .gc(GcRequest {
            repack_below_percent: 0,
            ..GC
        })
        .unwrap();
    assert_eq!(report.deleted_pack_count, 0, "{report:?}");
    assert_eq!(relocations(&rig.store), whole);
    crate::common::assert_restores(&repository, kept, &disk.bytes);
    // gc deletes both when they are unused.
    repository.forget(kept, "test").unwrap();
    repository.gc(GC).unwrap();
    assert_eq!(relocations(&rig.store), []);
}

/// If both objects of a relocation are damaged, the pack that they refer to seems unused. Then gc deletes nothing: the
/// objects may exist in a copy of the store, and the pack must still exist.
#[test]
fn gc_deletes_nothing_if_a_relocation_is_unreadable() {
    let (rig, kept, disk) = moved(43);
    let before = rig.store.objects();
    for name in relocations(&rig.store) {
        let mut bytes = before[&name].to_vec();
        bytes.truncate(20);
        rig.store.damage(&name, &bytes);
    }
    let repository = reopen(&rig.store);
    let error = repository.gc(GC).unwrap_err();
    assert!(error.is_damage(), "{error}");
    for name in relocations(&rig.store) {
        rig.store.damage(&name, &before[&name]);
    }
    crate::common::assert_restores(&reopen(&rig.store), kept, &disk.bytes);
}
