//! gc on a repository that has lost packs: it deletes nothing that could restore them, and removes records of packs
//! that are not needed.

use std::collections::BTreeMap;

use holdfast_block::{BlockDevice, MemoryDevice};
use holdfast_repo::store::{MemoryStore, ObjectKind, ObjectName, Store};
use holdfast_repo::{FindingKind, GcRequest, Parent, RepairReport, RepairRequest, ScrubRequest, Source, SourceData};

use crate::common::{Disk, Rig, request};

const GC: GcRequest = GcRequest {
    repack_below_percent: 50,
    thread_count: 0,
};
const FULL: ScrubRequest = ScrubRequest {
    percent: 100,
    thread_count: 1,
};

fn repair(rig: &Rig) -> RepairReport {
    let request = RepairRequest {
        percent: 100,
        thread_count: 1,
    };
    let plan = rig.repository.plan_repair(request, &rig.progress).unwrap();
    rig.repository.repair(&plan, 1, &rig.progress).unwrap()
}

/// The packs of chunks, by the type in their 11th byte.
fn data_packs(store: &MemoryStore) -> Vec<ObjectName> {
    let objects = store.objects();
    let packs = objects
        .iter()
        .filter(|(name, bytes)| name.kind() == ObjectKind::Pack && bytes[10] == 1);
    packs.map(|(name, _)| name.clone()).collect()
}

fn damage_records(store: &MemoryStore) -> Vec<ObjectName> {
    let names = store.objects().into_keys();
    names
        .filter(|name| name.kind() == ObjectKind::Scrub && name.name().starts_with("damage."))
        .collect()
}

/// Regression: a pack was lost. Before the loss was noticed, gc removed the index entries of the pack. So repair could
/// not report which chunks were lost, and a later backup of the same data healed nothing.
#[test]
fn gc_keeps_the_index_of_a_lost_pack() {
    let rig = Rig::new(31);
    let mut disk = Disk::new(2 << 20, 1);
    disk.fill(0, 1 << 20);
    let snapshot = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let [pack] = &data_packs(&rig.store)[..] else {
        panic!("one pack of chunks")
    };
    rig.store.delete(pack).unwrap();
    for _ in 0..2 {
        rig.repository.gc(GC).unwrap();
    }
    let report = repair(&rig);
    assert_eq!(report.lost_bytes, 1 << 20, "{report:?}");
    rig.backup("m", &disk, Parent::Newest);
    rig.assert_restores(snapshot, &disk);
    // gc still removes unused entries from the index.
    rig.repository.forget(snapshot, "test").unwrap();
    rig.repository.gc(GC).unwrap();
    let scrubbed = rig.repository.scrub(FULL, &rig.progress).unwrap();
    assert!(
        scrubbed
            .findings
            .iter()
            .all(|finding| finding.kind != FindingKind::Dangling),
        "{:?}",
        scrubbed.findings
    );
}

/// Regression: the record of a damaged pack stayed after gc had deleted the pack, or all snapshots that needed a lost
/// one: every later backup read the record, to repair unused chunks.
#[test]
fn gc_deletes_records_of_unused_lost_packs() {
    let rig = Rig::new(32);
    let mut disk = Disk::new(2 << 20, 1);
    disk.fill(0, 1 << 20);
    let first = rig.backup("damaged", &disk, Parent::Newest).snapshot.id;
    let [damaged] = &data_packs(&rig.store)[..] else {
        panic!("one pack of chunks")
    };
    disk.fill(0, 1 << 20);
    let second = rig.backup("lost", &disk, Parent::Newest).snapshot.id;
    let lost = data_packs(&rig.store).into_iter().find(|pack| pack != damaged).unwrap();
    let mut bytes = rig.store.objects()[damaged].to_vec();
    bytes[5000] ^= 1;
    rig.store.damage(damaged, &bytes);
    rig.store.delete(&lost).unwrap();
    rig.repository.scrub(FULL, &rig.progress).unwrap();
    repair(&rig);
    assert_eq!(damage_records(&rig.store).len(), 2);

    // As long as the packs are needed, the records stay.
    rig.repository.gc(GC).unwrap();
    assert_eq!(damage_records(&rig.store).len(), 2);
    rig.repository.forget(first, "test").unwrap();
    rig.repository.gc(GC).unwrap();
    assert!(!rig.store.objects().contains_key(damaged));
    let [record] = &damage_records(&rig.store)[..] else {
        panic!("{:?}", damage_records(&rig.store))
    };
    let lost_name = lost.name();
    assert!(record.name().starts_with(&format!("damage.{lost_name}.")), "{record}");
    rig.repository.forget(second, "test").unwrap();
    rig.repository.gc(GC).unwrap();
    assert_eq!(damage_records(&rig.store), []);
    let scrubbed = rig.repository.scrub(FULL, &rig.progress).unwrap();
    assert_eq!(scrubbed.findings, []);
}

/// The next backup of the same disk uses no damaged page of its parent's map, known or not: it reads a page and
/// compares it with its own before it reuses the page. Damaged pages stay damaged, and are reported.
#[test]
fn a_backup_is_complete_with_any_page_of_its_parent_damaged() {
    let rig = Rig::new(33);
    // The map has two leaves below a root.
    let mut disk = Disk::new(65 << 20, 3);
    disk.fill(0, 100 << 10);
    disk.fill(64 << 20, 100 << 10);
    let old = rig.backup("m", &disk, Parent::Newest).snapshot.id;
    let objects = rig.store.objects();
    let is_tree = |name: &ObjectName, bytes: &[u8]| name.kind() == ObjectKind::Pack && bytes[10] == 2;
    let (name, bytes) = objects.iter().find(|(name, bytes)| is_tree(name, bytes)).unwrap();
    let length = bytes.len();
    let mut cases: Vec<Option<Vec<u8>>> = vec![None, Some(bytes[..length / 2].to_vec())];
    // The pages are between the header and the directory, which exists twice.
    let field = bytes[length - 56..length - 48].try_into().unwrap();
    let pages_end = usize::try_from(u64::from_le_bytes(field)).unwrap();
    let pages = (64..pages_end).step_by((pages_end - 64) / 12);
    for at in (0..length).step_by(length / 12).chain(pages) {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 1;
        cases.push(Some(flipped));
    }
    let mut unread = 0;
    for (number, case) in (100..).zip(cases) {
        for is_known in [false, true] {
            let store = rig.store.duplicate();
            match &case {
                None => store.delete(name).unwrap(),
                Some(bytes) => store.damage(name, bytes),
            }
            let repository = rig.open_on(store.clone(), number);
            if is_known {
                assert!(repository.scrub(FULL, &rig.progress).unwrap().has_damage(), "{number}");
            }
            let device = MemoryDevice::from_bytes(&disk.bytes);
            let source = Source {
                name: "vda".to_owned(),
                data: SourceData::Disk(&device),
                notes: BTreeMap::new(),
            };
            let backup = request("m", 9, vec![source], Parent::Newest, 0);
            let new = repository.backup(backup, &rig.progress).unwrap().snapshot.id;
            // Opened by another process, without caches.
            let repository = rig.open_on(store, number);
            let device = repository.open_disk(new, None).unwrap();
            let mut bytes = vec![1; disk.bytes.len()];
            device.read_at(&mut bytes, 0).unwrap();
            assert!(bytes == disk.bytes, "{number}");
            let device = repository.open_disk(old, None).unwrap();
            unread += usize::from(device.read_at(&mut bytes, 0).is_err());
        }
    }
    assert!(unread > 8, "only {unread} cases damage the old map");
}
