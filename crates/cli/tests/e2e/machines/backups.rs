//! Backups of machines: the data that is read, the report, and the stored configuration.

use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::qmp::QmpCommand;
use serde_json::Value;

use super::{World, at};
use holdfast_test_kit::run;

#[test]
fn a_running_machine_is_backed_up_completely_and_then_incrementally() {
    let mut world = World::new();
    let first = world.back_up();
    assert_eq!(first["method"], "filter");
    assert_eq!(first["consistency"], "crash");
    assert!(first["paused_us"] == 0 && first["frozen_us"].is_null(), "{first}");
    assert!(
        first["disks"]
            .as_array()
            .unwrap()
            .iter()
            .all(|disk| disk["is_incremental"] == false)
    );
    let left_out: Vec<_> = first["left_out"]
        .as_array()
        .unwrap()
        .iter()
        .map(|disk| &disk["name"])
        .collect();
    assert_eq!(left_out, ["sda"]);
    world.assert_snapshot_is_right("first");
    world.assert_runs_and_is_clean();

    world.write(0, 50, 1 << 20, 65_536);
    world.write(1, 51, 3 << 20, 512);
    let second = world.back_up();
    for disk in second["disks"].as_array().unwrap() {
        assert_eq!(
            (&disk["is_incremental"], &disk["dirty_bytes"]),
            (&true.into(), &65_536.into()),
            "{disk}"
        );
    }
    // The changes of the disks, and the configuration.
    assert!(second["read_bytes"].as_u64().unwrap() < 2 * 65_536 + 20_000, "{second}");
    world.assert_snapshot_is_right("second");

    // The snapshot contains the configuration of the machine, which can be restored with the disks.
    world.rig.ok(&["restore", "web1:domain.xml", "domain.xml"]);
    assert!(
        String::from_utf8(world.rig.read("domain.xml"))
            .unwrap()
            .contains("<name>web1</name>")
    );
    std::fs::create_dir(world.rig.path("whole")).unwrap();
    world.rig.ok(&["restore", "web1", "whole", "--format", "qcow2"]);
    assert_eq!(
        world.rig.names("whole"),
        [
            "domain-live.xml",
            "domain-migratable.xml",
            "domain.xml",
            "vda.qcow2",
            "vdb.qcow2"
        ]
    );
    assert!(world.rig.read("whole/domain.xml") == world.rig.read("domain.xml"));
    world.rig.ok(&["verify"]);
}

/// A killed QEMU loses its bitmaps: everything is read, with the reason, and only changes are stored.
#[test]
fn everything_is_read_with_the_reason_after_a_kill_of_qemu() {
    let mut world = World::new();
    world.back_up();
    world.write(0, 60, 0, 4096);
    world.write(1, 61, 0, 4096);
    // Flush the writes of the guest, because a killed QEMU loses unflushed ones.
    world
        .machine()
        .monitor()
        .execute(&holdfast_host::qmp::QmpCommand::new(
            "human-monitor-command",
            serde_json::json!({ "command-line": "qemu-io -d /machine/peripheral/virtio-disk0/virtio-backend flush" }),
        ))
        .unwrap();
    let pid = std::fs::read_to_string(find_pid_file(&world)).unwrap();
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    while world.lab.virsh(&["domstate", "web1"]).trim() != "shut off" {
        std::thread::yield_now();
    }
    world.lab.virsh(&["start", "web1"]);
    let report = world.back_up();
    for disk in report["disks"].as_array().unwrap() {
        assert_eq!(disk["is_incremental"], false);
        let reason = disk["reason"].as_str().unwrap();
        assert!(reason.contains("bitmap"), "{reason}");
    }
    assert!(report["changed_bytes"].as_u64().unwrap() < 40_000, "{report}");
    world.assert_snapshot_is_right("after the kill");
    // The bitmaps of this backup are used by the next one.
    let report = world.back_up();
    assert!(
        report["disks"]
            .as_array()
            .unwrap()
            .iter()
            .all(|disk| disk["is_incremental"] == true),
        "{report}"
    );
}

fn find_pid_file(world: &World) -> std::path::PathBuf {
    let found = run(
        "find",
        &[world.lab.path("libvirt").to_str().unwrap(), "-name", "web1.pid"],
    );
    found.lines().next().unwrap().into()
}

/// Another process writes to the image without QEMU, so the bitmap lacks the change: the spot checks find a change of
/// this size.
#[test]
fn a_wrong_bitmap_is_detected_by_spot_checks() {
    let mut world = World::new();
    world.back_up();
    let image = world.lab.path("web1-b");
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&image).unwrap(),
        &vec![77; 8 << 20],
        0,
    )
    .unwrap();
    world.disks[1].fill(77);
    let report = world.back_up();
    let vdb = &report["disks"][1];
    assert!(
        vdb["reason"]
            .as_str()
            .unwrap()
            .contains("in a way that QEMU did not record"),
        "{report}"
    );
    assert_eq!(report["disks"][0]["is_incremental"], true);
    world.assert_snapshot_is_right("past QEMU");
}

#[test]
fn paused_and_shut_off_machines_are_backed_up_and_keep_their_state() {
    let mut world = World::new();
    world.write(0, 5, 4096, 4096);
    world.lab.virsh(&["suspend", "web1"]);
    let report = world.back_up();
    assert!(report["paused_us"].is_null() && report["method"] == "filter");
    world.assert_snapshot_is_right("paused");
    assert_eq!(world.lab.virsh(&["domstate", "web1"]).trim(), "paused");
    // No leftovers: the doctor finds nothing, and the next backup is incremental.
    assert!(world.journal().is_empty());
    world.doctor(0, &[]);
    world.write(1, 6, 8192, 4096);
    assert_eq!(world.back_up()["disks"][1]["dirty_bytes"], 65_536);
    world.assert_snapshot_is_right("paused twice");
    world.lab.virsh(&["resume", "web1"]);
    // QEMU closes the files of a backup of a paused machine only when the machine runs again: until then it has files
    // without a disk.
    world.back_up();
    world.assert_snapshot_is_right("it runs again");
    world.assert_runs_and_is_clean();
    world.lab.virsh(&["destroy", "web1"]);
    let report = world.back_up();
    assert_eq!(
        (&report["method"], &report["consistency"]),
        (&"images".into(), &"shut off".into())
    );
    world.assert_snapshot_is_right("shut off");
    let listed = world.rig.report(&["list"])["snapshots"].clone();
    let words = |one: &Value| (one["consistency"].clone(), one["method"].clone());
    let listed: Vec<_> = listed.as_array().unwrap().iter().map(words).collect();
    assert_eq!(listed[0], ("crash".into(), "filter".into()));
    assert_eq!(listed[3], ("shut off".into(), "images".into()));
}

/// An image that is read while its machine writes it is not of one point in time: there is a warning.
#[test]
fn an_image_in_use_by_a_machine_is_read_with_a_warning() {
    let world = World::new();
    let image = world.lab.path("web1-b").display().to_string();
    let document = world.rig.json(3, &["backup", &image, "--machine", "past"]);
    let warnings = document["warnings"].to_string();
    assert!(warnings.contains("is in use"), "{document}");
    world.lab.virsh(&["destroy", "web1"]);
    world.rig.ok(&["backup", &image, "--machine", "past"]);
}

/// When a machine is switched off during its backup, the backup fails with the reason, and leaves nothing.
#[test]
fn a_backup_fails_if_its_machine_is_switched_off() {
    let world = World::new();
    let uri = world.lab.uri();
    let words = at(&uri, &["backup", "web1", "--bwlimit", "2M", "--json"]);
    let child = world.rig.command(&words).spawn().unwrap();
    let is_read = || {
        let exports = world
            .machine()
            .monitor()
            .execute(&QmpCommand::new("query-block-exports", Value::Null));
        exports.is_ok_and(|exports| exports.as_array().is_some_and(|exports| exports.len() == 2))
    };
    while !is_read() {
        world.lab.clock.sleep(Duration::from_millis(20));
    }
    world.lab.virsh(&["destroy", "web1"]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(document["error"].to_string().contains("was switched off"), "{document}");
    assert!(world.journal().is_empty());
    world.doctor(0, &[]);
}

#[test]
fn impossible_requests_are_refused_with_a_reason() {
    let world = World::new();
    let uri = world.lab.uri();
    let refused = |code, words: &[&str]| world.rig.error(code, &at(&uri, words));
    let (kind, text) = refused(1, &["backup", "missing"]);
    assert!(kind == "not-found" && text.contains("missing"), "{text}");
    let (kind, text) = refused(1, &["backup", "web1", "--exclude", "vdx"]);
    assert!(kind == "not-found" && text.contains("vda, vdb"), "{kind}: {text}");
    let (kind, text) = refused(1, &["backup", "web1", "--quiesce", "require"]);
    assert!(kind == "refused" && text.contains("qemu-guest-agent"), "{text}");
    let (kind, text) = refused(1, &["backup", "web1", "--exclude", "vda", "--exclude", "vdb"]);
    assert!(kind == "refused" && text.contains("all disks"), "{kind}: {text}");
    let (_, text) = refused(2, &["backup", "web1", "--format", "raw"]);
    assert!(text.contains("machines"), "{text}");
    let (kind, text) = refused(1, &["backup", "web1", "--scratch", "/nonexistent"]);
    assert!(text.contains("/nonexistent"), "{kind} {text}");
    world.assert_runs_and_is_clean();
    assert_eq!(world.rig.snapshot_count(), 0);
    // One failed machine does not prevent the backup of the others.
    let document = world.rig.json(1, &at(&uri, &["backup", "missing", "web1"]));
    assert_eq!(document["report"]["failed"][0]["machine"], "missing");
    assert_eq!(document["report"]["machines"].as_array().unwrap().len(), 1);
}
