//! Every kind of object, damaged in every way, and what a user does next.
//!
//! Old states that are put back are in `put_back.rs`.
//!
//! For each case: open, list, restore, verify, scrub, back up again, repair, heal. Damage is always found; a restore gives exactly
//! the right bytes or an error; and where the data existed somewhere, everything is whole in the end.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]

mod common;

use std::collections::BTreeMap;
use std::io::Cursor;
use std::sync::Arc;

use common::{Disk, PASSPHRASE, Watch, init_request, request, surroundings};
use holdfast_block::{BlockDevice, MemoryDevice};
use holdfast_repo::key::Credential;
use holdfast_repo::store::{MemoryStore, ObjectKind, ObjectName, Put, Store};
use holdfast_repo::{
    Compare, Error, FindingKind, GcRequest, InitRequest, Parent, RepairRequest, Repository, RestoreRequest,
    ScrubRequest, Selection, SnapshotId, Source, SourceData, TargetState, VerifyDepth, VerifyReport, VerifyRequest,
};

const SECOND_KEY: Credential<'static> = Credential::KeyFile(b"another key file, for a bad day!");
const KIB: u64 = 1024;
const FULL: ScrubRequest = ScrubRequest {
    percent: 100,
    thread_count: 2,
};

/// All objects of a store.
type Objects = BTreeMap<ObjectName, Vec<u8>>;

fn objects_of(store: &MemoryStore) -> Objects {
    let mut objects = Objects::new();
    for kind in ObjectKind::ALL {
        store
            .list(kind, &mut |name, _| {
                let bytes = store.get(&name, u64::MAX)?;
                objects.insert(name, bytes);
                Ok(())
            })
            .unwrap();
    }
    objects
}

fn store_of(objects: &Objects) -> MemoryStore {
    let store = MemoryStore::new();
    for (name, bytes) in objects {
        assert_eq!(store.put(name, bytes).unwrap(), Put::Created);
    }
    store
}

/// What a snapshot holds: a disk and a stream.
#[derive(Clone)]
struct Content {
    disk: Disk,
    memory: Vec<u8>,
}

fn back_up(repository: &Repository, content: &Content) -> Result<SnapshotId, holdfast_repo::Error> {
    back_up_watching(repository, content, &mut Cursor::new(content.memory.clone()))
}

static TIME: std::sync::atomic::AtomicI64 = std::sync::atomic::AtomicI64::new(1_800_000_000_000);

fn back_up_watching(
    repository: &Repository,
    content: &Content,
    stream: &mut dyn std::io::Read,
) -> Result<SnapshotId, holdfast_repo::Error> {
    let device = MemoryDevice::from_bytes(&content.disk.bytes);
    let source = |name: &str, data| Source {
        name: name.to_owned(),
        data,
        notes: BTreeMap::new(),
    };
    let sources = vec![
        source("vda", SourceData::Disk(&device)),
        source("memory", SourceData::Stream(stream)),
    ];
    let time_ms = TIME.fetch_add(1000, std::sync::atomic::Ordering::Relaxed);
    let request = request("machine", time_ms, sources, Parent::Newest, 1);
    Ok(repository.backup(request, &Watch::default())?.snapshot.id)
}

/// Restores a disk in both ways; panics when that gives other bytes than `expected` without an error.
fn restores(repository: &Repository, snapshot: SnapshotId, disk: &str, expected: &[u8]) -> bool {
    let Ok(device) = repository.open_disk(snapshot, Some(disk)) else {
        return false;
    };
    assert_eq!(device.size_bytes(), expected.len() as u64);
    let mut bytes = vec![1; expected.len()];
    let read = device.read_at(&mut bytes, 0).is_ok();
    assert!(!read || bytes == expected, "the device reads something else");
    let target = MemoryDevice::new(expected.len() as u64);
    let request = RestoreRequest {
        target: &target,
        target_name: "target".into(),
        state: TargetState::Zeroed,
        thread_count: 1,
    };
    let restored = repository.restore(&device, &request, &Watch::default()).is_ok();
    assert!(
        !restored || target.to_bytes() == expected,
        "the restore wrote something else"
    );
    read && restored
}

fn restores_all(repository: &Repository, snapshot: SnapshotId, content: &Content) -> bool {
    let disk = restores(repository, snapshot, "vda", &content.disk.bytes);
    restores(repository, snapshot, "memory", &content.memory) && disk
}

fn verify(repository: &Repository, depth: VerifyDepth) -> VerifyReport {
    let request = VerifyRequest {
        snapshots: Selection::All,
        depth,
        compare: None,
        thread_count: 2,
    };
    repository.verify(&request, &Watch::default()).unwrap()
}

fn repair(repository: &Repository) {
    let request = RepairRequest {
        percent: 100,
        thread_count: 1,
    };
    let plan = repository.plan_repair(request, &Watch::default()).unwrap();
    repository.repair(&plan, 1, &Watch::default()).unwrap();
}

fn open(store: &MemoryStore, seed: u64) -> (Repository, bool) {
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let opened = Repository::open(Arc::clone(&shared), PASSPHRASE, surroundings(seed))
        .or_else(|_| Repository::open(shared, SECOND_KEY, surroundings(seed)));
    let opened = opened.unwrap();
    (opened.repository, !opened.warnings.is_empty())
}

/// A repository with an object of every kind.
struct Base {
    objects: Objects,
    snapshots: Vec<(SnapshotId, Content)>,
}

fn base() -> Base {
    let store = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let repository = Repository::init(shared, &init_request(), surroundings(1)).unwrap();
    let second = InitRequest {
        credential: SECOND_KEY,
        label: "second",
        ..init_request()
    };
    repository.add_key(&second).unwrap();
    let mut disk = Disk::new(1500 * KIB + 77, 3);
    disk.fill(0, 900 * KIB);
    let mut memory = Disk::new(200 * KIB, 4);
    memory.fill(0, 150 * KIB);
    let mut content = Content {
        disk,
        memory: memory.bytes.clone(),
    };
    let mut marker = StealMarker {
        store: store.clone(),
        inner: Cursor::new(content.memory.clone()),
        stolen: None,
    };
    let first = back_up_watching(&repository, &content, &mut marker).unwrap();
    content.disk.fill(0, 500 * KIB);
    let second = (back_up(&repository, &content).unwrap(), content.clone());
    repository.forget(first, "test").unwrap();
    let repack = GcRequest {
        repack_below_percent: 99,
        thread_count: 1,
    };
    // The first snapshot's packs are half dead: what is alive moves, and relocations say where.
    repository.gc(repack).unwrap();
    content.disk.fill(700 * KIB, 300 * KIB);
    memory.fill(100 * KIB, 30 * KIB);
    content.memory.clone_from(&memory.bytes);
    // Gc while a writer is at work: it leaves what it condemned, and whom it waits for.
    let other = Content {
        disk: Disk::new(0, 5),
        memory: content.memory.iter().map(|byte| byte ^ 0xff).collect(),
    };
    let extra = back_up(&repository, &other).unwrap();
    let mut stream = Meanwhile {
        inner: Cursor::new(content.memory.clone()),
        act: Some(Box::new(|| {
            repository.forget(extra, "test").unwrap();
            let report = repository.gc(repack).unwrap();
            assert_eq!(report.waiting_for.len(), 1, "{report:?}");
        })),
    };
    let third = back_up_watching(&repository, &content, &mut stream).unwrap();
    drop(stream);
    let third = (third, content);
    repository.protect(third.0).unwrap();
    assert!(!repository.scrub(FULL, &Watch::default()).unwrap().has_damage());
    let (name, bytes) = marker.stolen.unwrap();
    store.put(&name, &bytes).unwrap();
    Base {
        objects: objects_of(&store),
        snapshots: vec![second, third],
    }
}

/// A stream in the middle of which something else is done.
struct Meanwhile<'a> {
    inner: Cursor<Vec<u8>>,
    act: Option<Box<dyn FnOnce() + 'a>>,
}

impl std::io::Read for Meanwhile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(act) = self.act.take() {
            act();
        }
        self.inner.read(buffer)
    }
}

/// A stream that takes a copy of its own writer's announcement.
struct StealMarker {
    store: MemoryStore,
    inner: Cursor<Vec<u8>>,
    stolen: Option<(ObjectName, Vec<u8>)>,
}

impl std::io::Read for StealMarker {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let (store, stolen) = (&self.store, &mut self.stolen);
        store
            .list(ObjectKind::Writer, &mut |name, _| {
                let bytes = store.get(&name, u64::MAX)?;
                *stolen = Some((name, bytes));
                Ok(())
            })
            .unwrap();
        self.inner.read(buffer)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    Delete,
    /// Keeps so many 64ths.
    Truncate(usize),
    LoseLastByte,
    /// In so many 64ths of the object.
    FlipBit(usize),
    FlipInFirst(usize),
    FlipInLast(usize),
    ZeroPage(usize),
    Append,
    Swap,
}

const DAMAGES: [Damage; 19] = [
    Damage::Delete,
    Damage::Truncate(0),
    Damage::Truncate(32),
    Damage::LoseLastByte,
    Damage::FlipInFirst(0),
    Damage::FlipInFirst(8),
    Damage::FlipInFirst(10),
    Damage::FlipInFirst(20),
    Damage::FlipBit(8),
    Damage::FlipBit(32),
    Damage::FlipBit(50),
    Damage::FlipBit(62),
    Damage::FlipInLast(1),
    Damage::FlipInLast(40),
    Damage::FlipInLast(100),
    Damage::ZeroPage(0),
    Damage::ZeroPage(32),
    Damage::Append,
    Damage::Swap,
];

/// The objects after the damage; none when it does not change anything.
fn damaged(objects: &Objects, name: &ObjectName, damage: Damage) -> Option<Objects> {
    let mut changed = objects.clone();
    let bytes = changed.get_mut(name).unwrap();
    let length = bytes.len();
    let flip = |bytes: &mut Vec<u8>, at: usize| {
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 4;
        }
    };
    match damage {
        Damage::Delete => {
            changed.remove(name);
        }
        Damage::Truncate(part) => bytes.truncate(length * part / 64),
        Damage::LoseLastByte => bytes.truncate(length - 1),
        Damage::FlipBit(part) => flip(bytes, length * part / 64),
        Damage::FlipInFirst(at) => flip(bytes, at),
        Damage::FlipInLast(at) => flip(bytes, length.wrapping_sub(at)),
        Damage::ZeroPage(part) => {
            let start = length * part / 64;
            let end = (start + 4096).min(length);
            bytes[start..end].fill(0);
        }
        Damage::Append => bytes.push(0),
        Damage::Swap => {
            let sibling = objects
                .range(name..)
                .chain(objects)
                .find(|(other, _)| other.kind() == name.kind() && *other != name)?;
            bytes.clone_from(sibling.1);
            changed.insert(sibling.0.clone(), objects[name].clone());
        }
    }
    (changed != *objects).then_some(changed)
}

/// Whether a store without the object, or with the other one in its place, is as good as with it.
fn cannot_be_known(kind: ObjectKind, damage: Damage) -> bool {
    match damage {
        // Nothing else says that there was such an object.
        Damage::Delete => matches!(
            kind,
            ObjectKind::Key
                | ObjectKind::Forgotten
                | ObjectKind::Writer
                | ObjectKind::Condemned
                | ObjectKind::Protected
                | ObjectKind::Scrub
        ),
        // A slot opens under any name.
        Damage::Swap => kind == ObjectKind::Key,
        _ => false,
    }
}

fn check_case(base: &Base, name: &ObjectName, damage: Damage, seed: u64) {
    let Some(objects) = damaged(&base.objects, name, damage) else {
        return;
    };
    let store = store_of(&objects);
    let (repository, warned) = open(&store, seed);
    repository.snapshots().unwrap();
    let mut restored = true;
    for (snapshot, content) in &base.snapshots {
        restored &= restores_all(&repository, *snapshot, content);
    }
    let verified = verify(&repository, VerifyDepth::Full);
    assert!(
        restored || !verified.is_clean() || name.kind() == ObjectKind::Snapshot,
        "verify missed what a restore ran into"
    );
    let scrubbed = repository.scrub(FULL, &Watch::default()).unwrap();
    let is_found = warned || !verified.is_clean() || !scrubbed.findings.is_empty();
    assert!(is_found || cannot_be_known(name.kind(), damage), "nobody found it");

    // Back up what the snapshots held, repair, and see whether all is well.
    for (_, content) in &base.snapshots {
        match back_up(&repository, content) {
            Ok(snapshot) => assert!(
                restores_all(&repository, snapshot, content),
                "the backup does not restore"
            ),
            // A byte may be damaged that says which version the object has.
            Err(error) => assert!(error.is_damage() || matches!(error, Error::Key(_)), "{error}"),
        }
    }
    repair(&repository);
    for (_, content) in &base.snapshots {
        let snapshot = back_up(&repository, content).unwrap();
        assert!(
            restores_all(&repository, snapshot, content),
            "the backup does not restore"
        );
    }
    repair(&repository);
    // Reopened, so that no cache helps.
    let (repository, _) = open(&store, seed + 1);
    // Pages of maps exist once, and chunks that gc has cut are cut so by no backup. Relocations exist twice: only when the two
    // are exchanged for one another are both damaged. What is lost is named, and can be removed.
    let may_be_lost =
        name.kind() == ObjectKind::Pack || (name.kind(), damage) == (ObjectKind::Relocation, Damage::Swap);
    let is_lost = may_be_lost
        && base
            .snapshots
            .iter()
            .any(|(snapshot, content)| !restores_all(&repository, *snapshot, content));
    if is_lost {
        for finding in verify(&repository, VerifyDepth::Full).findings {
            assert!(finding.kind.is_damage(), "{finding:?}");
            for touched in finding.touches {
                repository.unprotect(touched.snapshot).unwrap();
                if repository.snapshot(touched.snapshot).is_ok() {
                    repository.forget(touched.snapshot, "lost").unwrap();
                }
            }
        }
        repair(&repository);
    } else {
        for (snapshot, content) in &base.snapshots {
            assert!(
                restores_all(&repository, *snapshot, content),
                "an old snapshot was not healed"
            );
        }
    }
    let verified = verify(&repository, VerifyDepth::Full);
    assert!(verified.is_clean(), "{:#?}", verified.findings);
    let scrubbed = repository.scrub(FULL, &Watch::default()).unwrap();
    let left: Vec<_> = scrubbed
        .findings
        .iter()
        // A damaged slot may be somebody's: people remove it.
        .filter(|finding| !finding.object.starts_with("keys/"))
        // Without the record that it was removed, a snapshot of which parts are left was lost.
        .filter(|finding| {
            (name.kind(), damage) != (ObjectKind::Forgotten, Damage::Delete) || finding.kind != FindingKind::Missing
        })
        .collect();
    assert!(left.is_empty(), "{left:#?}");
}

fn check_kind(kind: ObjectKind) {
    let mut base = base();
    if kind != ObjectKind::Writer {
        // While a writer is at work, repair leaves some things to the next run.
        base.objects.retain(|name, _| name.kind() != ObjectKind::Writer);
    }
    let base = base;
    let names: Vec<&ObjectName> = base.objects.keys().filter(|name| name.kind() == kind).collect();
    assert!(!names.is_empty(), "the base has an object of each kind");
    for (number, name) in names.iter().enumerate() {
        for (place, damage) in DAMAGES.into_iter().enumerate() {
            let seed = 1000 + (number * 100 + place) as u64 * 2;
            println!("{name} {damage:?} seed {seed}");
            check_case(&base, name, damage, seed);
        }
    }
}

/// A pack of maps whose header is damaged reads as well as before. Repair asked only where the bytes of disks lie whether a
/// damaged pack is needed, found that pages of maps are needed by nobody, and deleted the pack with the map of a snapshot.
#[test]
fn repair_deletes_no_damaged_pack_whose_pages_are_needed() {
    let base = base();
    let packs = base.objects.keys().filter(|name| name.kind() == ObjectKind::Pack);
    for (number, name) in packs.enumerate() {
        let mut objects = base.objects.clone();
        objects.retain(|name, _| name.kind() != ObjectKind::Writer);
        objects.get_mut(name).unwrap()[40] ^= 4;
        let store = store_of(&objects);
        let seed = 500 + number as u64;
        repair(&open(&store, seed).0);
        let (repository, _) = open(&store, seed + 100);
        for (snapshot, content) in &base.snapshots {
            assert!(
                restores_all(&repository, *snapshot, content),
                "repair of {name} lost {snapshot}"
            );
        }
    }
}

#[test]
fn config() {
    check_kind(ObjectKind::Config);
}

#[test]
fn key_slots() {
    check_kind(ObjectKind::Key);
}

#[test]
fn packs() {
    check_kind(ObjectKind::Pack);
}

#[test]
fn segments() {
    check_kind(ObjectKind::Index);
}

#[test]
fn snapshots() {
    check_kind(ObjectKind::Snapshot);
}

#[test]
fn forgotten() {
    check_kind(ObjectKind::Forgotten);
}

#[test]
fn writers() {
    check_kind(ObjectKind::Writer);
}

#[test]
fn condemned() {
    check_kind(ObjectKind::Condemned);
}

#[test]
fn relocations() {
    check_kind(ObjectKind::Relocation);
}

#[test]
fn protected() {
    check_kind(ObjectKind::Protected);
}

#[test]
fn scrub_records() {
    check_kind(ObjectKind::Scrub);
}

/// Damage says exactly which bytes of which disk it touches: what it names cannot be read, and everything else can.
#[test]
fn a_damaged_frame_names_the_ranges_that_cannot_be_read() {
    let store = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let repository = Repository::init(shared, &init_request(), surroundings(5)).unwrap();
    let mut disk = Disk::new(9 << 20, 8);
    disk.fill(0, 8 << 20);
    let content = Content {
        disk,
        memory: Vec::new(),
    };
    let snapshot = back_up(&repository, &content).unwrap();
    let mut objects = objects_of(&store);
    let (_, pack) = objects
        .iter_mut()
        .find(|(name, bytes)| name.kind() == ObjectKind::Pack && bytes.len() > 1 << 20)
        .unwrap();
    let middle = pack.len() / 2;
    pack[middle] ^= 1;
    let (repository, _) = open(&store_of(&objects), 6);
    let report = verify(&repository, VerifyDepth::Full);
    let [finding] = &report.findings[..] else {
        panic!("{:?}", report.findings)
    };
    let [touched] = &finding.touches[..] else {
        panic!("{finding:?}")
    };
    assert_eq!((touched.snapshot, &touched.disk[..]), (snapshot, "vda"));
    assert_eq!(
        touched.bytes,
        touched.ranges.iter().map(|range| range.end - range.start).sum::<u64>()
    );
    assert!(touched.bytes > 0 && touched.bytes <= 2 << 20);
    let device = repository.open_disk(snapshot, Some("vda")).unwrap();
    let mut block = vec![0; 4096];
    for offset in (0..9u64 << 20).step_by(4096) {
        let is_touched = touched.ranges.iter().any(|range| range.contains(&offset));
        assert_eq!(device.read_at(&mut block, offset).is_err(), is_touched, "{offset}");
    }
    // Structure alone does not read frames, and scrub says the same as verify.
    assert!(verify(&repository, VerifyDepth::Structure).is_clean());
    let scrubbed = repository.scrub(FULL, &Watch::default()).unwrap();
    assert_eq!(scrubbed.findings, report.findings);
}

#[test]
fn a_disk_is_compared_with_its_device_byte_for_byte() {
    let base = base();
    let (repository, _) = open(&store_of(&base.objects), 7);
    let (snapshot, content) = &base.snapshots[1];
    let compare = |bytes: &[u8]| {
        let device = MemoryDevice::from_bytes(bytes);
        let request = VerifyRequest {
            snapshots: Selection::Some(Vec::new()),
            depth: VerifyDepth::Structure,
            compare: Some(Compare {
                snapshot: *snapshot,
                disk: Some("vda"),
                device: &device,
            }),
            thread_count: 2,
        };
        repository.verify(&request, &Watch::default()).unwrap()
    };
    let same = compare(&content.disk.bytes);
    assert!(same.is_clean() && same.compared_bytes == content.disk.bytes.len() as u64);
    // In data, in zeroes, and in the part of a block that ends the disk.
    let size = content.disk.bytes.len();
    for at in [0, 5000, 1200 << 10, size - 1] {
        let mut other = content.disk.bytes.clone();
        other[at] ^= 1;
        let report = compare(&other);
        assert_eq!(report.findings.len(), 1, "{at}");
        assert_eq!(report.findings[0].kind, FindingKind::Differs);
        assert!(report.findings[0].touches[0].ranges[0].contains(&(at as u64)), "{at}");
    }
    assert_eq!(
        compare(&content.disk.bytes[..size - 4096]).findings[0].kind,
        FindingKind::Differs
    );
}

/// A share of the repository at a time, oldest first, reads everything in the end; and what was read is remembered.
#[test]
fn scrubs_of_some_percent_come_round() {
    let base = base();
    let store = store_of(&base.objects);
    let (repository, _) = open(&store, 9);
    let mut read_bytes = 0;
    let total = repository.scrub(FULL, &Watch::default()).unwrap();
    assert_eq!(
        (total.read_bytes, total.read_pack_count),
        (total.pack_bytes, total.pack_count)
    );
    let some = ScrubRequest {
        percent: 20,
        thread_count: 1,
    };
    let mut rounds = 0;
    while read_bytes < total.pack_bytes && rounds < 10 {
        let report = repository.scrub(some, &Watch::default()).unwrap();
        assert!(report.is_remembered && report.read_pack_count < total.pack_count);
        read_bytes += report.read_bytes;
        rounds += 1;
    }
    assert!(rounds <= 5, "{rounds}");
    let mut records = 0;
    store
        .list(ObjectKind::Scrub, &mut |_, _| {
            records += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(records, 1);
}

/// A file that is put back as it was ends the matter.
#[test]
fn a_pack_that_is_whole_again_is_used_again() {
    let base = base();
    let name = base
        .objects
        .keys()
        .find(|name| name.kind() == ObjectKind::Pack)
        .unwrap();
    let store = store_of(&damaged(&base.objects, name, Damage::FlipBit(20)).unwrap());
    let (repository, _) = open(&store, 10);
    assert!(repository.scrub(FULL, &Watch::default()).unwrap().has_damage());
    store.delete(name).unwrap();
    store.put(name, &base.objects[name]).unwrap();
    assert!(!repository.scrub(FULL, &Watch::default()).unwrap().has_damage());
    let damage_records = objects_of(&store)
        .into_keys()
        .filter(|name| name.name().starts_with("damage."))
        .count();
    assert_eq!(damage_records, 0);
}

/// Whatever is lost of the chunks of a backup, the next backup of the same data brings back, for the old snapshot too.
#[test]
fn a_backup_heals_what_it_brings_again() {
    let store = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let repository = Repository::init(shared, &init_request(), surroundings(11)).unwrap();
    let mut disk = Disk::new(3000 * KIB, 12);
    disk.fill(100 * KIB, 2500 * KIB);
    let content = Content {
        memory: disk.bytes[200_000..600_000].iter().map(|byte| byte ^ 1).collect(),
        disk,
    };
    let snapshot = back_up(&repository, &content).unwrap();
    let objects = objects_of(&store);
    let data_packs = objects
        .iter()
        .filter(|(name, bytes)| name.kind() == ObjectKind::Pack && bytes[10] == 1);
    for (number, (name, _)) in data_packs.enumerate() {
        for (place, damage) in DAMAGES.into_iter().enumerate() {
            // The other pack may be the one with the map, and no backup brings that back.
            let Some(damaged) = damaged(&objects, name, damage).filter(|_| damage != Damage::Swap) else {
                continue;
            };
            let store = store_of(&damaged);
            let (repository, _) = open(&store, (2000 + number * 100 + place) as u64);
            repair(&repository);
            assert!(restores_all(
                &repository,
                back_up(&repository, &content).unwrap(),
                &content
            ));
            assert!(restores_all(&repository, snapshot, &content), "{name} {damage:?}");
            repair(&repository);
            assert!(verify(&repository, VerifyDepth::Full).is_clean(), "{name} {damage:?}");
            let scrubbed = repository.scrub(FULL, &Watch::default()).unwrap();
            assert!(!scrubbed.has_damage(), "{name} {damage:?} {:#?}", scrubbed.findings);
        }
    }
}
