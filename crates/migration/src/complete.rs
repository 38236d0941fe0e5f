//! The end of every migration.

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
