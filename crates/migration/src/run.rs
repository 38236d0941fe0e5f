//! The migration of a machine that runs: the disks, then the memory, then both together while the machine is stopped.

use std::sync::mpsc::channel;

use holdfast_block::error_text;
use holdfast_engine::{Job, MIGRATION_SOCKETS, PullNote, PullRecord, RecordedDisk};
use holdfast_host::ConfigurationLanguage;
use holdfast_live_copy::{ConvergenceOptions, CopyDirector, TrackedSource, Unconverged};

use crate::complete::{arrived, complete, complete_arrived, obsolete_files};
use crate::disk_copy::{DiskRun, copy_disk};
use crate::disks::{MoveEvent, MoveOutcome, StoppedByHypervisor};
use crate::error::{Error, Result};
use crate::migration_tools::{MigrationTools, RunningTools};
use crate::mover::{MoveSetup, Mover};
use crate::plan::MigrationPlan;
use crate::post_copy::{ImageUse, PullSource, PulledMachine, pull};
use crate::report::{MigrationPhase, MigrationReport, PhaseDuration};

/// Moves a machine that runs.
///
/// # Errors
/// The machine runs here, unless the error says otherwise. The copies of the disks can be continued.
pub fn migrate_running(plan: &MigrationPlan, tools: &RunningTools<'_>, job: Job<'_>) -> Result<MigrationReport> {
    plan.require_no_obstacles()?;
    let [hypervisor, onward] = MIGRATION_SOCKETS.map(|name| tools.folder.join(name));
    if plan.language == ConfigurationLanguage::DomainXml {
        (tools.forward)(&hypervisor, &plan.far_socket)?;
    }
    (tools.forward)(&onward, &tools.memory_socket)?;
    let source = start_source(plan, &tools.common)?;
    let copied_count = if source.is_some() { 0 } else { plan.disks.len() };
    let directors: Vec<CopyDirector> = (0..copied_count).map(|_| CopyDirector::default()).collect();
    let outcome = MoveOutcome::default();
    let (events, inbox) = channel();
    let freezer = StoppedByHypervisor {
        events: std::sync::Mutex::new(events.clone()),
    };
    let started = tools.common.clock.now();
    let mut result = std::thread::scope(|scope| {
        for (disk, director) in directors.iter().enumerate() {
            let (events, outcome, freezer) = (events.clone(), &outcome, &freezer);
            scope.spawn(move || {
                let result = Box::new(TrackedSource::open(tools.tracked, disk, freezer).and_then(|source| {
                    let run = DiskRun {
                        disk,
                        source: &source,
                        convergence: convergence_options(tools),
                        attempt_count_max: tools.attempt_count_max + 1,
                        outcome,
                        director,
                    };
                    copy_disk(plan, &tools.common, &run, &events, job)
                }));
                events.send(MoveEvent::Ended { disk, result }).ok();
            });
        }
        let setup = MoveSetup {
            plan,
            tools,
            job,
            scope,
            hypervisor: &hypervisor,
            onward: &onward,
            events: events.clone(),
            directors: &directors,
            source: source.as_ref(),
        };
        Mover::new(setup).run(&inbox, &outcome)
    });
    match &mut result {
        Ok(report) => {
            match &source {
                Some(source) => pull_disks(plan, source, tools, report, job)?,
                None => complete(plan, &tools.common),
            }
            report.duration = tools.common.clock.now().saturating_sub(started);
        }
        // It may run there.
        Err(Error::Unresolved { .. }) => {}
        Err(_) => {
            if let Some(Err(error)) = source.as_ref().map(PullSource::forget) {
                tools.common.observer.left(&error_text(&error));
            }
        }
    }
    result
}

fn convergence_options(tools: &RunningTools<'_>) -> ConvergenceOptions {
    ConvergenceOptions {
        frozen_max: tools.frozen_max,
        // The rest of the memory, and the start there.
        other_frozen: tools.frozen_max / 2,
        throttle: tools.throttle,
        unconverged: Unconverged::GiveUp,
    }
}

/// Serves the disks that the other host pulls; none if they are copied.
fn start_source(plan: &MigrationPlan, tools: &MigrationTools<'_>) -> Result<Option<PullSource>> {
    let pulled = plan.pulled();
    if pulled.is_empty() {
        return Ok(None);
    }
    let disks = plan.disks.iter().map(|disk| RecordedDisk {
        disk: disk.target.clone(),
        path: disk.image.path.clone(),
        format: disk.image.format.clone(),
        path_there: disk.path.clone(),
    });
    let mut record = PullRecord::new(plan.machine.clone(), plan.uuid.clone(), tools.pull.destination.clone());
    record.disks = disks.collect();
    record.former_files.clone_from(&plan.former_files);
    let note = PullNote::begin(&tools.pull.records, record)?;
    let images = plan.disks.iter().map(|disk| disk.image.clone());
    let disks = pulled.into_iter().zip(images).collect();
    PullSource::start(disks, ImageUse::ByMachine, note, tools).map(Some)
}

fn pull_disks(
    plan: &MigrationPlan,
    source: &PullSource,
    tools: &RunningTools<'_>,
    report: &mut MigrationReport,
    job: Job<'_>,
) -> Result<()> {
    let tools = &tools.common;
    let locked = source.lock();
    let is_unfinished = complete_arrived(arrived(plan, tools), tools.far, tools).is_err();
    locked?;
    tools.observer.phase(MigrationPhase::Pull);
    let started = tools.clock.now();
    let machine = PulledMachine {
        name: &plan.machine,
        uuid: &plan.uuid,
        configuration: &plan.own_configuration,
        obsolete_files: obsolete_files(&plan.former_files, tools),
        unfinished: is_unfinished.then(|| arrived(plan, tools)),
    };
    report.pulled = pull(&machine, source, tools, job)?;
    report.phases.push(PhaseDuration {
        phase: MigrationPhase::Pull,
        duration: tools.clock.now().saturating_sub(started),
    });
    Ok(())
}
