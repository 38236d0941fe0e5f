//! Images as targets, and QEMU's opinion of them.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_test_kit::file_systems::{Mounted, system};
use rustix::process::{Pid, Signal};

use super::MIB;
use crate::host::text;
use crate::nbdkit::Nbdkit;
use crate::replication::sshd::{Program, Sshd, texts};
use crate::rig::{Rig, noise};
use crate::schedules::wait_until;

/// A disk with data, zeroes and data again, which ends within a cluster.
fn content(size_bytes: usize) -> Vec<u8> {
    let mut content = noise(size_bytes, 60);
    content[size_bytes / 3..size_bytes / 2].fill(0);
    content
}

/// QEMU finds no error in the image and no lost space, and the content of the disk.
fn assert_image(image: &Path, format: &str, disk: &Path) {
    // It cannot check a VHD.
    if format != "vpc" {
        system("qemu-img", &["check", "-f", format, text(image)]).unwrap();
    }
    system(
        "qemu-img",
        &["compare", "-f", "raw", "-F", format, text(disk), text(image)],
    )
    .unwrap();
}

#[test]
fn a_disk_is_copied_to_an_image_of_each_format() {
    let rig = Rig::empty();
    rig.write("disk.raw", &content(5 * MIB + 4096));
    for (name, format) in [
        ("copy.qcow2", "qcow2"),
        ("copy.vdi", "vdi"),
        ("copy.vhd", "vpc"),
        ("copy.vhdx", "vhdx"),
        ("copy.vmdk", "vmdk"),
        ("copy.hds", "parallels"),
    ] {
        let done = rig.report(&["live-copy", "disk.raw", name]);
        assert_eq!(done["format"].as_str(), Some(format.replace("vpc", "vhd").as_str()));
        if format == "vpc" {
            // QEMU rounds the size of a VHD to its geometry.
            let compared = rig.report(&["image", "compare", "disk.raw", name]);
            assert_eq!(compared["is_equal"], true, "{compared}");
        } else {
            assert_image(&rig.path(name), format, &rig.path("disk.raw"));
        }
    }
    rig.ok(&["live-copy", "disk.raw", "named.raw", "--to", "qcow2"]);
    assert_image(&rig.path("named.raw"), "qcow2", &rig.path("disk.raw"));
    rig.ok(&["live-copy", "disk.raw", "raw.qcow2", "--to", "raw"]);
    assert!(rig.read("raw.qcow2") == rig.read("disk.raw"));
    let (kind, text) = rig.error(2, &["live-copy", "disk.raw", "copy.qcow"]);
    assert!(kind == "usage" && text.contains("no known format"), "{kind}: {text}");
    let (kind, text) = rig.error(1, &["live-copy", "disk.raw", "copy.hdd"]);
    assert!(
        kind == "refused" && text.contains("would be a folder"),
        "{kind}: {text}"
    );
}

/// Kills at many moments: each leaves an image without errors, and the last command completes it.
#[test]
fn a_killed_copy_to_an_image_continues() {
    let rig = Rig::empty();
    rig.write("disk.raw", &content(96 * MIB));
    let (disk, socket) = (rig.path("disk.raw"), rig.path("nbd"));
    // The source is slow, so that kills find a part of the copy. This nbdkit may abort when a client is killed.
    let serve = || {
        std::fs::remove_file(&socket).ok();
        let slow = ["--filter=delay", "file", text(&disk), "delay-read=60ms"];
        Nbdkit::serve(&socket, &slow)
    };
    let address = format!("nbd+unix:///?socket={}", socket.display());
    let words = ["live-copy", &address, "copy.qcow2"];
    let (partial, journal) = (
        rig.path(".copy.qcow2.holdfast-copy"),
        rig.path(".copy.qcow2.holdfast-copy.journal"),
    );
    let clock = SystemClock::new();
    let mut killed_count = 0;
    for delay_ms in [250, 90, 140, 200, 60, 310, 170, 120] {
        let _server = serve();
        let mut copy = rig.command(&words).spawn().unwrap();
        clock.sleep(Duration::from_millis(delay_ms));
        copy.kill().unwrap();
        if copy.wait().unwrap().signal().is_none() {
            break;
        }
        killed_count += 1;
        if partial.exists() && partial.metadata().unwrap().len() > 0 {
            let report = rig.run(&["image", "check", "--format", "qcow2", text(&partial), "--json"]);
            let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
            assert_eq!(report["report"]["corruption_count"], 0, "{report}");
        }
    }
    assert!(killed_count >= 3, "{killed_count}");
    let is_durable = || journal.metadata().is_ok_and(|found| found.len() > 200);
    if !is_durable() {
        // On a busy host, all kills were early.
        let _server = serve();
        let mut copy = rig.command(&words).spawn().unwrap();
        wait_until("a part of the copy is durable", is_durable);
        copy.kill().unwrap();
        copy.wait().unwrap();
    }
    let server = serve();
    let done = rig.report(&words);
    let phases = done["times"]["phases"].as_array().unwrap();
    assert!(phases.iter().any(|phase| phase["phase"] == "comparing"), "{done}");
    drop(server);
    assert_image(&rig.path("copy.qcow2"), "qcow2", &disk);
    assert_eq!(rig.names("."), ["copy.qcow2", "disk.raw", "nbd"]);
}

#[test]
fn an_image_on_another_host_survives_cuts_and_kills() {
    let rig = Rig::empty();
    let Some(sshd) = Sshd::start(Program::Found, None) else {
        return;
    };
    rig.write("disk.raw", &content(60 * MIB));
    let there = tempfile::tempdir().unwrap();
    let target = there.path().join("copy.qcow2");
    let far = format!("ssh://127.0.0.1{}", target.display());
    let proxy = sshd.breaking_proxy();
    let options = sshd.options_by(proxy.port);
    let words = [&["live-copy", "disk.raw", &far][..], &texts(&options)].concat();
    let mut killed = rig.command(&words).spawn().unwrap();
    let partial = there.path().join(".copy.qcow2.holdfast-copy");
    wait_until("data arrives", || {
        partial.metadata().is_ok_and(|found| found.len() > 4 << 20)
    });
    killed.kill().unwrap();
    killed.wait().unwrap();
    proxy.break_after(6 << 20);
    let done = std::thread::scope(|scope| {
        scope.spawn(|| proxy.heal_after_the_break());
        rig.json(3, &words)
    });
    assert_eq!(done["report"]["lost_connections"], 1, "{done}");
    assert_image(&target, "qcow2", &rig.path("disk.raw"));
    // The same target, with the format of the first copy only.
    let (kind, text) = rig.error(1, &[&words[..], &["--to", "raw"]].concat());
    assert!(kind == "exists", "{kind}: {text}");
    assert_eq!(std::fs::read_dir(there.path()).unwrap().count(), 1);
}

/// A process that has a file open.
fn user_of(path: &Path) -> Option<Pid> {
    let processes = std::fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let has_open = |id: &i32| {
        let files = std::fs::read_dir(format!("/proc/{id}/fd"));
        files.is_ok_and(|files| {
            files
                .flatten()
                .any(|file| std::fs::read_link(file.path()).is_ok_and(|open| open == path))
        })
    };
    ids.into_iter().find(has_open).and_then(Pid::from_raw)
}

/// Receivers are killed after they have confirmed something. The sender runs on and does not compare that again, so it must be in
/// the image.
#[test]
fn an_image_survives_kills_of_its_receivers() {
    let rig = Rig::empty();
    let Some(sshd) = Sshd::start(Program::Found, None) else {
        return;
    };
    rig.write("disk.raw", &content(96 * MIB));
    let (disk, socket) = (rig.path("disk.raw"), rig.path("nbd"));
    let slow = ["--filter=delay", "file", text(&disk), "delay-read=60ms"];
    let _server = Nbdkit::serve(&socket, &slow);
    let address = format!("nbd+unix:///?socket={}", socket.display());
    let there = tempfile::tempdir().unwrap();
    let folder = there.path().canonicalize().unwrap();
    let (partial, journal) = (
        folder.join(".copy.qcow2.holdfast-copy"),
        folder.join(".copy.qcow2.holdfast-copy.journal"),
    );
    let far = format!("ssh://127.0.0.1{}", folder.join("copy.qcow2").display());
    let options = sshd.options();
    let words = [&["live-copy", &address, &far][..], &texts(&options)].concat();
    let done = std::thread::scope(|scope| {
        let copy = scope.spawn(|| rig.json(3, &words));
        let mut confirmed_bytes = 200;
        for _ in 0..3 {
            wait_until("more is confirmed, and the receiver is killed", || {
                let is_more = journal.metadata().is_ok_and(|found| found.len() > confirmed_bytes);
                let receiver = user_of(&partial).filter(|_| is_more);
                receiver.is_some_and(|receiver| rustix::process::kill_process(receiver, Signal::KILL).is_ok())
            });
            confirmed_bytes = journal.metadata().unwrap().len();
        }
        copy.join().unwrap()
    });
    assert!(done["report"]["lost_connections"].as_u64().unwrap() >= 3, "{done}");
    assert_image(&folder.join("copy.qcow2"), "qcow2", &disk);
}

/// A file system without room: the copy ends at once, and continues when there is some.
#[test]
fn a_full_file_system_ends_the_copy_to_an_image() {
    let rig = Rig::empty();
    rig.write("disk.raw", &noise(24 * MIB, 61));
    let point = rig.path("small");
    let _mounted = match Mounted::at("ext4", &point) {
        Ok(mounted) => mounted,
        Err(reason) => return super::skipped(&reason),
    };
    let ballast = super::fill_but(&point, 64 << 20);
    // Room for the estimate, which is taken by another file meanwhile.
    let socket = rig.path("nbd");
    let disk = rig.path("disk.raw");
    let slow = ["--filter=delay", "file", text(&disk), "delay-read=30ms"];
    let _server = Nbdkit::serve(&socket, &slow);
    let address = format!("nbd+unix:///?socket={}", socket.display());
    let words = ["live-copy", &address, "small/copy.qcow2", "--json"];
    let output = std::thread::scope(|scope| {
        let copy = scope.spawn(|| rig.run(&words));
        wait_until("the copy has begun", || {
            point.join(".copy.qcow2.holdfast-copy").exists()
        });
        super::fill_but(&point, 8 << 20);
        copy.join().unwrap()
    });
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(
        report.contains("\"no-space\"") && report.contains("space left"),
        "{report}"
    );
    std::fs::remove_file(&ballast).unwrap();
    rig.report(&words[..3]);
    assert_image(&point.join("copy.qcow2"), "qcow2", &disk);
}
