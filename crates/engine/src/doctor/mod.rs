//! `doctor`: what is wrong with machines after a process died that worked on them, and how it is repaired.
//!
//! 1. [`look`] sees what there is; nothing is changed.
//! 2. [`diagnose`] makes findings of it, a pure function: each in words, with what would repair it, or what an administrator can do.
//! 3. Each finding is repaired by itself ([`repair`]). As one may have hidden another, it is looked again then, a few times at most.

mod chains;
mod commit;
mod diagnose;
mod diagnose_disks;
mod diagnose_host;
mod diagnosis;
mod emptied;
mod host_work;
mod instants;
mod leftovers;
mod look;
mod places;
mod pool;
mod repair;
mod repair_host;
mod seen;
mod virtualbox;

use std::path::PathBuf;
use std::time::Duration;

use holdfast_host::{Hypervisor, Machine, Overlays, processes_named};
use holdfast_repo::{Liveness, ProcessIdentity, Processes, Repository};

use crate::capture::virtualbox::VirtualBoxMachine;
use crate::job::{Job, Result};
use crate::machine::run_journal::noted_runs;
use crate::machine::watchdog::is_watchdog_of;
use crate::repository::forget::Execution;
use diagnose::diagnose;
use look::look;
use repair::repair;

/// How often the examination is repeated: what was repaired may have hidden another finding.
const ROUND_COUNT: usize = 6;
/// How long the watchdog of a dead run may take.
const WATCHDOG_PATIENCE: Duration = Duration::from_secs(10);
const WATCHDOG_INTERVAL: Duration = Duration::from_millis(100);

/// What is examined, and by what means.
pub struct DoctorRequest<'a> {
    /// The machines.
    pub patients: Vec<ExaminedMachine<'a>>,
    /// The machines of VirtualBox.
    pub virtualbox: Vec<VirtualBoxMachine<'a>>,
    /// Pools of XenServer.
    pub pools: Vec<ExaminedPool>,
    /// The ids of repositories that are gone: pools need not keep anything for them.
    pub forgotten_repositories: Vec<String>,
    /// Machines that could not be reached, and why.
    pub unreachable: Vec<(String, String)>,
    /// The address at which libvirt is examined.
    pub address: String,
    /// All machines of the same hypervisor: what they have is never taken from them.
    pub neighbours: Option<&'a dyn Hypervisor>,
    /// The way to bring overlays down into their bases.
    pub overlays: Option<&'a dyn Overlays>,
    /// Whether all machines are examined: what belongs to no machine is looked for then.
    pub everything: bool,
    /// The folder of the journal of runs.
    pub journal: Option<PathBuf>,
    /// The folder with the notes of places in which something is made.
    pub places: Option<PathBuf>,
    /// Finds out which processes are alive.
    pub processes: &'a dyn Processes,
    /// This process.
    pub process: ProcessIdentity,
    /// The name of the program, by which its processes are found.
    pub program: &'a str,
    /// Where sockets of backups are.
    pub runtime: PathBuf,
    /// Where scratch files of backups are.
    pub scratch: PathBuf,
    /// The repository whose snapshots need bitmaps.
    pub repository: Option<&'a Repository>,
    /// The time, in milliseconds since 1970-01-01 UTC.
    pub now_ms: &'a dyn Fn() -> i64,
    /// Gives numbers of runs.
    pub new_run: &'a dyn Fn() -> u32,
    /// What happens to an overlay whose content is in its base.
    pub emptied: EmptiedOverlays,
    /// Where host snapshots are looked for; none where they are not.
    pub storage: Option<DoctorStorage<'a>>,
}

/// What happens to an overlay whose content is in its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmptiedOverlays {
    /// It stays.
    Keep,
    /// It is deleted, where no machine has it.
    Delete,
}

/// A machine to be examined.
pub struct ExaminedMachine<'a> {
    /// The machine.
    pub machine: &'a dyn Machine,
    /// The address of its hypervisor.
    pub address: String,
    /// The words by which another process finds it.
    pub way: Vec<String>,
}

/// What was found, and what happened to it.
#[derive(Debug, Default)]
pub struct DoctorReport {
    /// What is wrong, or was.
    pub findings: Vec<Outcome>,
    /// What is worth knowing, and is as it should be.
    pub notes: Vec<String>,
}

/// A finding, and what happened to it.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// What is wrong, or was.
    pub finding: Finding,
    /// What happened to it.
    pub result: FindingState,
}

/// What happened to a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FindingState {
    /// Nothing was done.
    Left,
    /// It is repaired, in these words.
    Repaired(String),
    /// Mending it failed, in these words.
    Failed(String),
}

impl DoctorReport {
    /// How many findings are left.
    pub fn left_count(&self) -> usize {
        let is_repaired = |outcome: &&Outcome| matches!(outcome.result, FindingState::Repaired(_));
        self.findings.len() - self.findings.iter().filter(is_repaired).count()
    }
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The machine, where it is about one.
    pub machine: Option<String>,
    /// Of what kind it is.
    pub kind: FindingKind,
    /// What is wrong, in words.
    pub what: String,
    /// Since when, where that is known, in milliseconds since 1970-01-01 UTC.
    pub since_ms: Option<i64>,
    /// Whether the machine or its data are in danger.
    pub is_danger: bool,
    /// What is to be done.
    pub remedy: Action,
}

/// What is to be done about a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// This, in these words.
    Repair(Repair, String),
    /// Something that only a person can decide.
    Advice(String),
}

pub use host_work::DoctorStorage;
pub use pool::ExaminedPool;
pub use seen::{FindingKind, Repair};

/// Examines machines, and repairs what can be repaired.
///
/// # Errors
/// The journal or the repository cannot be read. What is wrong with one machine is a finding.
pub fn doctor(request: &DoctorRequest<'_>, execution: Execution, job: Job<'_>) -> Result<DoctorReport> {
    let mut report = DoctorReport::default();
    if execution == Execution::Execute {
        wait_for_watchdogs(request, job)?;
    }
    for round in 1..=ROUND_COUNT {
        job.interrupt.check()?;
        let seen = look(request, job)?;
        let (findings, notes) = diagnose(&seen);
        report.notes = notes;
        if execution == Execution::DryRun || round == ROUND_COUNT {
            report.findings.extend(findings.into_iter().map(untreated));
            break;
        }
        let failed: Vec<Finding> = report.failed().cloned().collect();
        let has_failed = |machine: &Option<String>| failed.iter().any(|failed| failed.machine == *machine);
        let is_new = |finding: &Finding| !failed.contains(finding);
        let (curable, others): (Vec<_>, Vec<_>) = findings.into_iter().partition(|finding| {
            let is_kept = finding.kind == FindingKind::DeadRun && has_failed(&finding.machine);
            matches!(finding.remedy, Action::Repair(..)) && is_new(finding) && !is_kept
        });
        if curable.is_empty() {
            let others = others.into_iter().filter(is_new);
            report.findings.extend(others.map(untreated));
            break;
        }
        let repaired: Vec<Option<String>> = curable
            .iter()
            .filter(|finding| finding.kind != FindingKind::DeadRun)
            .map(|finding| finding.machine.clone())
            .collect();
        for finding in curable {
            job.interrupt.check()?;
            // A note stays until another look finds nothing else of its machine: a repair may reveal more of the same run.
            if finding.kind == FindingKind::DeadRun && repaired.contains(&finding.machine) {
                continue;
            }
            let result = repair(request, &finding, job);
            report.findings.push(Outcome { finding, result });
        }
    }
    Ok(report)
}

/// Gives the watchdogs of dead runs time to finish: they are at the same work.
fn wait_for_watchdogs(request: &DoctorRequest<'_>, job: Job<'_>) -> Result<()> {
    let Some(folder) = &request.journal else {
        return Ok(());
    };
    let start = job.clock.now();
    loop {
        let dead = noted_runs(folder)?.into_iter();
        let mut dead = dead.filter(|note| note.liveness(request.processes) == Liveness::Dead);
        let living = processes_named(request.program).unwrap_or_default();
        let is_watched = dead.any(|note| {
            living
                .iter()
                .any(|process| is_watchdog_of(&process.arguments, note.run))
        });
        if !is_watched || job.clock.now().saturating_sub(start) >= WATCHDOG_PATIENCE {
            return Ok(());
        }
        job.interrupt.check()?;
        job.clock.sleep(WATCHDOG_INTERVAL);
    }
}

impl DoctorReport {
    fn failed(&self) -> impl Iterator<Item = &Finding> {
        let failed = self
            .findings
            .iter()
            .filter(|outcome| matches!(outcome.result, FindingState::Failed(_)));
        failed.map(|outcome| &outcome.finding)
    }
}

fn untreated(finding: Finding) -> Outcome {
    Outcome {
        finding,
        result: FindingState::Left,
    }
}
