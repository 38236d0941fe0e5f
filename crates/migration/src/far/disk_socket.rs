//! The socket at which the hypervisor of this host gets a disk of the source.

use std::fs::Permissions;
use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::streams::{join_streams, wait_for_any};

/// Interval of looking whether the source has connected again.
const LOOK_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// The socket for one client.
pub(super) struct DiskSocket {
    path: PathBuf,
    listener: UnixListener,
    /// Device and inode.
    identity: (u64, u64),
}

impl DiskSocket {
    /// Only `user`, its group and root may connect. A socket that exists is replaced: it is of a connection that was lost.
    pub(super) fn bind(path: PathBuf, user: Option<(u32, u32)>) -> std::io::Result<Self> {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        let found = path.symlink_metadata()?;
        let socket = Self {
            listener,
            identity: (found.dev(), found.ino()),
            path,
        };
        std::fs::set_permissions(&socket.path, Permissions::from_mode(0o660))?;
        if let Some((user, group)) = user {
            chown(&socket.path, Some(user), Some(group))?;
        }
        Ok(socket)
    }

    /// Sends a byte 0 when a client can connect, and another one when it has. Then joins it with `stream`, until one of them ends, or another connection has replaced this socket: then that
    /// of `stream` was lost, which its end may show only after hours.
    pub(super) fn serve_one(self, stream: &UnixStream) -> std::io::Result<()> {
        let mut output = stream;
        output.write_all(&[0])?;
        let Some(client) = self.accept_for(stream)? else {
            return Ok(());
        };
        output.write_all(&[0])?;
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The client is not read here: only its end is awaited.
                let mut waited = [PollFd::new(&client, PollFlags::empty())];
                while !has_ended.load(Ordering::Relaxed) && self.is_in_place() {
                    if poll(&mut waited, Some(&LOOK_INTERVAL)).is_ok_and(|count| count > 0) {
                        break;
                    }
                }
                for ended in [&client, stream] {
                    ended.shutdown(Shutdown::Both).ok();
                }
            });
            join_streams(stream, &client);
            has_ended.store(true, Ordering::Relaxed);
        });
        Ok(())
    }

    /// The first client; none if `stream` ends before it comes.
    fn accept_for(&self, stream: &UnixStream) -> std::io::Result<Option<UnixStream>> {
        let mut waited = [
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::new(stream, PollFlags::RDHUP),
        ];
        wait_for_any(&mut waited)?;
        if !waited[1].revents().is_empty() {
            return Ok(None);
        }
        self.listener.accept().map(|(client, _)| Some(client))
    }

    fn is_in_place(&self) -> bool {
        let found = self.path.symlink_metadata();
        found.is_ok_and(|found| (found.dev(), found.ino()) == self.identity)
    }
}

impl Drop for DiskSocket {
    fn drop(&mut self) {
        if self.is_in_place() {
            std::fs::remove_file(&self.path).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::DiskSocket;

    #[test]
    fn the_first_client_is_joined_and_its_end_is_passed_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk0");
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let socket = DiskSocket::bind(path.clone(), None).unwrap();
        let serving = std::thread::spawn(move || socket.serve_one(&theirs));
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"question").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut bytes = Vec::new();
        ours.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"\0\0question");
        ours.write_all(b"answer").unwrap();
        drop(ours);
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert_eq!(text, "answer");
        serving.join().unwrap().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_source_that_ends_first_leaves_no_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk0");
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let socket = DiskSocket::bind(path.clone(), None).unwrap();
        let serving = std::thread::spawn(move || socket.serve_one(&theirs));
        ours.read_exact(&mut [0]).unwrap();
        drop(ours);
        serving.join().unwrap().unwrap();
        assert!(!path.exists());
    }

    /// The connection of the first socket was lost, and nothing shows it.
    #[test]
    fn a_new_connection_of_the_source_ends_the_former_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk0");
        let (mut lost, theirs) = UnixStream::pair().unwrap();
        let socket = DiskSocket::bind(path.clone(), None).unwrap();
        let serving = std::thread::spawn(move || socket.serve_one(&theirs));
        let mut client = UnixStream::connect(&path).unwrap();
        lost.read_exact(&mut [0; 2]).unwrap();
        let next = DiskSocket::bind(path.clone(), None).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        serving.join().unwrap().unwrap();
        assert!(path.exists());
        drop(next);
        assert!(!path.exists());
    }
}
