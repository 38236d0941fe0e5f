//! Errors of hypervisors and their machines.

use crate::qemu::qmp::MonitorError;

/// Result of a call to a hypervisor.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a hypervisor or of a machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The hypervisor cannot be reached.
    #[error("cannot reach the hypervisor at {address}")]
    Unreachable {
        /// The address.
        address: String,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A monitor does not answer. It serves one client at a time, and another client is connected.
    #[error("QEMU does not answer at {address}: it serves one client at a time, and another one is connected")]
    MonitorInUse {
        /// Address of its monitor.
        address: String,
        /// The timeout.
        source: MonitorError,
    },
    /// There is no machine of this name.
    #[error("{hypervisor} has no machine {name:?}")]
    NoSuchMachine {
        /// The hypervisor.
        hypervisor: String,
        /// The name.
        name: String,
    },
    /// An operation of another client on the machine excludes this operation.
    #[error("the machine {machine} is busy: {holder}")]
    Busy {
        /// The machine.
        machine: String,
        /// The other client, as the hypervisor reports it.
        holder: String,
    },
    /// The hypervisor refuses an action, or the action fails.
    #[error("cannot {action} the machine {machine}: {reason}")]
    Refused {
        /// The action: "describe", "resume"...
        action: &'static str,
        /// The machine.
        machine: String,
        /// The hypervisor's message.
        reason: String,
    },
    /// The hypervisor's answer about a machine is invalid.
    #[error("the configuration of the machine {machine} is invalid: {detail}")]
    Configuration {
        /// The machine.
        machine: String,
        /// What is missing or wrong.
        detail: String,
    },
    /// A command to QEMU's monitor failed.
    #[error("the machine {machine}")]
    Monitor {
        /// The machine.
        machine: String,
        /// The command, and why it failed.
        source: MonitorError,
    },
}
