//! The stream of bytes under a connection, and where it comes from.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// The port that IANA assigns to NBD.
pub const PORT: u16 = 10_809;

/// A connected stream. One thread reads while another one writes.
///
/// Both directions take `&self`. A socket needs no more; a TLS session, which is one state for both directions, keeps a
/// lock around that state and waits for its socket outside of the lock: a reader that waits must never keep a writer out.
pub trait Stream: Send + Sync {
    /// Reads some bytes into the slices, in order; 0 at the end. Fails with [`WouldBlock`](io::ErrorKind::WouldBlock) or
    /// [`TimedOut`](io::ErrorKind::TimedOut) when nothing came for the time of [`set_patience`](Self::set_patience).
    fn read_vectored(&self, buffers: &mut [IoSliceMut]) -> io::Result<usize>;

    /// Writes some bytes of the slices, in order. Fails like a read when nothing was taken.
    fn write_vectored(&self, buffers: &[IoSlice]) -> io::Result<usize>;

    /// Sets how long one read, or one write, waits.
    fn set_patience(&self, patience: Duration) -> io::Result<()>;

    /// Ends both directions; a read or write that waits returns.
    fn shutdown(&self) -> io::Result<()>;
}

macro_rules! socket_stream {
    ($($socket:ty),*) => {$(
        impl Stream for $socket {
            fn read_vectored(&self, buffers: &mut [IoSliceMut]) -> io::Result<usize> {
                let mut socket = self;
                Read::read_vectored(&mut socket, buffers)
            }
            fn write_vectored(&self, buffers: &[IoSlice]) -> io::Result<usize> {
                let mut socket = self;
                Write::write_vectored(&mut socket, buffers)
            }
            fn set_patience(&self, patience: Duration) -> io::Result<()> {
                self.set_read_timeout(Some(patience))?;
                self.set_write_timeout(Some(patience))
            }
            fn shutdown(&self) -> io::Result<()> {
                <$socket>::shutdown(self, Shutdown::Both)
            }
        }
    )*};
}

socket_stream!(UnixStream, TcpStream);

/// Makes one more connection; gets the time that it may take.
pub type Connector = dyn Fn(Duration) -> io::Result<Box<dyn Stream>> + Send + Sync;

/// Where a server is.
#[derive(Clone)]
pub enum Endpoint {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host, by name or address, and a port ([`PORT`] as a rule).
    Tcp(String, u16),
    /// Whatever a closure connects to, under a name for people.
    Made(String, Arc<Connector>),
}

impl Endpoint {
    /// An endpoint that is one socket, connected already: it serves one connection and no further one.
    ///
    /// `name` is for people.
    pub fn connected(name: impl Into<String>, stream: impl Stream + 'static) -> Self {
        let stream: Mutex<Option<Box<dyn Stream>>> = Mutex::new(Some(Box::new(stream)));
        let connect = move |_| {
            let taken = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
            taken.ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "the one connection is in use"))
        };
        Self::Made(name.into(), Arc::new(connect))
    }

    /// Makes a connection.
    pub(super) fn connect(&self, timeout: Duration) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Unix(path) => connect_unix(path, timeout),
            Self::Tcp(host, port) => connect_tcp(host, *port, timeout),
            Self::Made(_, connect) => connect(timeout),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(to),
            Self::Tcp(host, port) if host.contains(':') => write!(to, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(to, "{host}:{port}"),
            Self::Made(name, _) => to.write_str(name),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Endpoint({self})")
    }
}

/// A connection to a Unix socket waits, without an end, while the queue of its listener is full: unless the time to send is limited.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<Box<dyn Stream>> {
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    rustix::net::connect(&socket, &address)?;
    Ok(Box::new(UnixStream::from(socket)))
}

fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<Box<dyn Stream>> {
    let mut failure = None;
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(Box::new(stream));
            }
            Err(error) => failure = Some(error),
        }
    }
    let nowhere = || io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    Err(failure.unwrap_or_else(nowhere))
}
