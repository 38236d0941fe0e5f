//! Events of a server, which its owner can log or count.

use std::io;

use holdfast_block::Error as DeviceError;

use super::handshake::HandshakeEnd;
use crate::server::peer::Peer;
use crate::server::receive::ReceiveEnd;

/// Why a connection ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum Closed {
    /// The client disconnected, or closed its end between two messages.
    ByClient,
    /// The server was stopped.
    ByServer,
    /// The handshake ended without a session.
    Handshake(HandshakeEnd),
    /// The client closed its end, or took too long, in the middle of a message or of the handshake.
    Abandoned(&'static str),
    /// The input is not valid NBD.
    Malformed(&'static str),
    /// The socket failed.
    Io(io::Error),
}

impl From<ReceiveEnd> for Closed {
    fn from(end: ReceiveEnd) -> Self {
        match end {
            ReceiveEnd::ByPeer => Self::ByClient,
            ReceiveEnd::Idle => Self::Abandoned("the client was idle for too long"),
            ReceiveEnd::Abandoned(reason) => Self::Abandoned(reason),
            ReceiveEnd::Io(error) => Self::Io(error),
        }
    }
}

/// An event.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A client connected; the handshake begins.
    Connected {
        /// The client.
        peer: &'a Peer,
    },
    /// A client was refused, because the maximum number of connections is reached.
    TooMany {
        /// The client.
        peer: &'a Peer,
    },
    /// A client begins to use an export.
    Entered {
        /// The client.
        peer: &'a Peer,
        /// The name of the export.
        export: &'a str,
    },
    /// An export could not be opened.
    OpenFailed {
        /// The client.
        peer: &'a Peer,
        /// The requested name.
        export: &'a str,
        /// The error.
        error: &'a DeviceError,
    },
    /// The device of an export failed; the client got an error.
    RequestFailed {
        /// The client.
        peer: &'a Peer,
        /// The name of the export.
        export: &'a str,
        /// The operation: "read", "write"...
        action: &'static str,
        /// First byte of the request.
        offset: u64,
        /// Bytes of the request.
        length: u64,
        /// The error.
        error: &'a DeviceError,
    },
    /// A connection ended.
    Disconnected {
        /// The client.
        peer: &'a Peer,
        /// The reason.
        reason: &'a Closed,
    },
    /// A connection could not be accepted or set up. The server continues.
    AcceptFailed {
        /// The error.
        error: &'a io::Error,
    },
}

/// Receives events on any thread of the server. Implementations must return quickly.
pub trait EventSink: Send + Sync {
    /// Handles `event`.
    fn event(&self, event: &Event<'_>);
}

impl<F: Fn(&Event<'_>) + Send + Sync> EventSink for F {
    fn event(&self, event: &Event<'_>) {
        self(event);
    }
}
