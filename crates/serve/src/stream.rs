//! The connection to a peer: a Unix or TCP socket, encrypted by TLS once both sides agree.
//!
//! One thread receives while others send. Data is sent in the order of the calls if only one thread sends at a time;
//! the caller must ensure that.

use std::io::{self, IoSlice};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use rustls::Connection;

use super::tls::TlsLayer;

/// Idle time after which a TCP peer is probed, and then every [`PROBE_INTERVAL`].
const PROBE_AFTER: Duration = Duration::from_secs(60);
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
const PROBE_COUNT: u32 = 4;

/// A connected socket.
#[derive(Debug)]
pub enum Socket {
    /// A connection on this host.
    Unix(UnixStream),
    /// A connection over the network.
    Tcp(TcpStream),
}

impl Socket {
    /// The network address of the peer.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok().map(|address| address.ip()),
            Self::Unix(_) => None,
        }
    }

    /// Where the peer is.
    pub(crate) fn origin(&self) -> Origin {
        match self {
            Self::Tcp(_) => self.address().map_or(Origin::Unknown, Origin::Address),
            Self::Unix(stream) => sockopt::socket_peercred(stream)
                .map_or(Origin::Unknown, |who| Origin::Process(who.pid.as_raw_nonzero().get())),
        }
    }

    /// The peer's name for messages: an address, or user and process.
    pub(crate) fn peer(&self) -> String {
        match self {
            Self::Tcp(stream) => stream
                .peer_addr()
                .map_or_else(|_| "tcp".to_owned(), |it: SocketAddr| it.to_string()),
            Self::Unix(stream) => sockopt::socket_peercred(stream).map_or_else(
                |_| "unix".to_owned(),
                |who| format!("uid {} pid {}", who.uid.as_raw(), who.pid.as_raw_nonzero()),
            ),
        }
    }
}

/// Where a client is. All connections of one origin share its part of memory and workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// A network address.
    Address(IpAddr),
    /// A process of this host.
    Process(i32),
    /// The connection has ended already.
    Unknown,
}

/// Whether to wait for the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Wait for as long as the timeout of the socket allows.
    ForPeer,
    /// Do not wait: bytes that do not fit into the socket buffer are not sent.
    Not,
}

/// How much of a message has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrived {
    /// All bytes that were asked for.
    All,
    Part,
    /// Nothing, within the timeout of the socket.
    Nothing,
    /// The peer has closed.
    End,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct SocketStream {
    socket: OwnedFd,
    tls: OnceLock<TlsLayer>,
}

impl SocketStream {
    /// Configures a socket: no delay of small packets ("both the client and server SHOULD disable Nagle's algorithm";
    /// with it, a batch of replies waits 40 ms for an acknowledgement), and keepalive probes that detect a vanished TCP
    /// peer.
    pub(crate) fn new(socket: Socket) -> io::Result<Self> {
        let socket = match socket {
            Socket::Unix(stream) => OwnedFd::from(stream),
            Socket::Tcp(stream) => {
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, PROBE_AFTER)?;
                sockopt::set_tcp_keepintvl(&stream, PROBE_INTERVAL)?;
                sockopt::set_tcp_keepcnt(&stream, PROBE_COUNT)?;
                OwnedFd::from(stream)
            }
        };
        Ok(Self {
            socket,
            tls: OnceLock::new(),
        })
    }

    /// The address at which a TCP peer has connected.
    pub(crate) fn local_address(&self) -> Option<SocketAddr> {
        let address = rustix::net::getsockname(&self.socket).ok()?;
        let address = SocketAddr::try_from(address).ok()?;
        // A listener for both families reports IPv4 addresses in the form of IPv6.
        Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
    }

    /// Sets how long one receive and one send may wait before they fail with [`io::ErrorKind::WouldBlock`].
    pub(crate) fn set_time_limits(&self, receive: Duration, send: Duration) -> io::Result<()> {
        sockopt::set_socket_timeout(&self.socket, Timeout::Recv, Some(receive))?;
        Ok(sockopt::set_socket_timeout(&self.socket, Timeout::Send, Some(send))?)
    }

    /// Encrypts all bytes from now on. The TLS handshake takes place while the first bytes are received.
    ///
    /// No other thread may be sending meanwhile.
    pub(crate) fn start_tls(&self, connection: Connection) {
        let is_first = self.tls.set(TlsLayer::new(connection)).is_ok();
        assert!(is_first, "TLS begins once");
    }

    /// Receives at least one byte; 0 when the peer has closed.
    pub(crate) fn receive(&self, buffer: &mut [u8], wait: Wait) -> io::Result<usize> {
        let Some(tls) = self.tls.get() else {
            return self.receive_plain(buffer, wait);
        };
        // Messages of TLS itself fit into an empty socket buffer. If the buffer is full, they are sent with the next
        // data.
        let send = |bytes: &[u8]| self.send_plain(&[IoSlice::new(bytes)], Wait::Not);
        tls.receive(buffer, |buffer| self.receive_plain(buffer, wait), send)
    }

    fn receive_plain(&self, buffer: &mut [u8], wait: Wait) -> io::Result<usize> {
        let flags = match wait {
            Wait::ForPeer => RecvFlags::empty(),
            Wait::Not => RecvFlags::DONTWAIT,
        };
        loop {
            match rustix::net::recv(&self.socket, &mut *buffer, flags) {
                Ok((length, _)) => return Ok(length),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits for bytes, and reports whether `count` bytes (at most 64) have arrived. They are not received.
    ///
    /// The connection must not be encrypted.
    pub(crate) fn peek(&self, count: usize) -> io::Result<Arrived> {
        let mut bytes = [0; 64];
        let count = count.min(bytes.len());
        match rustix::net::recv(&self.socket, &mut bytes[..count], RecvFlags::PEEK) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Ok(Arrived::End),
            Ok((length, _)) if length < count => Ok(Arrived::Part),
            Ok(_) => Ok(Arrived::All),
            Err(Errno::INTR | Errno::AGAIN) => Ok(Arrived::Nothing),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Another handle of the socket.
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Accepts a prefix of `pieces` and returns its length. The bytes are sent at the latest by [`flush`](Self::flush).
    pub(crate) fn send(&self, pieces: &[IoSlice<'_>], wait: Wait) -> io::Result<usize> {
        let Some(tls) = self.tls.get() else {
            return self.send_plain(pieces, wait);
        };
        tls.send(pieces, |bytes| self.send_plain(&[IoSlice::new(bytes)], wait))
    }

    /// Sends bytes that were accepted but not sent.
    pub(crate) fn flush(&self, wait: Wait) -> io::Result<()> {
        match self.tls.get() {
            None => Ok(()),
            Some(tls) => tls.flush(|bytes| self.send_plain(&[IoSlice::new(bytes)], wait)),
        }
    }

    /// Announces the end of the connection to the peer, if TLS is used, and closes both directions.
    pub(crate) fn close_gracefully(&self) {
        if let Some(tls) = self.tls.get() {
            tls.send_close_notify();
            // A closed peer needs no announcement, and a peer that does not read cannot get it.
            self.flush(Wait::Not).unwrap_or_default();
        }
        self.shut_down(Shutdown::Both);
    }

    fn send_plain(&self, pieces: &[IoSlice<'_>], wait: Wait) -> io::Result<usize> {
        let flags = match wait {
            Wait::ForPeer => SendFlags::NOSIGNAL,
            Wait::Not => SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        };
        loop {
            let sent = match pieces {
                [piece] => rustix::net::send(&self.socket, piece, flags),
                _ => rustix::net::sendmsg(&self.socket, pieces, &mut SendAncillaryBuffer::default(), flags),
            };
            match sent {
                Ok(length) => return Ok(length),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Sends all of `bytes`, and waits for as long as the peer makes progress.
    pub(crate) fn send_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let length = self.send(&[IoSlice::new(bytes)], Wait::ForPeer)?;
            bytes = &bytes[length..];
        }
        self.flush(Wait::ForPeer)
    }

    /// Closes one direction or both; a blocked thread returns.
    pub(crate) fn shut_down(&self, what: Shutdown) {
        let what = match what {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        // The peer may have closed already.
        rustix::net::shutdown(self.socket.as_fd(), what).unwrap_or_default();
    }
}
