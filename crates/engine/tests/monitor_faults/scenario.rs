//! Runs a backup with a fault at its first command, then at its second, and so on to its last.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use holdfast_block::conformance::test_seed;
use holdfast_block::{SeededRandom, to_usize};
use holdfast_engine::{Compared, Finding, FindingKind, FindingState, Method, Outcome};
use holdfast_qemu_model::{Fault, FaultKind};
use serde_json::Value;

use crate::lab::{BackupResult, DISK_BYTES, Lab, is_lock};

/// More time than the model needs for any command, even on a busy host.
const PATIENCE: Duration = Duration::from_secs(60);
/// The deadline of a backup whose command is answered too late.
const LATE: Duration = Duration::from_millis(100);
/// The deadline of a backup whose QEMU stops answering.
const HUNG: Duration = Duration::from_millis(25);
/// Number of labs that share the commands for a slow kind of fault.
const SHARE_COUNT: usize = 4;
/// How often an unreached fault is retried: on a busy host, another command may exceed the deadline first.
const ATTEMPT_COUNT: usize = 20;
/// One of this many commands gets a fault, unless all of them do.
const STRIDE: usize = 12;
/// Bytes per write of the guest.
const WRITE_BYTES: usize = 4096;

/// The machine that is backed up, and the method.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) disk_count: usize,
    pub(crate) is_first: bool,
    pub(crate) has_nvram: bool,
    pub(crate) has_iothread: bool,
    pub(crate) method: Option<Method>,
    /// The kinds of faults.
    pub(crate) kinds: &'static [FaultKind],
}

/// The kinds that differ most from each other; another scenario uses all kinds.
pub(crate) const MAIN_KINDS: &[FaultKind] = &[FaultKind::Refused, FaultKind::Killed];

impl Default for Scenario {
    fn default() -> Self {
        Self {
            disk_count: 2,
            is_first: false,
            has_nvram: false,
            has_iothread: false,
            method: None,
            kinds: MAIN_KINDS,
        }
    }
}

/// Injects a fault of each kind at some commands, which `HOLDFAST_SEED` selects.
pub(crate) fn survives_some(scenario: &Scenario) {
    let start = SeededRandom::new(test_seed()).below(STRIDE as u64);
    survives(scenario, to_usize(start), STRIDE);
}

/// Injects a fault of each kind at each command.
pub(crate) fn survives_all(scenario: &Scenario) {
    survives(scenario, 0, 1);
}

fn survives(scenario: &Scenario, start: usize, stride: usize) {
    let command_count = count_commands(scenario);
    assert!(command_count > 20, "a backup has only {command_count} commands");
    std::thread::scope(|scope| {
        for kind in scenario.kinds.iter().copied() {
            let share_count = match kind {
                FaultKind::Late | FaultKind::Hung => SHARE_COUNT,
                _ => 1,
            };
            for share in 0..share_count {
                scope.spawn(move || {
                    let lab = Arc::new(Lab::new(scenario));
                    prepare(&lab, scenario);
                    let commands = (1..=command_count).skip(start).step_by(stride);
                    for at in commands.skip(share).step_by(share_count) {
                        survives_one(&lab, scenario, kind, at);
                    }
                    lab.delete_folder();
                });
            }
        }
    });
}

/// Number of commands of a backup without a fault.
fn count_commands(scenario: &Scenario) -> usize {
    let lab = Lab::new(scenario);
    prepare(&lab, scenario);
    lab.model.arm(None);
    let report = lab.back_up(PATIENCE).unwrap();
    let (commands, _) = lab.model.disarm();
    let by_bitmap = |(_, compared): &(String, Compared)| matches!(compared, Compared::ByBitmap { .. });
    let is_incremental = report.reading.compared.iter().all(by_bitmap);
    assert_eq!(
        is_incremental,
        !scenario.is_first && scenario.method.is_none(),
        "{:?}",
        report.reading.compared
    );
    commands.len()
}

fn prepare(lab: &Lab, scenario: &Scenario) {
    write(lab, 1);
    if !scenario.is_first {
        lab.back_up(PATIENCE).unwrap();
    }
    write(lab, 2);
}

/// The guest writes to each disk.
fn write(lab: &Lab, number: usize) {
    for disk in 0..lab.disk_count() {
        let place = (number * 7 + disk) as u64 * 37 * 4096 % (DISK_BYTES - WRITE_BYTES as u64);
        let byte = u8::try_from(number % 251).unwrap() + 1;
        lab.model.guest_write(disk, &[byte; WRITE_BYTES], place).unwrap();
    }
}

fn survives_one(lab: &Arc<Lab>, scenario: &Scenario, kind: FaultKind, at: usize) {
    for _ in 0..ATTEMPT_COUNT {
        if scenario.is_first {
            lab.replace_repository();
        }
        write(lab, at);
        let before = StateBefore {
            inventory: lab.model.inventory(),
            files: lab.files(),
            disks: lab.guest_bytes(),
            next_time_ms: lab.next_time_ms(),
        };
        let (result, is_unreached) = back_up_with(lab, kind, at);
        let case = format!("{kind:?} at command {at} of {scenario:?}: {result}");
        before.assert_restored(lab, kind, &case);
        write(lab, at + 1);
        let now = lab.guest_bytes();
        let next = lab.back_up(PATIENCE);
        let next = next.unwrap_or_else(|error| panic!("{case}; the next backup: {error:?}"));
        assert!(
            lab.stored(next.backup.snapshot.id) == now,
            "{case}; the next backup is wrong"
        );
        if !is_unreached {
            return;
        }
    }
    panic!("{kind:?} was not reached at command {at} of {scenario:?}");
}

/// Runs a backup with a fault; returns its result as text, and whether the fault was not reached.
fn back_up_with(lab: &Arc<Lab>, kind: FaultKind, at: usize) -> (String, bool) {
    let (send, over) = channel();
    lab.model.arm(Some(Fault {
        kind,
        at,
        happened: (kind == FaultKind::Killed).then(|| send.clone()),
    }));
    let deadline = match kind {
        FaultKind::Late => LATE,
        FaultKind::Hung => HUNG,
        _ => PATIENCE,
    };
    let shared_lab = Arc::clone(lab);
    let backup = std::thread::spawn(move || {
        let result: BackupResult = shared_lab.back_up(deadline);
        // Nothing receives the result of a backup that counts as killed.
        send.send(()).ok();
        result.map_or_else(|error| format!("{error:?}"), |_| "success".to_owned())
    });
    over.recv().unwrap();
    let (commands, is_unreached) = lab.model.disarm();
    let result = if kind == FaultKind::Killed && !is_unreached {
        // Its thread never gets an answer, and never ends.
        lab.kill_running_backups();
        "the backup was killed".to_owned()
    } else {
        backup.join().unwrap()
    };
    let command = commands.get(at - 1).map_or("none", |command| command);
    (format!("{command}: {result}"), is_unreached)
}

/// The state before a backup.
struct StateBefore {
    inventory: Value,
    files: Vec<PathBuf>,
    disks: Vec<Vec<u8>>,
    next_time_ms: i64,
}

impl StateBefore {
    /// Asserts that nothing of a backup is left after the doctor, and that committed snapshots are correct.
    fn assert_restored(&self, lab: &Lab, kind: FaultKind, case: &str) {
        assert_eq!(lab.model.aborted(), None, "{case}");
        assert!(lab.guest_bytes() == self.disks, "{case}: the guest sees other bytes");
        let report = lab.run_doctor_fix();
        // Locks of a thread that counts as killed still look as if it were alive.
        let is_locked = |finding: &Finding| kind == FaultKind::Killed && finding.kind == FindingKind::Leftover;
        let is_repaired =
            |outcome: &Outcome| matches!(outcome.result, FindingState::Repaired(_)) || is_locked(&outcome.finding);
        assert!(report.findings.iter().all(is_repaired), "{case}: {:?}", report.findings);
        assert_eq!(
            lab.model.aborted(),
            None,
            "{case}, then the doctor {:?}",
            report.findings
        );
        let after = lab.model.inventory();
        for (what, found) in self.inventory.as_object().unwrap() {
            if what != "bitmaps" {
                assert_eq!(after[what], *found, "{case}: {what}, after {:?}", report.findings);
            }
        }
        // Bitmaps for another repository are ignored.
        let own_prefix = format!(": holdfast-{}", &lab.repository().config().id.to_string()[..8]);
        let is_own = |bitmap: &&Value| bitmap.as_str().unwrap().contains(&own_prefix);
        let bitmaps: Vec<&Value> = after["bitmaps"].as_array().unwrap().iter().filter(is_own).collect();
        assert!(
            bitmaps.len() <= lab.disk_count(),
            "{case}: bitmaps {bitmaps:?}, after {:?}",
            report.findings
        );
        let files = lab.files();
        let is_new = |path: &&PathBuf| !self.files.contains(path) && path.is_file() && !is_lock(path);
        let new: Vec<&PathBuf> = files.iter().filter(is_new).collect();
        assert!(new.is_empty() || kind == FaultKind::Killed, "{case}: files {new:?}");
        assert!(
            lab.guest_bytes() == self.disks,
            "{case}: the guest sees other bytes after the doctor"
        );
        // The thread of an earlier backup that counts as killed continues when its request times out, and may commit by now.
        for snapshot in lab.snapshots_since(self.next_time_ms) {
            assert!(lab.stored(snapshot) == self.disks, "{case}: the snapshot is wrong");
        }
    }
}
