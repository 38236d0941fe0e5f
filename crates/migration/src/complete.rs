//! The end of every migration.

use std::path::PathBuf;

use holdfast_block::error_text;
use holdfast_host::{Autostart, MachineState};

use crate::error::{Error, Result};
use crate::far::{FarHost, FarRequest, FarState};
use crate::migration_tools::{FormerDisks, MigrationTools};
use crate::plan::MigrationPlan;

/// A machine that is at the other host.
#[derive(Clone)]
pub(crate) struct ArrivedMachine<'a> {
    pub(crate) uuid: &'a str,
    /// Its state there.
    pub(crate) state: FarState,
    pub(crate) starts_with_host: bool,
    /// Files there that are deleted.
    pub(crate) obsolete_files: Vec<PathBuf>,
}

/// What is left to do when the machine of a plan is there.
pub(crate) fn complete(plan: &MigrationPlan, tools: &MigrationTools<'_>) {
    let mut completed = complete_arrived(arrived(plan, tools), tools.far, tools);
    if let Err(Error::FarHost { .. }) = completed
        && let Ok(far) = (tools.reach_far_again)()
    {
        completed = complete_arrived(arrived(plan, tools), &far, tools);
    }
    if let Err(error) = completed {
        tools.observer.left(&error_text(&error));
    }
}

/// The machine of a plan, at the other host.
pub(crate) fn arrived<'a>(plan: &'a MigrationPlan, tools: &MigrationTools<'_>) -> ArrivedMachine<'a> {
    ArrivedMachine {
        uuid: &plan.uuid,
        state: match plan.state {
            MachineState::Running => FarState::Running,
            _ => FarState::ShutOff,
        },
        starts_with_host: plan.starts_with_host,
        // Whether a disk that is pulled depends on another file is known when it is complete.
        obsolete_files: if plan.is_pulled() {
            Vec::new()
        } else {
            obsolete_files(&plan.former_files, tools)
        },
    }
}

/// Does what is left to do at both hosts.
///
/// # Errors
/// The other host could not do all of it. The machine does not start with this host any more.
pub(crate) fn complete_arrived(machine: ArrivedMachine<'_>, far: &FarHost, tools: &MigrationTools<'_>) -> Result<()> {
    let completed = far.ask(&FarRequest::Complete {
        uuid: machine.uuid.to_owned(),
        state: machine.state,
        starts_with_host: machine.starts_with_host,
        obsolete_files: machine.obsolete_files,
    });
    if machine.starts_with_host
        && let Err(error) = tools.control.set_autostart(machine.uuid, Autostart::Off)
    {
        tools.observer.left(&format!(
            "the machine here would start with this host: {}",
            error_text(&error)
        ));
    }
    completed.map(drop)
}

/// The files that the machine had there before, if they are deleted.
pub(crate) fn obsolete_files(former_files: &[PathBuf], tools: &MigrationTools<'_>) -> Vec<PathBuf> {
    match tools.former_disks {
        FormerDisks::Keep => Vec::new(),
        FormerDisks::Delete => former_files.to_vec(),
    }
}
