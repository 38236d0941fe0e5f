//! The end of every migration.

use std::path::PathBuf;

use holdfast_block::error_text;
use holdfast_host::{Autostart, MachineState};

use crate::far::{FarRequest, FarState};
use crate::migration_tools::{FormerDisks, MigrationTools};
use crate::plan::MigrationPlan;

/// What is left to do when the machine is there.
pub(crate) fn complete(plan: &MigrationPlan, tools: &MigrationTools<'_>) {
    let completed = tools.far.ask(&FarRequest::Complete {
        uuid: plan.uuid.clone(),
        state: match plan.state {
            MachineState::Running => FarState::Running,
            _ => FarState::ShutOff,
        },
        starts_with_host: plan.starts_with_host,
        // Whether a disk that is pulled depends on another file is known when it is complete.
        obsolete_files: if plan.is_pulled() {
            Vec::new()
        } else {
            obsolete_files(plan, tools)
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

/// What the machine had there before, and does not need any more.
pub(crate) fn obsolete_files(plan: &MigrationPlan, tools: &MigrationTools<'_>) -> Vec<PathBuf> {
    match tools.former_disks {
        FormerDisks::Keep => Vec::new(),
        FormerDisks::Delete => plan.former_files.clone(),
    }
}
