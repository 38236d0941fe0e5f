//! The control socket of a server: where other commands list, add and remove its exports.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use holdfast_serve::lines::{LineLimits, LineServer};
use holdfast_serve::nbd::Listener;

use super::control::{
    ControlAnswer, ControlError, ControlErrorKind, ControlRequest, REQUEST_BYTES_MAX, encode_answer, encode_request,
    parse_answer, parse_request,
};
use super::exports::ServedExports;
use crate::job::{Error, Result};
use crate::machine::state::scratch::{CONTAINER_FOLDERS, CONTROL_SOCKET, RUNTIME_FOLDERS, RuntimeFolder, own_folders};

const LIMITS: LineLimits = LineLimits {
    request_bytes_max: REQUEST_BYTES_MAX,
    patience: Duration::from_secs(10),
    client_count_max: 16,
};
/// Requests that wait for the server.
const PENDING_COUNT_MAX: usize = 16;
/// Longest answer: a description of all exports and clients of a server.
const ANSWER_BYTES_MAX: u64 = 256 << 20;

/// Where the control socket of a server is.
#[derive(Debug)]
pub struct ControlPlace {
    /// The folder in which it is created.
    pub runtime: PathBuf,
    /// A socket that a service manager has opened, instead.
    pub inherited: Option<OwnedFd>,
    /// The number of this process.
    pub pid: u32,
    /// The folder for added overlays that are discarded at the end.
    pub scratch: PathBuf,
}

/// A queued request, and the channel of its answer.
pub(super) struct PendingRequest {
    pub(super) request: ControlRequest,
    pub(super) reply: SyncSender<ControlAnswer>,
}

/// A control socket.
pub(super) struct ControlServer {
    pending: Receiver<PendingRequest>,
    _server: LineServer,
    /// Removed after the server.
    _folder: Option<RuntimeFolder>,
}

impl ControlServer {
    /// Answers requests to describe the server, and queues the others.
    pub(super) fn start(place: ControlPlace, exports: &Arc<ServedExports>) -> Result<Self> {
        let (socket, folder) = match place.inherited {
            Some(socket) => (socket, None),
            None => bind(&place.runtime).map(|(socket, folder)| (socket, Some(folder)))?,
        };
        let listener = Listener::inherited(socket).map_err(Error::Serve)?;
        let (queue, pending) = sync_channel(PENDING_COUNT_MAX);
        let (exports, pid) = (Arc::clone(exports), place.pid);
        let clock = Arc::clone(&exports.clock);
        let handler = move |line: &[u8]| {
            encode_answer(match parse_request(line) {
                Err(error) => ControlAnswer::Error(error),
                Ok(ControlRequest::List) => ControlAnswer::Server(Box::new(exports.status(pid))),
                Ok(request) => queue_request(&queue, request),
            })
        };
        let server = LineServer::start(listener, LIMITS, clock, handler).map_err(Error::Serve)?;
        Ok(Self {
            pending,
            _server: server,
            _folder: folder,
        })
    }

    /// Waits for a request for at most `patience`.
    pub(super) fn receive(&self, patience: Duration) -> Option<PendingRequest> {
        self.pending.recv_timeout(patience).ok()
    }
}

/// Listens in a new folder that only the current user can access.
fn bind(runtime: &Path) -> Result<(OwnedFd, RuntimeFolder)> {
    let folder = RuntimeFolder::make(runtime)?;
    let path = folder.path().join(CONTROL_SOCKET);
    let bound = UnixListener::bind(&path).and_then(|listener| {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    });
    match bound {
        Ok(listener) => Ok((listener.into(), folder)),
        Err(source) => Err(Error::File {
            action: "create",
            path,
            source,
        }),
    }
}

fn queue_request(queue: &SyncSender<PendingRequest>, request: ControlRequest) -> ControlAnswer {
    let (reply, answer) = sync_channel(1);
    let pending = PendingRequest { request, reply };
    let is_queued = queue.try_send(pending).is_ok();
    let answer = is_queued.then(|| answer.recv().ok()).flatten();
    let busy = || {
        ControlError::new(
            ControlErrorKind::Failed,
            "the server is stopping or has too many requests",
        )
    };
    answer.unwrap_or_else(|| ControlAnswer::Error(busy()))
}

/// The control sockets of the current user in these folders. Some may be of servers that were killed.
pub fn control_sockets(runtimes: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for runtime in runtimes {
        let of_containers = own_folders(runtime, &[CONTAINER_FOLDERS]);
        let sockets = own_folders(runtime, &[RUNTIME_FOLDERS]).into_iter();
        found.extend(
            sockets
                .filter(|folder| !of_containers.contains(folder))
                .map(|folder| folder.join(CONTROL_SOCKET))
                .filter(|path| path.exists()),
        );
    }
    found.sort();
    found.dedup();
    found
}

/// Sends a request to a server. `None` if no server listens on the socket.
pub fn ask_server(socket: &Path, request: &ControlRequest) -> Result<Option<ControlAnswer>> {
    let failed = |source: std::io::Error| Error::File {
        action: "ask the server at",
        path: socket.to_owned(),
        source,
    };
    let mut stream = match UnixStream::connect(socket) {
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound
            ) =>
        {
            return Ok(None);
        }
        connected => connected.map_err(failed)?,
    };
    let mut line = encode_request(request).map_err(|error| failed(error.into()))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(failed)?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).map_err(failed)?;
    if answer.is_empty() {
        return Err(failed(std::io::Error::other(
            "it did not answer: it has too many requests, or has ended",
        )));
    }
    let parsed = parse_answer(&answer).map_err(|error| failed(error.into()))?;
    Ok(Some(parsed))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::control_sockets;

    #[test]
    fn mounted_containers_are_not_servers() {
        let runtime = tempfile::tempdir().unwrap();
        for name in ["holdfast-a1B2c3", "holdfast-container-c619f22b"] {
            let folder = runtime.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            File::create(folder.join("control")).unwrap();
        }
        let folder = runtime.path().canonicalize().unwrap().join("holdfast-a1B2c3");
        assert_eq!(control_sockets(&[runtime.path().to_owned()]), [folder.join("control")]);
    }
}
