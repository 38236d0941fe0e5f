//! Errors of a restore that lets the machine run while its disks are filled.

use std::path::PathBuf;

/// Why the disks of a running machine cannot be filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstantError {
    /// No instant restore of the machine is known.
    #[error("the disks of the machine {machine} are not being filled")]
    NotFilled {
        /// The machine.
        machine: String,
    },
    /// The file with the state of the restore cannot be used.
    #[error("{}: {reason}", path.display())]
    Job {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Another process is already filling the disks of the machine.
    #[error("another process is filling the disks of {machine}")]
    Busy {
        /// The machine.
        machine: String,
    },
    /// The server for a machine whose disks are being filled does not start.
    #[error("the server of the disks of {machine} does not start: {reason}")]
    Server {
        /// The machine.
        machine: String,
        /// Why.
        reason: String,
    },
    /// The disks are not complete, and no process fills them.
    #[error("the disks of {machine} are not filled yet: {reason}; nothing is lost")]
    Stopped {
        /// The machine.
        machine: String,
        /// Why.
        reason: String,
    },
}
