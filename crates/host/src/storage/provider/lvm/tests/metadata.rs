//! Tests of the metadata snapshots of pools.

use super::super::super::{Provider, ProviderResult};
use super::ScriptedAnswer::{Complains, Hangs, Owned, Says};
use super::{VOLUMES, World, name};

const DELTA: &str = include_str!("../fixtures/thin_delta.xml");
const ROOMS: &str = include_str!("../fixtures/thin_ls.txt");
const STATUS: &str = "0 4194304 thin-pool 34 121/1024 325/32768 - rw discard_passdown queue_if_no_space - 256 \n";
const STATUS_KEPT: &str =
    "0 4194304 thin-pool 34 121/1024 325/32768 255 rw discard_passdown queue_if_no_space - 256 \n";

/// Compares two of Holdfast's snapshots of one volume.
fn changes(world: &World) -> ProviderResult<Vec<std::ops::Range<u64>>> {
    let (older, newer) = (
        name("web1", "holdfast_2026-11-22_16:45:10Z"),
        name("web1", "before-update"),
    );
    Ok(world.lvm.changes(&older, &newer)?.as_slice().to_vec())
}

#[test]
fn differences_of_two_snapshots_are_read_from_the_pool() {
    let mut answers = vec![
        Says(VOLUMES),
        Says(VOLUMES),
        Says(STATUS),
        Says(""),
        Says(""),
        Says(STATUS_KEPT),
    ];
    answers.extend([Says(DELTA), Says(STATUS_KEPT), Says(""), Says(STATUS), Says("")]);
    let world = World::new(answers);
    let found = changes(&world).unwrap();
    assert_eq!((found.len(), found[0].start, found[0].end), (1, 655_360, 983_040));
    assert_eq!(
        world.requests(),
        [
            "dmsetup status vg0-pool-tpool",
            "lvchange -qq --addtag holdfast.metadata vg0/pool",
            "dmsetup message vg0-pool-tpool 0 reserve_metadata_snap",
            "dmsetup status vg0-pool-tpool",
            "thin_delta --metadata-snap --snap1 4 --snap2 5 /dev/mapper/vg0-pool_tmeta",
            "dmsetup status vg0-pool-tpool",
            "dmsetup message vg0-pool-tpool 0 release_metadata_snap",
            "dmsetup status vg0-pool-tpool",
            "lvchange -qq --deltag holdfast.metadata vg0/pool",
        ]
    );
}

#[test]
fn only_our_own_leftover_metadata_snapshot_is_released() {
    let world = World::new(vec![Says(VOLUMES), Says(VOLUMES), Says(STATUS_KEPT)]);
    let error = changes(&world).unwrap_err().to_string();
    assert!(error.contains("another process has reserved"), "{error}");
    assert_eq!(world.requests(), ["dmsetup status vg0-pool-tpool"]);
    let with_own_metadata = VOLUMES.replace(
        "\"lv_time\":\"1795387129\", \"lv_tags\":\"\"",
        "\"lv_time\":\"1795387129\", \"lv_tags\":\"holdfast.metadata\"",
    );
    let mut answers = vec![
        Says(VOLUMES),
        Owned(with_own_metadata),
        Says(STATUS_KEPT),
        Says(""),
        Says(""),
        Says(""),
        Says(STATUS_KEPT),
    ];
    answers.extend([Says(DELTA), Says(STATUS_KEPT), Says(""), Says(STATUS), Says("")]);
    let world = World::new(answers);
    assert!(changes(&world).is_ok());
    assert_eq!(
        world.requests()[1],
        "dmsetup message vg0-pool-tpool 0 release_metadata_snap"
    );
}

#[test]
fn differences_from_a_released_metadata_snapshot_are_discarded() {
    let mut answers = vec![
        Says(VOLUMES),
        Says(VOLUMES),
        Says(STATUS),
        Says(""),
        Says(""),
        Says(STATUS_KEPT),
    ];
    answers.extend([
        Says(DELTA),
        Says(STATUS),
        Complains("Invalid argument"),
        Says(STATUS),
        Says(""),
    ]);
    assert!(changes(&World::new(answers)).is_err());
    // If the program is missing, the metadata snapshot is released nevertheless.
    let mut answers = vec![
        Says(VOLUMES),
        Says(VOLUMES),
        Says(STATUS),
        Says(""),
        Says(""),
        Says(STATUS_KEPT),
    ];
    answers.extend([Hangs, Says(STATUS_KEPT), Says(""), Says(STATUS), Says("")]);
    let world = World::new(answers);
    assert!(changes(&world).is_err());
    assert_eq!(world.requests()[8], "lvchange -qq --deltag holdfast.metadata vg0/pool");
}

#[test]
fn only_our_snapshots_are_compared() {
    let world = World::new(vec![Says(VOLUMES)]);
    let refused = world
        .lvm
        .changes(&name("web1", "snapper_1"), &name("web1", "before-update"));
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("not a host snapshot of Holdfast")
    );
}

#[test]
fn space_of_snapshots_is_read_from_the_pool() {
    let mut answers = vec![
        Says(VOLUMES),
        Says(VOLUMES),
        Says(VOLUMES),
        Says(STATUS),
        Says(""),
        Says(""),
        Says(STATUS_KEPT),
    ];
    answers.extend([Says(ROOMS), Says(STATUS_KEPT), Says(""), Says(STATUS), Says("")]);
    answers.extend([Says(VOLUMES), Says(VOLUMES), Says(VOLUMES)]);
    let world = World::new(answers);
    let mut snapshots = world.lvm.snapshots("vg0/web1").unwrap();
    world.lvm.measure(&mut snapshots).unwrap();
    let rooms: Vec<_> = snapshots
        .iter()
        .map(|one| (one.referenced_bytes, one.used_bytes))
        .collect();
    assert_eq!(rooms[0], (Some(20_971_520), Some(327_680)));
    assert_eq!(rooms[1], (Some(20_971_520), Some(0)));
}
