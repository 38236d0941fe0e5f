//! The state of a machine whose backup failed. Nothing is reported about a machine that could not be asked.

use std::time::Duration;

use holdfast_host::qmp::QmpCommand;
use holdfast_host::{Machine, MachineEnd};
use serde_json::Value;

use crate::job::{Error, Job};

/// A hypervisor needs a moment to notice that a QEMU has ended.
const ATTEMPT_COUNT: u32 = 20;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(100);

/// The state of a machine after a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    /// It has ended.
    Ended(MachineEnd),
    /// Its processors run.
    Runs,
    /// Its QEMU answers, and its processors are paused.
    Paused,
    /// Neither its hypervisor nor its QEMU answers.
    Unknown,
}

impl Fate {
    /// Asks the machine's hypervisor and its QEMU.
    pub(super) fn of(machine: &dyn Machine, job: Job<'_>) -> Self {
        let status = QmpCommand::new("query-status", Value::Null);
        for _ in 0..ATTEMPT_COUNT {
            if let Some(how) = machine.ended() {
                return Self::Ended(how);
            }
            match machine.monitor().execute(&status) {
                Ok(status) if status["running"] == true => return Self::Runs,
                Ok(_) => return Self::Paused,
                Err(_) => job.clock.sleep(ATTEMPT_INTERVAL),
            }
            // A proxy to QEMU may have been restarted. If not, the next request fails like this one.
            machine.monitor().wake().ok();
        }
        Self::Unknown
    }
}

impl std::fmt::Display for Fate {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ended(how) => write!(formatter, "the machine {how}"),
            Self::Runs => formatter.write_str("the machine runs"),
            Self::Paused => formatter.write_str("the machine is paused"),
            Self::Unknown => formatter.write_str("whether the machine runs is not known: its QEMU does not answer"),
        }
    }
}

/// The error of a failed backup, or that the machine has ended if that is the cause.
pub(super) fn explained(error: Error, machine: &dyn Machine, name: &str, job: Job<'_>) -> Error {
    if matches!(error, Error::MachineEnded { .. } | Error::Interrupted(_)) {
        return error;
    }
    let Fate::Ended(how) = Fate::of(machine, job) else {
        return error;
    };
    let machine = name.to_owned();
    if is_of_machine(&error) {
        return Error::MachineEnded { machine, how };
    }
    job.progress.warning(&format!("{machine} {how} during the backup"));
    error
}

/// Whether the end of the machine may be the cause of an error.
fn is_of_machine(error: &Error) -> bool {
    match error {
        Error::Repository(holdfast_repo::Error::Device { role, .. }) => *role == "source",
        Error::Host(_)
        | Error::Device(_)
        | Error::Exchange(_)
        | Error::Image(_)
        | Error::NoDevice { .. }
        | Error::NotQuiesced { .. }
        | Error::Frozen { .. }
        | Error::FrozenBroken { .. }
        | Error::MemoryNotKept { .. }
        | Error::MemoryNotSent { .. } => true,
        _ => false,
    }
}
