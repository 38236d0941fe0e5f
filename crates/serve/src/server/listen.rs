//! Listeners: Unix sockets and TCP ports.

use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock;
use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::stream::Socket;
use crate::{Error, Result};

const BACKLOG: i32 = 128;
/// Interval at which a thread that accepts clients of an inherited socket checks whether the server stops.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(200);
/// Number and interval of attempts to lock a folder that another program has locked.
const LOCK_ATTEMPT_COUNT: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
    owner: Owner,
}

#[derive(Debug)]
enum Kind {
    Unix(
        UnixListener,
        #[expect(dead_code, reason = "dropped with the listener")] Option<SocketFile>,
    ),
    Tcp(TcpListener),
}

/// Who else has the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Only this process.
    Us,
    /// Another process, too: this one must not shut it down.
    ServiceManager,
}

/// A Unix socket's file, created by this process.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Listener {
    /// Listens on a Unix socket at `path`, which only its owner can connect to.
    ///
    /// A stale socket of a killed process is replaced. A socket in use, or any other file, is not touched. The socket
    /// is removed when the listener is dropped.
    pub fn unix(path: &Path, clock: &dyn Clock) -> Result<Self> {
        let folder = Folder::lock(path, clock)?;
        folder.remove_stale(path)?;
        let failed = |action| move |errno: Errno| unix_error(action, path, errno);
        let address = SocketAddrUnix::new(path).map_err(failed("bind"))?;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(failed("make a socket for"))?;
        // The socket gets its mode from the file that bind creates, so it is never open to other users, not even
        // briefly.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed("protect"))?;
        rustix::net::bind(&socket, &address).map_err(failed("bind"))?;
        rustix::net::listen(&socket, BACKLOG).map_err(failed("listen on"))?;
        let metadata = fs::symlink_metadata(path).map_err(|error| unix_error("look at", path, error))?;
        let file = SocketFile {
            path: path.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
        };
        drop(folder);
        Ok(Self {
            kind: Kind::Unix(UnixListener::from(socket), Some(file)),
            owner: Owner::Us,
        })
    }

    /// Listens on a TCP port; port 0 lets the system choose one.
    pub fn tcp(address: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(address).map_err(|source| Error::Tcp { address, source })?;
        Ok(Self {
            kind: Kind::Tcp(listener),
            owner: Owner::Us,
        })
    }

    /// A listening socket that a service manager has opened. It stays open there: a client that connects after the end
    /// of this process starts the service again.
    ///
    /// # Errors
    /// It is not a listening stream socket of TCP or of this host.
    pub fn inherited(socket: OwnedFd) -> Result<Self> {
        let failed = |source: io::Error| Error::InheritedSocket { source };
        let inspect = || {
            let is_stream =
                sockopt::socket_type(&socket)? == SocketType::STREAM && sockopt::socket_acceptconn(&socket)?;
            Ok((is_stream, sockopt::socket_domain(&socket)?))
        };
        let (is_stream, domain) = inspect().map_err(|errno: Errno| failed(errno.into()))?;
        let kind = match domain {
            AddressFamily::UNIX if is_stream => Kind::Unix(UnixListener::from(socket), None),
            AddressFamily::INET | AddressFamily::INET6 if is_stream => Kind::Tcp(TcpListener::from(socket)),
            _ => return Err(failed(io::ErrorKind::InvalidInput.into())),
        };
        let listener = Self {
            kind,
            owner: Owner::ServiceManager,
        };
        listener.set_accept_interval(ACCEPT_INTERVAL).map_err(failed)?;
        Ok(listener)
    }

    /// The path of a Unix socket.
    pub fn unix_path(&self) -> Option<PathBuf> {
        match &self.kind {
            Kind::Unix(listener, _) => listener.local_addr().ok()?.as_pathname().map(Path::to_owned),
            Kind::Tcp(_) => None,
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        match &self.kind {
            Kind::Unix(listener, _) => listener.as_fd(),
            Kind::Tcp(listener) => listener.as_fd(),
        }
    }

    /// Makes [`accept`](Self::accept) fail with [`io::ErrorKind::WouldBlock`] when no client connects in this time.
    pub(crate) fn set_accept_interval(&self, interval: Duration) -> io::Result<()> {
        // A service manager may have made it non-blocking.
        rustix::io::ioctl_fionbio(self.socket(), false)?;
        Ok(sockopt::set_socket_timeout(
            self.socket(),
            Timeout::Recv,
            Some(interval),
        )?)
    }

    /// The address of a TCP listener, with the port that the system chose.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match &self.kind {
            Kind::Unix(..) => None,
            Kind::Tcp(listener) => listener.local_addr().ok(),
        }
    }

    /// Waits for a client.
    pub(crate) fn accept(&self) -> io::Result<Socket> {
        match &self.kind {
            Kind::Unix(listener, _) => listener.accept().map(|(stream, _)| Socket::Unix(stream)),
            Kind::Tcp(listener) => listener.accept().map(|(stream, _)| Socket::Tcp(stream)),
        }
    }

    /// Wakes a thread that waits for a client; the thread gets an error.
    pub(crate) fn close(&self) {
        // The socket stays open in the service manager; the thread wakes by itself.
        if self.owner == Owner::Us {
            // The listener may be closed already.
            rustix::net::shutdown(self.socket(), rustix::net::Shutdown::Both).unwrap_or_default();
        }
    }
}

impl Drop for SocketFile {
    /// Removes the file unless another server has replaced it.
    fn drop(&mut self) {
        let is_same = |metadata: &fs::Metadata| metadata.dev() == self.device && metadata.ino() == self.inode;
        if fs::symlink_metadata(&self.path).is_ok_and(|metadata| is_same(&metadata)) {
            // If this fails, the next server recognizes the file as stale.
            drop(fs::remove_file(&self.path));
        }
    }
}

fn unix_error(action: &'static str, path: &Path, source: impl Into<io::Error>) -> Error {
    Error::UnixSocket {
        action,
        path: path.to_owned(),
        source: source.into(),
    }
}

/// The locked folder of a socket. The lock prevents that two servers find a socket stale and replace it at the same
/// time.
struct Folder {
    _lock: File,
}

impl Folder {
    fn lock(path: &Path, clock: &dyn Clock) -> Result<Self> {
        let folder = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let file = File::open(folder).map_err(|error| unix_error("open the folder of", path, error))?;
        for attempt in 1.. {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK | Errno::INTR) if attempt < LOCK_ATTEMPT_COUNT => clock.sleep(LOCK_PAUSE),
                Err(errno) => return Err(unix_error("lock the folder of", path, errno)),
            }
        }
        Ok(Self { _lock: file })
    }

    /// Removes a stale socket.
    #[expect(clippy::unused_self, reason = "self proves that the lock is held")]
    fn remove_stale(&self, path: &Path) -> Result<()> {
        let metadata = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found.map_err(|error| unix_error("look at", path, error))?,
        };
        let path = path.to_owned();
        if !metadata.file_type().is_socket() {
            return Err(Error::NotASocket { path });
        }
        match UnixStream::connect(&path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(&path).map_err(|error| unix_error("remove", &path, error))
            }
            // The socket accepts connections, or its queue is full: another process listens.
            _ => Err(Error::SocketInUse { path }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    use std::os::unix::net::{UnixListener, UnixStream};

    use holdfast_block::SystemClock;

    use super::Listener;
    use crate::Error;

    #[test]
    fn a_socket_is_private_and_goes_with_its_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::unix(&path, &SystemClock::new()).unwrap();
        let metadata = std::fs::symlink_metadata(&path).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_or_a_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let first = Listener::unix(&path, &SystemClock::new()).unwrap();
        let refused = Listener::unix(&path, &SystemClock::new()).unwrap_err();
        assert!(matches!(refused, Error::SocketInUse { .. }), "{refused}");
        UnixStream::connect(&path).unwrap();
        drop(first);
        let file = folder.path().join("file");
        std::fs::File::create(&file).unwrap();
        let refused = Listener::unix(&file, &SystemClock::new()).unwrap_err();
        assert!(matches!(refused, Error::NotASocket { .. }), "{refused}");
        assert!(file.exists());
    }

    #[test]
    fn a_socket_that_another_took_over_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = Listener::unix(&path, &SystemClock::new()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Listener::unix(&path, &SystemClock::new()).unwrap();
        drop(first);
        UnixStream::connect(&path).unwrap();
        drop(second);
        assert!(!path.exists());
    }
}
