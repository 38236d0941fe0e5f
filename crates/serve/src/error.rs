//! Errors of serving devices.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Result of serving.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another program listens on this socket. The socket was not changed.
    #[error("another program listens on {}", path.display())]
    SocketInUse {
        /// The socket's path.
        path: PathBuf,
    },
    /// The path exists and is not a socket. The file was not changed.
    #[error("{} exists and is not a socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// A Unix socket could not be created.
    #[error("{action} {}", path.display())]
    UnixSocket {
        /// What failed: "bind", "listen on"...
        action: &'static str,
        /// The socket's path.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A socket of a service manager cannot be used.
    #[error("the inherited socket is not a listening stream socket")]
    InheritedSocket {
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A socket for other commands is not a Unix socket, and so does not say which user connects.
    #[error("the control socket is not a Unix socket")]
    NotLocal,
    /// A TCP address could not be listened on.
    #[error("listen on {address}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A server has as many targets as it can have.
    #[error("the server has {count_max} targets, and cannot have more")]
    TargetCount {
        /// The maximum.
        count_max: usize,
    },
    /// A thread could not be started.
    #[error("start a thread for {purpose}")]
    Thread {
        /// What the thread was for.
        purpose: &'static str,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A server of files cannot continue the work of one that has ended.
    #[error("continue to serve a mounted file system")]
    TakeOver {
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Certificates or keys for TLS cannot be used.
    #[error("{action}")]
    Tls {
        /// What failed: "read the server's key"...
        action: &'static str,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A required option could not be set on a socket.
    #[error("set up a connection")]
    Socket {
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The name of an iSCSI target is not valid.
    #[error("'{name}' is not a valid iSCSI name")]
    TargetName {
        /// The name.
        name: String,
    },
    /// A single socket was given for several disks.
    #[error("a socket is for one disk, and {disks} disks are to be served")]
    SocketCount {
        /// The number of disks.
        disks: usize,
    },
    /// A target has too many logical units.
    #[error("the target {name} has {count} disks, more than 256")]
    UnitCount {
        /// The target's name.
        name: String,
        /// The number of its disks.
        count: usize,
    },
}
