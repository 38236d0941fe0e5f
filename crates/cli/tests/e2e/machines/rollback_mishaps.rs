//! Failures and kills during snapshots and rollbacks.

use std::path::Path;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};
use holdfast_host::MachineState;
use holdfast_host::qemu::runs_in;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::at;
use super::doctors_storage::{destroy, names};
use super::host_snapshots::{MachineSetup, machine_on};
use holdfast_test_kit::run;

impl MachineSetup {
    /// Starts the program, and kills it within `within_ms`.
    pub(super) fn kill(&self, words: &[&str], random: &mut SeededRandom, within_ms: u64) {
        let uri = self.world.lab.uri();
        let words = at(&uri, words);
        let mut child = self.world.rig.command(&words).spawn().unwrap();
        SystemClock::new().sleep(Duration::from_millis(random.below(within_ms)));
        kill_process(Pid::from_child(&child), Signal::KILL).ok();
        child.wait().unwrap();
    }

    pub(super) fn wait_until_it_runs(&self, what: &str) {
        for _ in 0..400 {
            let machine = self.world.machine();
            let runs = self.world.state_of("web1") == MachineState::Running;
            if runs && runs_in(machine.monitor()).is_ok_and(|runs| runs.is_empty()) {
                return;
            }
            SystemClock::new().sleep(Duration::from_millis(50));
        }
        panic!("{what}: web1 does not run, or something is left in its QEMU");
    }

    pub(super) fn state_count(&self) -> usize {
        let states = self.world.rig.path("state/holdfast/states/repository");
        let report = self.world.rig.report(&["list", "-r", states.to_str().unwrap()]);
        report["snapshots"].as_array().unwrap().len()
    }
}

#[test]
fn a_snapshot_killed_while_saving_memory_leaves_a_running_machine() {
    let Some(setup) = machine_on("btrfs") else { return };
    let mut random = SeededRandom::new(5);
    for round in 0..8 {
        setup.kill(&["snapshot", "web1", "--with-memory"], &mut random, 700);
        setup.wait_until_it_runs(&format!("round {round}"));
    }
    // Each snapshot is complete or absent: this one succeeds, and removes states without a host snapshot.
    setup.take(0, &["web1", "--with-memory", "--name", "last"]);
    let listed = setup.listed(&["web1"]);
    let names: Vec<String> = listed
        .iter()
        .map(|one| {
            format!(
                "btrfs:{}@{}",
                setup.world.lab.folder.path().display(),
                one["name"].as_str().unwrap()
            )
        })
        .collect();
    let memories = listed.iter().filter(|one| one["memories"][0] == "web1").count();
    assert!(memories >= 1 && memories <= names.len());
    for name in &names {
        setup.world.rig.ok(&["host", "remove", name]);
    }
    assert_eq!(setup.state_count(), 0);
    let scratch = setup.world.rig.path("state/holdfast/states/scratch");
    assert_eq!(std::fs::read_dir(scratch).unwrap().count(), 0);
}

#[test]
fn a_killed_rollback_can_be_repeated() {
    let Some(mut setup) = machine_on("btrfs") else { return };
    setup.world.write(0, 40, 0, 1 << 20);
    setup.take(0, &["web1", "--name", "one"]);
    let earlier = setup.world.disks.clone();
    let mut random = SeededRandom::new(6);
    for round in 0..6_u8 {
        setup.world.write(0, 90 + round, 0, 6 << 20);
        setup.world.write(1, 90 + round, 0, 6 << 20);
        let newest = setup.world.disks.clone();
        setup.world.lab.virsh(&["destroy", "web1"]);
        setup.kill(&["rollback", "web1@one"], &mut random, 350);
        let uri = setup.world.lab.uri();
        // Either the rollback is repeated, or the machine is started and its disks are overwritten.
        if round % 2 == 0 {
            setup.world.rig.ok(&at(&uri, &["rollback", "web1@one", "--start"]));
            setup.world.disks.clone_from(&earlier);
        } else {
            setup.world.lab.virsh(&["start", "web1"]);
            setup.world.disks = newest;
            setup.world.write(0, 91 + round, 0, 6 << 20);
            setup.world.write(1, 91 + round, 0, 6 << 20);
        }
        setup.world.back_up();
        setup.world.assert_snapshot_is_right(&format!("round {round}"));
    }
}

/// Gives the first disk an image with a base image, and starts the machine.
fn base(setup: &MachineSetup, base: &Path) {
    setup.world.lab.virsh(&["destroy", "web1"]);
    let image = setup.world.lab.path("web1-a");
    std::fs::copy(&image, base).unwrap();
    std::fs::remove_file(&image).unwrap();
    let (image, base) = (image.to_str().unwrap(), base.to_str().unwrap());
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", image],
    );
    setup.world.lab.virsh(&["start", "web1"]);
}

#[test]
fn the_base_of_an_image_is_read_as_of_the_host_snapshot() {
    let Some(mut setup) = machine_on("btrfs") else { return };
    base(&setup, &setup.world.lab.path("base.qcow2"));
    setup.world.write(0, 40, 0, 65_536);
    // The guest has not flushed: QEMU has the new cluster addresses only in memory, and they would be lost by a power
    // cut.
    setup.world.lab.virsh(&["suspend", "web1"]);
    setup.world.lab.virsh(&["resume", "web1"]);
    setup.take(0, &["web1", "--name", "one"]);
    let earlier = setup.world.disks.clone();
    setup.world.write(0, 99, 0, 1 << 20);
    setup.world.lab.virsh(&["destroy", "web1"]);
    run(
        "qemu-img",
        &["commit", "-q", setup.world.lab.path("web1-a").to_str().unwrap()],
    );
    let uri = setup.world.lab.uri();
    setup.world.rig.ok(&at(&uri, &["rollback", "web1@one", "--start"]));
    setup.world.disks = earlier;
    setup.world.back_up();
    setup.world.assert_snapshot_is_right("with its base");
}

#[test]
fn a_base_that_is_not_in_the_snapshot_and_was_written_to_is_refused() {
    let Some(mut setup) = machine_on("xfs") else { return };
    let elsewhere = setup.world.rig.path("base.qcow2");
    if holdfast_host::provider::why_no_reflink(elsewhere.parent().unwrap(), "test").is_none() {
        println!("skipped: everything here can be cloned");
        return;
    }
    base(&setup, &elsewhere);
    setup.world.write(0, 40, 0, 65_536);
    // The snapshot warns that the base is not in it.
    setup.take(3, &["web1", "--name", "one"]);
    let earlier = setup.world.disks.clone();
    setup.world.write(0, 99, 0, 1 << 20);
    setup.world.lab.virsh(&["destroy", "web1"]);
    let uri = setup.world.lab.uri();
    setup.world.rig.ok(&at(&uri, &["rollback", "web1@one", "--start"]));
    setup.world.disks = earlier;
    setup.world.back_up();
    setup.world.assert_snapshot_is_right("its base was not written to");
    setup.world.lab.virsh(&["destroy", "web1"]);
    SystemClock::new().sleep(Duration::from_millis(2100));
    run(
        "qemu-img",
        &["commit", "-q", setup.world.lab.path("web1-a").to_str().unwrap()],
    );
    let (error, text) = setup.world.rig.error(1, &at(&uri, &["rollback", "web1@one"]));
    assert!(error == "not-found" && text.contains("base.qcow2"), "{error}: {text}");
}

#[test]
fn snapshots_removed_by_another_program_are_detected() {
    let Some(setup) = machine_on("btrfs") else { return };
    for name in ["one", "two"] {
        setup.take(0, &["web1", "--name", name]);
    }
    assert_eq!(setup.state_count(), 2);
    let folder = setup.world.lab.folder.path().display().to_string();
    run(
        "btrfs",
        &["subvolume", "delete", &format!("{folder}/.holdfast/snapshots/one")],
    );
    // A new snapshot of the same name is another point in time.
    setup.take(0, &["web1", "--name", "one"]);
    assert_eq!(setup.state_count(), 3);
    setup.world.rig.ok(&["host", "remove", &format!("btrfs:{folder}@two")]);
    assert_eq!(setup.state_count(), 1);
    // An unmounted file system does not count as a loss of its snapshots.
    let (own_path, away) = (setup.world.lab.path(".holdfast"), setup.world.lab.path("away"));
    std::fs::create_dir(setup.world.lab.path("other")).unwrap();
    setup
        .world
        .rig
        .ok(&["snapshot", &format!("reflink:{folder}/other"), "--name", "empty"]);
    std::fs::rename(&own_path, &away).unwrap();
    setup
        .world
        .rig
        .ok(&["host", "remove", &format!("reflink:{folder}/other@empty")]);
    std::fs::rename(&away, &own_path).unwrap();
    assert_eq!(setup.state_count(), 1);
    let uri = setup.world.lab.uri();
    setup.world.lab.virsh(&["destroy", "web1"]);
    let report = setup
        .world
        .rig
        .json(0, &at(&uri, &["rollback", "web1@one", "--dry-run"]));
    assert_eq!(report["report"]["has_state"], true, "{report}");
}

#[test]
fn clones_and_missing_machines_are_reported_in_advance() {
    let Some(setup) = machine_on("zfs") else { return };
    let pool = setup.file_system.dataset().0.split('/').next().unwrap().to_owned();
    setup.take(0, &["web1", "--name", "one"]);
    let (name, clone) = (format!("zfs:{pool}@one"), format!("{pool}/trial"));
    let planned = setup.world.rig.report(&["host", "clone", &name, &clone, "--dry-run"]);
    assert_eq!(
        (&planned["dry_run"], &planned["clone"]),
        (&true.into(), &json!(null)),
        "{planned}"
    );
    setup.world.rig.ok(&["host", "remove", &name, "--dry-run"]);
    setup.world.rig.ok(&["host", "clone", &name, &clone]);
    setup.world.rig.error(1, &["host", "clone", &name, &clone, "--dry-run"]);
    let report = setup.world.rig.json(1, &["host", "remove", &name, "--dry-run"])["report"].clone();
    let obstacle = report["snapshots"][0]["obstacle"].as_str().unwrap();
    assert!(obstacle.contains("clones") && obstacle.contains(&clone), "{obstacle}");
    destroy(&clone);
    setup.world.rig.ok(&["host", "remove", &name, "--dry-run"]);
    setup.world.lab.virsh(&["destroy", "web1"]);
    setup.world.lab.virsh(&["undefine", "web1"]);
    let uri = setup.world.lab.uri();
    let (kind, text) = setup.world.rig.error(1, &at(&uri, &["rollback", "web1@one"]));
    assert!(
        kind == "not-found" && text.contains("holdfast clone web1@one"),
        "{text}"
    );
}

#[test]
fn an_impossible_rollback_does_not_switch_off_the_machine() {
    let Some(setup) = machine_on("btrfs") else { return };
    setup.take(0, &["web1", "--name", "one"]);
    let uri = setup.world.lab.uri();
    let refused = |words: &[&str]| {
        let words = [&["rollback", "web1@one", "--power-off"], words].concat();
        let (kind, text) = setup.world.rig.error(1, &at(&uri, &words));
        assert_eq!(setup.world.state_of("web1"), MachineState::Running, "{text}");
        assert_eq!(setup.listed(&["web1"]).len(), 1);
        (kind, text)
    };
    let (kind, text) = refused(&["--resume"]);
    assert!(kind == "refused" && text.contains("cannot be resumed"), "{text}");
    let planned = setup
        .world
        .rig
        .report(&at(&uri, &["rollback", "web1@one", "--power-off", "--dry-run"]));
    assert_eq!(
        (&planned["dry_run"], setup.world.state_of("web1")),
        (&json!(true), MachineState::Running)
    );
    let planned = setup
        .world
        .rig
        .report(&at(&uri, &["rollback", "web1@one", "--dry-run"]));
    let notes = planned["restore"]["notes"].to_string();
    assert!(notes.contains("running") && notes.contains("--power-off"), "{planned}");
    assert_eq!(setup.world.state_of("web1"), MachineState::Running);
    // Another machine now uses the disk.
    let xml = setup.world.lab.virsh(&["dumpxml", "web1", "--inactive"]);
    let uuid = xml.split("<uuid>").nth(1).unwrap().split("</uuid>").next().unwrap();
    let other = xml
        .replace(uuid, "11111111-2222-3333-4444-555555555555")
        .replace("<name>web1<", "<name>db1<");
    setup.world.rig.write("db1.xml", other.as_bytes());
    setup
        .world
        .lab
        .virsh(&["define", setup.world.rig.path("db1.xml").to_str().unwrap()]);
    let (_, text) = refused(&[]);
    assert!(text.contains("used by the machine db1"), "{text}");
    setup.world.lab.virsh(&["undefine", "db1"]);
    // A transient machine would disappear when it is switched off.
    setup.world.lab.virsh(&["undefine", "web1"]);
    let (_, text) = refused(&[]);
    assert!(text.contains("transient"), "{text}");
}

fn a_dry_run_makes_nothing(kind: &'static str) {
    let Some(setup) = machine_on(kind) else { return };
    setup.take(0, &["web1", "--name", "one"]);
    setup.world.lab.virsh(&["destroy", "web1"]);
    std::fs::remove_dir_all(setup.world.rig.path("state")).unwrap();
    let folder = setup.world.lab.folder.path();
    let changed = || folder.metadata().unwrap().modified().unwrap();
    let (before, was) = (setup.world.files(), changed());
    let uri = setup.world.lab.uri();
    setup.world.rig.ok(&at(&uri, &["rollback", "web1@one", "--dry-run"]));
    let words = at(&uri, &["clone", "web1@one", "trial", "--dry-run"]);
    setup.world.rig.run(&words);
    assert_eq!((setup.world.files(), changed()), (before, was));
    assert!(
        !setup.world.rig.path("state").exists(),
        "{:?}",
        names(&setup.world.rig.path("state/holdfast"))
    );
}

#[test]
fn a_dry_run_on_btrfs_changes_nothing() {
    a_dry_run_makes_nothing("btrfs");
}

#[test]
fn a_dry_run_on_xfs_changes_nothing() {
    a_dry_run_makes_nothing("xfs");
}
