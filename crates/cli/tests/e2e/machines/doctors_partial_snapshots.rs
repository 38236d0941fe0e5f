//! Host snapshots that a killed process left incomplete: they are no points in time, and the doctor removes those that
//! are safe to remove.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use holdfast_block::SeededRandom;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use super::at;
use super::doctors::found;
use super::doctors_storage::{dead_process, names, this_process, write};
use super::host_snapshots::machine_on;
use holdfast_test_kit::file_systems::system;

#[test]
fn partly_received_snapshots_are_removed_and_unrecorded_ones_are_kept() {
    let Some(setup) = machine_on("btrfs") else { return };
    setup.take(0, &["web1", "--name", "one"]);
    let btrfs = |words: &[&str]| system("btrfs", &[&["subvolume"], words].concat()).unwrap();
    let half = setup.own_path("snapshots/half");
    btrfs(&["create", half.to_str().unwrap()]);
    // Without the lock of a receiver, the subvolume belongs to another program.
    assert_eq!(found(&setup.doctor(0, &["--fix"])), [""; 0]);
    write(&setup.own_path("receiving"), "");
    let receiving = File::open(setup.own_path("receiving")).unwrap();
    flock(&receiving, FlockOperation::LockExclusive).unwrap();
    assert_eq!(found(&setup.doctor(0, &["--fix"])), [""; 0]);
    drop(receiving);
    assert_eq!(found(&setup.doctor(3, &[])), ["leftover"]);
    assert!(half.exists());
    assert_eq!(found(&setup.doctor(0, &["--fix"])), ["leftover"]);
    assert!(!half.exists());

    // The state after a kill between the snapshot and its record; while the lock is held, the snapshot is still in
    // progress.
    let cut = setup.own_path("snapshots/cut");
    btrfs(&["snapshot", "-r", &setup.folder(), cut.to_str().unwrap()]);
    let making = File::open(setup.own_path("making")).unwrap();
    flock(&making, FlockOperation::LockShared).unwrap();
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
    drop(making);
    let report = setup.doctor(3, &["--fix"]);
    let finding = &report["findings"][0];
    assert_eq!(
        (found(&report), &finding["is_danger"]),
        (vec!["host-snapshot"], &json!(false))
    );
    let name = format!("btrfs:{}@cut", setup.folder());
    assert!(
        finding["advice"]
            .as_str()
            .unwrap()
            .starts_with(&format!("holdfast host remove {name}"))
    );
    let whole = |name: &str| {
        let listed = setup.listed(&["web1"]);
        listed.iter().find(|one| one["name"] == name).unwrap()["is_whole"].clone()
    };
    assert_eq!((whole("one"), whole("cut")), (json!(true), json!(false)));
    setup.world.rig.ok(&["host", "remove", &name]);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
}

/// A snapshot of btrfs has a hidden name until it is recorded. So a process that is killed in between leaves no
/// incomplete snapshot under its name.
#[test]
fn a_hidden_partial_snapshot_is_removed() {
    let Some(setup) = machine_on("btrfs") else { return };
    setup.take(0, &["web1", "--name", "one"]);
    let hidden = setup.own_path("snapshots/.cut");
    let cut = || {
        let words = ["subvolume", "snapshot", "-r", &setup.folder(), hidden.to_str().unwrap()];
        system("btrfs", &words).unwrap();
    };
    cut();
    let making = File::open(setup.own_path("making")).unwrap();
    flock(&making, FlockOperation::LockShared).unwrap();
    // Another process may be creating it.
    assert_eq!(found(&setup.doctor(0, &["--fix"])), [""; 0]);
    let uri = setup.world.lab.uri();
    let (_, text) = setup
        .world
        .rig
        .error(1, &at(&uri, &["snapshot", "web1", "--name", "cut"]));
    assert!(text.contains("another process is creating"), "{text}");
    drop(making);
    assert_eq!(found(&setup.doctor(3, &[])), ["leftover"]);
    assert_eq!(found(&setup.doctor(0, &["--fix"])), ["leftover"]);
    assert!(!hidden.exists());
    // The next snapshot of the same name also removes it.
    cut();
    setup.take(0, &["web1", "--name", "cut"]);
    assert_eq!(setup.names("snapshots"), ["cut", "one"]);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
}

/// A host snapshot is complete once the state of its machine is stored. If its process was killed before that, the
/// snapshot is removed with its partial state.
#[test]
fn an_incomplete_snapshot_is_removed_with_its_state() {
    let Some(setup) = machine_on("btrfs") else { return };
    setup.take(0, &["web1", "--name", "one"]);
    setup.take(0, &["web1", "--name", "two"]);
    assert_eq!(setup.state_count(), 2);
    let path = setup.own_path("records/two.json");
    let noted: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let whole: Value = serde_json::from_str(noted["record"].as_str().unwrap()).unwrap();
    assert_eq!((&whole["is_whole"], &whole["maker"]), (&json!(true), &Value::Null));
    let note = |change: &dyn Fn(&mut Value)| {
        let (mut noted, mut record) = (noted.clone(), whole.clone());
        record["is_whole"] = json!(false);
        record["maker"] = dead_process();
        change(&mut record);
        noted["record"] = json!(record.to_string());
        write(&path, &noted.to_string());
    };
    note(&|record| record["maker"] = this_process());
    assert_eq!(
        found(&setup.doctor(0, &["--fix"])),
        [""; 0],
        "the process that takes it is running"
    );
    // The record of a received copy names the original dataset.
    note(&|record| record["datasets"] = json!(["btrfs:/elsewhere"]));
    let report = setup.doctor(3, &["--fix"]);
    assert_eq!(found(&report), ["host-snapshot"]);
    assert!(
        report["findings"][0]["advice"]
            .as_str()
            .unwrap()
            .contains("host remove")
    );
    note(&|_| ());
    assert_eq!(found(&setup.doctor(0, &["--fix"])), ["host-snapshot"]);
    assert_eq!(setup.names("snapshots"), ["one"]);
    assert_eq!(setup.names("records"), ["one.json"]);
    assert_eq!(setup.state_count(), 1);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
    // The memory of a machine is stored there before it is kept.
    let scratch = setup.world.rig.path("state/holdfast/states/scratch");
    write(&scratch.join("holdfast-memory-old/memory"), "pages");
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    let folder = File::open(scratch.join("holdfast-memory-old")).unwrap();
    folder.set_modified(long_ago).unwrap();
    drop(folder);
    assert_eq!(found(&setup.doctor(0, &["--fix"])), ["leftover"]);
    assert_eq!(names(&scratch), [""; 0]);
}

/// A machine with disks in two subvolumes: the process that snapshots both may be killed in between.
#[test]
fn an_incomplete_set_of_snapshots_is_no_point_in_time() {
    let Some(setup) = machine_on("btrfs") else { return };
    setup.world.lab.virsh(&["destroy", "web1"]);
    let other = setup.world.lab.path("other");
    let btrfs = |words: &[&str]| system("btrfs", &[&["subvolume"], words].concat()).unwrap();
    btrfs(&["create", other.to_str().unwrap()]);
    let (image, moved) = (setup.world.lab.path("web1-b"), other.join("web1-b"));
    std::fs::copy(&image, &moved).unwrap();
    std::fs::remove_file(&image).unwrap();
    std::os::unix::fs::symlink(&moved, &image).unwrap();
    let uri = setup.world.lab.uri();
    let roll_back = |code: i32, point: &str| setup.world.rig.json(code, &at(&uri, &["rollback", point, "--dry-run"]));
    setup.take(0, &["web1", "--name", "whole"]);
    assert_eq!(setup.listed(&["web1"])[0]["is_whole"], true);
    let cut = |folder: &Path, name: &str| {
        let place = folder.join(".holdfast/snapshots").join(name);
        btrfs(&["snapshot", "-r", folder.to_str().unwrap(), place.to_str().unwrap()]);
    };
    let folder = PathBuf::from(setup.folder());
    cut(&folder, "one");
    assert!(
        roll_back(1, "web1@one")["error"]
            .to_string()
            .contains("has none of that name")
    );
    cut(&other, "one");
    // Both exist, and it is unknown whether the machine was still paused for the second one.
    let refused = roll_back(1, "web1@one")["error"].to_string();
    assert!(refused.contains("died before all of them were made"), "{refused}");
    assert_eq!(roll_back(0, "web1@latest")["report"]["point"], "whole");
    let report = setup.doctor(3, &[]);
    assert_eq!(found(&report), ["host-snapshot"; 2], "{report:#}");

    // Real kills: every snapshot that is listed as complete is complete.
    setup.world.lab.virsh(&["start", "web1"]);
    let mut random = SeededRandom::new(22);
    for round in 0..6 {
        let name = format!("round-{round}");
        setup.kill(&["snapshot", "web1", "--name", &name], &mut random, 200);
        setup.wait_until_it_runs(&name);
    }
    setup.world.lab.virsh(&["destroy", "web1"]);
    let report = setup.world.rig.report(&at(&uri, &["host", "list", "web1"]));
    for round in 0..6 {
        let name = format!("round-{round}");
        let of_name = |dataset: &Value| {
            let mut snapshots = dataset["snapshots"].as_array().unwrap().iter();
            snapshots
                .find(|one| one["name"] == name[..])
                .map(|one| one["is_whole"] == true)
        };
        let datasets = report["datasets"].as_array().unwrap();
        let are_whole: Vec<_> = datasets.iter().map(of_name).collect();
        let is_whole = are_whole == [Some(true), Some(true)];
        assert!(is_whole || !are_whole.contains(&Some(true)), "{report:#}");
        roll_back(i32::from(!is_whole), &format!("web1@{name}"));
    }
}

/// Two datasets are snapshotted one by one: after a kill in between, the first snapshot does not count as fresh.
#[test]
fn an_incomplete_set_of_zfs_snapshots_does_not_count_as_fresh() {
    let Some(setup) = machine_on("zfs") else { return };
    let (other, _) = setup.file_system.dataset();
    let pool = other.split('/').next().unwrap().to_owned();
    let name = "autosnap_2026-11-22_10:00:00_frequently";
    setup.take(0, &[&format!("zfs:{pool}"), &other, "--name", name]);
    let record = system(
        "zfs",
        &["get", "-H", "-o", "value", "holdfast:record", &format!("{pool}@{name}")],
    )
    .unwrap();
    let whole: Value = serde_json::from_str(&record).unwrap();
    assert_eq!(
        whole["datasets"],
        json!([format!("zfs:{pool}"), format!("zfs:{other}")]),
        "{whole}"
    );
    assert_eq!((&whole["is_whole"], &whole["maker"]), (&json!(true), &Value::Null));
    let uri = setup.world.lab.uri();
    let is_whole = || {
        let report = setup
            .world
            .rig
            .report(&at(&uri, &["host", "list", &format!("zfs:{pool}")]));
        report["datasets"][0]["snapshots"][0]["is_whole"].clone()
    };
    let mut half = whole.clone();
    half["is_whole"] = json!(false);
    half["maker"] = dead_process();
    let note = |record: &Value| {
        system(
            "zfs",
            &["set", &format!("holdfast:record={record}"), &format!("{pool}@{name}")],
        )
        .unwrap();
    };
    note(&half);
    assert_eq!(is_whole(), true, "the record of the other dataset is complete");
    system("zfs", &["destroy", &format!("{other}@{name}")]).unwrap();
    assert_eq!(is_whole(), false);
    let policy = format!(
        "[{pool}]\nuse_template = mine\n\n[template_mine]\nfrequently = 1\nhourly = 0\ndaily = 0\nmonthly = 0\nfrequently_warn = 1000000h\nfrequently_crit = 2000000h\n"
    );
    setup.world.rig.write("sanoid.conf", policy.as_bytes());
    let check = |code: i32| setup.world.rig.code(code, &["monitor", "snapshots", "sanoid.conf"]);
    check(2);
    let report = setup.doctor(3, &[]);
    let what = report["findings"][0]["what"].as_str().unwrap();
    assert_eq!(found(&report), ["host-snapshot"], "{report:#}");
    assert!(what.contains(&format!("there is none of zfs:{other}")), "{what}");
    half["maker"] = this_process();
    note(&half);
    assert_eq!(
        found(&setup.doctor(0, &[])),
        [""; 0],
        "the process that takes it is running"
    );
    note(&whole);
    check(0);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
}
