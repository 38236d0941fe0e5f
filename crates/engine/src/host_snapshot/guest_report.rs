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
    /// Its state.
    pub state: MachineState,
    /// The result of freezing its file systems.
    pub quiesced: Quiesced,
    /// How long it was paused; none if no pause was needed.
    pub paused: Option<Duration>,
    /// Bytes of its memory, if that was captured.
    pub memory_bytes: Option<u64>,
}

impl GuestReport {
    /// The consistency of the snapshot together with the stored state: "memory", "file system", "crash", or "shut off".
    pub fn consistency(&self) -> &'static str {
        match self.memory_bytes {
            Some(_) => "memory",
            None => self.consistency_of_disks(),
        }
    }

    /// The consistency of the disks alone.
    pub(super) fn consistency_of_disks(&self) -> &'static str {
        match self.state {
            MachineState::ShutOff => "shut off",
            _ => self.quiesced.consistency(),
        }
    }
}
