//! Replication between datasets of one pool.

use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use serde_json::json;

use super::{World, names_and_holds, zfs};
use crate::rig::{assert_runs, noise};
use holdfast_test_kit::file_systems::system;

#[test]
fn new_snapshots_are_replicated_and_the_newest_common_one_is_kept() {
    let Some(world) = World::on_zfs() else { return };
    world.write("disk", 1, 3_000_000);
    world.take("a");
    world.write("disk", 2, 3_000_000);
    world.take("b");
    let status = world.status();
    assert_eq!(
        (&status["outcome"], &status["behind_count"]),
        (&json!("behind"), &json!(2))
    );
    assert_eq!(
        (&status["newest_there"], &status["newest_here"]["name"]),
        (&json!(null), &json!("b"))
    );
    let planned = world.replicate(0, &["--dry-run"]);
    assert_eq!(planned["streams"].as_array().unwrap().len(), 2, "{planned}");
    assert!(
        system("zfs", &["list", &world.target]).is_err(),
        "a dry run creates no dataset"
    );

    let done = world.replicate(0, &[]);
    assert_eq!(
        (&done["outcome"], &done["common"]),
        (&json!("sent"), &json!("b")),
        "{done}"
    );
    assert!(
        done["streams"][0]["stream_bytes"].as_u64().unwrap() > 3_000_000,
        "{done}"
    );
    assert_eq!(world.held(&world.target), names_and_holds(&[("a", 0), ("b", 1)]));
    assert_eq!(world.held(&world.source), names_and_holds(&[("a", 0), ("b", 1)]));
    // The copy is not mounted, and read-only.
    let properties = zfs(&["get", "-H", "-o", "value", "mounted,canmount,readonly", &world.target]);
    assert_eq!(properties, "no\nnoauto\non");

    world.write("disk", 3, 3_000_000);
    for name in ["c", "d", "e"] {
        world.take(name);
    }
    let done = world.replicate(0, &[]);
    assert_eq!(done["streams"].as_array().unwrap().len(), 1, "{done}");
    assert_eq!(done["streams"][0]["snapshot_count"], 3);
    let held = names_and_holds(&[("a", 0), ("b", 0), ("c", 0), ("d", 0), ("e", 1)]);
    assert_eq!(
        (world.held(&world.target), world.held(&world.source)),
        (held.clone(), held)
    );
    assert_eq!(world.replicate(0, &[])["outcome"], "up to date");
    let status = world.status();
    assert_eq!((&status["behind_count"], &status["behind_ms"]), (&json!(0), &json!(0)));
    // The newest common snapshot cannot be removed on either side.
    assert!(system("zfs", &["destroy", &world.full(&world.source, "e")]).is_err());
    assert!(world.received("a", "disk") == noise(3_000_000, 1));
    assert!(world.received("e", "disk") == noise(3_000_000, 3));
}

#[test]
fn a_tree_is_replicated_by_pattern_and_without_its_own_copies() {
    let Some(world) = World::on_zfs() else { return };
    let pool = world.source.split_once('/').unwrap().0.to_owned();
    for name in ["vms/web 1", "vms/db", "vms/empty"] {
        zfs(&["create", "-o", "canmount=off", &format!("{pool}/{name}")]);
    }
    for name in ["daily_1", "hourly_1", "daily_2"] {
        zfs(&["snapshot", "-r", &format!("{pool}/vms@{name}")]);
    }
    zfs(&["destroy", "-r", &format!("{pool}/vms/empty@daily_1")]);
    let target = format!("{pool}/vms/copy");
    let words = ["replicate", "-R", &world.source, &target, "--snapshots", "daily_*"];
    let report = world.rig.report(&words);
    assert_eq!(report["datasets"].as_array().unwrap().len(), 4, "{report}");
    let names = |dataset: &str| world.names(&format!("{target}{dataset}"));
    assert_eq!(
        (names(""), names("/web 1")),
        (vec!["daily_1".to_owned(), "daily_2".to_owned()], names("/db"))
    );
    assert_eq!(names("/empty"), ["daily_2"]);
    // The copies are now below the source, and are not copied again.
    zfs(&["snapshot", "-r", &format!("{pool}/vms@daily_3")]);
    zfs(&["destroy", "-r", &format!("{target}@daily_3")]);
    let report = world.rig.report(&[&words[..], &["--newest"]].concat());
    assert_eq!(report["datasets"].as_array().unwrap().len(), 4, "{report}");
    assert_eq!(names("/db"), ["daily_1", "daily_2", "daily_3"]);

    // Snapshots that do not match the pattern are not replicated.
    zfs(&["snapshot", "-r", &format!("{pool}/vms@hourly_4")]);
    zfs(&["destroy", "-r", &format!("{target}@hourly_4")]);
    let report = world.rig.report(&words);
    assert!(
        report["datasets"]
            .as_array()
            .unwrap()
            .iter()
            .all(|one| one["outcome"] == "up to date"),
        "{report}"
    );
}

/// Other programs use names that Holdfast never uses.
#[test]
fn snapshots_with_any_name_of_zfs_are_replicated() {
    let Some(world) = World::on_zfs() else { return };
    world.take("a");
    world.replicate(0, &[]);
    let long = "x".repeat(205);
    let names = ["before the update", &long, "-.b", "c"];
    for (seed, name) in (1..).zip(names) {
        world.write("disk", seed, 100_000);
        world.take(name);
    }
    // All snapshots are in one stream.
    let done = world.replicate(0, &[]);
    assert_eq!(
        (&done["outcome"], &done["common"]),
        (&json!("sent"), &json!("c")),
        "{done}"
    );
    world.write("disk", 9, 100_000);
    world.take("after it");
    let done = world.replicate(0, &[]);
    assert_eq!(
        (&done["outcome"], &done["common"]),
        (&json!("sent"), &json!("after it")),
        "{done}"
    );
    world.take("d");
    assert_eq!(world.replicate(0, &[])["outcome"], "sent");
    let held = |name: &str, count| ((*name).to_owned(), count);
    let mut expected: Vec<_> = ["a"].iter().chain(&names).map(|name| held(name, 0)).collect();
    expected.extend([held("after it", 0), held("d", 1)]);
    assert_eq!(world.held(&world.target), expected);
    assert_eq!(world.held(&world.source), expected);
    assert!(world.received("d", "disk") == noise(100_000, 9));
}

/// Two snapshots with the same name, even created in the same second, are the same one only if their guids are equal.
#[test]
fn snapshots_with_one_name_are_distinguished_by_guid() {
    let Some(world) = World::on_zfs() else { return };
    world.take("a");
    world.replicate(0, &[]);
    world.write("disk", 1, 100_000);
    zfs(&["snapshot", &world.full(&world.target, "b")]);
    zfs(&["snapshot", &world.full(&world.source, "b")]);
    for words in [&["--status"][..], &["--dry-run"], &[]] {
        let done = world.replicate(i32::from(words != ["--status"]), words);
        assert_eq!(
            (&done["outcome"], &done["common"]),
            (&json!("diverged"), &json!("a")),
            "{done}"
        );
    }
    zfs(&["destroy", &world.full(&world.target, "b")]);
    assert_eq!(world.replicate(0, &[])["outcome"], "sent");
    assert!(world.received("b", "disk") == noise(100_000, 1));
}

#[test]
fn a_diverged_target_is_kept_and_nothing_is_lost() {
    let Some(world) = World::on_zfs() else { return };
    world.take("a");
    world.replicate(0, &[]);
    zfs(&["snapshot", &world.full(&world.target, "own")]);
    world.take("b");
    let done = world.replicate(1, &[]);
    assert_eq!(done["outcome"], "diverged");
    assert!(done["reason"].as_str().unwrap().contains("own"), "{done}");
    assert!(
        done["advice"]
            .as_str()
            .unwrap()
            .contains(&format!("zfs rollback -r {}@a", world.target)),
        "{done}"
    );
    assert_eq!(world.names(&world.target), ["a", "own"]);
    // The advice of the error works.
    zfs(&["rollback", "-r", &world.full(&world.target, "a")]);
    assert_eq!(world.replicate(0, &[])["outcome"], "sent");

    // The name has another snapshot in the target.
    world.take("c");
    zfs(&[
        "rename",
        &world.full(&world.target, "a"),
        &world.full(&world.target, "c"),
    ]);
    let done = world.replicate(3, &[]);
    assert!(
        done["notes"][0].as_str().unwrap().contains("another snapshot c"),
        "{done}"
    );
    assert_eq!(world.names(&world.target), ["c", "b"]);
    world.take("d");
    world.replicate(3, &[]);
    assert_eq!(world.names(&world.target), ["c", "b", "d"]);

    // The last common snapshot was removed by force.
    for name in ["a", "b", "c", "d"] {
        let full = world.full(&world.source, name);
        let status = world.held(&world.source);
        if status.iter().any(|(held, count)| held == name && *count > 0) {
            let tag = super::sshd::tag_of(&world.target);
            zfs(&["release", &tag, &full]);
        }
        zfs(&["destroy", &full]);
    }
    world.take("e");
    let done = world.replicate(1, &[]);
    assert!(done["reason"].as_str().unwrap().contains("none of which"), "{done}");
    assert_eq!(world.names(&world.target), ["c", "b", "d"]);

    // A dataset that is no copy is not overwritten either.
    let other = format!("{}-other", world.target);
    zfs(&["create", "-o", "canmount=off", &other]);
    let done = world.replicate_to(1, &other, &[]);
    assert!(done["reason"].as_str().unwrap().contains("no copy"), "{done}");
    let (kind, text) = world
        .rig
        .error(1, &["replicate", &format!("{}/missing", world.source), &world.target]);
    assert_eq!(kind, "not-found", "{text}");
}

#[test]
fn a_full_target_is_reported_and_receives_the_rest_later() {
    let Some(world) = World::on_zfs() else { return };
    world.write("disk", 1, 9_000_000);
    world.take("a");
    let above = world.above();
    zfs(&["create", "-p", "-o", "canmount=off", &above]);
    zfs(&["set", "quota=4M", &above]);
    let done = world.replicate(1, &[]);
    assert_eq!(done["outcome"], "failed");
    assert!(done["reason"].as_str().unwrap().contains("no space is left"), "{done}");
    zfs(&["set", "quota=none", &above]);
    assert_eq!(world.replicate(0, &[])["outcome"], "sent");
    assert!(world.received("a", "disk") == noise(9_000_000, 1));
}

#[test]
fn two_replications_exclude_each_other_and_a_killed_one_does_no_harm() {
    let Some(world) = World::on_zfs() else { return };
    world.write("disk", 1, 9_000_000);
    world.take("a");
    let clock = SystemClock::new();
    let words = ["replicate", &world.source, &world.target, "--bwlimit", "1M"];
    let mut first = world.rig.command(&words).spawn().unwrap();
    let receives = || {
        let lines = system("pgrep", &["-f", &format!("zfs receive -u {}", world.target)]);
        lines.is_ok()
    };
    while !receives() {
        assert!(clock.now() < Duration::from_secs(60));
        assert_runs(&mut first);
        clock.sleep(Duration::from_millis(20));
    }
    assert_eq!(world.replicate(4, &[])["outcome"], "busy");
    first.kill().unwrap();
    first.wait().unwrap();
    while receives() {
        assert!(
            clock.now() < Duration::from_secs(60),
            "the receiver continues without its sender"
        );
        clock.sleep(Duration::from_millis(20));
    }
    assert_eq!(world.replicate(0, &[])["outcome"], "sent");
    assert!(world.received("a", "disk") == noise(9_000_000, 1));
}
