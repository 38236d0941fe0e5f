//! A host that is reached by a socket, at which it serves: the side of the `migrate` that brings a machine back.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use holdfast_host::ToolError;
use holdfast_live_copy::SocketConnector;

use crate::error::{Error, Result};
use crate::far::{FarHost, HostService};
use crate::streams::join_streams;

/// A host that is reached by a socket. Dropping it deletes the socket, which is used for one migration.
pub struct SocketHost {
    socket: PathBuf,
    name: String,
    forwarded: Mutex<Vec<ForwardedSocket>>,
}

impl SocketHost {
    /// The host that serves at `socket`. `name` is for people.
    pub fn new(socket: PathBuf, name: String) -> Self {
        Self {
            socket,
            name,
            forwarded: Mutex::default(),
        }
    }

    /// Requests to the host.
    ///
    /// # Errors
    /// It does not serve.
    pub fn far(&self) -> Result<FarHost> {
        let stream = HostService::machine().open(&self.socket);
        let far = stream.and_then(|stream| FarHost::of_socket(stream, self.name.clone()));
        far.map_err(|error| self.no_answer(&error))
    }

    /// A connection for requests about a container.
    ///
    /// # Errors
    /// The host does not serve.
    pub(crate) fn open_container_service(&self) -> Result<UnixStream> {
        let stream = HostService::container().open(&self.socket);
        stream.map_err(|error| self.no_answer(&error))
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn no_answer(&self, error: &std::io::Error) -> Error {
        Error::FarHost {
            host: self.name.clone(),
            reason: error.to_string(),
        }
    }

    /// The receivers of the host.
    pub fn connector(&self) -> SocketConnector {
        let socket = self.socket.clone();
        let open = move || HostService::disk().open(&socket);
        SocketConnector::new(Box::new(open), self.name.clone())
    }

    /// Forwards connections to the new socket `here` to the socket `there` of the host, as long as this exists.
    ///
    /// # Errors
    /// The new socket cannot be made.
    pub fn forward(&self, here: &Path, there: &Path) -> Result<()> {
        let service = HostService::of_socket(there);
        let socket = self.socket.clone();
        let open = move || service.open(&socket);
        let forwarded = ForwardedSocket::listen(here, open).map_err(|error| Error::Forward {
            host: self.name.clone(),
            source: ToolError::NoConnection {
                host: self.name.clone(),
                reason: format!("{}: {error}", here.display()),
            },
        })?;
        self.forwarded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(forwarded);
        Ok(())
    }
}

impl Drop for SocketHost {
    fn drop(&mut self) {
        std::fs::remove_file(&self.socket).ok();
    }
}

/// A socket here whose connections are forwarded.
struct ForwardedSocket {
    listener: UnixListener,
    thread: Option<JoinHandle<()>>,
}

impl ForwardedSocket {
    fn listen(here: &Path, open: impl Fn() -> std::io::Result<UnixStream> + Send + 'static) -> std::io::Result<Self> {
        let listener = UnixListener::bind(here)?;
        let accepting = listener.try_clone()?;
        let accept = move || {
            while let Ok((stream, _)) = accepting.accept() {
                // A connection that cannot be forwarded is closed.
                let Ok(onward) = open() else { continue };
                std::thread::spawn(move || join_streams(&stream, &onward));
            }
        };
        let thread = std::thread::Builder::new().name("forward".to_owned()).spawn(accept)?;
        Ok(Self {
            listener,
            thread: Some(thread),
        })
    }
}

impl Drop for ForwardedSocket {
    fn drop(&mut self) {
        // The thread waits for a connection.
        rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both).ok();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::Shutdown;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::SocketHost;

    /// What a host at the other end of the sockets gets.
    #[test]
    fn a_forwarded_connection_names_its_socket_and_ends_on_both_sides() {
        let folder = tempfile::tempdir().unwrap();
        let [socket, here] = ["host", "here"].map(|name| folder.path().join(name));
        let listener = UnixListener::bind(&socket).unwrap();
        let host = SocketHost::new(socket.clone(), "host1".to_owned());
        host.forward(&here, "/run/there".as_ref()).unwrap();
        let mut ours = UnixStream::connect(&here).unwrap();
        ours.write_all(b"question").unwrap();
        ours.shutdown(Shutdown::Write).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        let mut text = String::new();
        theirs.read_to_string(&mut text).unwrap();
        assert_eq!(
            text,
            "{\"service\":\"socket\",\"version\":1,\"path\":\"/run/there\"}\nquestion"
        );
        theirs.write_all(b"answer").unwrap();
        drop(theirs);
        let mut text = String::new();
        ours.read_to_string(&mut text).unwrap();
        assert_eq!(text, "answer");
        drop(host);
        assert!(!socket.exists());
        UnixStream::connect(&here).unwrap_err();
    }
}
