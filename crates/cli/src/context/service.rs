//! Messages to systemd with sd_notify(3), which sends datagrams to a socket.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use holdfast_daemon::{ServiceState, Severity};

use crate::context::Context;
use crate::output::printable;
use crate::process::environment;

/// The service manager, if this process is a service.
pub struct Service {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// The timeout of its watchdog.
    watchdog: Option<Duration>,
}

impl Service {
    /// Reads the environment.
    pub fn of(context: &Context) -> Self {
        let address =
            context
                .variable(environment::NOTIFY_SOCKET)
                .and_then(|path| match path.as_bytes().strip_prefix(b"@") {
                    Some(name) => SocketAddr::from_abstract_name(name).ok(),
                    None => SocketAddr::from_pathname(path).ok(),
                });
        let socket = address.and_then(|address| Some((UnixDatagram::unbound().ok()?, address)));
        let micros = context
            .variable(environment::WATCHDOG_USEC)
            .and_then(|text| text.to_str()?.parse().ok());
        Self {
            socket,
            watchdog: micros.map(Duration::from_micros),
        }
    }

    /// The interval in which the watchdog must be notified.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        self.watchdog.map(|watchdog| watchdog / 3)
    }

    /// Sends the state to systemd.
    pub fn report(&self, state: &ServiceState) {
        let text = match state {
            ServiceState::Ready => "READY=1".to_owned(),
            ServiceState::Alive(what) => format!("WATCHDOG=1\nSTATUS={}", printable(what)),
            ServiceState::Reloading => "RELOADING=1".to_owned(),
            ServiceState::Stopping => "STOPPING=1".to_owned(),
        };
        if let Some((socket, address)) = &self.socket {
            // Errors are ignored: if systemd expects messages, its watchdog detects their absence.
            socket.send_to_addr(text.as_bytes(), address).ok();
        }
    }
}

/// The reader of standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogReader {
    /// The journal of systemd, which reads the severity from the prefix of a line.
    Journal,
    /// A terminal or a file.
    Plain,
}

impl LogReader {
    /// Reads the environment.
    pub fn of(context: &Context) -> Self {
        match context.variable(environment::JOURNAL_STREAM) {
            Some(_) => Self::Journal,
            None => Self::Plain,
        }
    }
}

/// Formats a message for the reader.
pub fn line(severity: Severity, text: &str, reader: LogReader) -> String {
    let text = printable(text);
    match (severity, reader) {
        (Severity::Error, LogReader::Journal) => format!("<3>{text}"),
        (Severity::Warning, LogReader::Journal) => format!("<4>{text}"),
        (Severity::Info, LogReader::Journal) => format!("<6>{text}"),
        (Severity::Error, LogReader::Plain) => format!("holdfast: error: {text}"),
        (Severity::Warning, LogReader::Plain) => format!("holdfast: warning: {text}"),
        (Severity::Info, LogReader::Plain) => format!("holdfast: {text}"),
    }
}
