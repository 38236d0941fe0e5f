//! `migrate` of containers.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::write_file;
use crate::host::{system, text};
use crate::program::stderr;
use crate::replication::sshd::{Program, Sshd};
use crate::rig::{Rig, noise};
use crate::schedules::wait_until;
use crate::verbs::containers::Container;
use crate::verbs::mounts::MountPoint;

/// A service that appends consecutive numbers to a file of the container, and syncs each. A restarted service continues with the
/// next number.
const SERVICE: &str = r#"
state=$(dirname "$0")
# A process that has ended keeps its number until its parent asks for its exit code.
runs() {
    grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" 2>/dev/null
}
case $1 in
start)
    runs "$(cat "$state/service.pid" 2>/dev/null)" && exit 0
    (
        cd "$2" || exit 1
        last=$(tail -n 1 numbers 2>/dev/null || echo 0)
        while :; do
            last=$((last + 1))
            echo $last >> numbers
            sync numbers
            sleep 0.005
        done
    ) </dev/null >/dev/null 2>&1 &
    echo $! > "$state/service.pid"
    echo "$2" > "$state/service.folder"
    ;;
stop)
    pid=$(cat "$state/service.pid")
    kill $pid
    while runs $pid; do sleep 0.01; done
    ;;
esac
"#;

/// A container with a service, which is mounted at the first of two hosts. Both have the same kernel and files.
pub(super) struct Hosts<'a> {
    rig: &'a Rig,
    sshd: Sshd,
    pub(super) container: Container<'a>,
    pub(super) there: MountPoint,
}

impl<'a> Hosts<'a> {
    pub(super) fn new(rig: &'a Rig) -> Option<Self> {
        Self::with(rig, Program::Found)
    }

    /// Hosts of which the second one has this program.
    fn with(rig: &'a Rig, program: Program<'_>) -> Option<Self> {
        let sshd = Sshd::start(program, None)?;
        rig.write("service.sh", SERVICE.as_bytes());
        std::fs::create_dir(rig.path("there")).unwrap();
        rig.ok(&["container", "create", "web1", "512M"]);
        let container = Container::mount(rig, "web1");
        container.write("data", &noise(24 << 20, 1));
        rig.ok(&["container", "snapshot", "web1", "before"]);
        container.write("data", &noise(8 << 20, 2));
        let there = MountPoint::new(rig, "there-mnt");
        let hosts = Self {
            rig,
            sshd,
            container,
            there,
        };
        shell(&hosts.service("start", &hosts.container.point));
        Some(hosts)
    }

    pub(super) fn service(&self, verb: &str, point: &MountPoint) -> String {
        format!(
            "sh {} {verb} {}",
            self.rig.path("service.sh").display(),
            folder(point).display()
        )
    }

    fn words(&self, more: &[&str]) -> Vec<String> {
        let address = format!("ssh://root@127.0.0.1{}", self.rig.path("there").display());
        let mut words = vec!["migrate".to_owned(), "web1".to_owned(), address];
        words.extend(self.sshd.options());
        words.extend(more.iter().map(|word| (*word).to_owned()));
        words
    }

    fn moved(&self, words: &[String]) -> Value {
        self.rig.report(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn run(&self, words: &[String]) -> Output {
        self.rig.run(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn error(&self, code: i32, words: &[String]) -> (String, String) {
        self.rig
            .error(code, &words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Where the service writes; none if it does not run.
    fn served(&self) -> Option<PathBuf> {
        let read = |name: &str| String::from_utf8(self.rig.read(name)).unwrap();
        let process = read("service.pid").trim().parse().ok()?;
        let runs = rustix::process::test_kill_process(Pid::from_raw(process)?).is_ok();
        runs.then(|| PathBuf::from(read("service.folder").trim()))
    }

    /// Every number is there once, and more come.
    pub(super) fn assert_serves(&self, point: &MountPoint) {
        assert_eq!(self.served(), Some(folder(point)));
        let numbers = || std::fs::read_to_string(point.path("numbers")).unwrap();
        let count = numbers().lines().count();
        wait_until("the service writes", || numbers().lines().count() > count + 5);
        for (number, line) in numbers().lines().enumerate() {
            assert_eq!(line, (number + 1).to_string());
        }
    }

    fn snapshots(&self, container: &str) -> Vec<String> {
        let report = self.rig.report(&["container", "snapshots", container]);
        let snapshots = report["snapshots"].as_array().unwrap();
        snapshots
            .iter()
            .map(|snapshot| snapshot["name"].as_str().unwrap_or("-").to_owned())
            .collect()
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        if self.served().is_some() {
            shell(&self.service("stop", &self.there));
        }
        self.rig.run(&["container", "unmount", "there/web1"]);
    }
}

fn shell(command: &str) {
    system("sh", &["-c", command]).unwrap();
}

fn assert_no_damage(rig: &Rig, container: &str) {
    let checked = rig.report(&["container", "check", container]);
    let mut layers = checked["layers"].as_array().unwrap().iter();
    assert!(layers.all(|layer| layer["corruption_count"] == 0), "{checked}");
}

pub(super) fn folder(point: &MountPoint) -> PathBuf {
    point.path(".").canonicalize().unwrap()
}

/// Reports of `migrate` of a container.
pub(super) fn reports() -> Vec<Value> {
    let rig = Rig::new();
    let Some(hosts) = Hosts::new(&rig) else {
        return Vec::new();
    };
    let point = folder(&hosts.there);
    let stop = hosts.service("stop", &hosts.container.point);
    let words = ["--stop-command", &stop, "--mount-on", text(&point)];
    ["--dry-run", "--quiet"]
        .map(|option| hosts.moved(&hosts.words(&[&words, &[option][..]].concat())))
        .into()
}

#[test]
fn a_container_in_use_moves_with_its_service_and_back() {
    let rig = Rig::new();
    let Some(hosts) = Hosts::new(&rig) else { return };
    let plan = hosts.moved(&hosts.words(&["--dry-run", "--mount-on", text(&folder(&hosts.there))]));
    assert_eq!((&plan["obstacles"], &plan["layers"]), (&json!([]), &json!(2)), "{plan}");
    // The service is stopped where it is, and started there.
    let there = hosts.service("start", &hosts.there);
    let stop = hosts.service("stop", &hosts.container.point);
    let point = folder(&hosts.there);
    let words = [
        "--stop-command",
        &stop,
        "--start-command",
        &there,
        "--mount-on",
        text(&point),
    ];
    let moved = hosts.moved(&hosts.words(&words));
    let address = format!("ssh://root@127.0.0.1{}/web1", rig.path("there").display());
    assert_eq!(moved["destination"], address, "{moved}");
    assert_eq!(moved["mounted_on"], text(&point), "{moved}");
    hosts.assert_serves(&hosts.there);
    assert_eq!(std::fs::read(hosts.there.path("data")).unwrap(), noise(8 << 20, 2));
    assert_eq!(hosts.snapshots("there/web1"), ["before"]);
    let phases: Vec<&str> = moved["phases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|phase| phase["phase"].as_str().unwrap())
        .collect();
    assert_eq!(phases, ["layers", "stop", "last-pass", "complete", "mount", "start"]);
    assert!(!rig.path("there/.web1.holdfast-move").exists());
    // The former container is not used by mistake.
    let here = folder(&hosts.container.point);
    for words in [
        &["container", "mount", "web1", text(&here)] as &[&str],
        &["backup", "web1"],
    ] {
        let (kind, message) = rig.error(1, words);
        assert!(
            kind == "refused" && message.contains("was migrated to ssh://"),
            "{kind}: {message}"
        );
    }
    assert_eq!(rig.report(&["container", "info", "web1"])["migrated_to"], address);
    // What has happened there comes back, and little more.
    write_file(&hosts.there.path("more"), &noise(1 << 20, 3));
    let (stop, start) = (
        hosts.service("stop", &hosts.there),
        hosts.service("start", &hosts.container.point),
    );
    let back = [
        "--undo",
        "--delete-former",
        "--stop-command",
        &stop,
        "--start-command",
        &start,
        "--mount-on",
        text(&here),
    ];
    let back = hosts.moved(&hosts.words(&back));
    assert_eq!(
        (&back["source"], &back["destination"]),
        (&json!(address), &Value::Null),
        "{back}"
    );
    let sent = |report: &Value| report["sent_bytes"].as_u64().unwrap();
    assert!(sent(&back) * 6 < sent(&moved), "{moved} {back}");
    hosts.assert_serves(&hosts.container.point);
    assert_eq!(
        std::fs::read(hosts.container.point.path("more")).unwrap(),
        noise(1 << 20, 3)
    );
    assert_eq!(hosts.snapshots("web1"), ["before"]);
    assert!(!rig.path("web1-former").exists());
    shell(&stop);
    rig.ok(&["container", "unmount", "web1"]);
    assert_no_damage(&rig, "web1");
}

#[test]
fn a_migration_that_fails_leaves_the_service_where_it_was() {
    let rig = Rig::new();
    let Some(hosts) = Hosts::new(&rig) else { return };
    let here = &hosts.container.point;
    let point = folder(&hosts.there);
    let (stop, start) = (hosts.service("stop", here), hosts.service("start", here));
    // The service still uses it.
    let (kind, message) = hosts.error(1, &hosts.words(&["--mount-on", text(&point)]));
    assert!(kind == "locked" && message.contains("is in use"), "{kind}: {message}");
    hosts.assert_serves(here);
    // The mount fails when everything is there.
    let spoilt = format!("{stop}; touch {}/file", point.display());
    let words = [
        "--stop-command",
        &spoilt,
        "--start-command",
        &start,
        "--mount-on",
        text(&point),
    ];
    let (_, message) = hosts.error(1, &hosts.words(&words));
    assert!(message.contains("is not empty"), "{message}");
    hosts.assert_serves(here);
    assert!(!rig.path("there/web1").exists());
    // It cannot be mounted there, which is known before.
    let (_, message) = hosts.error(1, &hosts.words(&["--mount-on", text(&point)]));
    assert!(message.contains("is not empty there"), "{message}");
    std::fs::remove_file(point.join("file")).unwrap();
    // The stop takes too long.
    let slow = format!("{stop}; sleep 2");
    let words = [
        "--stop-command",
        &slow,
        "--start-command",
        &start,
        "--mount-on",
        text(&point),
        "--max-frozen",
        "1s",
    ];
    let (_, message) = hosts.error(1, &hosts.words(&words));
    assert!(message.contains("was stopped for longer than 1000 ms"), "{message}");
    hosts.assert_serves(here);
    assert_eq!(hosts.snapshots("web1"), ["before"]);
    // What was received is not sent again.
    let there = hosts.service("start", &hosts.there);
    let words = [
        "--stop-command",
        &stop,
        "--start-command",
        &there,
        "--mount-on",
        text(&point),
    ];
    let moved = hosts.moved(&hosts.words(&words));
    assert!(moved["sent_bytes"].as_u64().unwrap() < 16 << 20, "{moved}");
    hosts.assert_serves(&hosts.there);
}

/// The connection is lost before or after a request. The container is used at one host afterwards.
#[test]
fn a_lost_answer_leaves_one_service() {
    let rig = Rig::new();
    std::fs::create_dir(rig.path("programs")).unwrap();
    let plan = rig.path("plan");
    let program = include_str!("losing_receiver.py")
        .replace("@PROGRAM@", env!("CARGO_BIN_EXE_holdfast"))
        .replace("@PLAN@", text(&plan));
    rig.write_program("programs/holdfast", &program);
    rig.write("plan", b"none now");
    let programs = rig.path("programs");
    let Some(hosts) = Hosts::with(&rig, Program::FoundIn(&programs)) else {
        return;
    };
    let here = &hosts.container.point;
    let (point, back_to) = (folder(&hosts.there), folder(here));
    let start = hosts.service("start", &hosts.there);
    let start_here = hosts.service("start", here);
    let either = format!(
        "if mountpoint -q {}; then {start}; else {start_here}; fi",
        point.display()
    );
    let stop = hosts.service("stop", here);
    let words = [
        "--stop-command",
        &stop,
        "--start-command",
        &either,
        "--mount-on",
        text(&point),
    ];
    for (request, when, moves) in [
        ("complete", "before", false),
        ("complete", "after", true),
        ("mount", "before", true),
        ("mount", "after", true),
        ("run", "before", true),
        ("run", "after", true),
    ] {
        rig.write("plan", format!("{request} {when}").as_bytes());
        let output = hosts.run(&hosts.words(&words));
        assert_eq!(rig.read("plan"), b"none now", "{request} {when}: {}", stderr(&output));
        assert_eq!(output.status.success(), moves, "{request} {when}: {}", stderr(&output));
        if !moves {
            hosts.assert_serves(here);
            continue;
        }
        hosts.assert_serves(&hosts.there);
        let stop = hosts.service("stop", &hosts.there);
        let back = [
            "--undo",
            "--delete-former",
            "--stop-command",
            &stop,
            "--start-command",
            &start_here,
        ];
        hosts.moved(&hosts.words(&[&back[..], &["--mount-on", text(&back_to)]].concat()));
        hosts.assert_serves(here);
    }
    assert!(!rig.path("there/.web1.holdfast-move").exists());
}

/// Whether the process runs that stops the service, and starts it again after a kill.
fn has_stopper(rig: &Rig) -> bool {
    let folder = rig.path("web1").display().to_string();
    let processes = std::fs::read_dir("/proc").unwrap();
    let lines = processes.filter_map(|process| std::fs::read(process.ok()?.path().join("cmdline")).ok());
    let mut lines = lines.map(|line| String::from_utf8_lossy(&line).into_owned());
    lines.any(|line| line.contains("freeze-commands") && line.contains(&folder))
}

/// After each kill or interruption, the service runs at one of the hosts, or the same command completes the migration.
fn kill_migrations(count: u64) {
    let rig = Rig::new();
    let Some(hosts) = Hosts::new(&rig) else { return };
    let clock = SystemClock::new();
    let seed = std::env::var("HOLDFAST_SEED").map_or(1, |text| text.parse().unwrap());
    let mut random = SeededRandom::new(seed);
    let here = &hosts.container.point;
    let point = folder(&hosts.there);
    let (stop, start) = (hosts.service("stop", here), hosts.service("start", here));
    let there = hosts.service("start", &hosts.there);
    // Where it is started is decided by where it is mounted.
    let either = format!("if mountpoint -q {}; then {there}; else {start}; fi", point.display());
    let words = hosts.words(&[
        "--stop-command",
        &stop,
        "--start-command",
        &either,
        "--mount-on",
        text(&point),
    ]);
    for round in 0..count {
        let line: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut child = rig.command(&line).spawn().unwrap();
        clock.sleep(Duration::from_millis(random.below(4000)));
        let signal = [Signal::KILL, Signal::INT][usize::from(round % 2 == 1)];
        kill_process(Pid::from_child(&child), signal).ok();
        child.wait().unwrap();
        wait_until("the process has ended that starts the service again", || {
            !has_stopper(&rig)
        });
        let is_marked = || {
            let tree = String::from_utf8(rig.read("web1/container.json")).unwrap();
            tree.contains(r#""migration""#)
        };
        if !is_marked() {
            hosts.assert_serves(here);
            continue;
        }
        let completed = hosts.run(&hosts.words(&["--start-command", &either, "--mount-on", text(&point)]));
        assert!(completed.status.success(), "round {round}: {}", stderr(&completed));
        hosts.assert_serves(&hosts.there);
        let (stop, start) = (hosts.service("stop", &hosts.there), hosts.service("start", here));
        let back = folder(here);
        let back = [
            "--undo",
            "--delete-former",
            "--stop-command",
            &stop,
            "--start-command",
            &start,
            "--mount-on",
            text(&back),
        ];
        hosts.moved(&hosts.words(&back));
        hosts.assert_serves(here);
    }
}

#[test]
fn a_killed_migration_leaves_one_service() {
    kill_migrations(3);
}

#[test]
#[ignore = "many kills: make torture"]
fn many_killed_migrations_leave_one_service() {
    kill_migrations(std::env::var("HOLDFAST_KILLS").map_or(60, |text| text.parse().unwrap()));
}

#[test]
fn a_container_that_is_not_mounted_moves_with_the_memory_of_its_snapshots() {
    let rig = Rig::new();
    let Some(sshd) = Sshd::start(Program::Found, None) else {
        return;
    };
    std::fs::create_dir(rig.path("there")).unwrap();
    let address = |folder: &Path| format!("ssh://root@127.0.0.1{}", folder.display());
    for format in ["qcow2", "parallels"] {
        let name = format!("of-{format}");
        let folder = rig.path(&name);
        rig.ok(&["container", "create", &name, "64M", "--format", format]);
        rig.ok(&["container", "snapshot", &name, "one"]);
        // As a snapshot with memory has it.
        let memory = "memory-10a5e1b6-6f0b-4b39-8e25-6a2a3f0d7c11";
        std::fs::create_dir_all(folder.join(memory).join("images")).unwrap();
        write_file(&folder.join(memory).join("config.json"), b"{}");
        write_file(&folder.join(memory).join("images/pages-1.img"), &noise(100_000, 5));
        write_file(&folder.join(memory).join("images/empty.img"), b"");
        let path = folder.join("container.json");
        let mut document: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        document["snapshots"][0]["properties"]["memory"] = json!(memory);
        write_file(&path, document.to_string().as_bytes());
        let mut words = vec!["migrate".to_owned(), name.clone(), address(&rig.path("there"))];
        words.extend(sshd.options());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let moved = rig.report(&words);
        assert_eq!(
            (&moved["mounted_on"], &moved["stopped_us"]),
            (&Value::Null, &Value::Null),
            "{moved}"
        );
        let there = rig.path("there").join(&name);
        for file in ["config.json", "images/pages-1.img", "images/empty.img"] {
            let read = |folder: &Path| std::fs::read(folder.join(memory).join(file)).unwrap();
            assert!(read(&folder) == read(&there), "{file}");
        }
        assert_no_damage(&rig, text(&there));
        // The same command finds it there.
        let again = rig.report(&words);
        assert_eq!(again["sent_bytes"], 0, "{again}");
        // The former container is used here again if the user wants it.
        let point = MountPoint::new(&rig, &format!("{name}-mnt"));
        let point_folder = point.path(".");
        let mount = ["container", "mount", &name, text(&point_folder), "--take-back"];
        rig.ok(&mount);
        rig.ok(&["container", "unmount", &name]);
        rig.ok(&mount[..4]);
        rig.ok(&["container", "unmount", &name]);
    }
    // Both hosts have this folder.
    let mut words = vec![
        "migrate".to_owned(),
        "of-qcow2".to_owned(),
        "ssh://root@127.0.0.1".to_owned(),
    ];
    words.extend(sshd.options());
    let (kind, message) = rig.error(1, &words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(
        kind == "refused" && message.contains("both hosts have the same storage"),
        "{kind}: {message}"
    );
    assert!(rig.path("of-qcow2/container.json").exists());
}
