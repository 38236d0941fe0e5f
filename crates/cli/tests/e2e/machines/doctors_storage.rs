//! Leftovers of processes that were killed while they worked on host snapshots: the doctor reports them and changes
//! nothing, `--fix` removes what is safe to remove.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::Receiver;
use std::time::{Duration, SystemTime};

use holdfast_block::{Clock as _, SeededRandom};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::at;
use super::bare::{Bare, play_agent};
use super::doctors::{found, kill_with_watchdog};
use super::host_snapshots::{MachineSetup, bare_on_xfs, machine_on};
use crate::rig::assert_runs;
use holdfast_test_kit::file_systems::system;

impl MachineSetup {
    pub(super) fn folder(&self) -> String {
        self.world.lab.folder.path().to_str().unwrap().to_owned()
    }

    /// A path below `.holdfast` in the folder with the machine's disks.
    pub(super) fn own_path(&self, name: &str) -> PathBuf {
        self.world.lab.path(".holdfast").join(name)
    }

    /// The names in a folder below `.holdfast`.
    pub(super) fn names(&self, part: &str) -> Vec<String> {
        names(&self.own_path(part))
    }

    pub(super) fn doctor(&self, code: i32, words: &[&str]) -> Value {
        self.world.doctor(code, words)
    }

    /// The hidden names beside the machine's disks, except `.holdfast`.
    pub(super) fn hidden(&self) -> Vec<String> {
        let mut names = names(self.world.lab.folder.path());
        names.retain(|name| name.starts_with('.') && name != ".holdfast");
        names
    }

    pub(super) fn unfinished(&self) -> Vec<String> {
        let mut names = names(&self.world.rig.path("state/holdfast/states/unfinished"));
        names.retain(|name| name.contains(".json"));
        names
    }

    /// Starts the program, and kills it as soon as `is_time`; returns whether the kill was in time.
    pub(super) fn kill_when(&self, words: &[&str], is_time: &dyn Fn() -> bool) -> bool {
        let uri = self.world.lab.uri();
        let mut child = self.world.rig.command(&at(&uri, words)).spawn().unwrap();
        let is_in_time = loop {
            if is_time() {
                break true;
            }
            if child.try_wait().unwrap().is_some() {
                break false;
            }
        };
        let programs = children_of(child.id());
        kill_process(Pid::from_child(&child), Signal::KILL).ok();
        child.wait().unwrap();
        // A program that the killed process had started, such as zfs, may still make what the doctor then finds.
        let clock = self.world.lab.clock;
        let deadline = clock.now() + Duration::from_secs(60);
        while programs.iter().any(|program| runs(*program)) && clock.now() < deadline {
            clock.sleep(Duration::from_millis(5));
        }
        is_in_time
    }
}

/// The child processes of a process; none if it has ended.
fn children_of(process: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let lists: Vec<String> = lists.collect();
    lists
        .iter()
        .flat_map(|list| list.split_whitespace())
        .filter_map(|id| id.parse().ok())
        .collect()
}

/// Whether a process exists and has not ended.
fn runs(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    status
        .rsplit_once(')')
        .is_some_and(|(_, state)| !state.trim_start().starts_with('Z'))
}

pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(super) fn write(path: &Path, text: &str) {
    let mut builder = std::fs::DirBuilder::new();
    builder
        .recursive(true)
        .mode(0o700)
        .create(path.parent().unwrap())
        .unwrap();
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
}

/// Retries, because zfs-fuse keeps a dataset busy for a moment after the last file is closed.
pub(super) fn destroy(dataset: &str) {
    let clock = holdfast_block::SystemClock::new();
    for _ in 0..100 {
        if system("zfs", &["destroy", dataset]).is_ok() {
            return;
        }
        clock.sleep(Duration::from_millis(50));
    }
    panic!("{dataset} is still busy");
}

pub(super) fn make_old(path: &Path) {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    File::open(path).unwrap().set_modified(long_ago).unwrap();
}

/// The identity of a dead process: with the number of this process, but another start time.
pub(super) fn dead_process() -> Value {
    let mut process = this_process();
    process["started"] = json!(process["started"].as_u64().unwrap() + 1);
    process
}

pub(super) fn this_process() -> Value {
    use holdfast_repo::Processes as _;
    let this = holdfast_repo::SystemProcesses.this();
    json!({
        "host": this.host,
        "boot": this.boot,
        "namespace": this.namespace,
        "process": this.process,
        "started": this.started,
    })
}

/// Partial snapshots, records and holds without a snapshot, and files of a probe; and the same of a running process.
fn partial_snapshots_are_deleted(kind: &'static str) {
    let Some(setup) = machine_on(kind) else { return };
    setup.take(0, &["web1", "--name", "one"]);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
    // New files may belong to any running process of Holdfast; this one waits for its input.
    let rig = &setup.world.rig;
    let mut other = rig
        .command(&["backup", "-m", "other", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    write(&setup.own_path("snapshots/.two/web1-a"), "half");
    write(&setup.own_path("snapshots/.three/web1-a"), "half");
    let running = File::open(setup.own_path("snapshots/.three")).unwrap();
    flock(&running, FlockOperation::LockExclusive).unwrap();
    // The record of a snapshot exists before the snapshot has its final name.
    write(&setup.own_path("records/three.json"), "{}");
    write(&setup.own_path("records/.four.new"), "{\"sch");
    write(&setup.own_path("records/gone.json"), "{}");
    write(&setup.own_path("holds/gone/audit"), "");
    for probe in [
        setup.own_path(".holdfast-two.from.partial"),
        setup.world.lab.path(".holdfast-17.probe.partial"),
    ] {
        write(&probe, "H");
        make_old(&probe);
    }
    // A new file may be in use.
    write(&setup.world.lab.path(".holdfast-18.probe.partial"), "H");
    let before = [
        setup.names("snapshots"),
        setup.names("records"),
        setup.names("holds"),
        setup.hidden(),
    ];
    let report = setup.doctor(3, &[]);
    assert_eq!(found(&report), ["leftover"; 6], "{report:#}");
    assert_eq!(
        before,
        [
            setup.names("snapshots"),
            setup.names("records"),
            setup.names("holds"),
            setup.hidden()
        ]
    );
    // A process that removes, holds or records something has a lock: then the doctor changes nothing.
    let lock = File::options()
        .create(true)
        .append(true)
        .open(setup.own_path("lock"))
        .unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let fixed = setup.doctor(0, &["--fix"]);
    assert_eq!(found(&fixed), ["leftover"; 2], "{fixed:#}");
    drop(lock);
    let fixed = setup.doctor(0, &["--fix"]);
    assert_eq!(found(&fixed), ["leftover"; 4], "{fixed:#}");
    assert_eq!(setup.names("snapshots"), [".three", "one"]);
    assert_eq!(setup.names("records"), ["one.json", "three.json"]);
    assert_eq!(setup.names("holds"), [""; 0]);
    assert_eq!(setup.hidden(), [".holdfast-18.probe.partial"]);
    drop(running);
    assert_eq!(found(&setup.doctor(0, &["--fix"])), ["leftover"; 2]);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
    assert_eq!(setup.listed(&["web1"]).len(), 1);
    // A dataset is examined by its name, without a machine.
    write(&setup.own_path("records/gone.json"), "{}");
    let named = format!("reflink:{}", setup.folder());
    let report = setup.world.rig.json(3, &["doctor", &named])["report"].clone();
    assert_eq!(
        (found(&report), &report["datasets"]),
        (vec!["leftover"], &json!([named]))
    );
    drop(other.stdin.take());
    other.wait().unwrap();
}

#[test]
fn partial_snapshots_on_xfs_are_deleted() {
    partial_snapshots_are_deleted("xfs");
}

#[test]
fn partial_snapshots_on_btrfs_are_deleted() {
    partial_snapshots_are_deleted("btrfs");
}

#[test]
fn a_snapshot_killed_at_any_moment_is_cleaned_up_by_the_doctor() {
    let Some(setup) = machine_on("xfs") else { return };
    let mut random = SeededRandom::new(21);
    for round in 0..8 {
        setup.kill(&["snapshot", "web1"], &mut random, 150);
        setup.wait_until_it_runs(&format!("round {round}"));
        setup.world.doctor_answers(&["--fix"]);
        assert_eq!(found(&setup.doctor(0, &[])), [""; 0], "round {round}");
        let left = setup.names("snapshots").into_iter().find(|name| name.starts_with('.'));
        assert_eq!((left, setup.hidden()), (None, Vec::new()));
        assert_eq!(setup.names("records").len(), setup.names("snapshots").len());
    }
}

#[test]
fn a_failed_freeze_leaves_no_snapshot() {
    let Some(setup) = machine_on("xfs") else { return };
    let uri = setup.world.lab.uri();
    let words = ["snapshot", "web1", "--name", "one", "--quiesce", "require"];
    let (_, message) = setup.world.rig.error(1, &at(&uri, &words));
    assert!(message.contains("web1"), "{message}");
    assert_eq!(setup.names("snapshots"), [""; 0]);
    setup.take(0, &["web1", "--name", "one"]);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
}

/// Kills snapshots, each with its watchdog, until one leaves the guest frozen and running.
fn kill_while_frozen(bare: &Bare, agent_commands: &Receiver<String>) {
    let words = ["snapshot", &bare.source, "--quiesce", "require"];
    for _ in 0..40 {
        let mut child = bare.rig.command(&words).spawn().unwrap();
        while agent_commands.recv_timeout(Duration::from_secs(20)).unwrap() != "guest-fsfreeze-freeze" {}
        kill_with_watchdog(&mut child);
        let is_running = bare.lab.execute("query-status", Value::Null)["running"] == true;
        if is_running && !is_thawed(agent_commands) {
            return;
        }
        bare.rig.run(&["doctor", &bare.source, "--fix"]);
        is_thawed(agent_commands);
    }
    panic!("no snapshot was killed in time");
}

/// Takes all commands that the agent has received, and returns whether one was to thaw.
fn is_thawed(agent_commands: &Receiver<String>) -> bool {
    agent_commands
        .try_iter()
        .filter(|command| command == "guest-fsfreeze-thaw")
        .count()
        > 0
}

/// A snapshot is killed between the snapshot point and the thaw, together with its watchdog. It may have paused the
/// machine, whose agent cannot be asked then: one repair resumes and thaws it.
#[test]
fn a_guest_left_frozen_by_a_killed_snapshot_is_thawed() {
    let Some((bare, _mounted)) = bare_on_xfs() else { return };
    let agent_commands = play_agent(&bare.lab.path("agent"));
    let doctor = |code: i32, words: &[&str]| {
        let words = [&["doctor", &bare.source[..]], words].concat();
        bare.rig.json(code, &words)["report"].clone()
    };
    for finding in ["frozen", "paused"] {
        kill_while_frozen(&bare, &agent_commands);
        if finding == "paused" {
            bare.lab.execute("stop", Value::Null);
        }
        let report = doctor(3, &[]);
        let kinds = found(&report);
        assert!(kinds.contains(&finding) && kinds.contains(&"dead-run"), "{report:#}");
        assert!(!is_thawed(&agent_commands));
        let fixed = doctor(0, &["--fix"]);
        assert!(is_thawed(&agent_commands), "{fixed:#}");
        assert_eq!(bare.lab.execute("query-status", Value::Null)["running"], true);
        bare.wait_until_clean("the doctor");
        assert_eq!(found(&doctor(0, &[])), [""; 0]);
    }
}

#[test]
fn states_without_host_snapshots_are_removed() {
    let Some(setup) = machine_on("btrfs") else { return };
    for name in ["one", "two"] {
        setup.take(0, &["web1", "--name", name]);
    }
    let place = setup.own_path("snapshots/one");
    system("btrfs", &["subvolume", "delete", place.to_str().unwrap()]).unwrap();
    let report = setup.doctor(3, &[]);
    assert_eq!(found(&report), ["leftover", "states"], "{report:#}");
    assert_eq!(setup.state_count(), 2);
    setup.doctor(0, &["--fix"]);
    assert_eq!(setup.state_count(), 1);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
}

#[test]
fn zfs_clones_for_reading_are_removed_after_their_reader_died() {
    let Some(setup) = machine_on("zfs") else { return };
    let uri = setup.world.lab.uri();
    let views = || {
        let listed = system("zfs", &["list", "-H", "-o", "name"]).unwrap();
        listed.lines().filter(|line| line.contains("holdfast-view-")).count()
    };
    let words = at(&uri, &["backup", "web1", "--method", "snapshot", "--bwlimit", "1M"]);
    let mut child = setup.world.rig.command(&words).spawn().unwrap();
    while views() == 0 {
        assert_runs(&mut child);
    }
    assert_eq!(found(&setup.doctor(0, &["--fix"])), [""; 0], "a reader is running");
    assert_eq!(views(), 1);
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    let report = setup.doctor(3, &[]);
    assert!(found(&report).contains(&"leftover"), "{report:#}");
    assert_eq!(views(), 1);
    setup.doctor(0, &["--fix"]);
    assert_eq!(views(), 0);
    assert_eq!(found(&setup.doctor(0, &[])), [""; 0]);
}
