//! Replication between subvolumes of one btrfs file system.

use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use serde_json::json;

use super::{World, names_and_holds};
use crate::rig::{assert_runs, noise};
use holdfast_test_kit::file_systems::system;

#[test]
fn subvolumes_are_replicated_with_their_records() {
    let Some(world) = World::on_btrfs() else { return };
    world.write("disk", 1, 3_000_000);
    world.take("a");
    world.write("more", 2, 1_000_000);
    world.take("b");
    let done = world.replicate(0, &[]);
    assert_eq!(
        (&done["outcome"], &done["common"]),
        (&json!("sent"), &json!("b")),
        "{done}"
    );
    assert!(
        done["streams"][1]["stream_bytes"].as_u64().unwrap() < 1_100_000,
        "{done}"
    );
    assert_eq!(world.held(&world.target), names_and_holds(&[("a", 0), ("b", 1)]));
    assert_eq!(world.held(&world.source), names_and_holds(&[("a", 0), ("b", 1)]));
    let listed = |dataset: &str| {
        let report = world.rig.report(&["host", "list", &format!("btrfs:{dataset}")]);
        report["datasets"][0]["snapshots"][0]["time"].clone()
    };
    assert_eq!(listed(&world.source), listed(&world.target));
    assert!(world.received("a", "disk") == noise(3_000_000, 1));
    world.take("c");
    assert_eq!(world.replicate(0, &[])["streams"].as_array().unwrap().len(), 1);
    assert_eq!(
        world.held(&world.target),
        names_and_holds(&[("a", 0), ("b", 0), ("c", 1)])
    );
    assert_eq!(world.replicate(0, &[])["outcome"], "up to date");

    // A copy of the copy uses the snapshots of the copy as bases.
    let onward = format!("{}-2", world.target);
    let report = world.rig.report(&["replicate", &world.target, &onward]);
    assert_eq!(report["datasets"][0]["outcome"], "sent", "{report}");
    assert_eq!(world.names(&onward), ["a", "b", "c"]);

    // A snapshot that is missing in the middle of the target is no problem; a name that has another snapshot there is
    // one.
    world.rig.ok(&["host", "remove", &world.full(&world.target, "a")]);
    world.take("d");
    assert_eq!(world.replicate(0, &[])["outcome"], "sent");
    world
        .rig
        .ok(&["snapshot", &world.target, "--name", "e", "--quiesce", "off"]);
    world.take("e");
    let done = world.replicate(3, &[]);
    assert!(
        done["notes"][0].as_str().unwrap().contains("another snapshot e"),
        "{done}"
    );
}

#[test]
fn a_partial_stream_is_no_snapshot_and_is_sent_again() {
    let Some(world) = World::on_btrfs() else { return };
    world.write("disk", 1, 9_000_000);
    world.take("a");
    let clock = SystemClock::new();
    let words = ["replicate", &world.source, &world.target, "--bwlimit", "1M"];
    let mut first = world.rig.command(&words).spawn().unwrap();
    let part = std::path::Path::new(&world.target).join(".holdfast/snapshots/.incoming+a/disk");
    while !part.metadata().is_ok_and(|part| part.len() > 100_000) {
        assert!(clock.now() < Duration::from_secs(60));
        assert_runs(&mut first);
        clock.sleep(Duration::from_millis(20));
    }
    assert_eq!(world.replicate(4, &[])["outcome"], "busy");
    first.kill().unwrap();
    first.wait().unwrap();
    let receives = || system("pgrep", &["-f", "btrfs receive -q -e -C"]).is_ok();
    while receives() {
        assert!(
            clock.now() < Duration::from_secs(60),
            "the receiver continues without its sender"
        );
        clock.sleep(Duration::from_millis(20));
    }
    assert!(part.exists());
    assert_eq!(world.names(&world.target), [""; 0]);
    let done = world.replicate(3, &[]);
    assert_eq!(done["outcome"], "sent");
    assert!(
        done["notes"][0].as_str().unwrap().contains("received in part"),
        "{done}"
    );
    assert!(world.received("a", "disk") == noise(9_000_000, 1));
    let (kind, message) = world.rig.error(1, &["replicate", "-R", &world.source, &world.target]);
    assert_eq!(kind, "refused", "{message}");
}

/// Impossible requests are refused with advice: several subvolumes have no common point in time, and a relative path
/// without a leading dot or slash means a dataset of ZFS.
#[test]
fn nested_subvolumes_and_relative_paths_are_refused_with_advice() {
    let Some(world) = World::on_btrfs() else { return };
    world.take("a");
    let (kind, message) = world
        .rig
        .error(1, &["replicate", "--recursive", &world.source, &world.target]);
    assert!(
        kind == "refused" && message.contains("without --recursive"),
        "{message}"
    );
    let (kind, message) = world.rig.error(2, &["replicate", &world.source, "backup/web"]);
    assert!(
        kind == "usage" && message.contains("./backup/web, or btrfs:./backup/web"),
        "{message}"
    );
    let (_, message) = world
        .rig
        .error(2, &["replicate", &world.source, "root@backup:backup/web"]);
    assert!(message.contains("its whole path"), "{message}");
    // A path that leads to an existing subvolume means that subvolume.
    std::os::unix::fs::symlink(&world.source, world.rig.path("vms")).unwrap();
    world.rig.ok(&["replicate", "vms", &world.target]);
    assert_eq!(world.status()["outcome"], "up to date");
}

/// The capabilities of the systemd units are sufficient to receive.
#[test]
fn the_capabilities_of_the_services_suffice_to_receive() {
    let Some(world) = World::on_btrfs() else { return };
    world.write("disk", 1, 100_000);
    world.take("a");
    for unit in ["holdfast-daemon.service", "holdfast-run.service"] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../packaging/systemd")
            .join(unit);
        let text = std::fs::read_to_string(path).unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
        let bound = line
            .unwrap()
            .split(' ')
            .map(|name| format!(",+{}", name["CAP_".len()..].to_lowercase()));
        let bound = format!("-all{}", bound.collect::<String>());
        let target = format!("{}-{unit}", world.target);
        let state = format!("XDG_STATE_HOME={}", world.rig.path("state").display());
        let program = env!("CARGO_BIN_EXE_holdfast");
        let words = [
            "--bounding-set",
            &bound,
            "env",
            &state,
            program,
            "replicate",
            &world.source,
            &target,
        ];
        system("setpriv", &words).unwrap();
        assert_eq!(world.names(&target), ["a"]);
    }
}

/// Received snapshots may come from untrusted hosts.
#[test]
fn snapshots_are_mounted_without_programs_and_devices() {
    for world in [World::on_btrfs(), World::on_zfs()] {
        let Some(world) = world else { continue };
        world.write("disk", 1, 100_000);
        world.take("a");
        world.replicate(0, &[]);
        let point = world.rig.path("point");
        std::fs::create_dir(&point).unwrap();
        let text = point.display().to_string();
        world.rig.ok(&["mount", &world.full(&world.target, "a"), &text]);
        let options = system("findmnt", &["-n", "-o", "OPTIONS", "--mountpoint", &text]).unwrap();
        let found = std::fs::read(point.join("disk"));
        world.rig.ok(&["unmount", &text]);
        for option in ["ro", "nosuid", "nodev", "noexec"] {
            assert!(
                options.split(',').any(|one| one.trim() == option),
                "{option}: {options}"
            );
        }
        assert!(found.unwrap() == noise(100_000, 1));
    }
}
