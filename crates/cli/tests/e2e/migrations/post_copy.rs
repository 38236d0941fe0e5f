//! `migrate --post-copy`: a machine runs at the other host before its disks are complete there.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_test_kit::file_systems::system;
use holdfast_test_kit::libvirt::LibvirtLab;
use holdfast_test_kit::run;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{TwoHosts, write_file};
use crate::replication::sshd::Program;
use crate::schedules::wait_until;
use crate::writing_guest::assert_one_moment;

const POST_COPY: [&str; 3] = ["--post-copy", "--max-frozen", "20s"];

/// What the image of the machine there has as backing file.
fn backing_there(hosts: &TwoHosts) -> Option<String> {
    let image = hosts.there.path("images/web1.qcow2");
    let info = run("qemu-img", &["info", "-U", "--output=json", image.to_str().unwrap()]);
    let info: Value = serde_json::from_str(&info).unwrap();
    info["backing-filename"].as_str().map(str::to_owned)
}

/// The disk there is complete, and continues what the machine wrote here.
fn assert_complete(hosts: &TwoHosts) {
    assert_eq!(hosts.states(), ["shut off", "running"]);
    assert_eq!(backing_there(hosts), None);
    hosts.console.wait_for_more(50);
    hosts.console.assert_no_mismatch();
    for words in [&["dumpxml", "web1"] as &[&str], &["dumpxml", "--inactive", "web1"]] {
        let text = hosts.there.virsh(words);
        assert!(!text.contains("nbd") && text.contains("web1.qcow2"), "{text}");
    }
    let kept = hosts.there.virsh(&["dumpxml", "--inactive", "web1"]);
    assert!(!kept.contains("error_policy"), "{kept}");
    let raw = |image: &Path, name: &str| {
        let raw = hosts.rig.path(name);
        run(
            "qemu-img",
            &["convert", "-O", "raw", image.to_str().unwrap(), raw.to_str().unwrap()],
        );
        std::fs::read(raw).unwrap()
    };
    let here = raw(&hosts.image, "here.raw");
    let stopped_at = assert_one_moment(&here);
    hosts.there.virsh(&["destroy", "web1"]);
    let there = raw(&hosts.there.path("images/web1.qcow2"), "there.raw");
    assert!(assert_one_moment(&there) > stopped_at);
    assert!(here[32 << 20..] == there[32 << 20..], "what the guest has not written");
    hosts.assert_no_sockets();
    assert_eq!(hosts.names_there(), ["web1.qcow2"]);
}

#[test]
fn a_machine_runs_there_before_its_disk_is_complete() {
    let Some(hosts) = TwoHosts::new() else { return };
    let plan = hosts.moved(&["--post-copy", "--dry-run"]);
    assert!(
        plan["disks"][0]["path"].as_str().unwrap().ends_with("/web1.qcow2"),
        "{plan}"
    );
    assert!(plan["notes"][0].as_str().unwrap().contains("needs this host"), "{plan}");
    let boot = hosts.console.last().unwrap().boot;
    let report = hosts.moved(&POST_COPY);
    assert_eq!(report["pulled_disks"][0]["disk"], "vda", "{report}");
    assert!(
        report["pulled_disks"][0]["read_bytes"].as_u64().unwrap() >= 16 << 20,
        "{report}"
    );
    assert_eq!(report["disks"], Value::Array(Vec::new()));
    let last_phase = report["phases"].as_array().unwrap().last().unwrap();
    assert_eq!(last_phase["phase"], "pull", "{report}");
    assert_eq!(hosts.console.wait_for_more(20).boot, boot, "the guest has booted again");
    assert_complete(&hosts);
}

/// A `holdfast` of the other host whose connections of disks stop or break.
struct HeldReceiver {
    folder: tempfile::TempDir,
}

impl HeldReceiver {
    fn new() -> Self {
        use std::os::unix::fs::PermissionsExt as _;
        let receiver = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let text = include_str!("held_receiver.py")
            .replace("@PROGRAM@", env!("CARGO_BIN_EXE_holdfast"))
            .replace("@PLAN@", receiver.plan().to_str().unwrap());
        let program = receiver.folder.path().join("holdfast");
        write_file(&program, text.as_bytes());
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        receiver.act("pass", 0);
        receiver
    }

    fn plan(&self) -> PathBuf {
        self.folder.path().join("plan")
    }

    /// From now on, connections stop or break after this number of bytes.
    fn act(&self, action: &str, bytes: u64) {
        let next = self.folder.path().join("next");
        write_file(&next, format!("{action} {bytes}").as_bytes());
        std::fs::rename(next, self.plan()).unwrap();
    }

    fn hosts(&self) -> Option<TwoHosts> {
        TwoHosts::with(Program::FoundIn(self.folder.path()))
    }
}

/// A part of the disk, and less than its data.
const PART_BYTES: u64 = 4 << 20;

/// A command that migrates the machine, whose disk is pulled in part.
struct HeldMove {
    child: Child,
}

impl HeldMove {
    fn begin(hosts: &TwoHosts, receiver: &HeldReceiver) -> Self {
        Self::begin_after(PART_BYTES, hosts, receiver)
    }

    /// It is held after this number of bytes.
    fn begin_after(bytes: u64, hosts: &TwoHosts, receiver: &HeldReceiver) -> Self {
        receiver.act("hold", bytes);
        let words = hosts.words(&[&["--accept-incomplete-memory"], &POST_COPY[..]].concat());
        let mut command = hosts.rig.command(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the machine runs there", || hosts.states() == ["shut off", "running"]);
        assert!(backing_there(hosts).is_some_and(|name| name.starts_with("nbd+unix:///vda?socket=")));
        Self { child }
    }

    fn end_by(self, signal: Signal) -> Output {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        self.child.wait_with_output().unwrap()
    }
}

/// The machine was there before, with another disk.
fn define_former(hosts: &TwoHosts) {
    let image = hosts.there.path("images/former.raw");
    write_file(&image, &[0; 4096]);
    let uuid = hosts.here.virsh(&["domuuid", "web1"]);
    hosts.there.define_xml(&format!(
        "<domain type='qemu'><name>web1</name><uuid>{}</uuid><memory unit='MiB'>64</memory>\
         <os><type arch='x86_64' machine='pc'>hvm</type></os><devices>\
         <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/>\
         <target dev='vda' bus='virtio'/></disk></devices></domain>",
        uuid.trim(),
        image.display()
    ));
}

#[test]
fn an_interrupted_pull_is_continued_and_no_other_command_takes_its_disks() {
    let receiver = HeldReceiver::new();
    let Some(hosts) = receiver.hosts() else { return };
    define_former(&hosts);
    let words = hosts.words(&["--delete-former"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let held = HeldMove::begin(&hosts, &receiver);
    // The disk here can neither be used nor served a second time.
    let refused = system("virsh", &["-q", "-c", &hosts.here.uri(), "start", "web1"]).unwrap_err();
    assert!(refused.contains("lock"), "{refused}");
    let (kind, text) = hosts.rig.error(4, &words);
    assert!(
        kind == "locked" && text.contains("served to the other host already"),
        "{kind}: {text}"
    );
    let output = held.end_by(Signal::INT);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("needs its disks here until the same command"), "{text}");
    assert_eq!(output.status.signal(), Some(Signal::INT.as_raw()), "{text}");
    receiver.act("pass", 0);
    let report = hosts.rig.report(&words);
    assert_eq!(
        (&report["attempts"], &report["phases"][0]["phase"]),
        (&0.into(), &"pull".into()),
        "{report}"
    );
    // Nothing is left to continue.
    let (_, text) = hosts.rig.error(1, &words);
    assert!(text.contains("exists there"), "{text}");
    assert_complete(&hosts);
}

/// Its memory was not sent in time, and the command was killed. A definition there is not the machine.
#[test]
fn a_machine_that_has_not_moved_is_migrated_although_a_record_is_left() {
    let Some(hosts) = TwoHosts::new() else { return };
    define_former(&hosts);
    hosts.here.virsh(&["destroy", "web1"]);
    let uuid = hosts.here.virsh(&["domuuid", "web1"]).trim().to_owned();
    let disk = serde_json::json!({
        "disk": "vda", "path": hosts.image, "format": "qcow2", "path_there": hosts.there.path("images/web1.qcow2"),
    });
    let record = serde_json::json!({
        "version": 1, "machine": "web1", "uuid": uuid, "destination": hosts.destination(), "disks": [disk],
        "former_files": [hosts.there.path("images/former.raw")],
    });
    let name = format!("state/holdfast/pulls/{uuid}.pull");
    std::fs::create_dir_all(hosts.rig.path("state/holdfast/pulls")).unwrap();
    hosts
        .rig
        .write(&name, format!("{record}\n{{\"stamps\":[null]}}\n").as_bytes());
    let report = hosts.moved(&[]);
    assert_eq!(report["state"], "shut-off", "{report}");
    assert_eq!(report["disks"][0]["disk"], "vda", "{report}");
    assert!(!hosts.rig.path(&name).exists());
    assert_eq!(hosts.names_there(), ["former.raw", "web1.raw"]);
}

#[test]
fn a_killed_pull_is_found_by_doctor_and_continued() {
    let receiver = HeldReceiver::new();
    let Some(hosts) = receiver.hosts() else { return };
    // The guest writes to a part of the disk that is not there.
    HeldMove::begin_after(1024, &hosts, &receiver).end_by(Signal::KILL);
    receiver.act("break", 0);
    wait_until("the machine there waits for its disk", || hosts.states()[1] == "paused");
    // As if it had been killed earlier.
    hosts.here.virsh(&["autostart", "web1"]);
    let found = hosts.rig.json(3, &["doctor", "--connect", &hosts.here.uri()]);
    let findings = found["report"]["findings"].as_array().unwrap();
    let pull = findings.iter().find(|finding| finding["kind"] == "pull").unwrap();
    assert!(
        pull["advice"].to_string().contains("holdfast migrate web1 ssh://"),
        "{pull}"
    );
    let words = hosts.words(&[]);
    hosts.rig.report(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let autostart = |lab: &LibvirtLab| lab.virsh(&["list", "--all", "--autostart"]).contains("web1");
    assert!(!autostart(&hosts.here) && autostart(&hosts.there));
    assert_complete(&hosts);
}

#[test]
fn a_disk_that_was_written_here_meanwhile_is_not_pulled() {
    let receiver = HeldReceiver::new();
    let Some(hosts) = receiver.hosts() else { return };
    HeldMove::begin(&hosts, &receiver).end_by(Signal::KILL);
    receiver.act("pass", 0);
    let image = hosts.image.to_str().unwrap();
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 48M 4k", image]);
    let words = hosts.words(&[]);
    let (kind, text) = hosts
        .rig
        .error(1, &words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(
        kind == "refused" && text.contains("was written or replaced since"),
        "{kind}: {text}"
    );
    assert!(backing_there(&hosts).is_some());
}

#[test]
fn a_lost_connection_is_made_again() {
    let receiver = HeldReceiver::new();
    let Some(hosts) = receiver.hosts() else { return };
    receiver.act("break", PART_BYTES);
    hosts.moved(&POST_COPY);
    assert_eq!(std::fs::read_to_string(receiver.plan()).unwrap(), "pass 0");
    assert_complete(&hosts);
}

#[test]
fn a_machine_that_would_be_stopped_for_too_long_stays_without_a_trace() {
    let Some(hosts) = TwoHosts::new() else { return };
    // No time is as short as this.
    let output = hosts.migrate(&["--post-copy", "--max-frozen", "0ms", "--json"]);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["status"], "error", "{document}");
    assert_eq!(hosts.states(), ["running", "absent"]);
    hosts.console.wait_for_more(20);
    hosts.assert_no_sockets();
    assert_eq!(hosts.names_there(), [""; 0]);
    let found = hosts.rig.run(&["doctor", "--json", "--connect", &hosts.here.uri()]);
    let found = String::from_utf8(found.stdout).unwrap();
    assert!(!found.contains("\"pull\""), "{found}");
    hosts.here.virsh(&["destroy", "web1"]);
    let plan = hosts.moved(&["--post-copy", "--dry-run"]);
    assert!(
        plan["obstacles"][0].as_str().unwrap().contains("it is shut off"),
        "{plan}"
    );
}

#[test]
fn a_machine_that_is_shut_off_there_is_completed_when_it_is_started() {
    let receiver = HeldReceiver::new();
    let Some(hosts) = receiver.hosts() else { return };
    let held = HeldMove::begin(&hosts, &receiver);
    hosts.there.virsh(&["destroy", "web1"]);
    receiver.act("pass", 0);
    hosts.here.clock.sleep(Duration::from_secs(2));
    hosts.there.virsh(&["start", "web1"]);
    let output = held.child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.contains("is shut off there"), "{text}");
    assert_complete(&hosts);
}

/// The other host starts the machine here, and serves its disks.
#[test]
fn a_machine_comes_back_before_its_disks_are_complete() {
    let Some(hosts) = TwoHosts::new() else { return };
    hosts.moved(&["--max-frozen", "20s"]);
    let back = hosts.moved(&[&["--undo", "--delete-former"], &POST_COPY[..]].concat());
    assert_eq!(hosts.states(), ["running", "shut off"]);
    assert_eq!(back["pulled_disks"][0]["disk"], "vda", "{back}");
    assert_eq!(back["destination"], Value::Null);
    hosts.console.wait_for_more(50);
    hosts.console.assert_no_mismatch();
    let text = hosts.here.virsh(&["dumpxml", "web1"]);
    assert!(!text.contains("nbd") && text.contains("web1-2.qcow2"), "{text}");
    assert!(!hosts.image.exists());
    hosts.assert_no_sockets();
    hosts.here.virsh(&["destroy", "web1"]);
    let plan = hosts.moved(&["--post-copy", "--dry-run"]);
    assert!(
        plan["obstacles"][0].as_str().unwrap().contains("it is shut off"),
        "{plan}"
    );
}
