//! The bytes between two ends: a Unix or TCP socket, with TLS over it once both want that.
//!
//! One thread receives while others send. Sends are in the order of the calls as long as only one thread sends at a time, which
//! is the caller's business.

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

/// A TCP peer that says nothing is asked whether it still lives after this, and then every [`PROBE_INTERVAL`].
const PROBE_AFTER: Duration = Duration::from_secs(60);
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
const PROBE_COUNT: u32 = 4;

/// A connected socket.
#[derive(Debug)]
pub enum Socket {
    /// On this machine.
    Unix(UnixStream),
    /// Over the network.
    Tcp(TcpStream),
}

impl Socket {
    /// Where the other end is, over the network.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok().map(|address| address.ip()),
            Self::Unix(_) => None,
        }
    }

    /// Who is at the other end, for a person: an address, or user and process.
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

/// Whether to wait until the peer takes bytes, or sends some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// As long as the time limit of the socket allows.
    ForPeer,
    /// Not at all: what the socket has no room for is left over.
    Not,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: OwnedFd,
    tls: OnceLock<TlsLayer>,
}

impl Stream {
    /// Sets a socket up: no delay of small packets ("both the client and server SHOULD disable Nagle's algorithm"; with it, a
    /// batch of replies waits 40 ms for an acknowledgement), and probes that find a TCP peer that vanished.
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

    /// Sets how long one receive and one send may wait before they fail with [`io::ErrorKind::WouldBlock`].
    pub(crate) fn set_time_limits(&self, receive: Duration, send: Duration) -> io::Result<()> {
        sockopt::set_socket_timeout(&self.socket, Timeout::Recv, Some(receive))?;
        Ok(sockopt::set_socket_timeout(&self.socket, Timeout::Send, Some(send))?)
    }

    /// From here on all bytes are encrypted; the handshake of TLS takes place with the first that are received.
    ///
    /// Nobody may be sending meanwhile.
    pub(crate) fn start_tls(&self, connection: Connection) {
        let is_first = self.tls.set(TlsLayer::new(connection)).is_ok();
        assert!(is_first, "TLS begins once");
    }

    /// Receives at least one byte; 0 when the peer will send no more.
    pub(crate) fn receive(&self, buffer: &mut [u8], wait: Wait) -> io::Result<usize> {
        let Some(tls) = self.tls.get() else {
            return self.receive_plain(buffer, wait);
        };
        // What TLS itself has to say fits into an empty socket; where the socket is full, it goes with what is sent next.
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

    /// Takes a beginning of `pieces` and returns how many bytes; they are sent at the latest by [`flush`](Self::flush).
    pub(crate) fn send(&self, pieces: &[IoSlice<'_>], wait: Wait) -> io::Result<usize> {
        let Some(tls) = self.tls.get() else {
            return self.send_plain(pieces, wait);
        };
        tls.send(pieces, |bytes| self.send_plain(&[IoSlice::new(bytes)], wait))
    }

    /// Sends what was taken and not sent.
    pub(crate) fn flush(&self, wait: Wait) -> io::Result<()> {
        match self.tls.get() {
            None => Ok(()),
            Some(tls) => tls.flush(|bytes| self.send_plain(&[IoSlice::new(bytes)], wait)),
        }
    }

    /// Tells the peer that nothing more comes, where TLS has a word for that, and ends both directions.
    pub(crate) fn say_goodbye(&self) {
        if let Some(tls) = self.tls.get() {
            tls.say_goodbye();
            // A peer that is gone needs no goodbye, and one that takes nothing does not get it.
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

    /// Sends all of `bytes`, waiting as long as the peer makes progress.
    pub(crate) fn send_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let length = self.send(&[IoSlice::new(bytes)], Wait::ForPeer)?;
            bytes = &bytes[length..];
        }
        self.flush(Wait::ForPeer)
    }

    /// Ends one direction or both; whoever waits for the other end of it stops waiting.
    pub(crate) fn shut_down(&self, what: Shutdown) {
        let what = match what {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        // A peer that is gone already is as shut down as can be.
        rustix::net::shutdown(self.socket.as_fd(), what).unwrap_or_default();
    }
}
