//! The QEMU machine protocol: commands to a running QEMU, and its events.
//!
//! Source: QEMU's `docs/interop/qmp-spec.rst`. A [`Monitor`] transports the commands: a socket of Holdfast
//! ([`QmpSocket`]), or libvirt, which has QEMU's socket open.

mod logged;
mod message;
mod queued;
mod socket;

use std::os::fd::OwnedFd;
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::Value;

pub(crate) use logged::logged;
pub use message::Event;
pub use queued::QueuedSocket;
pub use socket::QmpSocket;

/// Result of a command.
pub type Result<T> = std::result::Result<T, MonitorError>;

/// The name of QEMU's monitor in notes of waits.
const MONITOR: &str = "QEMU's monitor";

/// A connection to QEMU's monitor.
pub trait Monitor: Send + Sync {
    /// Executes a command, and waits for the answer.
    fn execute(&self, command: &QmpCommand) -> Result<Value>;

    /// Restores the connection if a daemon in between may have been restarted. Commands never reconnect themselves:
    /// if the answer is lost, the command may have been executed.
    fn wake(&self) -> Result<()> {
        Ok(())
    }
}

/// Restores the connection of a monitor, with retries while a daemon in between restarts.
///
/// # Errors
/// The last error, after half a minute.
pub fn wake_with_retries(monitor: &dyn Monitor, clock: &dyn Clock) -> Result<()> {
    let start = clock.now();
    loop {
        match monitor.wake() {
            Err(_) if clock.now().saturating_sub(start) < DEADLINE => clock.sleep(WAKE_INTERVAL),
            other => return other,
        }
    }
}

/// Repeats a query until there is an answer, also while a daemon in between restarts. `ask` must be idempotent: it is
/// repeated if an answer is lost.
///
/// # Errors
/// A refusal by QEMU is returned immediately, a lost connection after half a minute.
pub fn query_with_retries<T>(
    monitor: &dyn Monitor,
    clock: &dyn Clock,
    ask: &dyn Fn(&dyn Monitor) -> Result<T>,
) -> Result<T> {
    let start = clock.now();
    loop {
        match ask(monitor) {
            Err(MonitorError::Transport { .. }) if clock.now().saturating_sub(start) < DEADLINE => {
                clock.sleep(WAKE_INTERVAL);
                wake_with_retries(monitor, clock)?;
            }
            other => return other,
        }
    }
}

/// A command.
#[derive(Debug)]
pub struct QmpCommand {
    /// The name: "query-block".
    pub name: &'static str,
    /// The arguments, an object; [`Value::Null`] if it has none.
    pub arguments: Value,
    /// Open files to pass to QEMU.
    pub files: Vec<OwnedFd>,
    /// The timeout of the answer.
    pub deadline: Duration,
}

/// QEMU answers most commands within milliseconds. While it waits for a slow disk, it answers none.
const DEADLINE: Duration = Duration::from_secs(30);
const WAKE_INTERVAL: Duration = Duration::from_millis(200);

impl QmpCommand {
    /// A command without files, with a timeout of half a minute.
    pub fn new(name: &'static str, arguments: Value) -> Self {
        Self {
            name,
            arguments,
            files: Vec::new(),
            deadline: DEADLINE,
        }
    }

    /// Adds an open file to the command.
    #[must_use]
    pub fn with_file(mut self, file: OwnedFd) -> Self {
        self.files.push(file);
        self
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// QEMU refused the command.
    #[error("QEMU refuses {command}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// "GenericError", "DeviceNotFound"...
        class: String,
        /// QEMU's message.
        description: String,
    },
    /// QEMU, or its machine, is busy with an exclusive operation of another client.
    #[error("QEMU is busy with {with}")]
    Busy {
        /// The operation, if known.
        with: String,
    },
    /// A defect of this QEMU would be triggered; nothing was done.
    #[error("the disk {device} cannot be frozen: {why}")]
    Dangerous {
        /// The QOM path of the device.
        device: String,
        /// The context of the disk, and the consequence.
        why: String,
    },
    /// There was no answer in time. It is unknown whether QEMU will still execute the command.
    #[error("QEMU did not answer {command} within {} ms", after.as_millis())]
    TimedOut {
        /// The command.
        command: String,
        /// The timeout.
        after: Duration,
    },
    /// The connection is lost: QEMU has ended, or the daemon in between.
    #[error("the connection to QEMU's monitor was lost ({during})")]
    Gone {
        /// The action.
        during: String,
        /// The operating system's reason, if there is one.
        source: Option<std::io::Error>,
    },
    /// An answer is invalid.
    #[error("QEMU's answer to {command} is invalid: {detail}")]
    Invalid {
        /// The command.
        command: String,
        /// What is missing or wrong.
        detail: String,
    },
    /// An action failed, and the cleanup in QEMU failed, too.
    #[error("{because}; the cleanup in QEMU failed, too: {left}")]
    Left {
        /// The first error.
        because: Box<MonitorError>,
        /// The error of the cleanup.
        left: Box<MonitorError>,
    },
    /// The command could not be passed to QEMU.
    #[error("{command} could not be sent to QEMU")]
    Transport {
        /// The command.
        command: String,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// The line of a command, for a monitor that another process has open.
pub(crate) fn line_of(command: &QmpCommand) -> String {
    message::object_of(command).to_string()
}

/// Parses the answer from a monitor that another process has open.
pub(crate) fn answer_of(command: &str, text: &[u8]) -> Result<Value> {
    match message::decode(text) {
        Ok(message::Message::Answer(_, found)) => message::answer(command, found),
        Ok(_) => Err(MonitorError::Invalid {
            command: command.to_owned(),
            detail: "not an answer".to_owned(),
        }),
        Err(detail) => Err(MonitorError::Invalid {
            command: command.to_owned(),
            detail,
        }),
    }
}

impl MonitorError {
    /// Whether QEMU refused the command: nothing has changed.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}
