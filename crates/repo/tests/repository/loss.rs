//! Repositories with lost, truncated or not yet copied objects: gc and repair delete nothing that is needed once the
//! objects are put back or repaired.

use std::collections::BTreeSet;
use std::sync::Arc;

use holdfast_block::{BlockDevice, SeededRandom};
use holdfast_repo::store::{
    DirectoryStore, MemoryStore, ObjectKind, ObjectName, ObjectWriter, Put, Result as StoreResult, Store, StoreError,
};
use holdfast_repo::{
    AcceptedLoss, Error, FindingKind, GcRequest, Loss, LostSearch, Parent, RepairRequest, Repository, Selection,
    SnapshotId, VerifyDepth, VerifyRequest,
};

use crate::common::{Disk, PASSWORD, Rig, Watch, assert_restores, environment, names_of};

const GC: GcRequest = GcRequest {
    repack_below_percent: 80,
    thread_count: 0,
};

/// A repository with all kinds of state: relocations of a rewritten pack, a removed snapshot whose space is not freed
/// yet, a protected one, damage records, and snapshots of two machines.
struct FullRepository {
    rig: Rig,
    existing: Vec<(SnapshotId, Disk)>,
}

fn full() -> FullRepository {
    let rig = Rig::new(71);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    let old = rig.backup("a", &disk, Parent::Newest).snapshot.id;
    disk.fill(0, 600 << 10);
    let mut existing = vec![(rig.backup("a", &disk, Parent::Newest).snapshot.id, disk.clone())];
    rig.repository.forget(old, "test").unwrap();
    let report = rig.repository.gc(GC).unwrap();
    assert!(report.rewritten_bytes > 0, "{report:?}");
    let mut other = Disk::new(1 << 20, 2);
    other.fill(0, 300 << 10);
    existing.push((rig.backup("b", &other, Parent::Newest).snapshot.id, other.clone()));
    rig.repository.protect(existing[1].0).unwrap();
    let mut forgotten = Disk::new(1 << 20, 3);
    forgotten.fill(0, 200 << 10);
    let forgotten = rig.backup("c", &forgotten, Parent::Newest).snapshot.id;
    rig.repository.forget(forgotten, "test").unwrap();
    for kind in [
        ObjectKind::Relocation,
        ObjectKind::Forgotten,
        ObjectKind::Protected,
        ObjectKind::Index,
    ] {
        assert!(!names_of(&rig.store, kind).is_empty(), "{kind}");
    }
    FullRepository { rig, existing }
}

fn open(store: MemoryStore, seed: u64) -> Option<Repository> {
    let opened = Repository::open(Arc::new(store), PASSWORD, environment(seed));
    opened.ok().map(|opened| opened.repository)
}

fn packs(store: &dyn Store) -> BTreeSet<ObjectName> {
    names_of(store, ObjectKind::Pack).into_iter().collect()
}

/// Puts the listed objects back in their original state.
fn put_back(store: &MemoryStore, whole: &MemoryStore, spare: &[ObjectName]) {
    for (name, bytes) in whole.objects() {
        if spare.contains(&name) {
            store.damage(&name, &bytes);
        }
    }
}

fn repair(repository: &Repository) -> Result<(), Error> {
    let request = RepairRequest {
        percent: 100,
        thread_count: 0,
    };
    let plan = repository.plan_repair(request, &Watch::default())?;
    repository.repair(&plan, 0, &Watch::default()).map(drop)
}

/// Runs gc, or repair and gc, on the remaining objects; then puts the lost objects back, and asserts that every
/// snapshot can be read.
fn assert_nothing_lost_for_good(full: &FullRepository, left: &MemoryStore, lost: &[ObjectName], case: &str) {
    for verbs in ["gc", "repair and gc"] {
        let store = left.duplicate();
        let case = format!("{verbs}: {case}");
        if let Some(repository) = open(store.clone(), 500) {
            if verbs != "gc" {
                repair(&repository).ok();
            }
            let repaired = packs(&store);
            let planned = repository.gc_plan(GC);
            let done = repository.gc(GC);
            if done.is_err() {
                assert_eq!(packs(&store), repaired, "{case}: a gc that fails deletes nothing");
                let is_loss = matches!(done, Err(Error::Loss { .. }));
                assert!(
                    !is_loss || planned.is_err(),
                    "{case}: the plan does not report the loss: {done:?}"
                );
            }
        }
        put_back(&store, &full.rig.store, lost);
        let repository = open(store, 501).unwrap();
        for (id, disk) in &full.existing {
            let manifest = repository.snapshot(*id);
            assert!(manifest.is_ok(), "{case}: {id} is missing: {:?}", manifest.err());
            let device = repository.open_disk(*id, None).unwrap();
            let mut bytes = vec![1; disk.bytes.len()];
            let read = device.read_at(&mut bytes, 0);
            assert!(read.is_ok(), "{case}: {id} cannot be read: {:?}", read.err());
            assert!(bytes == disk.bytes, "{case}: {id} has other content");
        }
    }
}

#[test]
fn gc_and_repair_keep_everything_needed_to_put_lost_files_back() {
    let full = full();
    let objects = full.rig.store.objects();
    for kind in ObjectKind::ALL {
        let names: Vec<ObjectName> = objects.keys().filter(|name| name.kind() == kind).cloned().collect();
        let mut selections: Vec<Vec<ObjectName>> = names.iter().map(|name| vec![name.clone()]).collect();
        selections.push(names);
        for lost in selections.iter().filter(|lost| !lost.is_empty()) {
            let absent = full.rig.store.duplicate();
            let cut = full.rig.store.duplicate();
            let empty = full.rig.store.duplicate();
            for name in lost {
                absent.delete(name).unwrap();
                cut.damage(name, &objects[name][..objects[name].len() / 2]);
                empty.damage(name, b"");
            }
            for (left, how) in [(absent, "lost"), (cut, "cut off"), (empty, "empty")] {
                assert_nothing_lost_for_good(
                    &full,
                    &left,
                    lost,
                    &format!("{} of {kind} {how}: {}", lost.len(), lost[0]),
                );
            }
        }
    }
}

/// A copy of a store is interrupted after any number of objects, in the order of names or another one; the rest is
/// copied later.
#[test]
fn a_partly_copied_repository_loses_nothing() {
    let full = full();
    let objects = full.rig.store.objects();
    let mut names: Vec<ObjectName> = objects.keys().cloned().collect();
    names.sort_by_key(ToString::to_string);
    let mut random = SeededRandom::new(5);
    for round in 0..60 {
        if round >= 20 {
            for at in (1..names.len()).rev() {
                names.swap(at, holdfast_block::to_usize(random.below(at as u64 + 1)));
            }
            let order: Vec<u64> = ObjectKind::ALL.iter().map(|_| random.next_u64()).collect();
            names.sort_by_key(|name| {
                ObjectKind::ALL
                    .iter()
                    .position(|kind| *kind == name.kind())
                    .map(|at| order[at])
            });
        }
        let count = 1 + holdfast_block::to_usize(random.below(names.len() as u64 - 1));
        let store = full.rig.store.duplicate();
        names[count..].iter().for_each(|name| store.delete(name).unwrap());
        assert_nothing_lost_for_good(
            &full,
            &store,
            &names[count..],
            &format!("round {round}, {count} copied"),
        );
    }
}

fn losses(result: Result<holdfast_repo::GcReport, Error>) -> Vec<Loss> {
    match result {
        Err(Error::Loss { losses }) => losses,
        other => panic!("{other:?}"),
    }
}

/// Regression: a folder of snapshots was lost. Verify, list and statistics reported no problem, and gc deleted data
/// that repair could have used.
#[test]
fn a_lost_snapshot_is_reported_and_can_be_repaired() {
    let full = full();
    let (id, disk) = &full.existing[0];
    let repository = &full.rig.repository;
    for name in names_of(&full.rig.store, ObjectKind::Snapshot) {
        full.rig.store.delete(&name).unwrap();
    }
    for search in [LostSearch::Likely, LostSearch::Thorough] {
        let lost = repository.lost_snapshots(&[], search).unwrap();
        let machines: BTreeSet<&str> = lost.iter().map(|lost| &*lost.machine).collect();
        assert_eq!(machines, BTreeSet::from(["a", "b"]));
    }
    assert_eq!(repository.statistics().unwrap().lost.len(), 2);
    let request = VerifyRequest {
        snapshots: Selection::All,
        depth: VerifyDepth::Structure,
        compare: None,
        thread_count: 0,
    };
    let found = repository.verify(&request, &full.rig.progress).unwrap().findings;
    let missing = found.iter().filter(|finding| finding.kind == FindingKind::Missing);
    assert_eq!(missing.count(), 2, "{found:?}");
    assert!(
        losses(repository.gc(GC))
            .iter()
            .all(|loss| matches!(loss, Loss::Snapshot(_)))
    );
    assert_eq!(names_of(&full.rig.store, ObjectKind::Writer), []);
    repair(repository).unwrap();
    repository.gc(GC).unwrap();
    assert_restores(repository, *id, &disk.bytes);
}

#[test]
fn a_loss_that_is_accepted_is_not_asked_about_again() {
    for accept_all in [false, true] {
        let full = full();
        let (id, _) = &full.existing[0];
        let name = ObjectName::new(ObjectKind::Snapshot, &id.to_string()).unwrap();
        full.rig.store.delete(&name).unwrap();
        let repository = &full.rig.repository;
        let wrong = AcceptedLoss::Snapshots(vec![full.existing[1].0]);
        assert!(matches!(
            repository.accept_loss(&wrong, &full.rig.progress),
            Err(Error::NoSnapshot { .. })
        ));
        assert_eq!(losses(repository.gc(GC)).len(), 1);
        let accepted = if accept_all {
            AcceptedLoss::All
        } else {
            AcceptedLoss::Snapshots(vec![*id])
        };
        assert_eq!(repository.accept_loss(&accepted, &full.rig.progress).unwrap().len(), 1);
        let report = repository.gc(GC).unwrap();
        assert!(report.deleted_pack_count > 0, "{report:?}");
        repository.gc(GC).unwrap();
        assert_eq!(repository.lost_snapshots(&[], LostSearch::Thorough).unwrap().len(), 0);
        let (kept, disk) = &full.existing[1];
        assert_restores(repository, *kept, &disk.bytes);
    }
}

/// Packs of snapshots that are not copied yet, and no maps.
#[test]
fn unexplained_packs_are_kept_until_their_loss_is_accepted() {
    let rig = Rig::new(72);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    rig.backup("a", &disk, Parent::Newest);
    for (name, bytes) in rig.store.objects() {
        if name.kind() == ObjectKind::Snapshot || name.kind() == ObjectKind::Pack && bytes[10] == 2 {
            rig.store.delete(&name).unwrap();
        }
    }
    let found = losses(rig.repository.gc(GC));
    assert!(
        matches!(&found[..], [Loss::Unexplained(packs)] if packs.len() == 1),
        "{found:?}"
    );
    rig.repository.accept_loss(&AcceptedLoss::All, &rig.progress).unwrap();
    assert_eq!(rig.repository.gc(GC).unwrap().deleted_pack_count, 1);
    rig.repository.gc(GC).unwrap();
    assert_eq!(names_of(&rig.store, ObjectKind::Scrub), []);
}

/// A failed backup is no loss, and its leftovers need no decision of the user.
#[test]
fn a_backup_that_is_cancelled_is_no_loss() {
    let rig = Rig::new(73);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 20);
    rig.progress.cancelled.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(
        rig.try_backup("a", &disk, Parent::Newest),
        Err(Error::Cancelled)
    ));
    rig.progress
        .cancelled
        .store(false, std::sync::atomic::Ordering::Relaxed);
    rig.repository.gc(GC).unwrap();
    assert_eq!(packs(&rig.store), BTreeSet::new());
}

/// Regression: gc succeeded although snapshots needed a missing pack, and deleted data that repair could have used.
#[test]
fn missing_packs_are_reported() {
    let full = full();
    let repository = &full.rig.repository;
    let report = repository.gc(GC).unwrap();
    assert!(report.plan.missing_packs.is_empty(), "{report:?}");
    for (name, bytes) in full.rig.store.objects() {
        if name.kind() == ObjectKind::Pack && bytes[10] == 1 {
            full.rig.store.delete(&name).unwrap();
        }
    }
    let report = repository.gc(GC).unwrap();
    assert_eq!(
        (report.deleted_pack_count, report.plan.missing_packs.is_empty()),
        (0, false)
    );
    full.rig.repository.forget(full.existing[0].0, "test").unwrap();
    assert!(matches!(&losses(repository.gc(GC))[..], [Loss::Pack(_), ..]));
    repair(repository).unwrap();
    repository.gc(GC).unwrap();
}

/// A store that refuses to read objects of a kind.
struct Refusing {
    inner: MemoryStore,
    kind: ObjectKind,
    is_permission: bool,
}

impl Refusing {
    fn check(&self, name: &ObjectName) -> StoreResult<&MemoryStore> {
        let (store, subject) = (self.inner.describe(), name.to_string());
        match (name.kind() == self.kind, self.is_permission) {
            (false, _) => Ok(&self.inner),
            (true, true) => Err(StoreError::Permission {
                store,
                action: "read",
                subject,
            }),
            (true, false) => Err(StoreError::Io {
                store,
                action: "read",
                subject,
                source: std::io::Error::from_raw_os_error(5),
            }),
        }
    }
}

impl Store for Refusing {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> StoreResult<Put> {
        self.inner.put(name, bytes)
    }
    fn create(&self, name: &ObjectName) -> StoreResult<Box<dyn ObjectWriter>> {
        self.inner.create(name)
    }
    fn get(&self, name: &ObjectName, length_max: u64) -> StoreResult<Vec<u8>> {
        self.check(name)?.get(name, length_max)
    }
    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> StoreResult<()> {
        self.check(name)?.get_range(name, offset, buffer)
    }
    fn length(&self, name: &ObjectName) -> StoreResult<u64> {
        self.check(name)?.length(name)
    }
    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> StoreResult<()>) -> StoreResult<()> {
        self.inner.list(kind, visit)
    }
    fn ages(
        &self,
        kind: ObjectKind,
        visit: &mut dyn FnMut(ObjectName, Option<std::time::Duration>) -> StoreResult<()>,
    ) -> StoreResult<()> {
        self.inner.ages(kind, visit)
    }
    fn delete(&self, name: &ObjectName) -> StoreResult<()> {
        self.inner.delete(name)
    }
    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> StoreResult<()>) -> StoreResult<()> {
        self.inner.foreign_files(visit)
    }
    fn clean(&self, age: std::time::Duration) -> StoreResult<u64> {
        self.inner.clean(age)
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn free_bytes(&self) -> Option<u64> {
        self.inner.free_bytes()
    }
}

#[test]
fn unreadable_objects_are_not_treated_as_missing() {
    let full = full();
    for kind in ObjectKind::ALL.into_iter().filter(|kind| *kind != ObjectKind::Key) {
        for is_permission in [false, true] {
            let case = format!("{kind}, permission {is_permission}");
            let inner = full.rig.store.duplicate();
            let refusing = Refusing {
                inner: inner.clone(),
                kind,
                is_permission,
            };
            if let Ok(opened) = Repository::open(Arc::new(refusing), PASSWORD, environment(600)) {
                opened.repository.gc(GC).ok();
                repair(&opened.repository).ok();
                opened.repository.gc(GC).ok();
            }
            let repository = open(inner, 601).unwrap();
            for (id, disk) in &full.existing {
                assert!(repository.snapshot(*id).is_ok(), "{case}");
                assert_restores(&repository, *id, &disk.bytes);
            }
        }
    }
}

/// Regression: a folder or a link in the place of an object counted as a missing object.
#[test]
fn other_file_types_are_not_treated_as_missing() {
    let full = full();
    let objects = full.rig.store.objects();
    for kind in ObjectKind::ALL.into_iter().filter(|kind| *kind != ObjectKind::Key) {
        for form in ["folder", "link", "folder of the kind"] {
            let case = format!("{kind}, {form}");
            let folder = tempfile::TempDir::new().unwrap();
            let store = DirectoryStore::open(folder.path()).unwrap();
            for (name, bytes) in &objects {
                store.put(name, bytes).unwrap();
            }
            let names = names_of(&store, kind);
            let Some(first) = names.first() else { continue };
            let path = folder.path().join(first.to_string());
            let aside = folder.path().join("aside");
            match form {
                "folder of the kind" if kind == ObjectKind::Config => continue,
                "folder of the kind" => {
                    std::fs::rename(folder.path().join(kind.folder()), &aside).unwrap();
                    std::os::unix::fs::symlink(&aside, folder.path().join(kind.folder())).unwrap();
                }
                "link" => {
                    std::fs::rename(&path, &aside).unwrap();
                    std::os::unix::fs::symlink(&aside, &path).unwrap();
                }
                _ => {
                    std::fs::rename(&path, &aside).unwrap();
                    std::fs::create_dir(&path).unwrap();
                }
            }
            let open = |seed| {
                let store = DirectoryStore::open(folder.path()).unwrap();
                Repository::open(Arc::new(store), PASSWORD, environment(seed)).map(|opened| opened.repository)
            };
            if let Ok(repository) = open(700) {
                repository.gc(GC).ok();
                repair(&repository).ok();
                repository.gc(GC).ok();
                if kind == ObjectKind::Protected {
                    // It is unknown which snapshots are protected, so none is removed.
                    assert!(repository.forget(full.existing[1].0, "test").is_err(), "{case}");
                }
            }
            let target = if form == "folder of the kind" {
                folder.path().join(kind.folder())
            } else {
                path
            };
            // Repair may have recreated the object already.
            match std::fs::symlink_metadata(&target) {
                Ok(found) if found.is_dir() => std::fs::remove_dir(&target).unwrap(),
                Ok(_) => std::fs::remove_file(&target).unwrap(),
                Err(_) => {}
            }
            std::fs::rename(&aside, &target).unwrap();
            let repository = open(701).unwrap();
            for (id, disk) in &full.existing {
                assert!(repository.snapshot(*id).is_ok(), "{case}");
                assert_restores(&repository, *id, &disk.bytes);
            }
        }
    }
}
