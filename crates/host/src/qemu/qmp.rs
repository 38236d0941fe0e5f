//! The QEMU machine protocol: commands to a running QEMU, and its events.
//!
//! Source: QEMU's `docs/interop/qmp-spec.rst`. How commands reach QEMU is a [`Monitor`]'s business: a socket of its own
//! ([`QmpSocket`]), or libvirt, which has the socket open already.

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

/// What notes of waits call the one at the other end.
const MONITOR: &str = "QEMU's monitor";

/// A way to QEMU's monitor.
pub trait Monitor: Send + Sync {
    /// Does a command, and waits for the answer.
    fn execute(&self, command: &QmpCommand) -> Result<Value>;

    /// Makes sure that there is a way, after a time in which whoever stands in between may have been restarted. Commands never do
    /// that by themselves: one whose answer is lost may have been done.
    fn wake(&self) -> Result<()> {
        Ok(())
    }
}

/// Wakes a monitor, with retries while a daemon in between restarts.
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

/// Repeats a query until there is an answer, across restarts of a daemon in between. `ask` must be idempotent: it is repeated if an answer is lost.
///
/// # Errors
/// QEMU's refusal at once; a lost connection after half a minute.
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
    /// What it is called: "query-block".
    pub name: &'static str,
    /// Its arguments, an object; [`Value::Null`] where it has none.
    pub arguments: Value,
    /// Open files that QEMU is to get with it.
    pub files: Vec<OwnedFd>,
    /// How long an answer is waited for.
    pub deadline: Duration,
}

/// QEMU answers most commands within milliseconds; it does nothing else while it waits for a slow disk.
const DEADLINE: Duration = Duration::from_secs(30);
const WAKE_INTERVAL: Duration = Duration::from_millis(200);

impl QmpCommand {
    /// A command without files, and half a minute for it.
    pub fn new(name: &'static str, arguments: Value) -> Self {
        Self {
            name,
            arguments,
            files: Vec::new(),
            deadline: DEADLINE,
        }
    }

    /// The same with a file.
    #[must_use]
    pub fn with_file(mut self, file: OwnedFd) -> Self {
        self.files.push(file);
        self
    }
}

/// Why there is no answer, or not the one that was wished for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// QEMU refuses.
    #[error("QEMU refuses {command}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// "GenericError", "DeviceNotFound"...
        class: String,
        /// QEMU's words.
        description: String,
    },
    /// QEMU, or its machine, is busy with an exclusive operation of another client.
    #[error("QEMU is busy with {with}")]
    Busy {
        /// The operation, if known.
        with: String,
    },
    /// This QEMU would not survive what was asked for; nothing was done.
    #[error("the disk {device} cannot be frozen: {why}")]
    Dangerous {
        /// The device, as a path of QEMU's object model.
        device: String,
        /// Where it is, and what would happen.
        why: String,
    },
    /// There is no answer in time. Whether QEMU does it later is not known.
    #[error("QEMU did not answer {command} within {} ms", after.as_millis())]
    TimedOut {
        /// The command.
        command: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// The connection is gone: QEMU has ended, or was taken away.
    #[error("the connection to QEMU's monitor is gone ({during})")]
    Gone {
        /// What was going on.
        during: String,
        /// The operating system's reason, where it gave one.
        source: Option<std::io::Error>,
    },
    /// An answer makes no sense.
    #[error("QEMU's answer to {command} makes no sense: {detail}")]
    Senseless {
        /// The command.
        command: String,
        /// What is missing or wrong.
        detail: String,
    },
    /// Something went wrong, and what had been made until then could not all be taken out of QEMU again.
    #[error("{because}; and not everything could be taken out of QEMU again: {left}")]
    Left {
        /// What went wrong first.
        because: Box<MonitorError>,
        /// What could not be taken out, and why.
        left: Box<MonitorError>,
    },
    /// What passes the command on to QEMU fails.
    #[error("{command} does not reach QEMU")]
    Transport {
        /// The command.
        command: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// The line of a command, for a monitor that another process has open.
pub(crate) fn line_of(command: &QmpCommand) -> String {
    message::object_of(command).to_string()
}

/// The answer in the text of another process's monitor.
pub(crate) fn answer_of(command: &str, text: &[u8]) -> Result<Value> {
    match message::decode(text) {
        Ok(message::Message::Answer(_, found)) => message::answer(command, found),
        Ok(_) => Err(MonitorError::Senseless {
            command: command.to_owned(),
            detail: "it is no answer".to_owned(),
        }),
        Err(detail) => Err(MonitorError::Senseless {
            command: command.to_owned(),
            detail,
        }),
    }
}

impl MonitorError {
    /// Whether QEMU was asked and said no: nothing has changed.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}
