//! Failures during a backup: the machine is never harmed, the message names the cause, and the next snapshot is
//! correct.

use std::process::Child;
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::qemu::runs_in;
use rustix::process::{Pid, Signal, kill_process};

use super::doctors::found;
use super::{World, at};
use crate::host::{SmallFileSystem, small_file_system, system, text};
use crate::rig::assert_runs;
use holdfast_test_kit::run;

/// Longer than any successful step here.
const PATIENCE: Duration = Duration::from_secs(60);

impl World {
    /// Starts a slow backup, and waits until it is reading.
    fn begin_slowly(&self, words: &[&str]) -> Child {
        let uri = self.lab.uri();
        let words = [&["backup", "web1", "--bwlimit", "3M"], words].concat();
        let mut child = self.rig.command(&at(&uri, &words)).spawn().unwrap();
        let start = self.lab.clock.now();
        while !self.journal().iter().any(|note| note["phase"] == "reading") {
            assert_runs(&mut child);
            assert!(self.lab.clock.now().saturating_sub(start) < PATIENCE);
            self.lab.clock.sleep(Duration::from_millis(5));
        }
        child
    }
}

/// A folder with a repository, on a file system that can be frozen and filled; `None` if this host cannot create one.
fn target(world: &World) -> Option<SmallFileSystem> {
    let small = small_file_system(&world.rig.path("target"), 64 << 20)?;
    world.rig.ok(&["init", "--no-encryption", "-r", "target/repo"]);
    Some(small)
}

struct Frozen<'a>(&'a SmallFileSystem);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        system("fsfreeze", &["--unfreeze", text(&self.0.path)]).unwrap();
    }
}

/// The repository hangs: writes of the guest do not.
#[test]
fn a_hanging_repository_does_not_block_the_guest() {
    let mut world = World::new();
    let Some(small) = target(&world) else { return };
    let before = world.disks.clone();
    let mut child = world.begin_slowly(&["-r", "target/repo"]);
    {
        system("fsfreeze", &["--freeze", text(&small.path)]).unwrap();
        let _frozen = Frozen(&small);
        for round in 0..40 {
            world.write(round % 2, 90, 65_536 * round, 65_536);
        }
        world.lab.clock.sleep(Duration::from_secs(5));
        for round in 40..60 {
            world.write(round % 2, 91, 65_536 * round, 65_536);
        }
        assert_runs(&mut child);
    }
    assert_eq!(child.wait().unwrap().code(), Some(0));
    world.assert_runs_and_is_clean();
    let now = std::mem::replace(&mut world.disks, before);
    world.assert_snapshot_in("target/repo", "the instant before");
    world.disks = now;
    world
        .rig
        .ok(&at(&world.lab.uri(), &["backup", "web1", "-r", "target/repo"]));
    world.assert_snapshot_in("target/repo", "the next one");
}

#[test]
fn a_full_repository_does_not_affect_the_guest_or_the_next_backup() {
    let mut world = World::new();
    let Some(small) = target(&world) else { return };
    let uri = world.lab.uri();
    let words = at(&uri, &["backup", "web1", "-r", "target/repo"]);
    world.rig.ok(&words);
    world.write(0, 90, 0, 65_536);
    let filler = small.path.join("filler");
    let file = std::fs::File::create(&filler).unwrap();
    let fill = |length: usize| std::io::Write::write_all(&mut &file, &vec![0; length]);
    while fill(1 << 20).is_ok() {}
    while fill(512).is_ok() {}
    let (kind, _) = world.rig.error(1, &words);
    assert_eq!(kind, "no-space");
    world.assert_runs_and_is_clean();
    world.write(1, 91, 0, 65_536);
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    let report = world.rig.report(&words);
    for disk in report["machines"][0]["disks"].as_array().unwrap() {
        assert_eq!(disk["dirty_bytes"], 65_536, "{report:#}");
    }
    world.assert_snapshot_in("target/repo", "after it was full");
}

/// Two backups of one machine: the error of the second one names the first, and neither the first nor the machine is
/// affected.
#[test]
fn a_second_backup_of_a_machine_is_refused() {
    let world = World::new();
    let mut first = world.begin_slowly(&[]);
    let uri = world.lab.uri();
    let (kind, message) = world.rig.error(4, &at(&uri, &["backup", "web1"]));
    let process = format!(
        "another backup of it: holdfast backup, process {}, since 20",
        first.id()
    );
    assert!(kind == "locked" && message.contains(&process), "{message}");
    // With --wait it waits for the first one to end.
    world.rig.ok(&at(&uri, &["backup", "web1", "--wait", "60"]));
    assert_eq!(first.try_wait().unwrap().unwrap().code(), Some(0));
    assert_eq!(world.rig.snapshot_count(), 2);
    world.assert_runs_and_is_clean();
    world.assert_snapshot_is_right("the first one");
}

/// A backup job of libvirt continues, and the error of Holdfast names it.
#[test]
fn a_backup_job_of_libvirt_is_left_alone() {
    let world = World::new();
    let scratch = world.lab.path("pull.xml");
    let text = "<domainbackup mode='pull'><server transport='unix' socket='SOCKET'/></domainbackup>"
        .replace("SOCKET", text(&world.lab.path("pull.sock")));
    std::io::Write::write_all(&mut std::fs::File::create(&scratch).unwrap(), text.as_bytes()).unwrap();
    world.lab.virsh(&["backup-begin", "web1", scratch.to_str().unwrap()]);
    let (kind, message) = world.rig.error(4, &at(&world.lab.uri(), &["backup", "web1"]));
    assert_eq!(kind, "locked", "{message}");
    let info = world.lab.virsh(&["domjobinfo", "web1"]);
    assert!(info.contains("Backup"), "{info}");
    world.lab.virsh(&["domjobabort", "web1"]);
    world.assert_runs_and_is_clean();
    world.back_up();
    world.assert_snapshot_is_right("after libvirt's own");
}

/// libvirtd is restarted while a machine is read, as in an update of the host.
#[test]
fn libvirtd_may_be_restarted_during_a_backup() {
    let mut world = World::new();
    world.back_up();
    world.write(0, 90, 0, 65_536);
    world.lab.virsh(&["destroy", "web1"]);
    world.lab.virsh(&["start", "web1"]);
    let child = world.begin_slowly(&[]);
    world.lab.stop_daemon();
    world.lab.clock.sleep(Duration::from_millis(500));
    world.lab.start_daemon();
    world.lab.connect();
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{message}");
    world.assert_runs_and_is_clean();
    world.assert_snapshot_is_right("over a restart");
    world.write(1, 91, 0, 4096);
    let report = world.back_up();
    assert!(
        report["disks"]
            .as_array()
            .unwrap()
            .iter()
            .all(|disk| disk["is_incremental"] == true),
        "{report:#}"
    );
    world.assert_snapshot_is_right("after a restart");
}

/// The process that hangs while a backup is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hanging {
    Libvirtd,
    Qemu,
}

impl World {
    fn process_of(&self, hanging: Hanging) -> Pid {
        let file = match hanging {
            Hanging::Libvirtd => "libvirt/libvirtd.pid",
            Hanging::Qemu => "libvirt/run/qemu/web1.pid",
        };
        let number = std::fs::read_to_string(self.lab.path(file)).unwrap();
        Pid::from_raw(number.trim().parse().unwrap()).unwrap()
    }

    /// Asks a backup to stop while `still` hangs. The backup ends without cleaning up.
    fn stop_backup(&self, hanging: Hanging, child: &mut Child) {
        let signal = |pid, signal| kill_process(pid, signal).unwrap();
        let process = self.process_of(hanging);
        signal(process, Signal::STOP);
        signal(Pid::from_child(child), Signal::INT);
        let start = self.lab.clock.now();
        let ended = loop {
            let ended = child.try_wait().unwrap();
            if ended.is_some() || self.lab.clock.now().saturating_sub(start) > PATIENCE {
                break ended;
            }
            self.lab.clock.sleep(Duration::from_millis(20));
        };
        signal(process, Signal::CONT);
        let status = ended.unwrap_or_else(|| panic!("the backup does not end while {hanging:?} hangs"));
        assert!(!status.success(), "{status}");
    }
}

/// A hanging libvirtd answers no call, and its library waits for ever; a hanging QEMU answers no call of libvirtd. The
/// program nevertheless stops at once. The watchdog cleans up when it gets answers again.
#[test]
fn a_backup_stops_while_libvirtd_or_qemu_hangs() {
    let mut world = World::new();
    world.back_up();
    for hanging in [Hanging::Libvirtd, Hanging::Qemu] {
        world.write(0, 90, 0, 65_536);
        let mut child = world.begin_slowly(&[]);
        world.stop_backup(hanging, &mut child);
        let start = world.lab.clock.now();
        let machine = world.machine();
        while !runs_in(machine.monitor()).is_ok_and(|runs| runs.is_empty()) {
            assert!(
                world.lab.clock.now().saturating_sub(start) < 2 * PATIENCE,
                "{hanging:?}"
            );
            world.lab.clock.sleep(Duration::from_millis(50));
        }
        world.assert_runs_and_is_clean();
        world.back_up();
        world.assert_snapshot_is_right("after libvirtd or QEMU hung");
    }
}

/// If the watchdog dies too, the doctor finds the leftovers.
#[test]
fn leftovers_of_a_backup_stopped_while_qemu_hung_are_found() {
    let mut world = World::new();
    world.back_up();
    for hanging in [Hanging::Libvirtd, Hanging::Qemu] {
        world.write(0, 91, 0, 65_536);
        let mut child = world.begin_slowly(&[]);
        let id = child.id();
        let watchdogs = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        for watchdog in watchdogs.split_whitespace() {
            kill_process(Pid::from_raw(watchdog.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
        }
        world.stop_backup(hanging, &mut child);
        let report = world.doctor(0, &["--fix"]);
        // libvirtd may have ended the backup when QEMU answered again: the backup asked for that before it stopped.
        assert!(
            !found(&report).is_empty() || matches!(hanging, Hanging::Qemu),
            "{hanging:?}: {report:#}"
        );
        assert_eq!(found(&world.doctor(0, &[])), [""; 0], "{hanging:?}: {report:#}");
        world.assert_runs_and_is_clean();
        world.back_up();
        world.assert_snapshot_is_right("after the doctor");
    }
}

/// Disks are resized, added, removed, and exchanged between two backups.
#[test]
fn resized_added_removed_and_exchanged_disks_are_backed_up() {
    let mut world = World::new();
    world.back_up();
    // A larger disk.
    world.lab.virsh(&["blockresize", "web1", "vda", "12M"]);
    world.disks[0].resize(12 << 20, 0);
    world.write(0, 90, 9 << 20, 65_536);
    let report = world.back_up();
    let reason = report["disks"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("8388608") && reason.contains("12582912"), "{reason}");
    assert_eq!(report["disks"][1]["is_incremental"], true);
    world.assert_snapshot_is_right("resized");
    // An additional disk.
    let third = world.lab.path("web1-c");
    run("qemu-img", &["create", "-q", "-f", "raw", text(&third), "4M"]);
    world.lab.virsh(&[
        "attach-disk",
        "web1",
        text(&third),
        "vdc",
        "--live",
        "--config",
        "--subdriver",
        "raw",
    ]);
    let report = world.back_up();
    let disks = report["disks"].as_array().unwrap();
    assert_eq!(disks.len(), 3);
    assert!(
        disks[2]["reason"].as_str().unwrap().contains("no such disk"),
        "{report:#}"
    );
    assert!(
        disks[..2].iter().all(|disk| disk["is_incremental"] == true),
        "{report:#}"
    );
    world.lab.virsh(&["detach-disk", "web1", "vdc", "--live", "--config"]);
    let start = world.lab.clock.now();
    while world
        .machine()
        .describe()
        .unwrap()
        .disks
        .iter()
        .any(|disk| disk.target == "vdc")
    {
        assert!(
            world.lab.clock.now().saturating_sub(start) < PATIENCE,
            "the discarded ranges are zero"
        );
        world.lab.virsh(&["destroy", "web1"]);
        world.lab.virsh(&["start", "web1"]);
    }
    assert_eq!(world.back_up()["disks"].as_array().unwrap().len(), 2);
    // Another image under the name of the first disk.
    let configuration = world.lab.virsh(&["dumpxml", "web1", "--inactive"]);
    world.lab.virsh(&["destroy", "web1"]);
    let exchanged = configuration
        .replace("dev='vda'", "dev='vdX'")
        .replace("dev='vdb'", "dev='vda'")
        .replace("dev='vdX'", "dev='vdb'");
    let file = world.lab.path("domain.xml");
    std::io::Write::write_all(&mut std::fs::File::create(&file).unwrap(), exchanged.as_bytes()).unwrap();
    world.lab.virsh(&["define", text(&file)]);
    world.lab.virsh(&["start", "web1"]);
    world.disks.swap(0, 1);
    let report = world.back_up();
    assert!(
        report["disks"]
            .as_array()
            .unwrap()
            .iter()
            .all(|disk| disk["is_incremental"] == false),
        "{report:#}"
    );
    world.assert_snapshot_is_right("exchanged");
}

/// Ranges that the guest discards are zero in the snapshot, and use no space in the repository.
#[test]
fn discarded_ranges_are_holes_in_the_snapshot() {
    let mut world = World::new();
    world.back_up();
    let monitor = world.machine();
    for (disk, offset, length) in [(0, 1 << 20, 4 << 20), (1, 2 << 20, 65_536)] {
        let line = format!(
            "qemu-io -d /machine/peripheral/virtio-disk{disk}/virtio-backend \"write -z -u {offset} {length}\""
        );
        let command =
            holdfast_host::qmp::QmpCommand::new("human-monitor-command", serde_json::json!({ "command-line": line }));
        monitor.monitor().execute(&command).unwrap();
        world.disks[disk][offset..offset + length].fill(0);
    }
    let report = world.back_up();
    let dirty: Vec<_> = report["disks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|disk| disk["dirty_bytes"].as_u64())
        .collect();
    assert_eq!(dirty, [Some(4 << 20), Some(65_536)]);
    assert!(report["stored_bytes"].as_u64().unwrap() < 20_000, "{report:#}");
    world.assert_snapshot_is_right("discarded");
}
