//! Events of a vhost-user server, which its owner can log or count.

use std::io;

use holdfast_block::Error as DeviceError;

use crate::server::connections::ReachedLimit;
use crate::server::peer::Peer;

/// Why the connection of a front end ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum FrontEndGone {
    /// The front end closed its end.
    ByFrontEnd,
    /// The server was stopped.
    ByServer,
    /// The front end took too long.
    Abandoned(&'static str),
    /// A message or ring is not valid.
    Malformed(String),
    /// The front end continues with a disk whose earlier server has ended, and this server does not have all writes that
    /// the earlier one accepted.
    WritesLost,
    /// The socket failed.
    Io(io::Error),
}

/// An event.
#[derive(Debug)]
#[non_exhaustive]
pub enum VhostUserEvent<'a> {
    /// A front end connected.
    Connected {
        /// The disk's name.
        export: &'a str,
        /// The front end.
        peer: &'a Peer,
    },
    /// A connection was refused, because the maximum number is reached.
    TooMany {
        /// The disk's name.
        export: &'a str,
        /// The front end.
        peer: &'a Peer,
        /// The reached maximum: that of the server is one for a disk that can be written.
        limit: ReachedLimit,
    },
    /// The front end can shorten the memory that it shares. An access would then end this process.
    UnsealedMemory {
        /// The disk's name.
        export: &'a str,
        /// The front end.
        peer: &'a Peer,
    },
    /// The device failed; the guest got an error.
    RequestFailed {
        /// The disk's name.
        export: &'a str,
        /// The front end.
        peer: &'a Peer,
        /// The operation: "read", "write"...
        action: &'static str,
        /// The error.
        error: &'a DeviceError,
    },
    /// The guest sent a request whose descriptors are not valid.
    InvalidRequest {
        /// The disk's name.
        export: &'a str,
        /// The front end.
        peer: &'a Peer,
        /// The reason.
        reason: &'static str,
    },
    /// The guest's ring is not valid; the queue stops until the guest resets the device.
    QueueFailed {
        /// The disk's name.
        export: &'a str,
        /// The front end.
        peer: &'a Peer,
        /// The number of the queue.
        queue: usize,
        /// The reason.
        reason: &'static str,
    },
    /// A connection ended.
    Disconnected {
        /// The disk's name.
        export: &'a str,
        /// The front end.
        peer: &'a Peer,
        /// The reason.
        reason: &'a FrontEndGone,
    },
    /// A connection could not be accepted or set up. The server continues.
    AcceptFailed {
        /// The disk's name.
        export: &'a str,
        /// The error.
        error: &'a io::Error,
    },
}

/// Receives events on any thread of the server. Implementations must return quickly.
pub trait VhostUserEventSink: Send + Sync {
    /// Handles `event`.
    fn vhost_user_event(&self, event: &VhostUserEvent<'_>);
}

impl<F: Fn(&VhostUserEvent<'_>) + Send + Sync> VhostUserEventSink for F {
    fn vhost_user_event(&self, event: &VhostUserEvent<'_>) {
        self(event);
    }
}
