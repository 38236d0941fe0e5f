//! Backups of containers: consistent, of the changes only, and what killed processes leave.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{BlockDeviceMut as _, Clock as _, SystemClock};
use holdfast_image::{ContainerLock, LiveChain, LiveOptions};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::host::{system, text};
use crate::program::stdout;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether containers can be mounted here; prints why not.
#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
fn can_mount() -> bool {
    let can = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !can {
        println!("skipped: a container is mounted by root, with /dev/fuse");
    }
    can
}

/// Waits until `is_true` holds.
fn wait_for(what: &str, mut is_true: impl FnMut() -> bool) {
    let clock = SystemClock::new();
    while !is_true() {
        assert!(clock.now() < PATIENCE, "{what}");
        clock.sleep(Duration::from_millis(20));
    }
}

/// A mounted container; unmounted on drop.
struct MountedContainer {
    point: PathBuf,
    container: PathBuf,
}

impl MountedContainer {
    fn new(rig: &Rig, name: &str) -> Self {
        let point = rig.path(&format!("{name}-mnt"));
        std::fs::create_dir_all(&point).unwrap();
        rig.ok(&["container", "mount", name, text(&point)]);
        Self {
            container: rig.path(name),
            point,
        }
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        use std::io::Write as _;
        let mut file = std::fs::File::create(self.point.join(name)).unwrap();
        file.write_all(bytes).unwrap();
        file.sync_all().unwrap();
    }

    fn unmount(self, rig: &Rig) {
        rig.ok(&["container", "unmount", text(&self.container)]);
        std::mem::forget(self);
    }

    /// The processes that serve it.
    fn servers(&self) -> Vec<Pid> {
        let is_server = |process: &Path| {
            let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("mount-") && line.contains(text(&self.container))
        };
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let servers = processes.filter(|process| is_server(&process.path()));
        let numbers = servers.filter_map(|process| process.file_name().to_str()?.parse().ok());
        numbers.filter_map(Pid::from_raw).collect()
    }
}

impl Drop for MountedContainer {
    fn drop(&mut self) {
        // After a failed assertion, nothing may stay.
        system("fsfreeze", &["--unfreeze", text(&self.point)]).ok();
        system("umount", &["-l", text(&self.point)]).ok();
    }
}

/// The only machine of a report of `backup`.
fn back_up(rig: &Rig, words: &[&str]) -> Value {
    let words: Vec<&str> = ["backup"].iter().chain(words).copied().collect();
    let report = rig.report(&words);
    assert_eq!(report["machines"].as_array().unwrap().len(), 1, "{report:#}");
    report["machines"][0].clone()
}

fn kept_snapshots(rig: &Rig, container: &str) -> usize {
    let report = rig.report(&["container", "snapshots", container]);
    let snapshots = report["snapshots"].as_array().unwrap();
    let is_kept = |snapshot: &&Value| snapshot["comment"].as_str().unwrap().starts_with("kept for");
    snapshots.iter().filter(is_kept).count()
}

/// Writes to a container that is not mounted.
fn write_offline(rig: &Rig, container: &str, offset: usize, bytes: &[u8]) {
    let path = rig.path(container);
    let _lock = ContainerLock::take(&path).unwrap();
    let chain = LiveChain::open(&path, LiveOptions::default()).unwrap();
    chain.write_at(bytes, offset as u64).unwrap();
    chain.flush().unwrap();
}

/// The disk of the newest snapshot.
fn restored(rig: &Rig, machine: &str) -> Vec<u8> {
    let file = format!("{machine}-restored.raw");
    rig.ok(&["restore", &format!("{machine}:disk"), &file, "--force"]);
    rig.read(&file)
}

#[test]
fn a_mounted_container_is_backed_up_by_its_changes() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new();
    rig.ok(&["container", "create", "web1", "64M"]);
    let mounted = MountedContainer::new(&rig, "web1");
    let (first, second) = (noise(8 * MIB, 1), noise(MIB, 2));
    mounted.write("first", &first);
    let whole = back_up(&rig, &["web1"]);
    assert_eq!(whole["consistency"], "file system");
    assert!(whole["frozen_us"].as_u64().unwrap() > 0);
    assert_eq!(whole["disks"][0]["reason"], "there is no snapshot to compare with");
    assert!(whole["read_bytes"].as_u64().unwrap() > 8 * MIB as u64);
    mounted.write("second", &second);
    let changes = back_up(&rig, &["web1"]);
    assert_eq!(changes["disks"][0]["is_incremental"], true, "{changes:#}");
    let read_bytes = changes["read_bytes"].as_u64().unwrap();
    assert!((MIB as u64..3 * MIB as u64).contains(&read_bytes), "{read_bytes}");
    assert_eq!(kept_snapshots(&rig, "web1"), 1);
    // What is known survives the server: another process opens the layers.
    mounted.unmount(&rig);
    let unmounted = back_up(&rig, &["web1"]);
    assert_eq!(unmounted["disks"][0]["is_incremental"], true, "{unmounted:#}");
    assert_eq!(
        (&unmounted["consistency"], &unmounted["paused_us"]),
        (&"shut off".into(), &Value::Null)
    );
    assert!(unmounted["read_bytes"].as_u64().unwrap() < MIB as u64);
    assert_eq!(kept_snapshots(&rig, "web1"), 1);

    rig.ok(&["restore", "web1", "--to-directory", "files"]);
    assert!(rig.read("files/first") == first && rig.read("files/second") == second);
    rig.ok(&["restore", "web1", "--to-tar", "web1.tar"]);
    let listed = system("tar", &["-tf", text(&rig.path("web1.tar"))]).unwrap();
    assert!(listed.contains("first") && listed.contains("second"), "{listed}");
    let report = rig.report(&["restore", "web1", "--to-container", "web2", "--format", "parallels"]);
    assert_eq!(report["container"]["format"], "parallels");
    let other = MountedContainer::new(&rig, "web2");
    assert!(rig.read("web2-mnt/first") == first && rig.read("web2-mnt/second") == second);
    other.unmount(&rig);
    let (kind, _) = rig.error(1, &["restore", "web1", "--to-container", "web2"]);
    assert_eq!(kind, "exists");
    assert_eq!(rig.runtime_names(), [""; 0]);
}

/// What a writer writes while a backup reads is not in it, and is in the next.
#[test]
fn a_writer_goes_on_while_a_container_is_backed_up() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new();
    rig.ok(&["container", "create", "web1", "64M"]);
    let mounted = MountedContainer::new(&rig, "web1");
    for round in 0..4_u8 {
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in 0..40_u8 {
                    // Each file has one content only, so a mixture of two moments would show.
                    mounted.write(&format!("{round}-{number}"), &[number; 12_000]);
                }
            });
            let report = back_up(&rig, &["web1"]);
            assert_eq!(report["consistency"], "file system");
            assert_eq!(report["disks"][0]["is_incremental"], round > 0);
            writer.join().unwrap();
        });
        let target = format!("files-{round}");
        rig.ok(&["restore", "web1", "--to-directory", &target]);
        for name in rig.names(&target) {
            let number: u8 = name.rsplit_once('-').unwrap().1.parse().unwrap();
            let bytes = rig.read(&format!("{target}/{name}"));
            // The last one was perhaps created and not yet written.
            assert!(bytes == [number; 12_000] || bytes.len() < 12_000, "{name}");
            assert!(bytes.iter().all(|byte| *byte == number), "{name}");
        }
        let complete = rig.names(&target).len();
        assert!(
            complete >= usize::from(round) * 40,
            "{complete} files after round {round}"
        );
    }
    mounted.unmount(&rig);
}

fn kill_a_backup(rig: &Rig) {
    let mut command = rig.command(&["backup", "web1", "--bwlimit", "1M"]);
    let before = kept_snapshots(rig, "web1");
    let mut child = command.process_group(0).spawn().unwrap();
    wait_for("the snapshot of the backup", || kept_snapshots(rig, "web1") > before);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn what_a_killed_backup_leaves_is_removed_by_the_next_and_by_doctor() {
    let rig = Rig::new();
    rig.ok(&["container", "create", "web1", "64M", "--filesystem", "none"]);
    write_offline(&rig, "web1", 0, &noise(12 * MIB, 1));
    kill_a_backup(&rig);
    assert_eq!((kept_snapshots(&rig, "web1"), rig.snapshot_count()), (1, 0));
    let found = rig.json(3, &["doctor", "container:web1"])["report"].clone();
    assert_eq!(found["findings"][0]["kind"], "container-snapshot", "{found:#}");
    assert_eq!(kept_snapshots(&rig, "web1"), 1, "nothing is changed without --fix");
    let fixed = rig.report(&["doctor", "container:web1", "--fix"]);
    assert!(fixed["findings"][0]["repaired"].is_string(), "{fixed:#}");
    assert_eq!(kept_snapshots(&rig, "web1"), 0);

    back_up(&rig, &["web1"]);
    let bytes = noise(12 * MIB, 2);
    write_offline(&rig, "web1", 20 * MIB, &bytes);
    kill_a_backup(&rig);
    assert_eq!(kept_snapshots(&rig, "web1"), 2);
    write_offline(&rig, "web1", 3 * MIB, &bytes[..MIB]);
    let next = back_up(&rig, &["web1"]);
    assert_eq!(next["disks"][0]["is_incremental"], true, "{next:#}");
    let read_bytes = next["read_bytes"].as_u64().unwrap();
    assert!((13 * MIB as u64..15 * MIB as u64).contains(&read_bytes), "{read_bytes}");
    assert_eq!(kept_snapshots(&rig, "web1"), 1);
    let disk = restored(&rig, "web1");
    assert!(disk[20 * MIB..32 * MIB] == bytes && disk[3 * MIB..4 * MIB] == bytes[..MIB]);
    assert_eq!(rig.report(&["doctor", "container:web1"])["is_healthy"], true);
}

#[test]
fn everything_is_read_if_the_layer_is_not_there_any_more() {
    for format in ["qcow2", "parallels"] {
        let rig = Rig::new();
        rig.ok(&[
            "container",
            "create",
            "web1",
            "16M",
            "--filesystem",
            "none",
            "--format",
            format,
        ]);
        write_offline(&rig, "web1", 0, &noise(4 * MIB, 1));
        rig.ok(&["container", "snapshot", "web1", "before"]);
        back_up(&rig, &["web1"]);
        write_offline(&rig, "web1", 2 * MIB, &noise(MIB, 2));
        let changes = back_up(&rig, &["web1"]);
        assert_eq!(changes["disks"][0]["is_incremental"], true, "{format}: {changes:#}");
        assert!(
            changes["read_bytes"].as_u64().unwrap() < 3 * MIB as u64,
            "{format}: {changes:#}"
        );
        rig.ok(&["container", "merge", "web1", "--all"]);
        assert_eq!(
            kept_snapshots(&rig, "web1"),
            1,
            "merge leaves the snapshot of the backup"
        );
        write_offline(&rig, "web1", 3 * MIB, &noise(MIB, 3));
        let merged = back_up(&rig, &["web1"]);
        assert_eq!(merged["disks"][0]["is_incremental"], true, "{format}: {merged:#}");
        let mut expected = noise(4 * MIB, 1);
        expected[2 * MIB..3 * MIB].copy_from_slice(&noise(MIB, 2));
        expected[3 * MIB..].copy_from_slice(&noise(MIB, 3));
        assert!(restored(&rig, "web1")[..4 * MIB] == expected, "{format}");

        rig.ok(&["container", "snapshot", "web1", "now"]);
        write_offline(&rig, "web1", 0, &noise(MIB, 4));
        back_up(&rig, &["web1"]);
        rig.ok(&["container", "switch", "web1", "now", "--discard"]);
        let switched = back_up(&rig, &["web1"]);
        let reason = switched["disks"][0]["reason"].as_str().unwrap();
        assert!(
            reason.contains("layer") || reason.contains("switched"),
            "{format}: {reason}"
        );
        assert!(restored(&rig, "web1")[..4 * MIB] == expected, "{format}");
        assert_eq!(kept_snapshots(&rig, "web1"), 1, "{format}");

        let report = rig.report(&["container", "snapshots", "web1"]);
        let kept = report["snapshots"].as_array().unwrap().iter();
        let kept = kept
            .filter(|one| one["name"].is_null())
            .map(|one| one["id"].as_str().unwrap());
        let kept: Vec<&str> = kept.collect();
        rig.ok(&[&["container", "delete", "web1"], &kept[..]].concat());
        let deleted = back_up(&rig, &["web1"]);
        assert_eq!(
            deleted["disks"][0]["reason"], "the container no longer has the layer of the snapshot before",
            "{format}"
        );
        assert!(restored(&rig, "web1")[..4 * MIB] == expected, "{format}");
    }
}

#[test]
fn a_backup_is_planned_and_options_of_machines_are_refused() {
    let rig = Rig::new();
    rig.ok(&["container", "create", "web1", "16M", "--filesystem", "none"]);
    write_offline(&rig, "web1", 0, &noise(4 * MIB, 1));
    let planned = |rig: &Rig| rig.report(&["backup", "web1", "--dry-run"])["machines"][0].clone();
    let whole = planned(&rig);
    assert_eq!(
        (&whole["method"], &whole["state"]),
        (&"container-snapshot".into(), &"shut off".into())
    );
    assert!(whole["disks"][0]["read_bytes"].as_u64().unwrap() >= 4 * MIB as u64);
    assert_eq!(kept_snapshots(&rig, "web1"), 0);
    back_up(&rig, &["web1", "--machine", "shop"]);
    let changes = rig.report(&["backup", "web1", "--machine", "shop", "--dry-run"])["machines"][0].clone();
    assert_eq!(changes["disks"][0]["reason"], Value::Null, "{changes:#}");
    assert!(changes["disks"][0]["read_bytes"].as_u64().unwrap() < MIB as u64);
    for option in ["--with-memory", "--include=disk", "--method=pause"] {
        let (kind, _) = rig.error(2, &["backup", "web1", option]);
        assert_eq!(kind, "usage", "{option}");
    }
    rig.write("plain.raw", &noise(MIB, 3));
    rig.ok(&["backup", "plain.raw"]);
    let (_, message) = rig.error(1, &["restore", "plain", "--to-container", "other"]);
    assert!(message.contains("not of a container"), "{message}");
    assert!(stdout(&rig.run(&["show", "shop"])).contains("container"));
}

#[test]
fn doctor_unmounts_a_container_whose_servers_were_killed() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new();
    rig.ok(&["container", "create", "web1", "64M"]);
    let mounted = MountedContainer::new(&rig, "web1");
    mounted.write("kept", b"synced");
    assert_eq!(rig.report(&["doctor", "container:web1"])["is_healthy"], true);
    // Frozen as by a worker that is killed in the middle of a snapshot.
    system("fsfreeze", &["--freeze", text(&mounted.point)]).unwrap();
    let servers = mounted.servers();
    assert!(servers.len() >= 2, "{servers:?}");
    // The supervisor first, so that it does not replace the worker.
    for signal in [Signal::STOP, Signal::KILL] {
        for server in &servers {
            kill_process(*server, signal).ok();
        }
    }
    wait_for("the end of the servers", || {
        mounted.servers().is_empty() && rig.run(&["doctor", "container:web1"]).status.code() == Some(3)
    });
    let found = rig.json(3, &["doctor", "container:web1"])["report"].clone();
    assert_eq!(found["findings"][0]["kind"], "container-mount", "{found:#}");
    assert_eq!(found["findings"][0]["is_danger"], true);
    let fixed = rig.report(&["doctor", "container:web1", "--fix"]);
    assert!(fixed["findings"][0]["repaired"].is_string(), "{fixed:#}");
    assert_eq!(rig.runtime_names(), [""; 0]);
    let again = MountedContainer::new(&rig, "web1");
    assert_eq!(rig.read("web1-mnt/kept"), b"synced");
    again.unmount(&rig);
    drop(mounted);
}
