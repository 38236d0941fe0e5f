//! Events of a target server, which its owner can log or count.

use std::io;

use holdfast_block::Error as DeviceError;

use crate::server::peer::Peer;
use crate::server::receive::ReceiveEnd;

/// Why a connection of an initiator ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum InitiatorGone {
    /// The initiator logged out.
    LoggedOut,
    /// The initiator closed its end between two messages.
    ByInitiator,
    /// The server was stopped.
    ByServer,
    /// Another session of the same initiator took the place of this one, or the target was reset.
    Replaced,
    /// The target was removed during the login.
    TargetRemoved,
    /// The login failed.
    LoginFailed(&'static str),
    /// The initiator closed its end in the middle of a message, or took too long.
    Abandoned(&'static str),
    /// The input is not valid iSCSI.
    Malformed(&'static str),
    /// The socket failed.
    Io(io::Error),
}

impl From<ReceiveEnd> for InitiatorGone {
    fn from(end: ReceiveEnd) -> Self {
        match end {
            ReceiveEnd::ByPeer => Self::ByInitiator,
            ReceiveEnd::Idle => Self::Abandoned("the initiator was idle for too long"),
            ReceiveEnd::Abandoned(reason) => Self::Abandoned(reason),
            ReceiveEnd::Io(error) => Self::Io(error),
        }
    }
}

/// An event.
#[derive(Debug)]
#[non_exhaustive]
pub enum TargetEvent<'a> {
    /// An initiator connected; the login begins.
    Connected {
        /// The initiator's connection.
        peer: &'a Peer,
    },
    /// A connection was refused, because the maximum number is reached.
    TooMany {
        /// The initiator's connection.
        peer: &'a Peer,
    },
    /// A login succeeded.
    LoggedIn {
        /// The initiator's connection.
        peer: &'a Peer,
        /// The initiator's name.
        initiator: &'a str,
        /// The target's name; `None` for a discovery session.
        target: Option<&'a str>,
    },
    /// The device of a logical unit failed; the initiator got an error.
    CommandFailed {
        /// The initiator's connection.
        peer: &'a Peer,
        /// The target's name.
        target: &'a str,
        /// The operation: "read", "write"...
        action: &'static str,
        /// The error.
        error: &'a DeviceError,
    },
    /// A connection ended.
    Disconnected {
        /// The initiator's connection.
        peer: &'a Peer,
        /// The reason.
        reason: &'a InitiatorGone,
    },
    /// A connection could not be accepted or set up. The server continues.
    AcceptFailed {
        /// The error.
        error: &'a io::Error,
    },
}

/// Receives events on any thread of the server. Implementations must return quickly.
pub trait TargetEventSink: Send + Sync {
    /// Handles `event`.
    fn target_event(&self, event: &TargetEvent<'_>);
}

impl<F: Fn(&TargetEvent<'_>) + Send + Sync> TargetEventSink for F {
    fn target_event(&self, event: &TargetEvent<'_>) {
        self(event);
    }
}
