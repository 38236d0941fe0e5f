//! A host that is reached by a socket, at which it serves: the side of the `migrate` that brings a machine back.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use holdfast_live_copy::SocketConnector;

use crate::error::{Error, Result};
use crate::far::{FarHost, HostService};
use crate::forwarded_sockets::ForwardedSockets;
use crate::request_link::RequestLink;
use crate::service_link::ServiceLink;
use crate::streams::join_streams;

/// A host that is reached by a socket. Dropping it deletes the socket, which is used for one migration.
pub struct SocketHost {
    socket: PathBuf,
    name: String,
    forwarded: ForwardedSockets,
}

impl SocketHost {
    /// The host that serves at `socket`. `name` is for people.
    pub fn new(socket: PathBuf, name: String) -> Self {
        Self {
            socket,
            name,
            forwarded: ForwardedSockets::default(),
        }
    }

    /// Requests about a machine.
    ///
    /// # Errors
    /// The host does not serve.
    pub fn far(&self) -> Result<FarHost> {
        self.link(&HostService::machine()).map(FarHost::of_link)
    }

    /// Requests about a container.
    ///
    /// # Errors
    /// The host does not serve.
    pub(crate) fn container_link(&self) -> Result<RequestLink> {
        self.link(&HostService::container())
    }

    fn link(&self, service: &HostService) -> Result<RequestLink> {
        let stream = service.open(&self.socket);
        let link = stream.and_then(|stream| RequestLink::of_socket(stream, self.name.clone()));
        link.map_err(|error| Error::FarHost {
            host: self.name.clone(),
            reason: error.to_string(),
        })
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
        let connect = move |stream: UnixStream| {
            if let Ok(onward) = service.open(&socket) {
                join_streams(&stream, &onward);
            }
        };
        self.forwarded.listen(here, &self.name, connect)
    }
}

impl ServiceLink for SocketHost {
    fn join(&self, line: &[u8], stream: UnixStream) -> Result<()> {
        let opened = UnixStream::connect(&self.socket).and_then(|mut onward| {
            onward.write_all(line)?;
            Ok(onward)
        });
        let onward = opened.map_err(|error| Error::FarHost {
            host: self.name.clone(),
            reason: error.to_string(),
        })?;
        join_streams(&stream, &onward);
        Ok(())
    }
}

impl Drop for SocketHost {
    fn drop(&mut self) {
        std::fs::remove_file(&self.socket).ok();
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
