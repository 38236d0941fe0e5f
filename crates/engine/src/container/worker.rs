//! The worker of a mounted container: serves its disk, and executes requests.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::{BlockDeviceMut as _, Clock, error_text};
use holdfast_host::Tools;
use holdfast_image::{Continue, LiveChain, LiveOptions, MEMORY_PROPERTY, MergeObserver, MergeProgress, NewSnapshot};
use holdfast_serve::fuse::MountEvents;

use super::attach::mount_points;
use super::control::{
    Consistency, ContainerControlRequest, ControlReply, ControlResult, parse_request, read_request, send_reply,
};
use super::freezer::{Freezer, FreezerLauncher};
use super::nbd::serve_over_nbd;
use super::pause::{EndedPause, end_abandoned_pause, is_paused_by_process};
use super::place::DiskTransport;
use super::place::{ContainerPlace, DISK_FILE};
use super::runtime::memory_error;
use super::state::{CONSISTENCY_PROPERTY, SnapshotState};
use super::traffic::CountedDisk;
use crate::job::error::{ContainerError, MemoryProblem, ServerFailure};
use crate::job::{Error, Job, Result};
use crate::restore::mount::{LOOK_INTERVAL, WorkerFiles, serve_as_worker};

/// Time between two flushes while the file system is synced.
const FLUSH_INTERVAL: Duration = Duration::from_millis(20);

/// Connections at a time; each request is short, except merges.
const CONNECTION_COUNT_MAX: usize = 16;
/// A client that sends nothing is disconnected.
const REQUEST_PATIENCE: Duration = Duration::from_secs(10);

/// What a worker serves.
pub struct ContainerWorkerRequest<'a> {
    /// The container.
    pub place: ContainerPlace,
    /// The mount point of the FUSE file system.
    pub disk_folder: PathBuf,
    /// Number of workers that have ended.
    pub predecessor_count: u32,
    /// What makes a block device of the disk.
    pub transport: DiskTransport,
    /// The opened `/dev/fuse`; of no use for NBD.
    pub device: OwnedFd,
    /// The file of the log of writes.
    pub log: File,
    /// Receives errors of reads and writes.
    pub events: Arc<dyn MountEvents>,
    /// Starts the process that freezes the file system.
    pub freezer: &'a FreezerLauncher<'a>,
    /// Runs runc, to resume what a process that was killed has paused.
    pub tools: Box<dyn Tools>,
    /// Measures durations.
    pub clock: Arc<dyn Clock>,
}

/// Serves a container as a worker of [`ContainerMount::supervise`](super::ContainerMount::supervise), until it is unmounted. `ready` is called when the
/// disk can be used.
///
/// # Errors
/// The container cannot be opened or served.
pub fn serve_container(request: ContainerWorkerRequest<'_>, job: Job<'_>, ready: &mut dyn FnMut()) -> Result<()> {
    let folder = request.place.folder.clone();
    let chain = LiveChain::open(&folder, LiveOptions::default()).map_err(|error| Error::from(error).on(&folder))?;
    let disk = Arc::new(CountedDisk::new(chain));
    let listener = listen(&request.place)?;
    let server = ContainerControlServer {
        disk: Arc::clone(&disk),
        place: request.place,
        file: request.disk_folder.join(DISK_FILE),
        freezer: request.freezer,
        job,
        tools: request.tools,
        pausing: Mutex::new(()),
        is_ended: AtomicBool::new(false),
        connection_count: AtomicUsize::new(0),
    };
    let files = WorkerFiles {
        path: folder,
        predecessor_count: request.predecessor_count,
        device: request.device,
        log: request.log,
        events: request.events,
    };
    std::thread::scope(|scope| {
        scope.spawn(|| server.accept(&listener, scope));
        scope.spawn(|| server.collapse_pending());
        scope.spawn(|| server.end_abandoned_pauses());
        let served = match request.transport {
            DiskTransport::Fuse => serve_as_worker(disk, DISK_FILE.to_owned(), files, job, ready),
            DiskTransport::Nbd => serve_over_nbd(disk, &server.place, files, request.clock, job, ready),
        };
        server.is_ended.store(true, Ordering::Release);
        served
    })
}

fn listen(place: &ContainerPlace) -> Result<UnixListener> {
    let failed = |source| Error::File {
        action: "listen on",
        path: place.socket(),
        source,
    };
    // A worker that was killed has left its socket.
    std::fs::remove_file(place.socket()).ok();
    let listener = UnixListener::bind(place.socket()).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Executes the requests of clients in a worker.
struct ContainerControlServer<'a> {
    disk: Arc<CountedDisk>,
    place: ContainerPlace,
    /// The disk as a file.
    file: PathBuf,
    freezer: &'a FreezerLauncher<'a>,
    job: Job<'a>,
    tools: Box<dyn Tools>,
    /// Held during a snapshot with memory, and while an abandoned pause is ended: no process runs between both parts
    /// of a snapshot.
    pausing: Mutex<()>,
    is_ended: AtomicBool,
    connection_count: AtomicUsize,
}

impl ContainerControlServer<'_> {
    fn accept<'scope>(&'scope self, listener: &UnixListener, scope: &'scope std::thread::Scope<'scope, '_>) {
        while !self.is_ended.load(Ordering::Acquire) {
            match listener.accept() {
                Ok((stream, _)) if self.connection_count.load(Ordering::Acquire) < CONNECTION_COUNT_MAX => {
                    self.connection_count.fetch_add(1, Ordering::AcqRel);
                    scope.spawn(move || {
                        self.serve(&stream);
                        self.connection_count.fetch_sub(1, Ordering::AcqRel);
                    });
                }
                _ => self.job.clock.sleep(LOOK_INTERVAL / 10),
            }
        }
    }

    fn serve(&self, stream: &UnixStream) {
        if stream.set_nonblocking(false).is_err() || stream.set_read_timeout(Some(REQUEST_PATIENCE)).is_err() {
            return;
        }
        let Ok(Some(line)) = read_request(stream) else { return };
        let reply = match parse_request(&line) {
            Err(message) => ControlReply::Failed {
                failure: ServerFailure::Invalid,
                message,
            },
            Ok(request) => match self.execute(request, stream) {
                Ok(result) => ControlReply::Done(result),
                Err(error) => ControlReply::Failed {
                    failure: failure_of(&error),
                    message: error_text(&error),
                },
            },
        };
        // A client that has gone does not need the answer.
        send_reply(stream, &reply).ok();
    }

    fn execute(&self, request: ContainerControlRequest, stream: &UnixStream) -> Result<ControlResult> {
        let chain = self.disk.chain();
        match request {
            ContainerControlRequest::Snapshot {
                name,
                comment,
                created_s,
                properties,
                consistency,
            } => {
                let new = NewSnapshot {
                    name,
                    comment,
                    created_s: Some(created_s),
                    properties,
                };
                if new.properties.contains_key(MEMORY_PROPERTY) {
                    return self.take_paused_snapshot(new, consistency);
                }
                self.take_snapshot(new, consistency)
            }
            ContainerControlRequest::Delete { names } => {
                let tree = chain.tree();
                let ids: std::result::Result<Vec<_>, _> = names.iter().map(|name| tree.find_snapshot(name)).collect();
                chain.hide_snapshots(&ids?)?;
                self.collapse(&Client { stream, server: self })
            }
            ContainerControlRequest::Collapse {} => self.collapse(&Client { stream, server: self }),
            ContainerControlRequest::Grow { size_bytes } => {
                chain.grow(size_bytes)?;
                Ok(ControlResult::Grown {})
            }
            ContainerControlRequest::SetProperties { properties } => {
                chain.set_properties(properties)?;
                Ok(ControlResult::Stored {})
            }
            ContainerControlRequest::Status {} => Ok(self.disk.status()),
        }
    }

    /// Takes a snapshot whose memory was read by a process that has paused the processes of the container.
    fn take_paused_snapshot(&self, new: NewSnapshot, consistency: Consistency) -> Result<ControlResult> {
        let _pausing = self.pausing.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_paused_by_process(&self.place) {
            return Err(memory_error(
                MemoryProblem::Checkpoint,
                "the process that has paused the container has ended: its memory and its disk would not fit",
            ));
        }
        self.take_snapshot(new, consistency)
    }

    fn take_snapshot(&self, new: NewSnapshot, consistency: Consistency) -> Result<ControlResult> {
        let clock = self.job.clock;
        let mut started = match consistency {
            Consistency::Crash => None,
            _ => Some(self.while_flushing(|| self.start_freezer())),
        };
        if let (Some(Err(reason)), Consistency::Frozen) = (&started, consistency) {
            return Err(self.not_frozen(reason.clone()));
        }
        let mut prepared = self.disk.chain().prepare_snapshot(new)?;
        let expected = state_with(started.as_ref().and_then(|started| started.as_ref().ok()));
        prepared.note(CONSISTENCY_PROPERTY, expected.word());
        prepared.stage()?;
        if let Some(Ok((_, freezer))) = &mut started {
            // What was written while the snapshot was prepared. The freeze reports the error.
            self.while_flushing(|| freezer.sync()).ok();
        }
        let start = clock.now();
        let frozen = started.map(|started| {
            started.and_then(|(point, mut freezer)| match freezer.freeze() {
                Ok(()) => Ok((point, freezer)),
                Err(error) => Err(error_text(&error)),
            })
        });
        let (frozen, not_frozen) = match frozen {
            None => (None, None),
            Some(Ok(frozen)) => (Some(frozen), None),
            Some(Err(reason)) if consistency == Consistency::Frozen => return Err(self.not_frozen(reason)),
            Some(Err(reason)) => (None, Some(reason)),
        };
        let is_frozen = frozen.is_some();
        prepared.note(CONSISTENCY_PROPERTY, state_with(frozen.as_ref()).word());
        let mut paused = Duration::ZERO;
        let mut thawed = Ok(());
        let committed = prepared.commit_then(|_| {
            if let Some((point, freezer)) = frozen {
                thawed = freezer.thaw(&point, self.freezer);
            }
            paused = clock.now().saturating_sub(start);
        });
        let thaw_failure = thawed.err().map(|error| error_text(&error));
        if let Some(reason) = &thaw_failure {
            let message = format!("{} may still be frozen: {reason}", self.place.folder.display());
            self.job.progress.warning(&message);
        }
        Ok(ControlResult::Taken {
            id: committed?.to_string(),
            is_frozen,
            paused_us: u64::try_from(paused.as_micros()).unwrap_or(u64::MAX),
            not_frozen,
            thaw_failure,
        })
    }

    /// Flushes the disk before and during `sync`, which syncs the file system.
    ///
    /// A loop device executes no other request during a flush. So as little as possible is left for the one that it
    /// gets from the file system.
    fn while_flushing<T>(&self, sync: impl FnOnce() -> T) -> T {
        let flush = || self.disk.chain().flush().ok();
        flush();
        std::thread::scope(|scope| {
            // Dropped at the end of the sync, also of one that panics: the thread ends then.
            let (_synced, is_synced) = mpsc::channel::<()>();
            scope.spawn(move || {
                while is_synced.recv_timeout(FLUSH_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    flush();
                }
            });
            sync()
        })
    }

    /// Starts the process that freezes the file system.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn start_freezer(&self) -> std::result::Result<(PathBuf, Freezer), String> {
        let of_file = mount_points(&self.file).into_iter();
        let point = of_file.chain(self.place.mount_points()).next();
        let point = point.ok_or("it is not mounted where the server can see it")?;
        match Freezer::start(&point, self.freezer) {
            Ok(freezer) => Ok((point, freezer)),
            Err(error) => Err(error_text(&error)),
        }
    }

    fn not_frozen(&self, reason: String) -> Error {
        ContainerError::NotFrozen {
            container: self.place.folder.clone(),
            reason,
        }
        .into()
    }

    fn collapse(&self, observer: &dyn MergeObserver) -> Result<ControlResult> {
        let done = self.disk.chain().collapse(observer)?;
        Ok(ControlResult::Collapsed {
            merged_count: done.merged_count,
            removed_count: done.removed_count,
        })
    }

    /// Resumes the processes of the container if the process that has paused them was killed.
    fn end_abandoned_pauses(&self) {
        while !self.is_ended.load(Ordering::Acquire) {
            let ended = {
                let _pausing = self.pausing.lock().unwrap_or_else(PoisonError::into_inner);
                end_abandoned_pause(&self.place, &*self.tools)
            };
            if let Some(EndedPause { id, result }) = ended {
                let progress = self.job.progress;
                match result {
                    Ok(()) => progress.warning(&format!(
                        "the container {id} of runc was paused by a process that has ended, and runs again"
                    )),
                    Err(error) => {
                        progress.warning(&format!(
                            "the paused container {id} of runc cannot be resumed: {}",
                            error_text(&error)
                        ));
                        // runc is not asked in each round.
                        self.job.clock.sleep(LOOK_INTERVAL * 10);
                    }
                }
            }
            self.job.clock.sleep(LOOK_INTERVAL);
        }
    }

    /// Continues the merges of a process that was killed.
    fn collapse_pending(&self) {
        if self.disk.chain().tree().is_collapse_pending()
            && let Err(error) = self.collapse(&Background(self))
            && !self.is_ended.load(Ordering::Acquire)
        {
            self.job.progress.warning(&format!(
                "the layers of deleted snapshots of {} cannot be merged: {}",
                self.place.folder.display(),
                error_text(&error)
            ));
        }
    }
}

/// The state of a snapshot during which `freezer` holds the file system.
fn state_with<F>(freezer: Option<&F>) -> SnapshotState {
    match freezer {
        Some(_) => SnapshotState::Frozen,
        None => SnapshotState::Crash,
    }
}

/// A merge that a client has requested: it stops when the client closes the connection.
struct Client<'a> {
    stream: &'a UnixStream,
    server: &'a ContainerControlServer<'a>,
}

impl MergeObserver for Client<'_> {
    fn advanced(&self, progress: &MergeProgress) -> Continue {
        let reply = ControlReply::Progress {
            position: progress.position,
            size_bytes: progress.size_bytes,
        };
        let is_gone = send_reply(self.stream, &reply).is_err();
        if is_gone || self.server.is_ended.load(Ordering::Acquire) {
            return Continue::Stop;
        }
        Continue::Go
    }
}

struct Background<'a>(&'a ContainerControlServer<'a>);

impl MergeObserver for Background<'_> {
    fn advanced(&self, _: &MergeProgress) -> Continue {
        if self.0.is_ended.load(Ordering::Acquire) {
            return Continue::Stop;
        }
        Continue::Go
    }
}

fn failure_of(error: &Error) -> ServerFailure {
    use holdfast_image::Error as ImageError;
    match error {
        Error::Container(error) if matches!(**error, ContainerError::NotFrozen { .. }) => ServerFailure::NotFrozen,
        Error::Image(ImageError::NotFound { .. }) => ServerFailure::NotFound,
        Error::Image(ImageError::InvalidOption { .. }) => ServerFailure::Invalid,
        Error::Image(ImageError::WouldShrink { .. } | ImageError::NotResizable { .. }) => ServerFailure::Refused,
        Error::Image(ImageError::Locked { .. }) => ServerFailure::Locked,
        Error::Image(error) if error.is_corrupt() => ServerFailure::Damaged,
        Error::Image(ImageError::Device(holdfast_block::Error::Io { source, .. }))
            if source.kind() == std::io::ErrorKind::Interrupted =>
        {
            ServerFailure::Interrupted
        }
        _ => ServerFailure::Io,
    }
}
