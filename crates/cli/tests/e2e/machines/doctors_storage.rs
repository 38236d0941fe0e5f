//! What those have left who were killed at work on host snapshots: the doctor tells of it and changes nothing, `--fix` mends what is safe.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use holdfast_block::{Clock as _, SeededRandom};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::at;
use super::bare::play_agent;
use super::doctors::{found, kill_with_watchdog};
use super::host_snapshots::{OnOwn, bare_on_xfs, on};
use holdfast_test_kit::file_systems::system;

impl OnOwn {
    fn folder(&self) -> String {
        self.world.lab.folder.path().to_str().unwrap().to_owned()
    }

    /// Something of ours in the folder with the machine's disks.
    fn ours(&self, name: &str) -> PathBuf {
        self.world.lab.path(".holdfast").join(name)
    }

    /// The names in a folder of ours.
    fn names(&self, part: &str) -> Vec<String> {
        names(&self.ours(part))
    }

    pub(super) fn doctor(&self, code: i32, words: &[&str]) -> Value {
        self.world.doctor(code, words)
    }

    /// The names of what begins with a dot beside the machine's disks, but for what is always there.
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

    /// Starts the program, and kills it as soon as `is_time`; whether it was in time.
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
        kill_process(Pid::from_child(&child), Signal::KILL).ok();
        child.wait().unwrap();
        is_in_time
    }
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

/// zfs-fuse keeps a dataset busy for a moment after the last file is closed.
pub(super) fn destroy(dataset: &str) {
    let clock = holdfast_block::SystemClock::new();
    for _ in 0..100 {
        if system("zfs", &["destroy", dataset]).is_ok() {
            return;
        }
        clock.sleep(Duration::from_millis(50));
    }
    panic!("{dataset} stays busy");
}

pub(super) fn make_old(path: &Path) {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    File::open(path).unwrap().set_modified(long_ago).unwrap();
}

/// A process that is dead, as notes have it: it has our number, and began at another time.
pub(super) fn somebody_dead() -> Value {
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

/// Half-made snapshots, notes and holds of nothing, files of a trial; and the same of somebody who is at work.
fn halves_are_deleted(kind: &'static str) {
    let Some(on) = on(kind) else { return };
    on.take(0, &["web1", "--name", "one"]);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
    // What is new may be of any living process of the program; this one waits for its input.
    let rig = &on.world.rig;
    let mut other = rig
        .command(&["backup", "-m", "other", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    write(&on.ours("snapshots/.two/web1-a"), "half");
    write(&on.ours("snapshots/.three/web1-a"), "half");
    let living = File::open(on.ours("snapshots/.three")).unwrap();
    flock(&living, FlockOperation::LockExclusive).unwrap();
    // The note of one that is being made is there before it has its name.
    write(&on.ours("records/three.json"), "{}");
    write(&on.ours("records/.four.new"), "{\"sch");
    write(&on.ours("records/gone.json"), "{}");
    write(&on.ours("holds/gone/audit"), "");
    for probe in [
        on.ours(".holdfast-two.from.partial"),
        on.world.lab.path(".holdfast-17.probe.partial"),
    ] {
        write(&probe, "H");
        make_old(&probe);
    }
    // It may be just being made.
    write(&on.world.lab.path(".holdfast-18.probe.partial"), "H");
    let before = [
        on.names("snapshots"),
        on.names("records"),
        on.names("holds"),
        on.hidden(),
    ];
    let report = on.doctor(3, &[]);
    assert_eq!(found(&report), ["leftover"; 6], "{report:#}");
    assert_eq!(
        before,
        [
            on.names("snapshots"),
            on.names("records"),
            on.names("holds"),
            on.hidden()
        ]
    );
    // Whoever removes, holds or notes something has a lock: then nothing is touched.
    let lock = File::options().create(true).append(true).open(on.ours("lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let fixed = on.doctor(0, &["--fix"]);
    assert_eq!(found(&fixed), ["leftover"; 2], "{fixed:#}");
    drop(lock);
    let fixed = on.doctor(0, &["--fix"]);
    assert_eq!(found(&fixed), ["leftover"; 4], "{fixed:#}");
    assert_eq!(on.names("snapshots"), [".three", "one"]);
    assert_eq!(on.names("records"), ["one.json", "three.json"]);
    assert_eq!(on.names("holds"), [""; 0]);
    assert_eq!(on.hidden(), [".holdfast-18.probe.partial"]);
    drop(living);
    assert_eq!(found(&on.doctor(0, &["--fix"])), ["leftover"; 2]);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
    assert_eq!(on.listed(&["web1"]).len(), 1);
    // A dataset is looked at by its name, without any machine.
    write(&on.ours("records/gone.json"), "{}");
    let named = format!("reflink:{}", on.folder());
    let report = on.world.rig.json(3, &["doctor", &named])["report"].clone();
    assert_eq!(
        (found(&report), &report["datasets"]),
        (vec!["leftover"], &json!([named]))
    );
    drop(other.stdin.take());
    other.wait().unwrap();
}

#[test]
fn halves_on_xfs_are_deleted() {
    halves_are_deleted("xfs");
}

#[test]
fn halves_on_btrfs_are_deleted() {
    halves_are_deleted("btrfs");
}

#[test]
fn killed_at_any_moment_the_doctor_makes_all_well() {
    let Some(on) = on("xfs") else { return };
    let mut random = SeededRandom::new(21);
    for round in 0..8 {
        on.kill(&["snapshot", "web1"], &mut random, 150);
        on.wait_until_it_runs(&format!("round {round}"));
        on.world.doctor_answers(&["--fix"]);
        assert_eq!(found(&on.doctor(0, &[])), [""; 0], "round {round}");
        let left = on.names("snapshots").into_iter().find(|name| name.starts_with('.'));
        assert_eq!((left, on.hidden()), (None, Vec::new()));
        assert_eq!(on.names("records").len(), on.names("snapshots").len());
    }
}

#[test]
fn nothing_is_left_where_a_guest_cannot_freeze() {
    let Some(on) = on("xfs") else { return };
    let uri = on.world.lab.uri();
    let words = ["snapshot", "web1", "--name", "one", "--quiesce", "require"];
    let (_, said) = on.world.rig.error(1, &at(&uri, &words));
    assert!(said.contains("web1"), "{said}");
    assert_eq!(on.names("snapshots"), [""; 0]);
    on.take(0, &["web1", "--name", "one"]);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
}

#[test]
fn what_was_received_in_part_and_what_was_cut_and_not_noted() {
    let Some(on) = on("btrfs") else { return };
    on.take(0, &["web1", "--name", "one"]);
    let btrfs = |words: &[&str]| system("btrfs", &[&["subvolume"], words].concat()).unwrap();
    let half = on.ours("snapshots/half");
    btrfs(&["create", half.to_str().unwrap()]);
    // Where nobody receives it is somebody's own.
    assert_eq!(found(&on.doctor(0, &["--fix"])), [""; 0]);
    write(&on.ours("receiving"), "");
    let receiving = File::open(on.ours("receiving")).unwrap();
    flock(&receiving, FlockOperation::LockExclusive).unwrap();
    assert_eq!(found(&on.doctor(0, &["--fix"])), [""; 0]);
    drop(receiving);
    assert_eq!(found(&on.doctor(3, &[])), ["leftover"]);
    assert!(half.exists());
    assert_eq!(found(&on.doctor(0, &["--fix"])), ["leftover"]);
    assert!(!half.exists());

    // As a kill between cut and note leaves it; and as it is in between.
    let cut = on.ours("snapshots/cut");
    btrfs(&["snapshot", "-r", &on.folder(), cut.to_str().unwrap()]);
    let making = File::open(on.ours("making")).unwrap();
    flock(&making, FlockOperation::LockShared).unwrap();
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
    drop(making);
    let report = on.doctor(3, &["--fix"]);
    let finding = &report["findings"][0];
    assert_eq!(
        (found(&report), &finding["is_danger"]),
        (vec!["host-snapshot"], &json!(false))
    );
    let name = format!("btrfs:{}@cut", on.folder());
    assert!(
        finding["advice"]
            .as_str()
            .unwrap()
            .starts_with(&format!("holdfast host remove {name}"))
    );
    let whole = |name: &str| {
        let listed = on.listed(&["web1"]);
        listed.iter().find(|one| one["name"] == name).unwrap()["is_whole"].clone()
    };
    assert_eq!((whole("one"), whole("cut")), (json!(true), json!(false)));
    on.world.rig.ok(&["host", "remove", &name]);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
}

/// A snapshot of btrfs has a hidden name until it is noted. So a process that is killed right after the cut leaves no half of one under its name.
#[test]
fn what_was_cut_and_has_no_name_yet_is_removed() {
    let Some(on) = on("btrfs") else { return };
    on.take(0, &["web1", "--name", "one"]);
    let hidden = on.ours("snapshots/.cut");
    let cut = || {
        let words = ["subvolume", "snapshot", "-r", &on.folder(), hidden.to_str().unwrap()];
        system("btrfs", &words).unwrap();
    };
    cut();
    let making = File::open(on.ours("making")).unwrap();
    flock(&making, FlockOperation::LockShared).unwrap();
    // Another process may be making it.
    assert_eq!(found(&on.doctor(0, &["--fix"])), [""; 0]);
    let uri = on.world.lab.uri();
    let (_, said) = on.world.rig.error(1, &at(&uri, &["snapshot", "web1", "--name", "cut"]));
    assert!(said.contains("another process is creating"), "{said}");
    drop(making);
    assert_eq!(found(&on.doctor(3, &[])), ["leftover"]);
    assert_eq!(found(&on.doctor(0, &["--fix"])), ["leftover"]);
    assert!(!hidden.exists());
    // The next one of its name removes it, too.
    cut();
    on.take(0, &["web1", "--name", "cut"]);
    assert_eq!(on.names("snapshots"), ["cut", "one"]);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
}

/// A host snapshot is whole when the state of its machine is kept. One whose maker was killed before goes with what was kept of it.
#[test]
fn what_was_not_completed_is_removed_with_its_state() {
    let Some(on) = on("btrfs") else { return };
    on.take(0, &["web1", "--name", "one"]);
    on.take(0, &["web1", "--name", "two"]);
    assert_eq!(on.state_count(), 2);
    let path = on.ours("records/two.json");
    let noted: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let whole: Value = serde_json::from_str(noted["record"].as_str().unwrap()).unwrap();
    assert_eq!((&whole["is_whole"], &whole["maker"]), (&json!(true), &Value::Null));
    let note = |change: &dyn Fn(&mut Value)| {
        let (mut noted, mut record) = (noted.clone(), whole.clone());
        record["is_whole"] = json!(false);
        record["maker"] = somebody_dead();
        change(&mut record);
        noted["record"] = json!(record.to_string());
        write(&path, &noted.to_string());
    };
    note(&|record| record["maker"] = this_process());
    assert_eq!(found(&on.doctor(0, &["--fix"])), [""; 0], "its maker is at work");
    // A copy that was received here says of what it is a copy.
    note(&|record| record["datasets"] = json!(["btrfs:/elsewhere"]));
    let report = on.doctor(3, &["--fix"]);
    assert_eq!(found(&report), ["host-snapshot"]);
    assert!(
        report["findings"][0]["advice"]
            .as_str()
            .unwrap()
            .contains("host remove")
    );
    note(&|_| ());
    assert_eq!(found(&on.doctor(0, &["--fix"])), ["host-snapshot"]);
    assert_eq!(on.names("snapshots"), ["one"]);
    assert_eq!(on.names("records"), ["one.json"]);
    assert_eq!(on.state_count(), 1);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
    // The memory of a machine waits there before it is kept.
    let scratch = on.world.rig.path("state/holdfast/states/scratch");
    write(&scratch.join("holdfast-memory-old/memory"), "pages");
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    let folder = File::open(scratch.join("holdfast-memory-old")).unwrap();
    folder.set_modified(long_ago).unwrap();
    // Nobody has it open.
    drop(folder);
    assert_eq!(found(&on.doctor(0, &["--fix"])), ["leftover"]);
    assert_eq!(names(&scratch), [""; 0]);
}

/// A machine with disks in two subvolumes: whoever cuts both may be killed between them.
#[test]
fn what_was_cut_in_part_is_no_point_in_time() {
    let Some(on) = on("btrfs") else { return };
    on.world.lab.virsh(&["destroy", "web1"]);
    let other = on.world.lab.path("other");
    let btrfs = |words: &[&str]| system("btrfs", &[&["subvolume"], words].concat()).unwrap();
    btrfs(&["create", other.to_str().unwrap()]);
    let (image, moved) = (on.world.lab.path("web1-b"), other.join("web1-b"));
    std::fs::copy(&image, &moved).unwrap();
    std::fs::remove_file(&image).unwrap();
    std::os::unix::fs::symlink(&moved, &image).unwrap();
    let uri = on.world.lab.uri();
    let back = |code: i32, point: &str| on.world.rig.json(code, &at(&uri, &["rollback", point, "--dry-run"]));
    on.take(0, &["web1", "--name", "whole"]);
    assert_eq!(on.listed(&["web1"])[0]["is_whole"], true);
    let cut = |folder: &Path, name: &str| {
        let place = folder.join(".holdfast/snapshots").join(name);
        btrfs(&["snapshot", "-r", folder.to_str().unwrap(), place.to_str().unwrap()]);
    };
    let folder = PathBuf::from(on.folder());
    cut(&folder, "one");
    assert!(
        back(1, "web1@one")["error"]
            .to_string()
            .contains("has none of that name")
    );
    cut(&other, "one");
    // Both are there, and nobody knows whether the machine held still for the second.
    let refused = back(1, "web1@one")["error"].to_string();
    assert!(refused.contains("died before all of them were made"), "{refused}");
    assert_eq!(back(0, "web1@latest")["report"]["point"], "whole");
    let report = on.doctor(3, &[]);
    assert_eq!(found(&report), ["host-snapshot"; 2], "{report:#}");

    // Killed for real: what is listed as whole is.
    on.world.lab.virsh(&["start", "web1"]);
    let mut random = SeededRandom::new(22);
    for round in 0..6 {
        let name = format!("round-{round}");
        on.kill(&["snapshot", "web1", "--name", &name], &mut random, 200);
        on.wait_until_it_runs(&name);
    }
    on.world.lab.virsh(&["destroy", "web1"]);
    let report = on.world.rig.report(&at(&uri, &["host", "list", "web1"]));
    for round in 0..6 {
        let name = format!("round-{round}");
        let of_name = |dataset: &Value| {
            let mut snapshots = dataset["snapshots"].as_array().unwrap().iter();
            snapshots
                .find(|one| one["name"] == name[..])
                .map(|one| one["is_whole"] == true)
        };
        let datasets = report["datasets"].as_array().unwrap();
        let told: Vec<_> = datasets.iter().map(of_name).collect();
        let is_whole = told == [Some(true), Some(true)];
        assert!(is_whole || !told.contains(&Some(true)), "{report:#}");
        back(i32::from(!is_whole), &format!("web1@{name}"));
    }
}

/// A kill between the cut and the thaw, with the watchdog's.
#[test]
fn a_guest_that_a_dead_snapshot_froze_is_thawed() {
    let Some((bare, _mounted)) = bare_on_xfs() else { return };
    let asked = play_agent(&bare.lab.path("agent"));
    let words = ["snapshot", &bare.source, "--quiesce", "require"];
    for round in 0..40 {
        let mut child = bare.rig.command(&words).spawn().unwrap();
        while asked.recv_timeout(Duration::from_secs(20)).unwrap() != "guest-fsfreeze-freeze" {}
        kill_with_watchdog(&mut child);
        let is_thawed = asked.try_iter().any(|asked| asked == "guest-fsfreeze-thaw");
        if is_thawed {
            continue;
        }
        let doctor = |code: i32, words: &[&str]| {
            let words = [&["doctor", &bare.source[..]], words].concat();
            bare.rig.json(code, &words)["report"].clone()
        };
        let report = doctor(3, &[]);
        let kinds = found(&report);
        assert!(
            kinds.contains(&"frozen") && kinds.contains(&"dead-run"),
            "round {round}: {report:#}"
        );
        assert!(asked.try_iter().all(|asked| asked != "guest-fsfreeze-thaw"));
        doctor(0, &["--fix"]);
        assert!(asked.try_iter().any(|asked| asked == "guest-fsfreeze-thaw"));
        bare.wait_until_clean("the doctor");
        assert_eq!(found(&doctor(0, &[])), [""; 0]);
        return;
    }
    panic!("no snapshot was killed in time");
}

#[test]
fn states_whose_host_snapshots_are_gone_are_forgotten() {
    let Some(on) = on("btrfs") else { return };
    for name in ["one", "two"] {
        on.take(0, &["web1", "--name", name]);
    }
    let place = on.ours("snapshots/one");
    system("btrfs", &["subvolume", "delete", place.to_str().unwrap()]).unwrap();
    let report = on.doctor(3, &[]);
    assert_eq!(found(&report), ["leftover", "states"], "{report:#}");
    assert_eq!(on.state_count(), 2);
    on.doctor(0, &["--fix"]);
    assert_eq!(on.state_count(), 1);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
}

#[test]
fn clones_of_zfs_to_look_into_snapshots_go_when_nobody_looks_any_more() {
    let Some(on) = on("zfs") else { return };
    let uri = on.world.lab.uri();
    let views = || {
        let listed = system("zfs", &["list", "-H", "-o", "name"]).unwrap();
        listed.lines().filter(|line| line.contains("holdfast-view-")).count()
    };
    let words = at(&uri, &["backup", "web1", "--method", "snapshot", "--bwlimit", "1M"]);
    let mut child = on.world.rig.command(&words).spawn().unwrap();
    while views() == 0 {
        assert!(child.try_wait().unwrap().is_none());
    }
    assert_eq!(found(&on.doctor(0, &["--fix"])), [""; 0], "somebody looks");
    assert_eq!(views(), 1);
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    let report = on.doctor(3, &[]);
    assert!(found(&report).contains(&"leftover"), "{report:#}");
    assert_eq!(views(), 1);
    on.doctor(0, &["--fix"]);
    assert_eq!(views(), 0);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
}

/// Two datasets of one name, cut one by one: killed in between, the first is no sign of a fresh point in time.
#[test]
fn a_set_of_zfs_that_is_not_whole_is_no_point_for_anybody() {
    let Some(on) = on("zfs") else { return };
    let (other, _) = on.file_system.dataset();
    let pool = other.split('/').next().unwrap().to_owned();
    let name = "autosnap_2026-11-22_10:00:00_frequently";
    on.take(0, &[&format!("zfs:{pool}"), &other, "--name", name]);
    let record = system(
        "zfs",
        &["get", "-H", "-o", "value", "holdfast:record", &format!("{pool}@{name}")],
    )
    .unwrap();
    let whole: Value = serde_json::from_str(&record).unwrap();
    assert_eq!(
        whole["datasets"],
        json!([format!("zfs:{pool}"), format!("zfs:{other}")]),
        "{whole}"
    );
    assert_eq!((&whole["is_whole"], &whole["maker"]), (&json!(true), &Value::Null));
    let uri = on.world.lab.uri();
    let is_whole = || {
        let report = on
            .world
            .rig
            .report(&at(&uri, &["host", "list", &format!("zfs:{pool}")]));
        report["datasets"][0]["snapshots"][0]["is_whole"].clone()
    };
    let mut half = whole.clone();
    half["is_whole"] = json!(false);
    half["maker"] = somebody_dead();
    let note = |record: &Value| {
        system(
            "zfs",
            &["set", &format!("holdfast:record={record}"), &format!("{pool}@{name}")],
        )
        .unwrap();
    };
    note(&half);
    assert_eq!(is_whole(), true, "the other one says so");
    system("zfs", &["destroy", &format!("{other}@{name}")]).unwrap();
    assert_eq!(is_whole(), false);
    let policy = format!(
        "[{pool}]\nuse_template = mine\n\n[template_mine]\nfrequently = 1\nhourly = 0\ndaily = 0\nmonthly = 0\nfrequently_warn = 1000000h\nfrequently_crit = 2000000h\n"
    );
    on.world.rig.write("sanoid.conf", policy.as_bytes());
    let check = |code: i32| on.world.rig.code(code, &["monitor", "snapshots", "sanoid.conf"]);
    check(2);
    let report = on.doctor(3, &[]);
    let what = report["findings"][0]["what"].as_str().unwrap();
    assert_eq!(found(&report), ["host-snapshot"], "{report:#}");
    assert!(what.contains(&format!("there is none of zfs:{other}")), "{what}");
    half["maker"] = this_process();
    note(&half);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0], "whoever makes it is at work");
    note(&whole);
    check(0);
    assert_eq!(found(&on.doctor(0, &[])), [""; 0]);
}
