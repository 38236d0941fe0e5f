//! Running machines, which are backed up from a temporary snapshot of VirtualBox.

use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use serde_json::Value;

use super::{LAB, MIB, NAME, World};
use crate::program::{stderr, stdout};
use crate::rig::assert_code;

#[test]
fn a_running_machine_is_read_from_a_temporary_snapshot() {
    let world = World::new();
    world.state("running");
    let report = world.back_up(0, &["vbox:", "--with-memory"])["report"].clone();
    let machine = &report["machines"][0];
    assert_eq!(
        (&machine["method"], &machine["consistency"]),
        (&"virtualbox-snapshot".into(), &"memory".into())
    );
    assert!(machine["memory_bytes"].as_u64().unwrap() > 4096, "{machine}");
    // Writes of the machine during the backup are not in the snapshot, and are not lost.
    world.assert_holds(NAME, &[("sda", &world.disks[0]), ("sdb", &world.disks[1])]);
    world.assert_unchanged();
    let requests = world.requests();
    assert!(
        requests.contains("\"--live\"") && requests.contains("\"delete\""),
        "{requests}"
    );
    // The stored settings are those before the snapshot.
    let kept = world
        .rig
        .run(&["restore", &format!("{NAME}:original-machine.vbox"), "-"]);
    assert!(!stdout(&kept).contains("<Snapshot "), "{}", stdout(&kept));

    // A paused machine stays paused; snapshots of the owner are kept.
    world.state("paused");
    world.set("asked", "");
    let machine_now = world.disk_now();
    world.back_up(0, &["vbox:"]);
    assert!(!world.requests().contains("--live"), "{}", world.requests());
    world.assert_holds(NAME, &[("sda", &machine_now)]);
    world.state("running");
    world.run_manager(&["snapshot", LAB, "take", "mine", "--description", "", "--live"]);
    let before = world.settings();
    assert!(before.contains("name=\"mine\""));
    world.set("quiet", "");
    world.back_up(0, &["vbox:", "--machine", "deep"]);
    assert_eq!(
        world.settings().matches("<Snapshot ").count(),
        1,
        "{}",
        world.settings()
    );
    let mut expected = machine_now;
    expected[MIB..2 * MIB].fill(0xee);
    world.assert_holds("deep", &[("sda", &expected)]);
    // The export has a new identity, so that VirtualBox can register it beside the original.
    let export = [
        "export",
        NAME,
        "twin",
        "--format",
        "vbox",
        "--name",
        "twin",
        "--new-identity",
        "--register",
    ];
    let report = world.json(0, &export)["report"].clone();
    assert_eq!(report["is_registered"], true, "{report}");
    let text = String::from_utf8(world.rig.read("twin/twin.vbox")).unwrap();
    assert!(
        !text.contains(LAB) && !text.contains("080027BB1475") && text.contains("name=\"twin\""),
        "{text}"
    );
}

/// A killed backup left its snapshot: the doctor finds and deletes it, but no other snapshots, and not while a backup
/// is running.
#[test]
fn the_doctor_deletes_the_snapshots_of_dead_backups() {
    let world = World::new();
    world.state("running");
    for name in ["mine", "holdfast-backup-before", "holdfast-backup-0000002a"] {
        world.run_manager(&["snapshot", LAB, "take", name, "--description", "", "--live"]);
    }
    let state = world.rig.path("state").display().to_string();
    let doctor = |code: i32, words: &[&str]| -> Value {
        let words = [&["doctor", "vbox:", "--json"], words].concat();
        let (clock, mut waited) = (SystemClock::new(), 0);
        loop {
            let mut command = world.command(&words);
            let output = command.env("XDG_STATE_HOME", &state).output().unwrap();
            let report = serde_json::from_str::<Value>(&stdout(&output)).unwrap()["report"].clone();
            // While backups of other tests are running, the owner of a snapshot is unknown.
            if waited < 600 && report["notes"].to_string().contains("is not known whether") {
                clock.sleep(Duration::from_millis(100));
                waited += 1;
                continue;
            }
            assert_code(&output, code, &words);
            return report;
        }
    };
    let count = || world.settings().matches("<Snapshot ").count();

    // The lock of a running backup of this machine.
    let folder = world.rig.path("state/holdfast/machines");
    std::fs::create_dir_all(&folder).unwrap();
    let lock = std::fs::File::create(folder.join(format!("{LAB}.backup"))).unwrap();
    lock.lock().unwrap();
    let report = doctor(0, &["--fix"]);
    assert!(report["notes"].to_string().contains("is running"), "{report}");
    assert_eq!((&report["findings"].to_string()[..], count()), ("[]", 3));
    lock.unlock().unwrap();

    let report = doctor(3, &[]);
    let finding = &report["findings"][0];
    assert_eq!(
        (&finding["kind"], &finding["machine"]),
        (&"virtualbox-snapshot".into(), &NAME.into())
    );
    let message = finding.to_string();
    assert!(
        message.contains("-0000002a") && !message.contains("-before"),
        "{message}"
    );
    assert_eq!((report["findings"].as_array().unwrap().len(), count()), (1, 3));

    // VirtualBox does not manage to delete it: it is kept and reported.
    world.set("fail-delete", "error-delete");
    let report = doctor(3, &["--fix"]);
    assert!(
        report["findings"][0]["error"].to_string().contains("still has"),
        "{report}"
    );
    world.unset("fail-delete");
    let report = doctor(0, &["--fix"]);
    assert!(
        report["findings"][0]["repaired"].to_string().contains("-0000002a"),
        "{report}"
    );
    let settings = world.settings();
    assert!(settings.contains("name=\"mine\"") && settings.contains("holdfast-backup-before\""));
    assert!(!settings.contains("0000002a"), "{settings}");
    let report = doctor(0, &[]);
    assert_eq!(
        (&report["findings"].to_string()[..], &report["machines"][0]),
        ("[]", &NAME.into())
    );
}

/// Hooks are called around the snapshot, even if it fails; and the read rate is limited.
#[test]
fn hooks_are_called_and_the_read_rate_is_limited() {
    let world = World::new();
    world.rig.write_hook();
    world.back_up(0, &["vbox:", "--hook", "hook"]);
    assert_eq!(world.rig.take_hook_calls(), ["job-start", "job-end"]);
    world.state("running");
    let report = world.back_up(0, &["vbox:", "--hook", "hook", "--no-parent", "--bwlimit", "8M"])["report"].clone();
    assert_eq!(
        world.rig.take_hook_calls(),
        ["job-start", "pre-freeze", "post-thaw", "job-end"]
    );
    let machine = &report["machines"][0];
    let waited = machine["load"]["waited_ms"].as_u64().unwrap();
    assert!(waited > 200, "{machine}");
    let variables = String::from_utf8(world.rig.read("hook.post-thaw")).unwrap();
    for line in [
        "HOLDFAST_HYPERVISOR=vbox:",
        "HOLDFAST_MACHINE_STATE=running",
        &format!("HOLDFAST_MACHINE_UUID={LAB}"),
    ] {
        assert!(variables.contains(line), "{line}: {variables}");
    }
    assert!(!variables.contains("PAUSED_MS"), "{variables}");
    let variables = String::from_utf8(world.rig.read("hook.job-end")).unwrap();
    assert!(variables.contains("HOLDFAST_CONSISTENCY=crash"), "{variables}");
    // A dry run calls no hook, and takes no snapshot.
    world.set("asked", "");
    let planned = world.back_up(0, &["vbox:", "--hook", "hook", "--dry-run"])["report"]["machines"][0].clone();
    assert_eq!(
        (&planned["method"], &planned["state"]),
        (&"virtualbox-snapshot".into(), &"running".into())
    );
    assert!(!world.requests().contains("take") && !world.rig.path("hook.calls").exists());
    // A hook that was called before the snapshot is called at the end, although the snapshot failed.
    world.set("fail-take", "error-locked");
    world.refused(4, &["vbox:", "--hook", "hook"]);
    assert_eq!(
        world.rig.take_hook_calls(),
        ["job-start", "pre-freeze", "post-thaw", "job-abort"]
    );
    world.unset("fail-take");
    world.assert_unchanged();
    // If a hook fails before the snapshot, the machine is not changed.
    world.set("asked", "");
    let (_, message) = world.refused(1, &["vbox:", "--hook", "/bin/false"]);
    assert!(
        message.contains("job-start") && !world.requests().contains("take"),
        "{message}"
    );
    let (_, message) = world.refused(2, &["vbox:", "--max-latency", "20"]);
    assert!(message.contains("does not apply to VirtualBox"), "{message}");
}

#[test]
fn a_snapshot_that_cannot_be_deleted_is_reported_and_deleted_later() {
    let world = World::new();
    world.state("running");
    // The snapshot cannot be deleted: the backup succeeds, with a warning and a remedy.
    world.set("fail-delete", "error-delete");
    let document = world.back_up(3, &["vbox:"]);
    let message = document["warnings"].to_string();
    assert!(
        message.contains("VERR_DISK_FULL") && message.contains("delete "),
        "{message}"
    );
    world.assert_holds(NAME, &[("sda", &world.disks[0])]);
    assert!(world.settings().contains("name=\"holdfast-backup-"));
    let output = world.run(3, &["backup", "vbox:"]);
    assert!(stdout(&output).contains("still there"), "{}", stdout(&output));
    // The next backup finds it and retries, with a warning; it contains later writes of the machine.
    world.unset("fail-delete");
    let output = world.run(0, &["backup", "vbox:", "--machine", "next"]);
    assert!(stderr(&output).contains("is deleted"), "{}", stderr(&output));
    world.assert_unchanged();
    let mut expected = world.disks[0].clone();
    expected[MIB..2 * MIB].fill(0xee);
    world.assert_holds("next", &[("sda", &expected)]);

    for (failure, reason) in [
        ("nothing", "says that it is deleted"),
        ("killed", "was killed by signal 9"),
    ] {
        world.set("fail-delete", failure);
        let document = world.back_up(3, &["vbox:"]);
        let message = document["warnings"].to_string();
        assert!(message.contains(reason), "{message}");
        world.unset("fail-delete");
        world.run(0, &["backup", "vbox:"]);
        world.assert_unchanged();
    }

    // VBoxManage reports a failure although it has taken the snapshot.
    world.set("fail-take", "late");
    let (kind, message) = world.refused(4, &["vbox:"]);
    assert!(kind == "locked" && message.contains("already locked"), "{message}");
    world.unset("fail-take");
    world.assert_unchanged();
    // No snapshot was taken.
    world.set("fail-take", "error-locked");
    assert_eq!(world.refused(4, &["vbox:"]).0, "locked");
    world.unset("fail-take");
    world.assert_unchanged();
    // The repository is not writable: the snapshot of VirtualBox is deleted.
    let count = world.rig.snapshot_count();
    std::fs::rename(world.rig.path("repo/tmp"), world.rig.path("gone")).unwrap();
    world.rig.write("repo/tmp", b"");
    world.set("asked", "");
    let output = world.command(&["backup", "vbox:", "--no-parent"]).output().unwrap();
    assert!(!output.status.success(), "{}", stderr(&output));
    assert!(world.requests().contains("\"take\""), "{}", world.requests());
    world.assert_unchanged();
    std::fs::remove_file(world.rig.path("repo/tmp")).unwrap();
    std::fs::rename(world.rig.path("gone"), world.rig.path("repo/tmp")).unwrap();
    assert_eq!(world.rig.snapshot_count(), count);
    // States between on and off, unknown states, and a crashed machine, which stays so until it is powered off.
    for (state, code) in [("livesnapshotting", 4), ("gurumeditation", 1), ("dreaming", 4)] {
        world.state(state);
        let (_, message) = world.refused(code, &["vbox:"]);
        assert!(
            message.contains("is in the state") && message.contains(state),
            "{message}"
        );
        assert_eq!(message.contains("poweroff"), code == 1, "{message}");
    } // A description that pretends it is off.
    world.state("running\"\nVMState=\"poweroff");
    let (_, message) = world.refused(1, &["vbox:"]);
    assert!(message.contains("different values"), "{message}");
}
