//! The addresses of a server.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use holdfast_block::Clock;
use holdfast_serve::nbd::Listener;

use crate::job::{Error, Result};

/// An address at which clients connect.
#[derive(Debug)]
pub enum ServeAddress {
    /// A Unix socket, accessible only to the current user.
    Unix(PathBuf),
    /// An address and a port.
    Tcp(SocketAddr),
    /// A listening socket that a service manager has opened.
    Inherited(OwnedFd),
}

/// An opened address.
pub(super) struct OpenDoor {
    pub(super) listener: Listener,
    pub(super) place: DoorPlace,
}

/// Where clients connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DoorPlace {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl ServeAddress {
    pub(super) fn open(self, clock: &dyn Clock) -> Result<OpenDoor> {
        let opened = match self {
            Self::Unix(path) => Listener::unix(&path, clock),
            Self::Tcp(address) => Listener::tcp(address),
            Self::Inherited(socket) => Listener::inherited(socket),
        };
        let listener = opened.map_err(Error::Serve)?;
        let place = DoorPlace::of(&listener);
        Ok(OpenDoor { listener, place })
    }
}

impl DoorPlace {
    fn of(listener: &Listener) -> Self {
        match listener.tcp_address() {
            Some(address) => Self::Tcp(address),
            None => Self::Unix(listener.unix_path().unwrap_or_default()),
        }
    }
}
