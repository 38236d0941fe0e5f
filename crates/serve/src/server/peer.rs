//! A connected client in events.

use std::fmt;

/// A connection in events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Number of the connection, from 1 on, never reused by the same server.
    pub connection: u64,
    /// Address of a TCP peer, or user and process of a local peer.
    pub name: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (connection {})", self.name, self.connection)
    }
}
