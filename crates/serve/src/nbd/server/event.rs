//! What happens on a server, for its owner to log or count.

use std::fmt;
use std::io;

use holdfast_block::Error as DeviceError;

use super::handshake::HandshakeEnd;

/// A connection, as events name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Number of the connection, from 1 on, never used again by the same server.
    pub connection: u64,
    /// Address of a TCP peer, or user and process of a local one.
    pub name: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (connection {})", self.name, self.connection)
    }
}

/// Why a connection ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum Closed {
    /// The client said goodbye, or closed its end between two messages.
    ByClient,
    /// The server was stopped.
    ByServer,
    /// The handshake led nowhere.
    Handshake(HandshakeEnd),
    /// The client closed its end, or took too long, in the middle of a message or of the handshake.
    Abandoned(&'static str),
    /// What came is not the protocol.
    Nonsense(&'static str),
    /// The socket failed.
    Io(io::Error),
}

/// Something that happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A client is there; the handshake begins.
    Connected {
        /// Who.
        peer: &'a Peer,
    },
    /// A client was sent away, because there are as many connections as there may be.
    TooMany {
        /// Who.
        peer: &'a Peer,
    },
    /// A client begins to use an export.
    Entered {
        /// Who.
        peer: &'a Peer,
        /// The export's own name.
        export: &'a str,
    },
    /// An export could not be opened.
    OpenFailed {
        /// Who wanted it.
        peer: &'a Peer,
        /// The name that was asked for.
        export: &'a str,
        /// Why.
        error: &'a DeviceError,
    },
    /// The device of an export gave an error, which the client was told.
    RequestFailed {
        /// Whose request.
        peer: &'a Peer,
        /// The export's own name.
        export: &'a str,
        /// What was asked: "read", "write"...
        action: &'static str,
        /// First byte of the request.
        offset: u64,
        /// Bytes of the request.
        length: u64,
        /// Why.
        error: &'a DeviceError,
    },
    /// A connection ended.
    Disconnected {
        /// Whose.
        peer: &'a Peer,
        /// Why.
        reason: &'a Closed,
    },
    /// A connection could not be accepted, or set up; the server goes on.
    AcceptFailed {
        /// Why.
        error: &'a io::Error,
    },
}

/// Who is told what happens, by any thread of the server: it must not take long.
pub trait EventSink: Send + Sync {
    /// Takes note of `event`.
    fn event(&self, event: &Event<'_>);
}

impl<F: Fn(&Event<'_>) + Send + Sync> EventSink for F {
    fn event(&self, event: &Event<'_>) {
        self(event);
    }
}
