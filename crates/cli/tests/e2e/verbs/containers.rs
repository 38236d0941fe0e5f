//! Containers: disks in a folder, with snapshots while they are used.

#![expect(
    clippy::print_stdout,
    reason = "a failed test needs its seed and the messages of the supervisor"
)]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::mounts::{MountPoint, kernel_has_resend, wait_for};
use crate::host::{system, text};
use crate::program::stderr;
use crate::rig::{Rig, noise};

/// Kills of a normal run. `HOLDFAST_KILLS` is the number of the long one.
const KILLS_OF_TEST: u64 = 9;
const KILLS_OF_TORTURE: u64 = 1000;

/// Only root can mount a file system.
pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A container that is unmounted on drop.
pub(crate) struct Container<'a> {
    rig: &'a Rig,
    name: &'a str,
    pub(crate) point: MountPoint,
    /// The supervisor, if it is in the foreground.
    supervisor: Option<Child>,
}

impl<'a> Container<'a> {
    pub(crate) fn mount(rig: &'a Rig, name: &'a str) -> Self {
        let point = MountPoint::new(rig, &format!("{name}-mnt"));
        rig.ok(&["container", "mount", name, text(&point.path("."))]);
        Self {
            rig,
            name,
            point,
            supervisor: None,
        }
    }

    /// The messages of the supervisor are those of the test.
    fn mount_in_foreground(rig: &'a Rig, name: &'a str) -> Self {
        let point = MountPoint::new(rig, &format!("{name}-mnt"));
        let folder = point.path(".");
        let words = ["container", "mount", name, text(&folder), "--foreground"];
        let mut supervisor = rig.command(&words).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(supervisor.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(line.ends_with(", writable\n"), "{line}");
        Self {
            rig,
            name,
            point,
            supervisor: Some(supervisor),
        }
    }

    /// The messages of a supervisor that has ended.
    fn messages(&mut self) -> String {
        let supervisor = self.supervisor.take().unwrap();
        stderr(&supervisor.wait_with_output().unwrap())
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        let mut file = File::create(self.point.path(name)).unwrap();
        file.write_all(bytes).unwrap();
    }

    fn info(&self) -> Value {
        self.rig.report(&["container", "info", self.name])
    }

    pub(crate) fn unmount(&self) {
        self.rig.ok(&["container", "unmount", self.name]);
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        // A failed test leaves it mounted.
        self.rig.run(&["container", "unmount", self.name]);
        if self.supervisor.is_some() {
            println!("{}", self.messages());
        }
    }
}

/// Kills the worker that serves the disk. None if there is none at this moment.
pub(super) fn kill_worker(rig: &Rig, container: &str) -> Option<()> {
    let folder = rig.path(container).canonicalize().unwrap();
    for entry in std::fs::read_dir("/proc").unwrap() {
        let entry = entry.unwrap();
        let Ok(id) = entry.file_name().to_string_lossy().parse::<i32>() else {
            continue;
        };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        if words.contains(&&b"mount-worker"[..]) && words.contains(&text(&folder).as_bytes()) {
            return kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).ok();
        }
    }
    None
}

fn layer_count(info: &Value) -> usize {
    info["layers"].as_array().unwrap().len()
}

/// The layers are valid for QEMU, and QEMU reads the disk that Holdfast shows.
fn check_with_qemu(rig: &Rig, name: &str, format: &str) {
    let info = rig.report(&["container", "info", name]);
    for layer in info["layers"].as_array().unwrap() {
        let file = layer["file"].as_str().unwrap();
        system("qemu-img", &["check", "-q", "-f", format, file]).unwrap();
    }
    let raw = rig.path("by-qemu.raw");
    if format == "qcow2" {
        let top = info["layers"][0]["file"].as_str().unwrap();
        system("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", top, text(&raw)]).unwrap();
    }
    let point = MountPoint::new(rig, "disk");
    rig.ok(&["container", "mount", name, text(&point.path(".")), "--disk"]);
    if format == "qcow2" {
        assert!(rig.read("by-qemu.raw") == point.read("disk.raw"));
    }
    rig.ok(&["container", "unmount", name]);
}

fn lives(format: &'static str) {
    let rig = Rig::empty();
    rig.report(&["container", "create", "web1", "64M", "--format", format]);
    let container = Container::mount(&rig, "web1");
    container.write("first", b"one");
    let taken = rig.report(&[
        "container",
        "snapshot",
        "web1",
        "monday",
        "--comment",
        "before the upgrade",
    ]);
    assert_eq!(
        (&taken["consistency"], &taken["name"]),
        (&"frozen".into(), &"monday".into())
    );
    container.write("first", b"two");
    container.write("second", &noise(3 << 20, 1));
    rig.ok(&["container", "snapshot", "web1", "tuesday"]);
    std::fs::remove_file(container.point.path("second")).unwrap();
    container.write("third", &noise(2 << 20, 2));
    let listed = rig.report(&["container", "snapshots", "web1"]);
    let names: Vec<&str> = listed["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .map(|snapshot| snapshot["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["monday", "tuesday"]);
    assert_eq!(listed["snapshots"][1]["parent"], "monday");
    assert_eq!(listed["snapshots"][0]["comment"], "before the upgrade");
    // Past points beside the present.
    let past = MountPoint::new(&rig, "past");
    rig.ok(&[
        "container",
        "mount",
        "web1",
        text(&past.path(".")),
        "--snapshot",
        "monday",
    ]);
    assert_eq!(past.read("first"), b"one");
    assert!(!past.path("second").exists());
    assert!(File::create(past.path("new")).is_err());
    // Its layer cannot be merged into meanwhile.
    let (kind, _) = rig.error(4, &["container", "delete", "web1", "monday"]);
    assert_eq!(kind, "locked");
    assert_eq!(container.info()["merge_pending"], true);
    rig.ok(&["container", "unmount", text(&past.path("."))]);
    assert!(!past.is_mounted());
    let merged = rig.report(&["container", "merge", "web1"]);
    assert_eq!(merged["merged_count"], 1, "{merged}");
    assert_eq!(layer_count(&container.info()), 2);
    rig.ok(&[
        "container",
        "mount",
        "web1",
        text(&past.path(".")),
        "--snapshot",
        "tuesday",
    ]);
    assert!(past.read("second") == noise(3 << 20, 1) && past.read("first") == b"two");
    rig.ok(&["container", "unmount", text(&past.path("."))]);
    // The top itself is merged while it is mounted.
    rig.ok(&["container", "merge", "web1", "--all"]);
    assert_eq!(layer_count(&container.info()), 1);
    assert!(container.point.read("third") == noise(2 << 20, 2));
    assert!(!container.point.path("second").exists());
    rig.report(&["container", "trim", "web1"]);
    rig.ok(&["container", "snapshot", "web1", "wednesday"]);
    container.write("first", b"three");
    container.unmount();
    assert!(!container.point.is_mounted());
    let checked = rig.report(&["container", "check", "web1"]);
    assert_eq!(checked["layers"].as_array().unwrap().len(), 2);
    check_with_qemu(&rig, "web1", if format == "qcow2" { "qcow2" } else { "parallels" });
    goes_back(&rig, &container);
}

/// A switch keeps the current state, unless it is discarded.
fn goes_back(rig: &Rig, container: &Container<'_>) {
    let planned = rig.report(&[
        "container",
        "switch",
        "web1",
        "wednesday",
        "--dry-run",
        "--keep-as",
        "late",
    ]);
    assert_eq!(
        (&planned["dry_run"], &planned["kept_as"]),
        (&true.into(), &"late".into())
    );
    rig.report(&["container", "switch", "web1", "wednesday", "--keep-as", "late"]);
    rig.ok(&["container", "mount", "web1", text(&container.point.path("."))]);
    assert_eq!(container.point.read("first"), b"two");
    container.write("lost", b"lost");
    assert_eq!(rig.error(4, &["container", "switch", "web1", "late"]).0, "locked");
    // The usual command unmounts everything, too.
    system("umount", &[text(&container.point.path("."))]).unwrap();
    wait_for("the container is free", || {
        !rig.report(&["container", "info", "web1"])["is_used"].as_bool().unwrap()
    });
    let switched = rig.report(&["container", "switch", "web1", "late", "--discard"]);
    assert!(switched["discarded_bytes"].as_u64().unwrap() > 0, "{switched}");
    rig.ok(&["container", "mount", "web1", text(&container.point.path("."))]);
    assert_eq!(container.point.read("first"), b"three");
    assert!(!container.point.path("lost").exists());
    container.unmount();
    rig.ok(&["container", "check", "web1"]);
}

#[test]
fn a_container_is_used_while_its_snapshots_come_and_go() {
    if is_root() {
        lives("qcow2");
    }
}

/// The descriptor is that of ploop, and other verbs read it.
#[test]
fn a_container_of_parallels_layers_is_used_while_its_snapshots_come_and_go() {
    if !is_root() {
        return;
    }
    lives("parallels");
    let rig = Rig::empty();
    // As OpenVZ leaves a disk: a folder with a descriptor, and no names of snapshots.
    rig.ok(&["image", "create", "root.hdd", "32M"]);
    assert_eq!(
        rig.report(&["container", "snapshots", "root.hdd"])["snapshots"],
        Value::Array(Vec::new())
    );
    let taken = rig.report(&["container", "snapshot", "root.hdd"]);
    assert_eq!(taken["consistency"], "unmounted");
    let info = rig.report(&["image", "info", "root.hdd"]);
    let id = taken["id"].as_str().unwrap();
    assert!(info.to_string().contains(id), "{info}");
    rig.ok(&["container", "delete", "root.hdd", &id[..8]]);
    assert!(!rig.report(&["image", "info", "root.hdd"]).to_string().contains(id));
}

#[test]
fn a_container_grows_with_its_file_system() {
    if !is_root() {
        return;
    }
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "512M", "--filesystem", "xfs"]);
    let container = Container::mount(&rig, "web1");
    let size = || rustix::fs::statvfs(container.point.path(".")).unwrap().f_blocks;
    let before = size();
    let grown = rig.report(&["container", "resize", "web1", "1G"]);
    assert_eq!(
        (&grown["at_next_mount"], grown["size_bytes"].as_u64()),
        (&false.into(), Some(1 << 30))
    );
    assert!(size() > before * 3 / 2, "{before} {}", size());
    container.write("file", &noise(1 << 20, 3));
    assert_eq!(rig.error(1, &["container", "resize", "web1", "256M"]).0, "refused");
    container.unmount();
    // An ext4 that is not mounted grows with the next mount.
    rig.ok(&["container", "create", "web2", "32M"]);
    let grown = rig.report(&["container", "resize", "web2", "64M"]);
    assert_eq!(grown["at_next_mount"], true);
    let container = Container::mount(&rig, "web2");
    let size = rustix::fs::statvfs(container.point.path(".")).unwrap();
    assert!(size.f_blocks * size.f_frsize > 40 << 20);
    wait_for("the growth is recorded", || container.info()["growth_pending"] == false);
}

#[test]
fn a_container_is_filled_from_a_folder_or_an_archive() {
    if !is_root() {
        return;
    }
    let rig = Rig::empty();
    rig.write("root/etc/hostname", b"web1\n");
    rig.write("root/srv/data", &noise(300_000, 5));
    let (root, archive) = (rig.path("root"), rig.path("root.tar"));
    system("chown", &["12:34", text(&rig.path("root/srv/data"))]).unwrap();
    system("tar", &["-C", text(&root), "-cf", text(&archive), "."]).unwrap();
    for (name, source) in [("web1", "root"), ("web2", "root.tar")] {
        let created = rig.report(&["container", "create", name, "32M", "--from", source]);
        assert_eq!(created["file_count"], 2, "{created}");
        let container = Container::mount(&rig, name);
        assert_eq!(container.point.read("etc/hostname"), b"web1\n");
        assert!(container.point.read("srv/data") == noise(300_000, 5));
        let owner = std::fs::metadata(container.point.path("srv/data")).unwrap();
        assert_eq!((owner.uid(), owner.gid()), (12, 34));
        assert!(container.info()["source"].as_str().unwrap().ends_with(source));
    }
    // Nothing is left of a container that cannot be filled.
    rig.write("broken.tar", &noise(5000, 6));
    rig.run(&["container", "create", "web3", "32M", "--from", "broken.tar"]);
    let left: Vec<String> = rig
        .names(".")
        .into_iter()
        .filter(|name| name.contains("web3"))
        .collect();
    assert_eq!(left, [""; 0]);
}

/// Without `--image`, the archive was once unpacked as if its blobs were the files of the container.
#[test]
fn an_archive_of_an_image_is_recognized_without_its_tag() {
    if !is_root() {
        return;
    }
    let rig = Rig::empty();
    rig.write("root/etc/hostname", b"web1\n");
    let architecture = if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        "amd64"
    };
    let script = format!(
        r#"cd "$1"; tar -C root -cf layer.tar .
        layer=$(sha256sum layer.tar | cut -d' ' -f1); mkdir -p "save/$layer"; mv layer.tar "save/$layer/"
        printf '{{"architecture":"{architecture}","os":"linux","rootfs":{{"diff_ids":["sha256:%s"]}}}}' "$layer" > config
        config=$(sha256sum config | cut -d' ' -f1); mv config "save/$config.json"
        image='{{"Config":"%s.json","RepoTags":["%s"],"Layers":["%s/layer.tar"]}}'
        printf "[$image]" "$config" web:1 "$layer" > save/manifest.json; tar -C save -cf one.tar .
        printf "[$image,$image]" "$config" web:1 "$layer" "$config" web:2 "$layer" > save/manifest.json; tar -C save -cf two.tar ."#
    );
    system("sh", &["-euc", &script, "sh", text(&rig.path("."))]).unwrap();
    let dry_run = rig.report(&["container", "create", "web1", "32M", "--from", "one.tar", "--dry-run"]);
    assert_eq!(dry_run["dry_run"], true);
    assert!(!rig.path("web1").exists());
    rig.ok(&["container", "create", "web1", "32M", "--from", "one.tar"]);
    let container = Container::mount(&rig, "web1");
    assert_eq!(container.point.read("etc/hostname"), b"web1\n");
    assert!(!container.point.path("manifest.json").exists());
    for more in [&[][..], &["--dry-run"]] {
        let words = [&["container", "create", "web2", "32M", "--from", "two.tar"][..], more].concat();
        let (kind, message) = rig.error(1, &words);
        assert_eq!(kind, "ambiguous", "{message}");
    }
    rig.ok(&[
        "container",
        "create",
        "web2",
        "32M",
        "--from",
        "two.tar",
        "--image",
        "web:2",
    ]);
}

/// A dry run once checked only whether the folder exists.
#[test]
fn a_dry_run_of_a_creation_checks_what_the_creation_needs() {
    let rig = Rig::empty();
    for words in [
        &["container", "create", "absent/web1", "8M", "--dry-run"][..],
        &[
            "container",
            "create",
            "web1",
            "10000P",
            "--filesystem",
            "none",
            "--dry-run",
        ],
    ] {
        assert!(!rig.run(words).status.success(), "{words:?}");
    }
    if is_root() {
        rig.write("broken.tar", &noise(5000, 6));
        for from in ["absent.tar", "broken.tar"] {
            let words = ["container", "create", "web1", "32M", "--from", from, "--dry-run"];
            assert!(!rig.run(&words).status.success(), "{from}");
        }
    }
    rig.ok(&["container", "create", "web1", "8M", "--filesystem", "none", "--dry-run"]);
    assert_eq!(rig.names(".").iter().filter(|name| name.contains("web1")).count(), 0);
}

#[test]
fn what_a_container_cannot_do_is_refused() {
    let rig = Rig::empty();
    rig.write("folder/file", b"something");
    rig.ok(&["container", "create", "web1", "8M", "--filesystem", "none"]);
    rig.ok(&["container", "snapshot", "web1", "monday"]);
    for (code, kind, words) in [
        (1, "exists", &["container", "create", "folder", "8M"][..]),
        (1, "exists", &["container", "create", "web1", "8M", "--dry-run"]),
        (1, "not-found", &["container", "info", "folder"]),
        (1, "io", &["container", "info", "absent"]),
        (1, "not-found", &["container", "delete", "web1", "friday"]),
        (1, "not-found", &["container", "switch", "web1", "friday"]),
        (2, "usage", &["container", "snapshot", "web1", "monday"]),
        (2, "usage", &["container", "snapshot", "web1", ".x"]),
        (2, "usage", &["container", "snapshot", "web1", "a/b"]),
        (1, "refused", &["container", "unmount", "web1"]),
        (1, "refused", &["container", "trim", "web1"]),
        (1, "refused", &["container", "resize", "web1", "4M"]),
    ] {
        let (found, message) = rig.error(code, words);
        assert_eq!(found, kind, "{words:?}: {message}");
    }
    let folder = rig.path("mnt");
    std::fs::create_dir(&folder).unwrap();
    if is_root() {
        let (kind, message) = rig.error(1, &["container", "mount", "web1", text(&folder)]);
        assert_eq!(kind, "unsupported", "{message}");
    }
    // A damaged list.
    rig.write(
        "web1/container.json",
        b"{\"kind\": \"holdfast container\", \"version\": 9}",
    );
    assert_eq!(rig.error(5, &["container", "info", "web1"]).0, "damage");
}

/// The programs above see no error, whatever the worker was doing, and all files and snapshots are whole.
fn survives_kills(seed: u64, kills: u64) {
    if !is_root() || !kernel_has_resend() {
        return;
    }
    println!("HOLDFAST_SEED={seed}");
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "96M"]);
    let mut container = Container::mount_in_foreground(&rig, "web1");
    let clock = SystemClock::new();
    let is_done = AtomicBool::new(false);
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut count = 0_u64;
            while !is_done.load(Ordering::SeqCst) {
                let mut file = File::create(container.point.path(&format!("file{}", count % 100))).unwrap();
                file.write_all(&noise(100_000, count)).unwrap();
                if count.is_multiple_of(3) {
                    file.sync_all().unwrap();
                }
                count += 1;
                written.store(count, Ordering::SeqCst);
            }
        });
        let changer = scope.spawn(|| {
            let mut number = 0_u64;
            while !is_done.load(Ordering::SeqCst) {
                // A request fails if its server is killed. The container stays mounted and served.
                let name = format!("s{number}");
                rig.run(&["container", "snapshot", "web1", &name]);
                if number > 1 {
                    rig.run(&["container", "delete", "web1", &format!("s{}", number - 2)]);
                }
                number += 1;
            }
        });
        let mut random = SeededRandom::new(seed);
        let mut killed = 0;
        while killed < kills {
            clock.sleep(Duration::from_millis(20 + random.below(300)));
            if kill_worker(container.rig, container.name).is_some() {
                killed += 1;
            }
            if writer.is_finished() {
                break;
            }
            // More than ten in a minute are a fault that a successor does not remove.
            if killed % 9 == 0 && killed < kills {
                clock.sleep(Duration::from_secs(62));
            }
        }
        wait_for("the writer has filled its files", || {
            writer.is_finished() || written.load(Ordering::SeqCst) > 100
        });
        is_done.store(true, Ordering::SeqCst);
        changer.join().unwrap();
        writer.join().unwrap();
    });
    let written = written.into_inner();
    let newest: Vec<(String, u64)> = (written.saturating_sub(100)..written)
        .map(|count| (format!("file{}", count % 100), count))
        .collect();
    for (name, count) in &newest {
        assert!(
            container.point.read(name) == noise(100_000, *count),
            "{name} of {count}"
        );
    }
    rig.ok(&["container", "merge", "web1", "--all"]);
    container.unmount();
    let messages = container.messages();
    assert!(messages.contains("another one continues"), "{messages}");
    // Without the caches of the kernel.
    let disk = MountPoint::new(&rig, "disk");
    rig.ok(&["container", "mount", "web1", text(&disk.path(".")), "--disk"]);
    system("e2fsck", &["-fn", text(&disk.path("disk.raw"))]).unwrap();
    rig.ok(&["container", "unmount", "web1"]);
    let checked = rig.report(&["container", "check", "web1"]);
    assert_eq!(checked["layers"].as_array().unwrap().len(), 1, "{checked}");
    let container = Container::mount(&rig, "web1");
    for (name, count) in &newest {
        assert!(
            container.point.read(name) == noise(100_000, *count),
            "{name} of {count}"
        );
    }
}

#[test]
fn a_container_survives_kills_while_snapshots_are_taken_and_deleted() {
    survives_kills(1, KILLS_OF_TEST);
}

#[test]
#[ignore = "a thousand kills take two hours: make torture"]
fn a_container_survives_a_thousand_kills() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let seed = number("HOLDFAST_SEED").unwrap_or_else(SeededRandom::fresh_seed);
    survives_kills(seed, number("HOLDFAST_KILLS").unwrap_or(KILLS_OF_TORTURE));
}

/// A merge that is interrupted continues with the next mount.
#[test]
fn a_supervisor_that_is_killed_leaves_a_container_that_works() {
    if !is_root() {
        return;
    }
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "32M"]);
    let container = Container::mount(&rig, "web1");
    let folder = rig.path("web1").canonicalize().unwrap();
    let pattern = format!("container mount-server {}", text(&folder));
    system("pkill", &["-9", "-f", &pattern]).unwrap();
    container.write("file", b"content");
    let output = rig.run(&["container", "snapshot", "web1", "alone"]);
    assert!(output.status.success(), "{}", stderr(&output));
    container.unmount();
    let container = Container::mount(&rig, "web1");
    assert_eq!(container.point.read("file"), b"content");
}
