//! Serves disks to the hypervisor of the other host, each by a stream that is opened again whenever it ends.

use std::io::Read as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_serve::nbd::{
    Event, Export, ExportDevice, FixedExports, Limits, Server, ServerOptions, ServerResources, Socket, TlsPolicy,
};

use super::served_disk::ServedDisk;
use crate::error::{Error, Result};
use crate::far::HostService;
use crate::service_link::ServiceLink;

/// How long the other host may take to make its sockets.
const LISTEN_PATIENCE: Duration = Duration::from_secs(60);
/// How long a connection waits after one has failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A disk, and the socket of the other host for it.
pub(super) struct ServedSocket {
    /// The name of the export.
    pub(super) export: String,
    pub(super) socket: PathBuf,
    pub(super) disk: Arc<ServedDisk>,
}

/// Serves disks until it is dropped.
pub(super) struct DiskServer {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    server: Server,
    link: Arc<dyn ServiceLink>,
    clock: Arc<dyn Clock>,
    has_ended: AtomicBool,
    streams: Mutex<Vec<DiskStream>>,
    changed: Condvar,
}

/// The stream of a disk.
#[derive(Default)]
struct DiskStream {
    /// Ends the connection.
    open: Option<UnixStream>,
    /// Whether the other host has a socket for it.
    is_listening: bool,
    /// Why the last connection failed.
    failure: Option<String>,
}

impl DiskServer {
    /// Serves the disks at sockets of the other host.
    ///
    /// # Errors
    /// The other host does not make the sockets.
    pub(super) fn start(
        disks: Vec<ServedSocket>,
        link: Arc<dyn ServiceLink>,
        clock: Arc<dyn Clock>,
        host: &str,
    ) -> Result<Self> {
        let export =
            |disk: &ServedSocket| Export::new(&disk.export, ExportDevice::ReadOnly(Arc::clone(&disk.disk) as _));
        let server = Server::new(ServerOptions {
            exports: Arc::new(FixedExports::new(disks.iter().map(export))),
            resources: ServerResources::new(Limits::default()),
            tls: TlsPolicy::Off,
            clock: Arc::clone(&clock),
            events: Arc::new(|event: &Event<'_>| log::debug!("{event:?}")),
        });
        let shared = Arc::new(Shared {
            server,
            link,
            clock,
            has_ended: AtomicBool::new(false),
            streams: Mutex::new(disks.iter().map(|_| DiskStream::default()).collect()),
            changed: Condvar::new(),
        });
        let threads = disks.into_iter().enumerate().map(|(number, disk)| {
            let shared = Arc::clone(&shared);
            let serve = move || shared.serve_disk(number, &disk.socket);
            std::thread::Builder::new().name("served-disk".to_owned()).spawn(serve)
        });
        let threads = threads.collect::<std::io::Result<Vec<_>>>();
        let server = Self {
            shared,
            threads: threads.map_err(|error| no_answer(host, error.to_string()))?,
        };
        server.shared.wait_for_sockets(host)?;
        Ok(server)
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Release);
        for stream in &*self.shared.streams() {
            if let Some(open) = &stream.open {
                open.shutdown(Shutdown::Both).ok();
            }
        }
        for thread in self.threads.drain(..) {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    }
}

impl Shared {
    fn streams(&self) -> MutexGuard<'_, Vec<DiskStream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    fn serve_disk(&self, number: usize, socket: &Path) {
        while !self.has_ended() {
            let served = self.serve_client(number, socket);
            let mut streams = self.streams();
            streams[number] = DiskStream {
                failure: served.as_ref().err().map(ToString::to_string),
                ..DiskStream::default()
            };
            drop(streams);
            self.changed.notify_all();
            if served.is_err() && !self.has_ended() {
                self.clock.sleep(RETRY_INTERVAL);
            }
        }
    }

    /// Serves one client of the socket there.
    fn serve_client(&self, number: usize, socket: &Path) -> std::io::Result<()> {
        let (mut ours, theirs) = UnixStream::pair()?;
        self.streams()[number].open = Some(theirs.try_clone()?);
        if self.has_ended() {
            return Ok(());
        }
        let line = HostService::client_of(socket).line()?;
        let link = Arc::clone(&self.link);
        let joining = std::thread::Builder::new().spawn(move || {
            let kept = theirs.try_clone()?;
            let joined = link.join(&line, theirs);
            kept.shutdown(Shutdown::Both).ok();
            joined.map_err(std::io::Error::other)
        })?;
        let served = ours.read_exact(&mut [0]).and_then(|()| {
            self.streams()[number].is_listening = true;
            self.changed.notify_all();
            ours.read_exact(&mut [0])
        });
        let served = served.and_then(|()| self.server.serve(Socket::Unix(ours)).map_err(std::io::Error::other));
        let joined = joining.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        joined.and(served)
    }

    fn wait_for_sockets(&self, host: &str) -> Result<()> {
        let mut streams = self.streams();
        let until = self.clock.now() + LISTEN_PATIENCE;
        while !streams.iter().all(|stream| stream.is_listening) {
            if let Some(reason) = streams.iter().find_map(|stream| stream.failure.clone()) {
                return Err(no_answer(host, format!("it does not receive disks: {reason}")));
            }
            if self.clock.now() > until {
                return Err(no_answer(host, "it has not made the sockets for the disks".to_owned()));
            }
            let waited = self.changed.wait_timeout(streams, Duration::from_millis(100));
            streams = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

fn no_answer(host: &str, reason: String) -> Error {
    Error::FarHost {
        host: host.to_owned(),
        reason,
    }
}
