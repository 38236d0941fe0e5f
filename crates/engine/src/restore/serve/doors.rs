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
    /// The address and port, if clients connect over the network; also those of an inherited socket.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(address) => Some(*address),
            Self::Inherited(socket) => {
                let address = rustix::net::getsockname(socket).ok()?;
                SocketAddr::try_from(address).ok()
            }
        }
    }

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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::ServeAddress;

    #[test]
    fn an_inherited_socket_has_its_address() {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        assert_eq!(ServeAddress::Inherited(tcp.into()).tcp_address(), Some(address));
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("socket")).unwrap();
        assert_eq!(ServeAddress::Inherited(unix.into()).tcp_address(), None);
    }
}
