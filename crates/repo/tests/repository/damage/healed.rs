//! Damage that later backups repair.

use std::sync::Arc;

use holdfast_repo::store::{MemoryStore, ObjectKind, Store};
use holdfast_repo::{Repository, VerifyDepth};

use super::KIB;
use super::base::{Content, FULL, back_up, base, objects_of, open, repair, restores_all, store_of, verify};
use super::kinds::{DAMAGES, Damage, damaged};
use crate::common::{Disk, Watch, environment, init_request};

/// Regression: packs of maps with a damaged header are still readable. Repair asked only whether the data of disks
/// needs a damaged pack, found that the pages of maps are not such data, and deleted the pack with the map of a
/// snapshot.
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

/// Restoring the original file resolves the damage.
#[test]
fn a_restored_pack_is_used_again() {
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

/// The next backup of the same data restores lost chunks, also for the old snapshot.
#[test]
fn a_backup_of_the_same_data_repairs_lost_chunks() {
    let store = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let repository = Repository::init(shared, &init_request(), environment(11)).unwrap();
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
            // The other pack may be the one with the map, which no backup restores.
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
