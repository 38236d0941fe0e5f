//! The migration of a machine: the disks, then the memory, then both together while the machine is stopped.

use std::sync::mpsc::channel;

use holdfast_block::error_text;
use holdfast_engine::{Job, MIGRATION_SOCKETS};
use holdfast_host::Autostart;
use holdfast_live_copy::CopyDirector;

use crate::disk_copy::{DiskRun, copy_disk};
use crate::disks::{MoveEvent, MoveOutcome, StoppedByHypervisor};
use crate::error::Result;
use crate::far::FarRequest;
use crate::migration_tools::{FormerDisks, MigrationTools};
use crate::mover::{MoveSetup, Mover};
use crate::plan::MigrationPlan;
use crate::report::MigrationReport;

/// Moves a machine.
///
/// # Errors
/// The machine runs here, unless the error says otherwise. The copies of the disks can be continued.
pub fn migrate(plan: &MigrationPlan, tools: &MigrationTools<'_>, job: Job<'_>) -> Result<MigrationReport> {
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
    let started = tools.clock.now();
    let mut result = std::thread::scope(|scope| {
        for disk in 0..plan.disks.len() {
            let events = events.clone();
            let (outcome, freezer, directors) = (&outcome, &freezer, &directors);
            scope.spawn(move || {
                let copied = copy_disk(
                    plan,
                    tools,
                    &DiskRun {
                        disk,
                        outcome,
                        freezer,
                        director: &directors[disk],
                    },
                    &events,
                    job,
                );
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
        complete(plan, tools);
        report.duration = tools.clock.now().saturating_sub(started);
    }
    result
}

/// What is left to do when the machine runs there.
fn complete(plan: &MigrationPlan, tools: &MigrationTools<'_>) {
    let completed = tools.far.ask(&FarRequest::Complete {
        uuid: plan.uuid.clone(),
        starts_with_host: plan.starts_with_host,
        obsolete_files: match tools.former_disks {
            FormerDisks::Keep => Vec::new(),
            FormerDisks::Delete => plan.former_files.clone(),
        },
    });
    if let Err(error) = completed {
        tools.observer.left(&error_text(&error));
    }
    if plan.starts_with_host
        && let Err(error) = tools.control.set_autostart(&plan.uuid, Autostart::Off)
    {
        tools.observer.left(&format!(
            "the machine here would start with this host: {}",
            error_text(&error)
        ));
    }
}
