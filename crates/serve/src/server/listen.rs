//! Listeners: Unix sockets and TCP ports.

use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock;
use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::stream::Socket;
use crate::{Error, Result};

const BACKLOG: i32 = 128;
/// Number and interval of attempts to lock a folder that another program has locked.
const LOCK_ATTEMPT_COUNT: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Unix(
        UnixListener,
        #[expect(dead_code, reason = "dropped with the listener")] Option<SocketFile>,
    ),
    Tcp(TcpListener),
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
        })
    }

    /// Listens on a TCP port; port 0 lets the system choose one.
    pub fn tcp(address: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(address).map_err(|source| Error::Tcp { address, source })?;
        Ok(Self {
            kind: Kind::Tcp(listener),
        })
    }

    /// A Unix socket inherited from another process, such as a service manager; its file is not removed.
    pub fn from_unix(listener: UnixListener) -> Self {
        Self {
            kind: Kind::Unix(listener, None),
        }
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
        let socket = match &self.kind {
            Kind::Unix(listener, _) => listener.as_fd(),
            Kind::Tcp(listener) => listener.as_fd(),
        };
        // The listener may be closed already.
        rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap_or_default();
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
