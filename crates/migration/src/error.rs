//! The errors of this crate.

use std::path::PathBuf;

use holdfast_host::ToolError;

/// Result of a migration.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a machine was not moved. Unless the error says otherwise, it runs at the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error that other jobs have, too.
    #[error(transparent)]
    Engine(Box<holdfast_engine::Error>),
    /// A disk could not be copied.
    #[error("disk {disk}")]
    Disk {
        /// The disk.
        disk: String,
        /// Why.
        source: Box<holdfast_live_copy::Error>,
    },
    /// The program of the other host cannot be started, or its connection broke.
    #[error("the holdfast of {host} does not answer: {reason}")]
    FarHost {
        /// The host.
        host: String,
        /// Why.
        reason: String,
    },
    /// The state of the TPM of a machine that is shut off cannot be read.
    #[error("{machine}: {reason}")]
    TpmState {
        /// The machine.
        machine: String,
        /// Why.
        reason: String,
    },
    /// The other host refuses a request.
    #[error("{host}: {reason}")]
    Refused {
        /// The host.
        host: String,
        /// Its reason.
        reason: String,
    },
    /// Something prevents the migration; nothing was changed.
    #[error("{machine} cannot be migrated: {}", obstacles.join("; "))]
    Obstacles {
        /// The machine.
        machine: String,
        /// What prevents it.
        obstacles: Vec<String>,
    },
    /// A socket of the other host cannot be reached.
    #[error("a socket of {host} cannot be forwarded")]
    Forward {
        /// The host.
        host: String,
        /// Why.
        source: ToolError,
    },
    /// The relay of the memory could not be made.
    #[error("could not create the socket for the memory, {}", path.display())]
    Relay {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The hypervisor has not moved the machine.
    #[error("the hypervisor has not migrated {machine}")]
    Hypervisor {
        /// The machine.
        machine: String,
        /// Why.
        source: Box<holdfast_host::Error>,
    },
    /// The guest changes its memory faster than it can be sent.
    #[error(
        "the memory of {machine} changes faster than it can be sent: {changed_bytes_per_s} bytes per second are changed, \
         {sent_bytes_per_s} are sent, and {remaining_bytes} remain after each pass"
    )]
    MemoryChangesTooFast {
        /// The machine.
        machine: String,
        /// What the guest changes per second.
        changed_bytes_per_s: u64,
        /// What is sent per second.
        sent_bytes_per_s: u64,
        /// What is left when a pass begins.
        remaining_bytes: u64,
    },
    /// Every attempt would have stopped the machine for too long.
    #[error(
        "{machine} was stopped for longer than {frozen_max_ms} ms in {attempt_count} attempts, and runs here again"
    )]
    FrozenTooLong {
        /// The machine.
        machine: String,
        /// Number of attempts.
        attempt_count: u32,
        /// The limit.
        frozen_max_ms: u128,
    },
    /// The receivers have not confirmed in time that they own the disks.
    #[error("{host} did not confirm that it has all disks of {machine}, which runs here again")]
    NotHandedOver {
        /// The machine.
        machine: String,
        /// The other host.
        host: String,
    },
    /// The rest of the disks was not pulled.
    #[error("{machine} is at {host}, and a part of its disks is still here only: {reason}")]
    NotPulled {
        /// The machine.
        machine: String,
        /// The other host.
        host: String,
        /// Why.
        reason: String,
    },
    /// A disk that the other host pulls has changed here.
    #[error("{machine} has moved, and the rest of its disk {disk} cannot be pulled: {reason}")]
    SourceChanged {
        /// The machine.
        machine: String,
        /// The disk.
        disk: String,
        /// What has happened.
        reason: String,
    },
    /// The machine was moved to another host than the one that was named.
    #[error(
        "{machine} was moved to {destination}, which may need the disks here, and it is not at the host that was named; the record \
         of that is {}",
        record.display()
    )]
    ElsewherePulled {
        /// The machine.
        machine: String,
        /// Where it was moved to.
        destination: String,
        /// The record of the move.
        record: PathBuf,
    },
    /// A migration to another address was interrupted, and the machine may run there.
    #[error("a migration of {machine} to {destination} was interrupted, and it may run there")]
    Interrupted {
        /// The machine.
        machine: String,
        /// The address.
        destination: String,
    },
    /// The machine was switched off, or has crashed, while it was moved.
    #[error("{machine} {how}")]
    Ended {
        /// The machine.
        machine: String,
        /// How.
        how: String,
    },
    /// The machine was paused while its memory was sent, by another program or because of an error.
    #[error("{machine} was paused here while it was moved ({state})")]
    Paused {
        /// The machine.
        machine: String,
        /// QEMU's word for its state.
        state: String,
    },
    /// What uses the container could not be stopped.
    #[error("what uses the container could not be stopped: {reason}")]
    Stop {
        /// Why.
        reason: String,
    },
    /// Programs write to the container faster than it is copied.
    #[error(
        "{} is written faster than it is copied: the last round sent {bytes} bytes in {took_ms} ms, and it may be unmounted for \
         {frozen_max_ms} ms",
        container.display()
    )]
    ContainerChangesTooFast {
        /// The container.
        container: PathBuf,
        /// Bytes of the last round.
        bytes: u64,
        /// How long it took.
        took_ms: u128,
        /// The limit.
        frozen_max_ms: u128,
    },
    /// The other host has failed at the end, and may have the container or not.
    #[error("whether {} is at {target} is not known: {reason}", container.display())]
    ContainerUnresolved {
        /// The container here, which is not used.
        container: PathBuf,
        /// Its address there.
        target: String,
        /// The failure.
        reason: String,
    },
    /// The hypervisor has failed after the disks were handed over, and the machine runs nowhere, or may run at both hosts.
    #[error("the hypervisor has failed at the end of the migration of {machine}; here: {here}; at {host}: {there}")]
    Unresolved {
        /// The machine.
        machine: String,
        /// Its state here.
        here: String,
        /// The other host.
        host: String,
        /// The state of the machine there, or why it is not known.
        there: String,
        /// The failure.
        source: Box<holdfast_host::Error>,
    },
}

impl Error {
    /// A failure of the hypervisor to migrate a machine.
    pub(crate) fn of_hypervisor(machine: &str, source: holdfast_host::Error) -> Self {
        Self::Hypervisor {
            machine: machine.to_owned(),
            source: Box::new(source),
        }
    }
}

impl From<holdfast_engine::Error> for Error {
    fn from(error: holdfast_engine::Error) -> Self {
        Self::Engine(Box::new(error))
    }
}

impl From<holdfast_host::Error> for Error {
    fn from(error: holdfast_host::Error) -> Self {
        Self::Engine(Box::new(error.into()))
    }
}
