//! `doctor`: finds and repairs what killed processes left behind on machines and hosts.
//!
//! 1. [`look`] examines the machines and the host; nothing is changed.
//! 2. [`diagnose`] derives findings, as a pure function: each has a description, and a repair or advice for the administrator.
//! 3. Each finding is repaired separately ([`repair`]). Since one may have hidden another, the examination is then repeated a few times.

mod chains;
mod commit;
mod containers;
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
mod pulls;
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

/// Most rounds of examination: a repair may reveal another finding.
const ROUND_COUNT: usize = 6;
/// How long to wait for the watchdog of a dead run.
const WATCHDOG_PATIENCE: Duration = Duration::from_secs(10);
const WATCHDOG_INTERVAL: Duration = Duration::from_millis(100);

/// What to examine, and with which tools.
pub struct DoctorRequest<'a> {
    /// The libvirt and QEMU machines.
    pub subjects: Vec<ExaminedMachine<'a>>,
    /// The VirtualBox machines.
    pub virtualbox: Vec<VirtualBoxMachine<'a>>,
    /// The XenServer pools.
    pub pools: Vec<ExaminedPool>,
    /// The folders of containers to examine, besides those that are mounted.
    pub containers: Vec<PathBuf>,
    /// Ids of repositories that no longer exist: pools and containers need not keep anything for them.
    pub forgotten_repositories: Vec<String>,
    /// Machines that could not be reached, and why.
    pub unreachable: Vec<(String, String)>,
    /// The libvirt address that is examined.
    pub address: String,
    /// All machines of the same hypervisor: their files are never deleted.
    pub neighbours: Option<&'a dyn Hypervisor>,
    /// Commits overlays into their bases.
    pub overlays: Option<&'a dyn Overlays>,
    /// Whether all machines are examined; only then leftovers without a machine are searched.
    pub everything: bool,
    /// The folder of the journal of runs.
    pub journal: Option<PathBuf>,
    /// The folder with the notes of folders in which files are being created.
    pub places: Option<PathBuf>,
    /// The folder with the records of machines whose disks another host pulls.
    pub pulls: Option<PathBuf>,
    /// Finds out which processes are alive.
    pub processes: &'a dyn Processes,
    /// This process.
    pub process: ProcessIdentity,
    /// The program name of Holdfast's processes.
    pub program: &'a str,
    /// The folder with the sockets of backups.
    pub runtime: PathBuf,
    /// The folder with the scratch files of backups.
    pub scratch: PathBuf,
    /// The repository whose snapshots need bitmaps.
    pub repository: Option<&'a Repository>,
    /// The time, in milliseconds since 1970-01-01 UTC.
    pub now_ms: &'a dyn Fn() -> i64,
    /// Generates run numbers.
    pub new_run: &'a dyn Fn() -> u32,
    /// What to do with an overlay whose content is in its base.
    pub emptied: EmptiedOverlays,
    /// Where to look for host snapshots; none if they are not examined.
    pub storage: Option<DoctorStorage<'a>>,
}

/// What to do with an overlay whose content is in its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmptiedOverlays {
    /// It is kept.
    Keep,
    /// It is deleted if no machine uses it.
    Delete,
}

/// A machine to examine.
pub struct ExaminedMachine<'a> {
    /// The machine.
    pub machine: &'a dyn Machine,
    /// The address of its hypervisor.
    pub address: String,
    /// The arguments with which another process finds the machine.
    pub way: Vec<String>,
}

/// Result of an examination.
#[derive(Debug, Default)]
pub struct DoctorReport {
    /// The findings.
    pub findings: Vec<Outcome>,
    /// Remarks that are not problems.
    pub notes: Vec<String>,
}

/// A finding and its result.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The finding.
    pub finding: Finding,
    /// The result.
    pub result: FindingState,
}

/// Result of a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FindingState {
    /// Nothing was done.
    Left,
    /// It was repaired, as described.
    Repaired(String),
    /// The repair failed, for this reason.
    Failed(String),
}

impl DoctorReport {
    /// Number of findings that were not repaired.
    pub fn left_count(&self) -> usize {
        let is_repaired = |outcome: &&Outcome| matches!(outcome.result, FindingState::Repaired(_));
        self.findings.len() - self.findings.iter().filter(is_repaired).count()
    }
}

/// A problem that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The machine, if the finding is about one.
    pub machine: Option<String>,
    /// Its kind.
    pub kind: FindingKind,
    /// A description of the problem.
    pub what: String,
    /// Since when, if known, in milliseconds since 1970-01-01 UTC.
    pub since_ms: Option<i64>,
    /// Whether the machine or its data are in danger.
    pub is_danger: bool,
    /// The repair or advice.
    pub remedy: Action,
}

/// What to do about a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// This repair, with its description.
    Repair(Repair, String),
    /// Advice, if only the user can decide.
    Advice(String),
}

pub use host_work::DoctorStorage;
pub use pool::ExaminedPool;
pub use seen::{FindingKind, Repair};

/// Examines machines, and repairs what can be repaired.
///
/// # Errors
/// The journal or the repository cannot be read. A problem with one machine is a finding.
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
            // A note is kept until a later round finds nothing else of its machine: a repair may reveal more leftovers of the same run.
            if finding.kind == FindingKind::DeadRun && repaired.contains(&finding.machine) {
                continue;
            }
            let result = repair(request, &finding, job);
            report.findings.push(Outcome { finding, result });
        }
    }
    Ok(report)
}

/// Gives the watchdogs of dead runs time to finish, since they clean up too.
fn wait_for_watchdogs(request: &DoctorRequest<'_>, job: Job<'_>) -> Result<()> {
    let Some(folder) = &request.journal else {
        return Ok(());
    };
    let start = job.clock.now();
    loop {
        let dead = noted_runs(folder)?.into_iter();
        let mut dead = dead.filter(|note| note.liveness(request.processes) == Liveness::Dead);
        let processes = processes_named(request.program).unwrap_or_default();
        let is_watched = dead.any(|note| {
            processes
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
