//! Old objects that are put back: by a partial restore of the store, an outdated copy, or an attacker.
//!
//! Objects never change, so a name has two old states: unused, or an object that was deleted since. Only the
//! configuration is ever written again under its name, with the same content. A repeated protection has the same
//! content in another seal. The test puts back each object that the repository had before and does not have now, or has
//! in another seal, one at a time. No existing snapshot is lost, and gc deletes the old object. Only what the threat
//! model lists is restored: a removed snapshot as far as its packs exist, an old key slot, and a protection.

#![allow(clippy::print_stdout, reason = "it prints the case that fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Cursor, Read};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::MemoryDevice;
use holdfast_repo::key::Credential;
use holdfast_repo::store::{MemoryStore, ObjectKind, ObjectName, Store};
use holdfast_repo::{
    AcceptedLoss, Error, GcRequest, InitRequest, Loss, Parent, Repository, ScrubRequest, SnapshotId, Source, SourceData,
};

use crate::common::{Disk, PASSWORD, Rig, Watch, environment, init_request, request};

const GC: GcRequest = GcRequest {
    repack_below_percent: 90,
    thread_count: 0,
};
const FULL: ScrubRequest = ScrubRequest {
    percent: 100,
    thread_count: 1,
};

/// Every state of every object that existed at some time.
#[derive(Default)]
struct OldStates(BTreeSet<(ObjectName, Vec<u8>)>);

impl OldStates {
    fn record(&mut self, store: &MemoryStore) {
        let objects = store.objects().into_iter();
        self.0.extend(objects.map(|(name, bytes)| (name, bytes.to_vec())));
    }
}

/// A stream that runs a function in the middle.
struct HookedStream<'a>(Option<Box<dyn FnOnce() + 'a>>, Cursor<Vec<u8>>);

impl Read for HookedStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(act) = self.0.take() {
            act();
        }
        self.1.read(buffer)
    }
}

fn source<'a>(name: &str, data: SourceData<'a>) -> Source<'a> {
    Source {
        name: name.to_owned(),
        data,
        notes: BTreeMap::new(),
    }
}

/// Adds and removes a key slot.
fn slots(rig: &Rig, old_states: &mut OldStates) {
    let before = rig.store.objects();
    let second = InitRequest {
        credential: Credential::KeyFile(b"another key file, for a bad day!"),
        label: "second",
        ..init_request()
    };
    rig.repository.add_key(&second).unwrap();
    old_states.record(&rig.store);
    let added = rig
        .store
        .objects()
        .into_keys()
        .filter(|name| !before.contains_key(name));
    added.for_each(|name| rig.store.delete(&name).unwrap());
}

/// Snapshots whose chunks are relocated, and that are then removed with their relocations.
fn moved(rig: &Rig, old_states: &mut OldStates) {
    let mut disk = Disk::new(1 << 20, 2);
    disk.fill(0, 1 << 19);
    let first = rig.backup("o", &disk, Parent::Newest).snapshot.id;
    disk.fill(0, 1 << 18);
    let second = rig.backup("o", &disk, Parent::Newest).snapshot.id;
    rig.repository.forget(first, "test").unwrap();
    assert!(rig.repository.gc(GC).unwrap().rewritten_bytes > 0);
    old_states.record(&rig.store);
    rig.repository.forget(second, "test").unwrap();
    rig.repository.gc(GC).unwrap();
}

/// A pack is damaged, found by scrub, and restored.
fn damage(rig: &Rig, old_states: &mut OldStates) {
    let objects = rig.store.objects();
    let is_data = |name: &ObjectName, bytes: &[u8]| name.kind() == ObjectKind::Pack && bytes.len() > 1 << 16;
    let (name, bytes) = objects.iter().find(|(name, bytes)| is_data(name, bytes)).unwrap();
    let mut damaged = bytes.to_vec();
    damaged[5000] ^= 1;
    rig.store.damage(name, &damaged);
    assert!(rig.repository.scrub(FULL, &rig.progress).unwrap().has_damage());
    let records = rig.store.objects().into_iter();
    let records = records.filter(|(name, _)| name.kind() == ObjectKind::Scrub);
    old_states.0.extend(records.map(|(name, bytes)| (name, bytes.to_vec())));
    rig.store.damage(name, bytes);
    assert!(!rig.repository.scrub(FULL, &rig.progress).unwrap().has_damage());
    old_states.record(&rig.store);
}

/// Creates the repository and records its old states; returns it with the two remaining snapshots.
fn create_history(old_states: &mut OldStates) -> (Rig, BTreeMap<SnapshotId, Disk>) {
    let rig = Rig::new(71);
    slots(&rig, old_states);
    moved(&rig, old_states);
    let mut disk = Disk::new(1 << 20, 1);
    disk.fill(0, 1 << 19);
    let first = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    old_states.record(&rig.store);
    disk.fill(0, 1 << 18);
    let kept = (rig.backup("m", &disk, Parent::Newest).snapshot.id, disk.clone());
    rig.repository.protect(kept.0).unwrap();
    old_states.record(&rig.store);
    rig.repository.unprotect(kept.0).unwrap();
    rig.repository.protect(kept.0).unwrap();
    // A writer, and a gc that has to wait for it.
    let mut stream = HookedStream(
        Some(Box::new(|| {
            rig.repository.forget(first, "test").unwrap();
            old_states.record(&rig.store);
            assert_eq!(rig.repository.gc(GC).unwrap().waiting_for.len(), 1);
            old_states.record(&rig.store);
        })),
        Cursor::new(vec![7; 5000]),
    );
    let backup = request(
        "n",
        5,
        vec![source("memory", SourceData::Stream(&mut stream))],
        Parent::None,
        0,
    );
    let short = rig.repository.backup(backup, &rig.progress).unwrap().snapshot.id;
    drop(stream);
    old_states.record(&rig.store);
    // Chunks are relocated repeatedly.
    assert!(rig.repository.gc(GC).unwrap().rewritten_bytes > 0);
    old_states.record(&rig.store);
    rig.repository.forget(short, "test").unwrap();
    disk.fill(1 << 19, 1 << 18);
    let last = (rig.backup("m", &disk, Parent::Newest).snapshot.id, disk.clone());
    damage(&rig, old_states);
    // Two days later, gc deletes all remains of removed snapshots.
    for _ in 0..2 * 24 * 3600 {
        (rig.environment.now_ms)();
    }
    rig.store.advance_clock(Duration::from_secs(2 * 24 * 3600));
    rig.repository.gc(GC).unwrap();
    rig.repository.gc(GC).unwrap();
    assert_eq!(rig.repository.scrub(FULL, &rig.progress).unwrap().findings, []);
    (rig, [kept, last].into())
}

/// Puts one object back into a copy of the store, and runs backup, gc and scrub.
fn check(rig: &Rig, existing: &BTreeMap<SnapshotId, Disk>, (name, bytes): (&ObjectName, &[u8]), seed: u64) {
    println!("{name} {seed}");
    let store = rig.store.duplicate();
    store.damage(name, bytes);
    // The store considers the object that was put back as new.
    store.advance_clock(Duration::from_secs(2 * 24 * 3600));
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let mut opening = environment(seed);
    opening.now_ms = Arc::clone(&rig.environment.now_ms);
    let repository = Repository::open(shared, PASSWORD, opening).unwrap().repository;
    let assert_reads = || {
        for (id, disk) in existing {
            crate::common::assert_restores(&repository, *id, &disk.bytes);
        }
    };
    assert_reads();
    let disk = existing.values().next().unwrap();
    let device = MemoryDevice::from_bytes(&disk.bytes);
    let backup = request(
        "m",
        9,
        vec![source("vda", SourceData::Disk(&device))],
        Parent::Newest,
        0,
    );
    let new = repository.backup(backup, &Watch::default()).unwrap().snapshot.id;
    // A removed snapshot is listed again. Without its packs it blocks gc until it is removed again.
    if let (ObjectKind::Snapshot, Ok(id)) = (name.kind(), name.name().parse())
        && !existing.contains_key(&id)
    {
        repository.forget(id, "removed before").unwrap();
    }
    // A pack with the copy of a manifest is all that is left of a snapshot whose removal record has expired: gc asks
    // for a decision.
    if name.kind() == ObjectKind::Pack
        && let Err(Error::Loss { losses }) = repository.gc(GC)
    {
        let lost = |loss: &Loss| matches!(loss, Loss::Snapshot(lost) if lost.copy.to_string() == name.name());
        assert!(losses.iter().all(lost), "{name}: {losses:?}");
        repository.accept_loss(&AcceptedLoss::All, &Watch::default()).unwrap();
    }
    repository.gc(GC).unwrap();
    repository.gc(GC).unwrap();
    let again = repository.gc(GC).unwrap();
    assert_eq!(
        (again.deleted_pack_count, again.rewritten_bytes),
        (0, 0),
        "{name}: {again:?}"
    );
    assert_reads();
    crate::common::assert_restores(&repository, new, &disk.bytes);
    // The first scrub removes records of damage that does not exist.
    repository.scrub(FULL, &Watch::default()).unwrap();
    assert_eq!(
        repository.scrub(FULL, &Watch::default()).unwrap().findings,
        [],
        "{name}"
    );
    // A segment whose packs all exist stays valid; and a writer may count as alive for a month.
    let stays = matches!(
        name.kind(),
        ObjectKind::Key | ObjectKind::Protected | ObjectKind::Writer | ObjectKind::Index
    );
    let is_there = store.objects().get(name).is_some_and(|known| **known == *bytes);
    assert!(stays || !is_there, "{name} is still there");
}

#[test]
fn gc_deletes_any_old_object_that_is_put_back_and_no_snapshot_is_lost() {
    let mut old_states = OldStates::default();
    let (rig, existing) = create_history(&mut old_states);
    let now = rig.store.objects();
    let mut kinds = BTreeSet::new();
    for (seed, (name, bytes)) in (1000..).zip(&old_states.0) {
        if now.get(name).is_none_or(|known| **known != bytes[..]) {
            kinds.insert(name.kind());
            check(&rig, &existing, (name, bytes), seed);
        }
    }
    let all: BTreeSet<ObjectKind> = ObjectKind::ALL.into();
    assert_eq!(&all - &kinds, [ObjectKind::Config].into(), "kinds without an old state");
}
