//! The byte stream of a connection, and how to connect it.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, recv, sockopt};

/// The port that IANA assigns to NBD.
pub const PORT: u16 = 10_809;

/// A connected stream. One thread reads while another one writes.
///
/// Both directions take `&self`, which is sufficient for a socket. A TLS session has one state for both directions: it
/// locks that state, and waits for its socket without the lock, because a waiting reader must never block a writer.
pub trait Stream: Send + Sync {
    /// Reads some bytes into the slices, in order; 0 at the end. Fails with [`WouldBlock`](io::ErrorKind::WouldBlock)
    /// or [`TimedOut`](io::ErrorKind::TimedOut) when nothing arrived within the time of
    /// [`set_timeout`](Self::set_timeout).
    fn read_vectored(&self, buffers: &mut [IoSliceMut]) -> io::Result<usize>;

    /// Writes some bytes of the slices, in order. Times out like a read.
    fn write_vectored(&self, buffers: &[IoSlice]) -> io::Result<usize>;

    /// Sets the time limit of one read and of one write.
    fn set_timeout(&self, timeout: Duration) -> io::Result<()>;

    /// Closes both directions; a blocked read or write returns. Unread input is discarded: otherwise a peer that waits
    /// for buffer space (as QEMU does) would not notice the end.
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
            fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
                self.set_read_timeout(Some(timeout))?;
                self.set_write_timeout(Some(timeout))
            }
            fn shutdown(&self) -> io::Result<()> {
                <$socket>::shutdown(self, Shutdown::Both)?;
                discard_input(self);
                Ok(())
            }
        }
    )*};
}

socket_stream!(UnixStream, TcpStream);

/// Reads and discards all input.
///
/// QEMU treats a socket that hung up as readable, not as writable (`aio_dispatch_handler`). While the queue is full,
/// QEMU's server waits for space. Until then it blocks everything that waits for the end of the server's requests, in
/// an event loop that the guest needs as well.
fn discard_input(socket: impl AsFd) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok((_, 1..)) | Err(Errno::INTR) = recv(&socket, &mut bytes[..], RecvFlags::DONTWAIT) {}
}

/// Opens another connection, within the given time.
pub type Connector = dyn Fn(Duration) -> io::Result<Box<dyn Stream>> + Send + Sync;

/// Address of a server.
#[derive(Clone)]
pub enum Endpoint {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host, by name or address, and a port ([`PORT`] by default).
    Tcp(String, u16),
    /// A connection made by a closure, with a name for messages.
    Custom(String, Arc<Connector>),
}

impl Endpoint {
    /// An endpoint for one socket that is already connected: it can be connected to only once.
    ///
    /// `name` is used in messages.
    pub fn connected(name: impl Into<String>, stream: impl Stream + 'static) -> Self {
        let stream: Mutex<Option<Box<dyn Stream>>> = Mutex::new(Some(Box::new(stream)));
        let connect = move |_| {
            let taken = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
            taken.ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "the only connection is in use"))
        };
        Self::Custom(name.into(), Arc::new(connect))
    }

    /// Opens a connection.
    pub(super) fn connect(&self, timeout: Duration) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Unix(path) => connect_unix(path, timeout),
            Self::Tcp(host, port) => connect_tcp(host, *port, timeout),
            Self::Custom(_, connect) => connect(timeout),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(to),
            Self::Tcp(host, port) if host.contains(':') => write!(to, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(to, "{host}:{port}"),
            Self::Custom(name, _) => to.write_str(name),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Endpoint({self})")
    }
}

/// Without a send timeout, connecting to a Unix socket blocks for an unlimited time while the queue of its listener is
/// full.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<Box<dyn Stream>> {
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    // A signal interrupts the wait; the socket is not changed.
    while let Err(error) = rustix::net::connect(&socket, &address) {
        if error != Errno::INTR {
            return Err(error.into());
        }
    }
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

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::UnixStream;

    use super::Stream;

    #[test]
    fn a_peer_that_waits_for_buffer_space_is_woken_at_the_end() {
        let (mut ours, mut peer) = UnixStream::pair().unwrap();
        peer.set_nonblocking(true).unwrap();
        let full = std::iter::repeat_with(|| peer.write(&[0; 4096])).find_map(Result::err);
        assert_eq!(full.unwrap().kind(), ErrorKind::WouldBlock);
        Stream::shutdown(&ours).unwrap();
        // The queue has space again, but the peer must not use it.
        assert_eq!(ours.read(&mut [0; 1]).unwrap(), 0);
        assert_eq!(peer.write(&[0]).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
