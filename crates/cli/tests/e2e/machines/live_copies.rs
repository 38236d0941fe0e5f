//! `live-copy` of disks of machines: a real guest writes meanwhile.

use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::qemu::runs_in;
use holdfast_test_kit::file_systems::system;
use holdfast_test_kit::qemu::{Image, QemuLab, QemuSetup};
use serde_json::Value;

use super::World;
use crate::host::text;
use crate::qemu_nbd::QemuNbd;
use crate::rig::Rig;
use crate::schedules::wait_until;
use crate::writing_guest::{GuestConsole, assert_one_moment, guest_file};

/// A bare QEMU with the writing guest.
struct WritingMachine {
    lab: QemuLab,
    rig: Rig,
    console: GuestConsole,
    source: String,
}

impl WritingMachine {
    fn new(format: &str) -> Self {
        let mut lab = QemuLab::new(&[format]);
        let console = GuestConsole(lab.path("console"));
        let serial = format!("file:{}", console.0.display());
        let (kernel, initrd) = (guest_file("vmlinuz"), guest_file("initrd"));
        let words = [
            "-name",
            "web1",
            "-qmp",
            "unix:{}/web1.qmp,server=on,wait=off",
            "-m",
            "160",
            "-kernel",
            &kernel,
            "-initrd",
            &initrd,
            "-append",
            "console=ttyS0 quiet",
            "-serial",
            &serial,
        ];
        let images: [Image; 1] = [(format.to_owned(), lab.path("disk0"))];
        let setup = QemuSetup {
            images: &images,
            words: &words,
        };
        lab.restart(setup, holdfast_test_kit::qemu::Ending::Quit);
        lab.execute("cont", Value::Null);
        console.wait_for(20);
        Self {
            source: format!("qmp:{}", lab.path("web1.qmp").display()),
            lab,
            rig: Rig::empty(),
            console,
        }
    }

    fn words<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        [&["live-copy", &self.source, "copy.raw"][..], more].concat()
    }

    /// Copies the disk, and calls `act` after QEMU has begun to record what the guest writes.
    fn copy_while(&self, act: impl FnOnce()) {
        let words = self.words(&["--max-frozen", "20s", "--force", "--bwlimit", "4M"]);
        let mut copy = self.rig.command(&words).spawn().unwrap();
        wait_until("the beginning of the copy", || {
            !runs_in(&*self.lab.monitor).unwrap().is_empty()
        });
        act();
        assert!(copy.try_wait().unwrap().is_none(), "the copy was too fast");
        assert!(copy.wait().unwrap().success());
        assert_one_moment(&self.rig.read("copy.raw"));
        assert!(runs_in(&*self.lab.monitor).unwrap().is_empty());
    }

    fn wait_until_clean(&self) {
        wait_until("the end of the run in QEMU", || {
            self.lab.is_running() && runs_in(&*self.lab.monitor).unwrap().is_empty()
        });
    }
}

#[test]
fn a_disk_is_copied_as_of_one_moment_while_the_guest_writes() {
    for format in ["qcow2", "raw"] {
        let machine = WritingMachine::new(format);
        let before = machine.lab.everything();
        let first = machine.console.wait_for_more(5).number;
        let report = machine.rig.report(&machine.words(&["--max-frozen", "20s"]));
        assert_eq!(report["consistency"], "crash");
        assert!(report["times"]["frozen_us"].as_u64().unwrap() > 0, "{report}");
        let copied = assert_one_moment(&machine.rig.read("copy.raw"));
        assert!(copied >= first, "{copied}: written before the copy began: {first}");
        assert_eq!(machine.lab.everything(), before, "QEMU is as before");
        let later = machine.console.wait_for_more(20);
        assert!(later.number > copied);
        // A paused machine stays paused.
        machine.lab.execute("stop", Value::Null);
        machine.rig.report(&machine.words(&["--force"]));
        assert!(!machine.lab.is_running());
        assert!(assert_one_moment(&machine.rig.read("copy.raw")) > copied);
        machine.lab.execute("cont", Value::Null);
        machine.console.wait_for_more(20);
        machine.console.assert_no_mismatch();
    }
}

/// What another program does with the machine during the copy lasts.
#[test]
fn a_machine_that_is_paused_or_resumed_during_a_copy_stays_so() {
    let machine = WritingMachine::new("qcow2");
    let before = machine.lab.everything();
    machine.copy_while(|| drop(machine.lab.execute("stop", Value::Null)));
    assert!(!machine.lab.is_running());
    machine.copy_while(|| drop(machine.lab.execute("cont", Value::Null)));
    assert_eq!(machine.lab.everything(), before);
    machine.console.wait_for_more(20);
    machine.console.assert_no_mismatch();
}

#[test]
fn a_disk_that_a_guest_writes_is_copied_to_an_image_and_to_an_export() {
    let machine = WritingMachine::new("qcow2");
    let rig = &machine.rig;
    let copy = |target: &str| rig.report(&["live-copy", &machine.source, target, "--force", "--max-frozen", "20s"]);
    let first = machine.console.wait_for_more(5).number;
    let done = copy("copy.qcow2");
    assert_eq!(done["format"], "qcow2");
    let image = rig.path("copy.qcow2");
    system("qemu-img", &["check", "-f", "qcow2", text(&image)]).unwrap();
    let raw = rig.path("image.raw");
    system("qemu-img", &["convert", "-O", "raw", text(&image), text(&raw)]).unwrap();
    let copied = assert_one_moment(&rig.read("image.raw"));
    assert!(copied >= first, "{copied}: written before the copy began: {first}");

    let (target, socket) = (rig.path("target.raw"), rig.path("nbd"));
    std::fs::File::create(&target)
        .unwrap()
        .set_len(done["size_bytes"].as_u64().unwrap())
        .unwrap();
    let server = QemuNbd::serve(&target, &socket, &["-f", "raw", "--shared", "8"]);
    copy(&format!("nbd+unix:///?socket={}", socket.display()));
    drop(server);
    assert!(assert_one_moment(&rig.read("target.raw")) > copied);
    machine.console.wait_for_more(20);
    machine.console.assert_no_mismatch();
}

/// The watchdog removes what a killed copy has left in QEMU, and the next copy continues.
#[test]
fn a_killed_copy_leaves_nothing_in_qemu() {
    let machine = WritingMachine::new("qcow2");
    let before = machine.lab.everything();
    for delay_ms in [40, 80, 120, 160, 200, 250, 300, 400] {
        let words = machine.words(&["--max-frozen", "20s", "--force"]);
        let mut killed = machine.rig.command(&words).spawn().unwrap();
        machine.lab.clock.sleep(Duration::from_millis(delay_ms));
        killed.kill().unwrap();
        killed.wait().unwrap();
        machine.wait_until_clean();
        machine.console.wait_for_more(5);
    }
    machine.rig.report(&machine.words(&["--max-frozen", "20s", "--force"]));
    assert_one_moment(&machine.rig.read("copy.raw"));
    assert_eq!(machine.lab.everything(), before);
    assert_eq!(machine.rig.names("."), ["copy.raw"]);
    machine.console.assert_no_mismatch();
}

#[test]
fn a_disk_of_a_machine_of_libvirt_is_copied_in_every_state() {
    let mut world = World::new();
    world.write(0, 7, 5000, 70_000);
    let uri = world.lab.uri();
    let copy = |disk: &str, more: &[&str]| {
        let words = [
            "live-copy",
            "web1",
            "copy.raw",
            "--force",
            "--disk",
            disk,
            "--connect",
            &uri,
        ];
        world.rig.report(&[&words[..], more].concat())
    };
    for (number, disk) in ["vda", "vdb"].into_iter().enumerate() {
        copy(disk, &["--max-frozen", "20s"]);
        assert!(world.rig.read("copy.raw") == world.disks[number], "{disk}");
    }
    world.assert_runs_and_is_clean();
    world.lab.virsh(&["suspend", "web1"]);
    let report = copy("vda", &[]);
    assert_eq!(report["consistency"], "crash");
    assert!(!world.is_running());
    world.lab.virsh(&["destroy", "web1"]);
    let report = copy("vda", &[]);
    assert_eq!(report["consistency"], "at-rest");
    assert!(world.rig.read("copy.raw") == world.disks[0]);
}

#[test]
fn wrong_words_about_machines_are_refused() {
    let world = World::new();
    let uri = world.lab.uri();
    world.rig.write("disk.raw", &[1; 4096]);
    for (words, kind, reason) in [
        (vec!["web1", "copy.raw"], "usage", "several disks: vda, vdb"),
        (vec!["web1", "copy.raw", "--disk", "vdz"], "not-found", "vda, vdb"),
        (
            vec!["web1", "copy.raw", "--disk", "vda", "--format", "raw"],
            "usage",
            "--format",
        ),
        (vec!["none", "copy.raw"], "not-found", "none"),
        (
            vec!["disk.raw", "copy.raw", "--disk", "vda"],
            "usage",
            "--disk applies to machines only",
        ),
    ] {
        let connect = if words[0] == "disk.raw" {
            vec![]
        } else {
            vec!["--connect", &uri]
        };
        let words = [&["live-copy"][..], &words, &connect, &["--json"]].concat();
        let output = world.rig.run(&words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!output.status.success() && text.contains(reason), "{words:?}: {text}");
        assert!(text.contains(&format!("\"{kind}\"")), "{words:?}: {text}");
    }
    let planned = [
        "live-copy",
        "web1",
        "copy.raw",
        "--disk",
        "vda",
        "--dry-run",
        "--connect",
        &uri,
    ];
    world.rig.report(&planned);
    assert!(!world.rig.path("copy.raw").exists());
    world.assert_runs_and_is_clean();
}
