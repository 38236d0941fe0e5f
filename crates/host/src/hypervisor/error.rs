//! What can go wrong with hypervisors and their machines.

use crate::qemu::qmp::MonitorError;

/// Result of asking a hypervisor.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a hypervisor or of a machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no way to the hypervisor.
    #[error("cannot reach the hypervisor at {address}")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A monitor does not answer, because it serves one client at a time and another one is connected.
    #[error("QEMU does not answer at {address}: it serves one client at a time, and another one has it")]
    Taken {
        /// Where its monitor is.
        address: String,
        /// How long it was waited for.
        source: MonitorError,
    },
    /// There is no machine of this name.
    #[error("{hypervisor} has no machine {name:?}")]
    NoSuchMachine {
        /// Where it was looked for.
        hypervisor: String,
        /// The name.
        name: String,
    },
    /// Another client's operation on the machine excludes this one.
    #[error("the machine {machine} is busy: {holder}")]
    Busy {
        /// The machine.
        machine: String,
        /// The other client, as the hypervisor reports it.
        holder: String,
    },
    /// The hypervisor refuses, or fails.
    #[error("{action} the machine {machine}: {reason}")]
    Refused {
        /// What was tried: "describe", "resume"...
        action: &'static str,
        /// The machine.
        machine: String,
        /// The hypervisor's words.
        reason: String,
    },
    /// The hypervisor's answer about a machine is invalid.
    #[error("the configuration of the machine {machine} makes no sense: {detail}")]
    Configuration {
        /// The machine.
        machine: String,
        /// What is missing or wrong.
        detail: String,
    },
    /// QEMU's monitor.
    #[error("the machine {machine}")]
    Monitor {
        /// The machine.
        machine: String,
        /// What was tried, and why it failed.
        source: MonitorError,
    },
}
