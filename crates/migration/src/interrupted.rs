//! A migration that was interrupted when the machine was stopped. If it had sent all of its memory, it may run at the other
//! host, wait for its start there, or have ended.

use holdfast_host::InterruptedMigration;

use crate::error::{Error, Result};
use crate::far::{FarRequest, FarState};
use crate::migration_tools::MigrationTools;

/// Where a machine runs whose migration may have been interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settlement {
    /// It was not interrupted.
    NotInterrupted,
    /// It runs at the other host, and has ended here.
    Moved,
    /// It runs here again.
    StaysHere,
}

/// Completes an interrupted migration of a machine, or undoes it if the machine has not started at the other host.
///
/// # Errors
/// It was a migration to another host, or this one does not answer.
pub fn settle(machine: &str, uuid: &str, tools: &MigrationTools<'_>) -> Result<Settlement> {
    let failed = |error| Error::of_hypervisor(machine, error);
    let take_back = || tools.control.take_back(uuid).map_err(failed);
    let destination = match tools.control.interrupted(uuid).map_err(failed)? {
        None => return Ok(Settlement::NotInterrupted),
        Some(InterruptedMigration::Held) => {
            take_back()?;
            return Ok(Settlement::StaysHere);
        }
        Some(InterruptedMigration::Sent { destination }) => destination,
    };
    if destination != tools.pull.destination {
        return Err(Error::Interrupted {
            machine: machine.to_owned(),
            destination,
        });
    }
    match tools.far.state(uuid)? {
        FarState::Absent | FarState::ShutOff => {
            take_back()?;
            Ok(Settlement::StaysHere)
        }
        state => {
            // It has all of its memory there.
            if state != FarState::Running {
                tools.far.ask(&FarRequest::Start { uuid: uuid.to_owned() })?;
            }
            tools.control.power_off(uuid).map_err(failed)?;
            Ok(Settlement::Moved)
        }
    }
}
