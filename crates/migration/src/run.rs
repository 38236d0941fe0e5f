//! The migration of a machine that runs: the disks, then the memory, then both together while the machine is stopped.

use std::sync::mpsc::channel;

use holdfast_engine::{Job, MIGRATION_SOCKETS};
use holdfast_live_copy::{ConvergenceOptions, CopyDirector, TrackedSource, Unconverged};

use crate::complete::complete;
use crate::disk_copy::{DiskRun, copy_disk};
use crate::disks::{MoveEvent, MoveOutcome, StoppedByHypervisor};
use crate::error::Result;
use crate::migration_tools::RunningTools;
use crate::mover::{MoveSetup, Mover};
use crate::plan::MigrationPlan;
use crate::report::MigrationReport;

/// Moves a machine that runs.
///
/// # Errors
/// The machine runs here, unless the error says otherwise. The copies of the disks can be continued.
pub fn migrate_running(plan: &MigrationPlan, tools: &RunningTools<'_>, job: Job<'_>) -> Result<MigrationReport> {
    plan.require_no_obstacles()?;
    let [hypervisor, onward] = MIGRATION_SOCKETS.map(|name| tools.folder.join(name));
    (tools.forward)(&hypervisor, &plan.far_socket)?;
    (tools.forward)(&onward, &tools.memory_socket)?;
    let directors: Vec<CopyDirector> = plan.disks.iter().map(|_| CopyDirector::default()).collect();
    let outcome = MoveOutcome::default();
    let (events, inbox) = channel();
    let freezer = StoppedByHypervisor {
        events: std::sync::Mutex::new(events.clone()),
    };
    let started = tools.common.clock.now();
    let mut result = std::thread::scope(|scope| {
        for disk in 0..plan.disks.len() {
            let events = events.clone();
            let (outcome, freezer, directors) = (&outcome, &freezer, &directors);
            scope.spawn(move || {
                let copied = TrackedSource::open(tools.tracked, disk, freezer).and_then(|source| {
                    let run = DiskRun {
                        disk,
                        source: &source,
                        convergence: ConvergenceOptions {
                            frozen_max: tools.frozen_max,
                            // The rest of the memory, and the start there.
                            other_frozen: tools.frozen_max / 2,
                            throttle: tools.throttle,
                            unconverged: Unconverged::GiveUp,
                        },
                        attempt_count_max: tools.attempt_count_max + 1,
                        outcome,
                        director: &directors[disk],
                    };
                    copy_disk(plan, &tools.common, &run, &events, job)
                });
                let result = Box::new(copied);
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
        };
        Mover::new(setup).run(&inbox, &outcome)
    });
    if let Ok(report) = &mut result {
        complete(plan, &tools.common);
        report.duration = tools.common.clock.now().saturating_sub(started);
    }
    result
}
