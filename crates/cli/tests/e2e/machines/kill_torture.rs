//! Kills of backups, restores, rollbacks, snapshots and the doctor: after each, one `doctor --fix` and the next backup
//! succeed, restores have the content of the disks, and nothing is left in QEMU, in folders, or among host snapshots.
//!
//! `HOLDFAST_KILLS` is the number of kills, `HOLDFAST_SEED` repeats the same choices.

use std::process::Child;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};
use holdfast_host::MachineState;
use holdfast_host::qemu::{disks, jobs};
use holdfast_host::qmp::QmpCommand;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::at;
use super::doctors::{found, kill_with_watchdog};
use super::host_snapshots::{MachineSetup, machine_on};

/// Number of kills in `make test`.
const KILLS_OF_TEST: u64 = 10;
/// Number of kills without `HOLDFAST_KILLS`.
const KILLS_OF_TORTURE: u64 = 1000;
/// The count is printed after this many kills.
const PROGRESS_KILLS: u64 = 50;
/// Maximum duration of a command.
const WHOLE_MAX: Duration = Duration::from_secs(60);

/// The command that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Backup,
    BackupWithMemory,
    BackupByOverlay,
    Restore,
    Snapshot,
    SnapshotWithMemory,
    Rollback,
    Doctor,
}

impl Victim {
    const ALL: [Self; 8] = [
        Self::Backup,
        Self::BackupWithMemory,
        Self::BackupByOverlay,
        Self::Restore,
        Self::Snapshot,
        Self::SnapshotWithMemory,
        Self::Rollback,
        Self::Doctor,
    ];

    fn words(self, number: u64) -> Vec<String> {
        let line = match self {
            Self::Backup => "backup web1".to_owned(),
            Self::BackupWithMemory => "backup web1 --with-memory".to_owned(),
            Self::BackupByOverlay => "backup web1 --method overlay".to_owned(),
            Self::Restore => "restore web1:vda out/vda.raw --force".to_owned(),
            Self::Snapshot => format!("snapshot web1 --name k{number}"),
            Self::SnapshotWithMemory => format!("snapshot web1 --with-memory --name k{number}"),
            Self::Rollback => "rollback web1@base".to_owned(),
            Self::Doctor => "doctor --fix --scratch scratch".to_owned(),
        };
        line.split(' ').map(str::to_owned).collect()
    }
}

struct Torture {
    setup: MachineSetup,
    random: SeededRandom,
    /// Duration of each command without a kill.
    whole_us: [u64; Victim::ALL.len()],
    /// Number of commands that were killed, and that had ended before the kill.
    counts: [[u64; 2]; Victim::ALL.len()],
    /// The content of the disks in the host snapshot for rollbacks.
    base: [Vec<u8>; 2],
}

impl Torture {
    fn new(seed: u64, setup: MachineSetup) -> Self {
        let world = &setup.world;
        std::fs::create_dir_all(world.rig.path("out")).unwrap();
        std::fs::create_dir_all(world.rig.path("run")).unwrap();
        std::fs::create_dir_all(world.rig.path("scratch")).unwrap();
        world.back_up();
        let base = world.disks.clone();
        world
            .rig
            .ok(&at(&world.lab.uri(), &["snapshot", "web1", "--name", "base"]));
        Self {
            setup,
            random: SeededRandom::new(seed),
            whole_us: [1_500_000; Victim::ALL.len()],
            counts: [[0; 2]; Victim::ALL.len()],
            base,
        }
    }

    fn begin(&self, victim: Victim, number: u64) -> Child {
        let words = victim.words(number);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let uri = self.setup.world.lab.uri();
        let mut command = self.setup.world.rig.command(&at(&uri, &words));
        command
            .env("XDG_RUNTIME_DIR", self.setup.world.rig.path("run"))
            .spawn()
            .unwrap()
    }

    fn one(&mut self, number: u64) {
        let index = usize::try_from(self.random.below(Victim::ALL.len() as u64)).unwrap();
        let victim = Victim::ALL[index];
        self.write();
        if victim == Victim::Rollback {
            self.setup.world.lab.virsh(&["destroy", "web1"]);
        }
        let after = Duration::from_micros(self.random.below(self.whole_us[index]));
        let with_watchdog = self.random.below(2) == 1;
        let what = format!("kill {number}: {victim:?} after {after:?}, watchdog too: {with_watchdog}");
        let clock = SystemClock::new();
        let start = clock.now();
        let mut child = self.begin(victim, number);
        clock.sleep(after);
        let has_ended = child.try_wait().unwrap().is_some();
        if with_watchdog {
            kill_with_watchdog(&mut child);
        } else {
            kill_process(Pid::from_child(&child), Signal::KILL).ok();
            child.wait().unwrap();
        }
        self.counts[index][usize::from(has_ended)] += 1;
        if has_ended {
            let took = u64::try_from(clock.now().saturating_sub(start).as_micros()).unwrap();
            self.whole_us[index] = took.min(u64::try_from(WHOLE_MAX.as_micros()).unwrap());
        }
        if victim == Victim::Rollback {
            self.repeat_rollback(&what);
        }
        self.assert_repaired(&what);
    }

    /// Repeats a killed rollback, as the doctor advises.
    fn repeat_rollback(&mut self, what: &str) {
        let uri = self.setup.world.lab.uri();
        let output = self.setup.world.rig.run(&at(&uri, &["rollback", "web1@base"]));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{what}: {message}");
        self.setup.world.disks = self.base.clone();
        self.setup.world.lab.virsh(&["start", "web1"]);
    }

    fn write(&mut self) {
        let disk = usize::try_from(self.random.below(2)).unwrap();
        let byte = u8::try_from(3 + self.random.below(250)).unwrap();
        let offset = usize::try_from(65_536 * self.random.below(100)).unwrap();
        self.setup.world.write(disk, byte, offset, 65_536);
    }

    /// Runs the doctor once, then a backup, and asserts that both succeed, that the restore is correct, and that
    /// nothing is left.
    fn assert_repaired(&mut self, what: &str) {
        let fixed = self.setup.world.doctor_answers(&["--fix"]);
        let message = String::from_utf8_lossy(&fixed.stdout).into_owned() + &String::from_utf8_lossy(&fixed.stderr);
        let report: Value = serde_json::from_slice(&fixed.stdout).unwrap();
        let findings = report["report"]["findings"].as_array().unwrap().iter();
        let left: Vec<&Value> = findings.filter(|one| one["repaired"].is_null()).collect();
        assert!(left.is_empty(), "{what}: {message}");
        assert_eq!(fixed.status.code(), Some(0), "{what}: {message}");
        let again = self.setup.world.doctor_answers(&[]);
        let report: Value = serde_json::from_slice(&again.stdout).unwrap();
        assert_eq!(found(&report["report"]), [""; 0], "{what}: first {message}");
        let state = self.setup.world.machine().describe().unwrap().summary.state;
        assert_eq!(state, MachineState::Running, "{what}: {message}");
        self.assert_nothing_left(what, &message);
        self.write();
        let uri = self.setup.world.lab.uri();
        let output = self.setup.world.rig.run(&at(&uri, &["backup", "web1"]));
        let of_backup = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{what}: {of_backup}; before {message}");
        self.setup.world.assert_snapshot_is_right(what);
        self.assert_nothing_left(what, &of_backup);
    }

    fn assert_nothing_left(&self, what: &str, message: &str) {
        let machine = self.setup.world.machine();
        let monitor = machine.monitor();
        let ask = |command| {
            monitor
                .execute(&QmpCommand::new(command, Value::Null))
                .unwrap()
                .to_string()
        };
        for command in [
            "query-named-block-nodes",
            "query-block-exports",
            "query-fdsets",
            "query-jobs",
        ] {
            let answer = ask(command);
            // Bitmaps of backups have another prefix.
            assert!(!answer.contains("\"hf-"), "{what}: {command}: {answer}; {message}");
        }
        assert!(jobs(monitor).unwrap().is_empty(), "{what}: {message}");
        let bitmaps: Vec<usize> = disks(monitor).unwrap().iter().map(|disk| disk.bitmaps.len()).collect();
        assert!(bitmaps.iter().all(|count| *count <= 2), "{what}: {bitmaps:?}");
        assert!(
            self.setup.world.journal().is_empty(),
            "{what}: {:#?}; {message}",
            self.setup.world.journal()
        );
        let rig = &self.setup.world.rig;
        let mut left = [rig.names("run"), rig.names("scratch")].concat();
        left.extend(rig.names("out").into_iter().filter(|name| name != "vda.raw"));
        for folder in ["state/holdfast/runs", "state/holdfast/places"] {
            if rig.path(folder).exists() {
                left.extend(rig.names(folder));
            }
        }
        assert_eq!(left, [""; 0], "{what}: {message}");
        self.assert_snapshots_complete(what, message);
    }

    /// Asserts that each state has its host snapshot, and that there is no incomplete one.
    fn assert_snapshots_complete(&self, what: &str, message: &str) {
        let listed = self.setup.listed(&["web1"]);
        let names: Vec<&str> = listed.iter().map(|one| one["name"].as_str().unwrap()).collect();
        assert!(names.contains(&"base"), "{what}: {names:?}; {message}");
        assert_eq!(self.setup.state_count(), names.len(), "{what}: {names:?}; {message}");
        let folder = self.setup.world.lab.path(".holdfast/snapshots");
        let hidden = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        let hidden: Vec<_> = hidden.filter(|name| name.to_string_lossy().starts_with('.')).collect();
        assert!(hidden.is_empty(), "{what}: {hidden:?}; {message}");
    }
}

#[expect(clippy::print_stdout, reason = "the seed makes the same choices again")]
fn run(seed: u64, kills: u64) {
    println!("HOLDFAST_SEED={seed}");
    let Some(setup) = machine_on("btrfs") else { return };
    let mut torture = Torture::new(seed, setup);
    for number in 0..kills {
        torture.one(number);
        if (number + 1) % PROGRESS_KILLS == 0 {
            println!("{} kills", number + 1);
        }
    }
    for (victim, [killed, ended]) in Victim::ALL.iter().zip(torture.counts) {
        println!("{victim:?}: {killed} killed, {ended} had ended");
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn after_any_kill_the_doctor_repairs_everything() {
    run(number("HOLDFAST_SEED").unwrap_or(1), KILLS_OF_TEST);
}

#[test]
#[ignore = "a thousand kills take hours: make torture"]
fn after_a_thousand_kills_the_doctor_repairs_everything() {
    let seed = number("HOLDFAST_SEED").unwrap_or_else(SeededRandom::fresh_seed);
    run(seed, number("HOLDFAST_KILLS").unwrap_or(KILLS_OF_TORTURE));
}
