//! What happened to a machine at the point in time of host snapshots.

use std::time::Duration;

use holdfast_host::MachineState;

use crate::machine::quiesce::Quiesced;

/// What happened to a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestReport {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// What it was doing.
    pub state: MachineState,
    /// What happened to freezing its file systems.
    pub quiesced: Quiesced,
    /// How long it was paused; none where it did not have to.
    pub paused: Option<Duration>,
    /// Bytes of its memory, where that was taken.
    pub memory_bytes: Option<u64>,
}

impl GuestReport {
    /// What is in the snapshot of it, with what is kept beside it: "memory", "file system", "crash", or "shut off".
    pub fn consistency(&self) -> &'static str {
        match self.memory_bytes {
            Some(_) => "memory",
            None => self.consistency_of_disks(),
        }
    }

    /// What the disks alone are worth.
    pub(super) fn consistency_of_disks(&self) -> &'static str {
        match self.state {
            MachineState::ShutOff => "shut off",
            _ => self.quiesced.consistency(),
        }
    }
}
