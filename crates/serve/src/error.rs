//! What can go wrong with serving.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Result of serving.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another program answers at this socket; it was left alone.
    #[error("another program listens on {}", path.display())]
    SocketInUse {
        /// The socket's path.
        path: PathBuf,
    },
    /// Something that is no socket stands where one was wanted; it was left alone.
    #[error("{} exists and is no socket", path.display())]
    NotASocket {
        /// What stands there.
        path: PathBuf,
    },
    /// A Unix socket could not be made.
    #[error("{action} {}", path.display())]
    UnixSocket {
        /// What was tried: "bind", "listen on"...
        action: &'static str,
        /// The socket's path.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A TCP address could not be listened on.
    #[error("listen on {address}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A thread that the server needs could not be started.
    #[error("start a thread for {purpose}")]
    Thread {
        /// What it was to do.
        purpose: &'static str,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Certificates or keys for TLS cannot be used.
    #[error("{action}")]
    Tls {
        /// What was tried: "read the server's key"...
        action: &'static str,
        /// Why it cannot be.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A socket refused an option that the server cannot do without.
    #[error("set up a connection")]
    Socket {
        /// The operating system's reason.
        source: std::io::Error,
    },
}
