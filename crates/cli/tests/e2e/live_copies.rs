//! `live-copy`: images at rest, file systems in use that commands freeze, and another host by a real sshd.

mod commands;
mod exports;
mod images;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_test_kit::file_systems::{Mounted, system};
use serde_json::Value;

use crate::qemu_nbd::QemuNbd;
use crate::replication::sshd::{Program, Sshd, texts};
use crate::rig::{Rig, noise};
use crate::schedules::wait_until;
use crate::verbs::containers::Container;

const MIB: usize = 1 << 20;

/// Reports of `live-copy`.
pub(crate) fn reports() -> Vec<Value> {
    let rig = Rig::empty();
    rig.write("disk.raw", &noise(2 * MIB, 1));
    let planned = rig.report(&["live-copy", "disk.raw", "copy.raw", "--dry-run"]);
    let copied = rig.report(&["live-copy", "disk.raw", "copy.raw"]);
    vec![planned, copied]
}

#[test]
fn an_image_at_rest_is_copied_once_and_not_over_another() {
    let rig = Rig::empty();
    let content = noise(3 * MIB + 512, 2);
    rig.write("disk.raw", &content);
    rig.ok(&["image", "convert", "disk.raw", "disk.qcow2"]);
    rig.report(&["live-copy", "disk.qcow2", "copy.raw", "--dry-run"]);
    assert!(!rig.path("copy.raw").exists());
    let done = rig.report(&["live-copy", "disk.qcow2", "copy.raw"]);
    assert!(rig.read("copy.raw") == content);
    assert_eq!(
        (&done["consistency"], &done["times"]["frozen_us"]),
        (&"at-rest".into(), &0.into())
    );
    let (kind, text) = rig.error(1, &["live-copy", "disk.qcow2", "copy.raw"]);
    assert!(kind == "exists" && text.contains("copy.raw exists"), "{kind}: {text}");
    rig.write("other.raw", &noise(MIB, 3));
    rig.ok(&["live-copy", "other.raw", "copy.raw", "--force"]);
    assert!(rig.read("copy.raw") == noise(MIB, 3));
    assert_eq!(rig.names("."), ["copy.raw", "disk.qcow2", "disk.raw", "other.raw"]);
}

#[test]
fn a_disk_of_a_snapshot_is_copied() {
    let rig = Rig::new();
    let content = noise(3 * MIB, 30);
    rig.write("disk.raw", &content);
    rig.ok(&["backup", "vda=disk.raw", "--machine", "web1"]);
    rig.write("disk.raw", &noise(3 * MIB, 31));
    rig.ok(&["backup", "vda=disk.raw", "--machine", "web1"]);
    let plan = rig.report(&["live-copy", "--snapshot", "web1", "new.raw", "--dry-run"]);
    assert_eq!(
        (&plan["size_bytes"], rig.path("new.raw").exists()),
        (&(3 * MIB).into(), false)
    );
    rig.ok(&["live-copy", "--snapshot", "web1:vda", "new.raw"]);
    assert!(rig.read("new.raw") == noise(3 * MIB, 31));
    let list = rig.report(&["list"]);
    let oldest = list["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .min_by_key(|entry| entry["time"].to_string());
    let id = oldest.unwrap()["id"].as_str().unwrap().to_owned();
    // The other one is the seed: the same content is not sent again.
    let done = rig.report(&["live-copy", "--snapshot", &id, "old.raw", "--seed", "disk.raw"]);
    assert!(rig.read("old.raw") == content);
    assert!(
        done["source"].as_str().unwrap().starts_with("web1:vda of snapshot "),
        "{done}"
    );
    let (kind, text) = rig.error(1, &["live-copy", "--snapshot", "web2", "other.raw"]);
    assert!(kind == "not-found" && text.contains("web2"), "{kind}: {text}");
    rig.error(2, &["live-copy", "--snapshot", "web1", "other.raw", "--format", "raw"]);
    assert!(!rig.path("other.raw").exists());
}

#[test]
fn an_export_is_copied_as_it_is_or_frozen() {
    let rig = Rig::empty();
    let content = noise(3 * MIB, 40);
    rig.write("disk.raw", &content);
    let socket = rig.path("nbd");
    let server = QemuNbd::serve(&rig.path("disk.raw"), &socket, &["-f", "raw", "--shared", "8"]);
    let address = format!("nbd+unix:///?socket={}", socket.display());
    let done = rig.report(&["live-copy", &address, "copy.raw"]);
    assert_eq!(
        (&done["consistency"], &done["source"]),
        (&"at-rest".into(), &address[..].into())
    );
    assert!(rig.read("copy.raw") == content);
    let frozen = [
        "live-copy",
        &address,
        "frozen.raw",
        "--freeze-command",
        "true",
        "--thaw-command",
        "true",
    ];
    assert_eq!(rig.report(&frozen)["consistency"], "commands");
    assert!(rig.read("frozen.raw") == content);
    rig.error(2, &["live-copy", &address, "other.raw", "--format", "qcow2"]);
    drop(server);
    let (kind, _) = rig.error(1, &["live-copy", &address, "other.raw"]);
    assert_eq!(kind, "io");
    let (_, text) = rig.error(2, &["live-copy", "nbd+unix:///disk", "other.raw"]);
    assert!(text.contains("?socket=PATH"), "{text}");
    assert!(!rig.path("other.raw").exists());
}

#[test]
fn a_second_copy_sends_only_what_differs_from_the_first() {
    let rig = Rig::empty();
    let mut content = noise(8 * MIB, 20);
    rig.write("disk.raw", &content);
    rig.ok(&["live-copy", "disk.raw", "copy.raw"]);
    content[3 * MIB..3 * MIB + 5].copy_from_slice(b"later");
    rig.write("disk.raw", &content);
    let again = ["live-copy", "disk.raw", "copy.raw", "--force", "--seed", "copy.raw"];
    let done = rig.report(&again);
    assert!(rig.read("copy.raw") == content);
    let sent_bytes = done["sent_bytes"].as_u64().unwrap();
    assert!((64 << 10..128 << 10).contains(&sent_bytes), "{done}");
    assert_eq!(rig.names("."), ["copy.raw", "disk.raw"]);
    let (kind, text) = rig.error(1, &["live-copy", "disk.raw", "new.raw", "--seed", "absent.raw"]);
    assert!(kind == "refused" && text.contains("the seed"), "{kind}: {text}");
    let there = [
        "live-copy",
        "disk.raw",
        "ssh://nowhere.invalid/new.raw",
        "--seed",
        "copy.raw",
    ];
    let (kind, text) = rig.error(2, &there);
    assert!(
        kind == "usage" && text.contains("not an absolute path"),
        "{kind}: {text}"
    );
    assert_eq!(rig.names("."), ["copy.raw", "disk.raw"]);
}

#[test]
fn what_cannot_be_copied_is_refused_with_the_reason() {
    let rig = Rig::empty();
    rig.write("disk.raw", &noise(MIB, 4));
    rig.ok(&["image", "convert", "disk.raw", "disk.qcow2"]);
    let commands = ["--freeze-command", "true", "--thaw-command", "true"];
    for (words, kind, reason) in [
        (vec!["disk.raw", "./disk.raw"], "usage", "the target is the source"),
        (vec!["disk.raw", "ssh://backup"], "usage", "has no path"),
        (
            [&["disk.qcow2", "copy.raw", "--format", "qcow2"][..], &commands].concat(),
            "usage",
            "another format than raw",
        ),
        (vec!["disk.raw", "none/copy.raw"], "io", "none"),
        (
            vec!["disk.raw", "copy.raw", "--bwlimit", "100K"],
            "usage",
            "at least 256K",
        ),
    ] {
        let words = [&["live-copy"][..], &words].concat();
        let output = rig.run(&[&words[..], &["--json"]].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!output.status.success() && text.contains(reason), "{words:?}: {text}");
        assert!(text.contains(&format!("\"{kind}\"")), "{words:?}: {text}");
    }
}

/// A file system with a program that writes to it all the time, and says what it has written.
struct BusyFileSystem {
    _mounted: Mounted,
    point: PathBuf,
    device: String,
    is_stopped: AtomicBool,
    written: AtomicU64,
    _place: tempfile::TempDir,
}

impl BusyFileSystem {
    fn new() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let point = place.path().canonicalize().unwrap().join("mounted");
        let mounted = Mounted::at("xfs", &point).map_err(|reason| skipped(&reason)).ok()?;
        let device = system("findmnt", &["--noheadings", "--output", "SOURCE", point.to_str()?]).unwrap();
        Some(Self {
            _mounted: mounted,
            point,
            device,
            is_stopped: AtomicBool::new(false),
            written: AtomicU64::new(0),
            _place: place,
        })
    }

    /// The commands that freeze and thaw it.
    fn commands(&self) -> [String; 2] {
        ["--freeze", "--unfreeze"].map(|word| format!("fsfreeze {word} '{}'", self.point.display()))
    }

    fn write_until_stopped(&self) {
        write_numbers(&self.point.join("numbers"), &self.is_stopped, &self.written);
    }

    /// Whether a program can write to it.
    fn is_thawed(&self) -> bool {
        let before = self.written.load(Ordering::SeqCst);
        let clock = SystemClock::new();
        (0..100).any(|_| {
            clock.sleep(Duration::from_millis(20));
            self.written.load(Ordering::SeqCst) > before + 1
        })
    }
}

/// Writes numbers one after another, and says which is the last.
fn write_numbers(path: &Path, is_stopped: &AtomicBool, written: &AtomicU64) {
    let clock = SystemClock::new();
    let file = File::create(path).unwrap();
    while !is_stopped.load(Ordering::SeqCst) {
        let number = written.load(Ordering::SeqCst) + 1;
        file.write_all_at(&number.to_le_bytes(), (number - 1) * 8).unwrap();
        written.store(number, Ordering::SeqCst);
        clock.sleep(Duration::from_millis(1));
    }
}

#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
fn skipped(reason: &str) {
    println!("skipped: {reason}");
}

/// Fills a file system with one more file until so many bytes are free. Returns that file.
fn fill_but(point: &Path, free_bytes: u64) -> PathBuf {
    let free = system("stat", &["--file-system", "--format", "%f %S", point.to_str().unwrap()]).unwrap();
    let numbers: Vec<u64> = free.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let ballast = point.join(format!("ballast-{free_bytes}"));
    let length = (numbers[0] * numbers[1] - free_bytes).to_string();
    system("fallocate", &["--length", &length, ballast.to_str().unwrap()]).unwrap();
    ballast
}

/// Mounts a copy, and returns how many numbers of the writer are in it, one after another.
fn numbers_in(copy: &Path) -> u64 {
    let point = tempfile::tempdir().unwrap();
    let device = system("losetup", &["--find", "--show", copy.to_str().unwrap()]).unwrap();
    system("mount", &["-o", "nouuid", &device, point.path().to_str().unwrap()]).unwrap();
    let bytes = std::fs::read(point.path().join("numbers")).unwrap();
    system("umount", &[point.path().to_str().unwrap()]).unwrap();
    system("losetup", &["--detach", &device]).unwrap();
    let numbers = bytes
        .chunks_exact(8)
        .map(|number| u64::from_le_bytes(number.try_into().unwrap()));
    for (expected, number) in (1..).zip(numbers) {
        assert_eq!(number, expected, "the copy is of more than one moment");
    }
    bytes.len() as u64 / 8
}

#[test]
fn a_file_system_in_use_is_copied_as_of_the_freeze() {
    let Some(busy) = BusyFileSystem::new() else { return };
    let rig = Rig::empty();
    let (kind, text) = rig.error(1, &["live-copy", &busy.device, "copy.raw"]);
    assert!(kind == "locked" && text.contains("is in use"), "{kind}: {text}");
    let [freeze, thaw] = busy.commands();
    let words = [
        "live-copy",
        &busy.device,
        "copy.raw",
        "--freeze-command",
        &freeze,
        "--thaw-command",
        &thaw,
    ];
    std::thread::scope(|scope| {
        scope.spawn(|| busy.write_until_stopped());
        wait_until("the program writes", || busy.written.load(Ordering::SeqCst) > 100);
        let before = busy.written.load(Ordering::SeqCst);
        let done = rig.json(0, &words)["report"].clone();
        let after = busy.written.load(Ordering::SeqCst);
        let is_thawed = busy.is_thawed();
        busy.is_stopped.store(true, Ordering::SeqCst);
        assert!(is_thawed, "the source is still frozen");
        assert_eq!(done["consistency"], "commands");
        assert!(done["times"]["frozen_us"].as_u64().unwrap() > 0, "{done}");
        let found = numbers_in(&rig.path("copy.raw"));
        assert!((before..=after + 1).contains(&found), "{before} <= {found} <= {after}");
    });
}

/// A container that is used is copied as of one moment, and goes on. Nothing of the copy is left in it.
#[test]
fn a_container_in_use_is_copied_as_it_is_now() {
    if !rustix::process::geteuid().is_root() {
        return skipped("mounting a file system needs root");
    }
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "400M", "--filesystem", "xfs"]);
    let container = Container::mount(&rig, "web1");
    let is_stopped = AtomicBool::new(false);
    let written = AtomicU64::new(0);
    let (before, found) = std::thread::scope(|scope| {
        scope.spawn(|| write_numbers(&container.point.path("numbers"), &is_stopped, &written));
        wait_until("the program writes", || written.load(Ordering::SeqCst) > 100);
        let before = written.load(Ordering::SeqCst);
        let planned = rig.report(&["live-copy", "web1", "copy.raw", "--dry-run"]);
        let done = rig.report(&["live-copy", "web1", "copy.raw"]);
        let at_end = written.load(Ordering::SeqCst);
        wait_until("the program goes on", || written.load(Ordering::SeqCst) > at_end + 2);
        is_stopped.store(true, Ordering::SeqCst);
        assert_eq!(planned["size_bytes"], done["size_bytes"]);
        assert_eq!(done["consistency"], "file-system", "{done}");
        (before, numbers_in(&rig.path("copy.raw")))
    });
    assert!(found >= before, "{before} <= {found}");
    let snapshots = rig.report(&["container", "snapshots", "web1"]);
    assert_eq!(snapshots["snapshots"], serde_json::json!([]), "{snapshots}");
    container.unmount();
    rig.ok(&["live-copy", "web1", "unmounted.raw"]);
    assert!(numbers_in(&rig.path("unmounted.raw")) >= found);
    rig.ok(&["container", "check", "web1"]);
    let (kind, text) = rig.error(2, &["live-copy", "web1", "other.raw", "--format", "raw"]);
    assert!(
        kind == "usage" && text.contains("do not apply to a container"),
        "{text}"
    );
}

/// The limit cannot be kept: the copy says so with the numbers, and the source was never frozen.
#[test]
fn a_limit_that_cannot_be_kept_is_an_error() {
    let Some(busy) = BusyFileSystem::new() else { return };
    let rig = Rig::empty();
    let [freeze, thaw] = busy.commands();
    let freeze = format!("touch '{}'; {freeze}", rig.path("was-frozen").display());
    let words = [
        "live-copy",
        &busy.device,
        "copy.raw",
        "--freeze-command",
        &freeze,
        "--thaw-command",
        &thaw,
        "--max-frozen",
        "0ms",
    ];
    std::thread::scope(|scope| {
        scope.spawn(|| busy.write_until_stopped());
        wait_until("the program writes", || busy.written.load(Ordering::SeqCst) > 10);
        let (kind, text) = rig.error(1, &words);
        let is_thawed = busy.is_thawed();
        busy.is_stopped.store(true, Ordering::SeqCst);
        assert!(
            is_thawed && kind == "refused" && text.contains("does not converge"),
            "{kind}: {text}"
        );
    });
    assert!(!rig.path("was-frozen").exists() && !rig.path("copy.raw").exists());
}

/// The copy is killed while the source is frozen: another process thaws it. The next copy continues.
#[test]
fn a_killed_copy_leaves_no_frozen_source() {
    let Some(busy) = BusyFileSystem::new() else { return };
    let rig = Rig::empty();
    let [freeze, thaw] = busy.commands();
    let frozen = rig.path("frozen");
    // The command does not end before the kill.
    let slow = format!("{freeze}; touch '{}'; sleep 2", frozen.display());
    let words = |freeze| {
        [
            "live-copy",
            &busy.device,
            "copy.raw",
            "--freeze-command",
            freeze,
            "--thaw-command",
            &thaw,
        ]
    };
    std::thread::scope(|scope| {
        scope.spawn(|| busy.write_until_stopped());
        wait_until("the program writes", || busy.written.load(Ordering::SeqCst) > 10);
        let mut killed = rig.command(&words(&slow)).spawn().unwrap();
        wait_until("the source is frozen", || frozen.exists());
        killed.kill().unwrap();
        killed.wait().unwrap();
        let before = busy.written.load(Ordering::SeqCst);
        wait_until("the source is thawed", || {
            busy.written.load(Ordering::SeqCst) > before + 2
        });
        assert_eq!(
            rig.names("."),
            [".copy.raw.holdfast-copy", ".copy.raw.holdfast-copy.journal", "frozen"]
        );
        let done = rig.json(0, &words(&freeze))["report"].clone();
        busy.is_stopped.store(true, Ordering::SeqCst);
        let compared = done["times"]["phases"].as_array().unwrap();
        assert!(compared.iter().any(|phase| phase["phase"] == "comparing"), "{done}");
    });
    assert!(numbers_in(&rig.path("copy.raw")) > 0);
}

/// A connection that breaks at random bytes, and a sender that is killed: the copy continues, over a real ssh.
#[test]
fn a_copy_to_another_host_survives_cuts_and_kills() {
    let rig = Rig::empty();
    let Some(sshd) = Sshd::start(Program::Found, None) else {
        return;
    };
    let content = noise(40 * MIB, 5);
    rig.write("disk.raw", &content);
    let there = tempfile::tempdir().unwrap();
    let target = there.path().join("a copy.raw");
    let far = format!("ssh://127.0.0.1{}", target.display());
    let proxy = sshd.breaking_proxy();
    let options = sshd.options_by(proxy.port);
    let words = [&["live-copy", "disk.raw", &far][..], &texts(&options)].concat();
    let mut killed = rig.command(&words).spawn().unwrap();
    wait_until("data arrives", || {
        let partial = there.path().join(".a copy.raw.holdfast-copy");
        system("du", &["--block-size=1", partial.to_str().unwrap()])
            .is_ok_and(|size| size.split('\t').next().unwrap().parse::<u64>().unwrap() > 4 << 20)
    });
    killed.kill().unwrap();
    killed.wait().unwrap();
    proxy.break_after(6 << 20);
    let done = std::thread::scope(|scope| {
        scope.spawn(|| proxy.heal_after_the_break());
        rig.json(3, &words)
    });
    assert!(
        done["warnings"][0]
            .as_str()
            .unwrap()
            .contains("the connection was lost"),
        "{done}"
    );
    assert_eq!(done["report"]["lost_connections"], 1, "{done}");
    assert!(std::fs::read(&target).unwrap() == content);
    assert_eq!(std::fs::read_dir(there.path()).unwrap().count(), 1);
}

/// What compresses is sent compressed, and what does not as it is. Nothing is compressed for this host.
#[test]
fn data_is_compressed_for_another_host_behind_a_slow_connection() {
    let rig = Rig::empty();
    let Some(sshd) = Sshd::start(Program::Found, None) else {
        return;
    };
    let lines: Vec<String> = (0..24 * MIB / 32)
        .map(|number| format!("{number:>20} sessions\n"))
        .collect();
    let lines = lines.concat();
    let there = tempfile::tempdir().unwrap();
    let options = sshd.options_by(sshd.slow_proxy(8 << 20));
    let copy = |name: &str, content: &[u8], more: &[&str]| {
        rig.write(name, content);
        let target = there.path().join(format!("{name}-{}", more.len()));
        let far = format!("ssh://127.0.0.1{}", target.display());
        let done = rig.report(&[&["live-copy", name, &far][..], more, &texts(&options)].concat());
        assert!(std::fs::read(&target).unwrap() == content, "{name}");
        ["sent_bytes", "uncompressed_bytes"].map(|field| done[field].as_u64().unwrap())
    };
    let [sent, uncompressed] = copy("text", lines.as_bytes(), &[]);
    assert!(
        uncompressed > 20 << 20 && sent < uncompressed / 2,
        "{sent} of {uncompressed}"
    );
    let [sent, uncompressed] = copy("noise", &noise(8 * MIB, 50), &[]);
    assert!(
        uncompressed > 8 << 20 && sent == uncompressed,
        "{sent} of {uncompressed}"
    );
    let [sent, uncompressed] = copy("text", lines.as_bytes().split_at(8 * MIB).0, &["--no-compression"]);
    assert!(
        uncompressed > 7 << 20 && sent == uncompressed,
        "{sent} of {uncompressed}"
    );
    let here = rig.report(&["live-copy", "text", "here.raw"]);
    assert_eq!(here["sent_bytes"], here["uncompressed_bytes"], "{here}");
}

#[test]
fn a_restricted_receiver_takes_disks_into_its_folder_only() {
    let rig = Rig::empty();
    let there = tempfile::tempdir().unwrap();
    let folder = there.path().join("copies");
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(there.path(), folder.join("link")).unwrap();
    let program = env!("CARGO_BIN_EXE_holdfast");
    let forced = format!("{program} receive-disk --below {}", folder.display());
    let Some(sshd) = Sshd::start(Program::NotFound, Some(&forced)) else {
        return;
    };
    rig.write("disk.raw", &noise(MIB, 6));
    let copy = |name: &str| {
        let far = format!("ssh://127.0.0.1{}", there.path().join(name).display());
        rig.run(&[&["live-copy", "disk.raw", &far][..], &texts(&sshd.options())].concat())
    };
    for outside in ["a.raw", "copies/../a.raw", "copies/link/a.raw"] {
        let output = copy(outside);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && text.contains("is not below"),
            "{outside}: {text}"
        );
    }
    assert!(copy("copies/a.raw").status.success());
    assert!(std::fs::read(folder.join("a.raw")).unwrap() == noise(MIB, 6));
    assert!(!there.path().join("a.raw").exists());
    for command in [
        "true",
        "holdfast receive-disk 2",
        "holdfast receive-disk --below /",
        "holdfast peer 1",
    ] {
        let (code, text) = sshd.run(command, b"{}\n");
        assert!(code != Some(0) && text.contains("refused"), "{command}: {text}");
    }
}
