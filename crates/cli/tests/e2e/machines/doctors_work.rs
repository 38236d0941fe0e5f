//! Findings and repairs of the doctor for killed rollbacks and clones.

use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom};
use serde_json::json;

use super::at;
use super::doctors::found;
use super::doctors_storage::{dead_process, destroy, make_old, this_process, write};
use super::host_snapshots::machine_on;

#[test]
fn a_killed_rollback_is_reported_until_it_is_completed_or_undone() {
    let Some(mut setup) = machine_on("btrfs") else { return };
    setup.world.write(0, 40, 0, 1 << 20);
    setup.take(0, &["web1", "--name", "one"]);
    let earlier = setup.world.disks.clone();
    for ends in [true, false] {
        let mut round = 0;
        loop {
            setup.world.write(0, 90 + round, 0, 6 << 20);
            setup.world.write(1, 90 + round, 0, 6 << 20);
            setup.world.lab.virsh(&["destroy", "web1"]);
            if setup.kill_when(&["rollback", "web1@one"], &|| !setup.unfinished().is_empty())
                && !setup.unfinished().is_empty()
            {
                break;
            }
            round += 1;
            assert!(round < 20, "no rollback was killed in time");
            setup.world.disks.clone_from(&earlier);
            setup.world.lab.virsh(&["start", "web1"]);
        }
        let newest = setup.world.disks.clone();
        let report = setup.doctor(3, &["--fix"]);
        let finding = &report["findings"][0];
        assert_eq!(
            (found(&report), &finding["is_danger"], &finding["machine"]),
            (vec!["rollback"], &json!(true), &json!("web1")),
            "{report:#}"
        );
        let uri = setup.world.lab.uri();
        let listed = setup.world.rig.report(&at(&uri, &["host", "list", "web1"]));
        let half = &listed["half_rolled_back"][0];
        assert_eq!((&half["machine"], &half["point"]), (&json!("web1"), &json!("one")));
        let safety = half["safety"][0]
            .as_str()
            .unwrap()
            .rsplit_once('@')
            .unwrap()
            .1
            .to_owned();
        let advice = finding["advice"].as_str().unwrap();
        assert!(
            advice.contains("rollback web1@one ends it") && advice.contains(&safety),
            "{advice}"
        );
        if ends {
            setup.world.rig.ok(&at(&uri, &["rollback", "web1@one", "--start"]));
            setup.world.disks.clone_from(&earlier);
        } else {
            let point = format!("web1@{safety}");
            setup.world.rig.ok(&at(&uri, &["rollback", &point, "--start"]));
            setup.world.disks = newest;
        }
        assert_eq!(setup.unfinished(), [""; 0]);
        assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
        setup.world.back_up();
        setup.world.assert_snapshot_is_right("after the rollback");
    }
}

fn a_clone_that_is_killed_leaves_nothing(kind: &'static str) {
    let Some(setup) = machine_on(kind) else { return };
    let cut = setup.take(0, &["web1", "--name", "one"]);
    // "zfs:POOL@one"
    let pool = cut["snapshots"][0]
        .as_str()
        .unwrap()
        .trim_start_matches("zfs:")
        .trim_end_matches("@one");
    let before = setup.world.files();
    let mut random = SeededRandom::new(23);
    let is_begun = || !setup.unfinished().is_empty();
    let (mut half, mut wait_max_ms) = (0, 25);
    for round in 0..30 {
        if round >= 10 && half > 0 {
            break;
        }
        let wait = Duration::from_millis(random.below(wait_max_ms));
        let is_time = || {
            is_begun() && {
                setup.world.lab.clock.sleep(wait);
                true
            }
        };
        setup.kill_when(&["clone", "web1@one", "trial"], &is_time);
        let after = setup.world.repair_after_kill();
        // libvirt may define the machine after the program that asked for it was killed.
        let is_defined = setup.world.machines().contains(&"trial".to_owned());
        half += usize::from(!is_defined);
        if is_defined {
            wait_max_ms = (wait_max_ms / 2).max(1);
        }
        assert_eq!(found(&after), [""; 0], "round {round}: {after:#}");
        assert_eq!(setup.unfinished(), [""; 0]);
        if is_defined {
            setup.world.lab.virsh(&["undefine", "trial"]);
            if kind == "zfs" {
                destroy(&format!("{pool}/trial"));
            } else {
                for disk in ["trial-a", "trial-b"] {
                    std::fs::remove_file(setup.world.lab.path(disk)).unwrap();
                }
            }
        }
        let mut files = setup.world.files();
        files.retain(|file| !before.contains(file));
        assert_eq!((files, setup.hidden()), (Vec::new(), Vec::new()), "round {round}");
    }
    assert!(half > 0, "no clone was killed in time");
}

#[test]
fn a_clone_on_xfs_that_is_killed_leaves_nothing() {
    a_clone_that_is_killed_leaves_nothing("xfs");
}

#[test]
fn a_clone_on_zfs_that_is_killed_leaves_nothing() {
    a_clone_that_is_killed_leaves_nothing("zfs");
}

/// The host snapshots for a clone of the current state are removed with it, whenever the clone is killed.
#[test]
fn a_killed_clone_of_the_current_state_leaves_nothing() {
    let Some(setup) = machine_on("xfs") else { return };
    let mut before = setup.world.files();
    before.push(".holdfast".into());
    let mut random = SeededRandom::new(29);
    let (mut left, mut wait_max_ms) = (0, 60);
    for round in 0..30 {
        if round >= 10 && left > 0 {
            break;
        }
        let wait = Duration::from_millis(random.below(wait_max_ms));
        let is_time = || {
            !setup.unfinished().is_empty() && {
                setup.world.lab.clock.sleep(wait);
                true
            }
        };
        setup.kill_when(&["clone", "web1", "trial"], &is_time);
        if setup.unfinished().is_empty() {
            wait_max_ms = (wait_max_ms / 2).max(1);
        } else {
            left += 1;
        }
        let after = setup.world.repair_after_kill();
        let is_defined = setup.world.machines().contains(&"trial".to_owned());
        assert_eq!(found(&after), [""; 0], "round {round}: {after:#}");
        assert_eq!(
            (setup.unfinished(), setup.listed(&["web1"])),
            (vec![], vec![]),
            "round {round}"
        );
        if is_defined {
            setup.world.lab.virsh(&["undefine", "trial"]);
            for disk in ["trial-a", "trial-b"] {
                std::fs::remove_file(setup.world.lab.path(disk)).unwrap();
            }
        }
        let mut files = setup.world.files();
        files.retain(|file| !before.contains(file));
        assert_eq!((files, setup.hidden()), (Vec::new(), Vec::new()), "round {round}");
    }
    assert!(left > 0, "no clone was killed in time");
}

/// A file with other content, or of a machine, is not deleted.
#[test]
fn changed_files_with_the_names_of_a_killed_clone_are_kept() {
    let Some(setup) = machine_on("xfs") else { return };
    setup.take(0, &["web1", "--name", "one"]);
    let path = setup.world.lab.path("precious");
    write(&path, "precious");
    let half = setup.world.lab.path(".precious.0123abcd.partial");
    write(&half, "half");
    let note = json!({
        "schema": 1, "kind": "clone", "machine": "trial", "uuid": "11111111-2222-3333-4444-555555555555", "of": "web1",
        "point": "one", "safety": [], "process": dead_process(), "start_ms": 1000,
        "files": [{ "path": path, "device": 1, "inode": 1 }],
    });
    let place = setup
        .world
        .rig
        .path("state/holdfast/states/unfinished/11111111-2222-3333-4444-555555555555.json");
    let mut alive = note.clone();
    alive["process"] = this_process();
    write(&place, &alive.to_string());
    let report = setup.doctor(0, &["--fix"]);
    assert!(
        half.exists() && report["notes"].to_string().contains("working on trial"),
        "{report:#}"
    );
    write(&place, &note.to_string());
    let halves = setup.world.rig.path("state/holdfast/states/unfinished/22222222.new");
    write(&halves, "{");
    make_old(&halves);
    let report = setup.doctor(3, &[]);
    assert_eq!(found(&report), ["clone", "leftover"], "{report:#}");
    assert!(half.exists() && halves.exists());
    setup.doctor(0, &["--fix"]);
    assert!(!half.exists() && path.exists() && !place.exists() && !halves.exists());
}
