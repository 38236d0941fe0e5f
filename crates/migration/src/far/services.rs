//! A host that serves the `migrate` of another host: over a socket on the way back of a machine, or one connection of a command.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_engine::{is_disk_socket, is_memory_socket};
use holdfast_live_copy::{ByteStream, ReceiveTools, TargetScope, serve_receiver};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::disk_socket::DiskSocket;
use super::serve::{FarTools, serve_far};
use crate::streams::{copy_bytes, join_streams};

/// Limit of the first line of a connection. A path has at most 4096 bytes.
const LINE_BYTES_MAX: usize = 8192;
/// Interval of looking whether the way back is needed any more.
const LOOK_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// How long a connection may take to say what it is for.
const GREETING_PATIENCE: Duration = Duration::from_secs(30);
/// The version of the first line.
const VERSION: u32 = 1;

/// What a connection is for: its first line. What follows belongs to the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "service", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum HostService {
    /// Requests about the machine.
    Machine { version: u32 },
    /// Requests about the container.
    Container { version: u32 },
    /// The receiver of a disk.
    Disk { version: u32 },
    /// The bytes of a socket: that of the hypervisor, or one for memory.
    Socket { version: u32, path: PathBuf },
    /// One client of the new socket, for a disk that is pulled. A byte 0 comes when the socket exists, and another one when the
    /// client has connected.
    Client { version: u32, path: PathBuf },
}

impl HostService {
    pub(crate) fn machine() -> Self {
        Self::Machine { version: VERSION }
    }

    pub(crate) fn container() -> Self {
        Self::Container { version: VERSION }
    }

    pub(crate) fn disk() -> Self {
        Self::Disk { version: VERSION }
    }

    pub(crate) fn of_socket(path: &Path) -> Self {
        Self::Socket {
            version: VERSION,
            path: path.to_owned(),
        }
    }

    pub(crate) fn client_of(path: &Path) -> Self {
        Self::Client {
            version: VERSION,
            path: path.to_owned(),
        }
    }

    /// The first line of a connection.
    pub(crate) fn line(&self) -> std::io::Result<Vec<u8>> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Connects to a host that serves at `socket`.
    pub(crate) fn open(&self, socket: &Path) -> std::io::Result<UnixStream> {
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(&self.line()?)?;
        Ok(stream)
    }

    /// Reads the first line of a connection, and nothing after it.
    fn read(mut stream: &UnixStream) -> std::io::Result<Self> {
        let mut line = Vec::new();
        stream.set_read_timeout(Some(GREETING_PATIENCE))?;
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            line.extend(byte);
            if line.len() > LINE_BYTES_MAX {
                return Err(std::io::Error::other("the first line of a connection is too long"));
            }
        }
        stream.set_read_timeout(None)?;
        Ok(serde_json::from_slice(&line)?)
    }
}

/// Requests that a host answers while something comes to it.
pub trait HostRequests: Sync {
    /// Answers requests about `subject` until the stream ends.
    ///
    /// # Errors
    /// The stream fails, or has no requests, or others than this host answers.
    fn serve(&self, subject: RequestSubject, stream: &UnixStream) -> std::io::Result<()>;
    /// The socket of the hypervisor, if it is needed.
    fn hypervisor_socket(&self) -> Option<PathBuf> {
        None
    }
    /// The user and group that may connect to the sockets of disks; none if they are those of this process.
    fn user_of_machines(&self) -> Option<(u32, u32)> {
        None
    }
}

/// What requests are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestSubject {
    /// A machine of a hypervisor.
    Machine,
    /// A container.
    Container,
}

impl RequestSubject {
    /// The error of a host that does not answer requests about it.
    pub(crate) fn refusal(self) -> std::io::Error {
        let name = match self {
            Self::Machine => "machines",
            Self::Container => "containers",
        };
        std::io::Error::other(format!("requests about {name} are not answered here"))
    }
}

impl HostRequests for FarTools<'_> {
    fn serve(&self, subject: RequestSubject, stream: &UnixStream) -> std::io::Result<()> {
        match subject {
            RequestSubject::Machine => serve_far(stream, stream, self),
            RequestSubject::Container => Err(subject.refusal()),
        }
    }

    fn hypervisor_socket(&self) -> Option<PathBuf> {
        self.hypervisor.socket()
    }

    fn user_of_machines(&self) -> Option<(u32, u32)> {
        self.hypervisor.user_of_machines().ok().flatten()
    }
}

/// What the services need of their host.
pub struct HostServices<'a> {
    /// Requests about what comes.
    pub requests: &'a dyn HostRequests,
    /// For its disks.
    pub disks: ReceiveTools,
}

/// Serves all connections to `listener` until `is_ended`.
///
/// # Errors
/// The listener fails. Connections that fail are closed.
pub fn serve_host(
    listener: &UnixListener,
    services: &HostServices<'_>,
    is_ended: &(dyn Fn() -> bool + Sync),
) -> std::io::Result<()> {
    let streams = KeptStreams::default();
    std::thread::scope(|scope| {
        let streams = &streams;
        let accept = || {
            while !is_ended() {
                if !is_ready(listener)? {
                    continue;
                }
                let (stream, _) = listener.accept()?;
                streams.keep(&stream)?;
                scope.spawn(move || {
                    if let Err(error) = services.serve(&stream, streams) {
                        log::info!("a connection of the other host ended: {error}");
                    }
                    // The other host waits for the end, and `streams` has the socket, too.
                    stream.shutdown(Shutdown::Both).ok();
                });
            }
            Ok(())
        };
        let accepted = accept();
        // Their threads wait for what will not come any more.
        streams.shut_down();
        accepted
    })
}

/// Serves one connection, of an input and an output that may be pipes, until it ends.
///
/// # Errors
/// It asks for something that this host does not serve, or fails.
pub fn serve_connection(input: File, output: File, services: &HostServices<'_>) -> std::io::Result<()> {
    let (served, own) = UnixStream::pair()?;
    let received = own.try_clone()?;
    // Not awaited: the input may be open when everything is served.
    std::thread::spawn(move || {
        copy_bytes(&input, &received).ok();
        received.shutdown(Shutdown::Write).ok();
    });
    let sending = std::thread::spawn(move || copy_bytes(&own, &output));
    let result = services.serve(&served, &KeptStreams::default());
    served.shutdown(Shutdown::Both).ok();
    // The last bytes may still be on their way.
    sending
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        .ok();
    result
}

/// The streams of all connections, to end them.
#[derive(Default)]
struct KeptStreams(Mutex<Vec<UnixStream>>);

impl KeptStreams {
    fn keep(&self, stream: &UnixStream) -> std::io::Result<()> {
        let kept = stream.try_clone()?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
        Ok(())
    }

    fn shut_down(&self) {
        for stream in &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl HostServices<'_> {
    fn serve(&self, stream: &UnixStream, streams: &KeptStreams) -> std::io::Result<()> {
        let other_version = || std::io::Error::other("it has another version of the protocol");
        match HostService::read(stream)? {
            HostService::Machine { version: VERSION } => self.requests.serve(RequestSubject::Machine, stream),
            HostService::Container { version: VERSION } => self.requests.serve(RequestSubject::Container, stream),
            HostService::Disk { version: VERSION } => {
                let stream = ByteStream::of_socket(stream.try_clone()?)?;
                let received = serve_receiver(stream, TargetScope::Host, &self.disks);
                received.map(drop).map_err(std::io::Error::other)
            }
            HostService::Socket { version: VERSION, path } => {
                let is_hypervisor = self.requests.hypervisor_socket().as_deref() == Some(&*path);
                if !is_hypervisor && !is_memory_socket(&path) {
                    let reason = format!("{} is not a socket of a migration", path.display());
                    return Err(std::io::Error::other(reason));
                }
                let onward = UnixStream::connect(path)?;
                // A hypervisor that hangs does not end it.
                streams.keep(&onward)?;
                join_streams(stream, &onward);
                Ok(())
            }
            HostService::Client { version: VERSION, path } => {
                if !is_disk_socket(&path) {
                    let reason = format!("{} is not a socket of a disk", path.display());
                    return Err(std::io::Error::other(reason));
                }
                let socket = DiskSocket::bind(path, self.requests.user_of_machines())?;
                socket.serve_one(stream)
            }
            _ => Err(other_version()),
        }
    }
}

/// Whether a connection waits, after at most [`LOOK_INTERVAL`].
fn is_ready(listener: &UnixListener) -> std::io::Result<bool> {
    match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&LOOK_INTERVAL)) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::{HostService, LINE_BYTES_MAX};

    #[test]
    fn a_first_line_is_read_without_what_follows() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let lines = include_str!("../../tests/fixtures/services-1.jsonl");
        for line in lines.lines() {
            writeln!(ours, "{line}").unwrap();
            ours.write_all(b"more").unwrap();
            let service = HostService::read(&theirs).unwrap();
            assert_eq!(serde_json::to_string(&service).unwrap(), line);
            let mut more = [0; 4];
            theirs.read_exact(&mut more).unwrap();
            assert_eq!(&more, b"more");
        }
        assert_eq!(lines.lines().count(), 5);
    }

    #[test]
    fn a_first_line_that_is_no_service_is_refused() {
        let long = "x".repeat(LINE_BYTES_MAX + 1);
        let shell = r#"{"service":"shell","version":1}"#;
        for text in [shell, "\n", "{}", r#"{"service":"disk"}"#, &long] {
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            writeln!(ours, "{text}").unwrap();
            HostService::read(&theirs).unwrap_err();
        }
    }
}
