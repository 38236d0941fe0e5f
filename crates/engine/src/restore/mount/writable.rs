//! An image that is mounted for writing.
//!
//! ```text
//! supervisor   locks the image, mounts, starts a worker; holds /dev/fuse and the log of writes
//!   └─ worker  opens the image, replays the log, serves the file
//! ```
//! If the worker is killed, or ends with an error, the supervisor starts another one. It replays the writes that the image
//! may have lost, and the kernel sends the requests again that were not answered. Programs that use the file wait
//! meanwhile, and see no error. Kernels before 6.9 cannot send requests again: the file system is then lost, as a disk
//! that was pulled out.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use holdfast_block::{BlockDevice as _, BlockDeviceMut, Error as DeviceError, LoggedDevice, WriteLog};
use holdfast_host::HandedProcess;
use holdfast_host::fuse_mount::{FuseMountError, UnmountMode, unmount_fuse, unmount_unused_fuse};
use holdfast_image::{Format, ImageLock, Locking, OpenOptions, open_mut};
use holdfast_serve::fuse::{
    Directory, FileAccess, FileContent, FileTree, FuseServer, MountEvents, Negotiation, SessionStart, TreeEntry,
};
use holdfast_serve::nbd::ExportDevice;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::process::configure_io_flusher_behavior;

use super::image::MountedImage;
use super::{LOOK_INTERVAL, MountPlace, owner_of_process};
use crate::job::{Error, Job, Result};

/// How long a worker may take to open the image and to negotiate with the kernel.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// More workers than this in [`RESTART_WINDOW`] end for a reason that another one does not remove.
const RESTART_COUNT_MAX: usize = 10;
const RESTART_WINDOW: Duration = Duration::from_secs(60);

/// What a worker has reported in the note of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkerState {
    Starting,
    /// It serves. If it ends, another one can continue.
    WithSuccessors,
    /// It serves. If it ends, the file system is lost.
    WithoutSuccessors,
}

impl WorkerState {
    const ALL: [Self; 3] = [Self::Starting, Self::WithSuccessors, Self::WithoutSuccessors];

    fn number(self) -> u32 {
        match self {
            Self::Starting => 0,
            Self::WithSuccessors => 1,
            Self::WithoutSuccessors => 2,
        }
    }

    fn of(log: &WriteLog) -> Result<Self> {
        let note = log.note()?;
        let found = Self::ALL.into_iter().find(|state| state.number() == note);
        Ok(found.unwrap_or(Self::Starting))
    }
}

/// Starts a worker with the number of its predecessors, the opened `/dev/fuse` as its standard input, and the file of the
/// log as its standard output.
pub type WorkerLauncher<'a> = dyn Fn(u32, OwnedFd, OwnedFd) -> std::io::Result<HandedProcess> + 'a;

/// An image that can be mounted for writing.
pub struct WritableImageMount {
    path: PathBuf,
    content: MountedImage,
    /// Held while the image is mounted, also between two workers.
    _lock: ImageLock,
}

impl WritableImageMount {
    /// The path of the image, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locks an image, and checks that it can be written.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        let on = |error| Error::from(error).on(path);
        let path = &path.canonicalize().map_err(|source| Error::File {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        let lock = ImageLock::take(path, options).map_err(on)?;
        let image = open_mut(path, &unlocked(options)).map_err(on)?;
        let format = image.layers().first().map_or(Format::Raw, |layer| layer.format);
        let content = MountedImage::of(path, format, image.size_bytes());
        Ok(Self {
            path: path.to_owned(),
            content,
            _lock: lock,
        })
    }

    /// What a mount shows.
    pub fn content(&self) -> &MountedImage {
        &self.content
    }

    /// Mounts the disk until it is unmounted, which is the normal end. If the job is interrupted while programs use the
    /// disk, it is served until they close it.
    pub fn supervise(
        &self,
        place: &MountPlace,
        launch: &WorkerLauncher<'_>,
        job: Job<'_>,
        ready: &mut dyn FnMut(),
    ) -> Result<()> {
        let supervision = Supervision {
            path: &self.path,
            place,
            launch,
            user: &NoUser,
        };
        supervision.run(job, ready)
    }
}

/// What uses the file of a mounted disk on this host, such as a file system above it. Its methods run beside the
/// supervisor: they may wait for the file.
pub(crate) trait MountUser: Sync {
    /// Begins to use the file.
    fn attach(&self) -> Result<()>;

    /// Whether it has ended the use, so that the file can be unmounted.
    fn is_detached(&self) -> bool;
}

struct NoUser;

impl MountUser for NoUser {
    fn attach(&self) -> Result<()> {
        Ok(())
    }

    fn is_detached(&self) -> bool {
        false
    }
}

/// A disk to mount for writing.
pub(crate) struct Supervision<'a> {
    /// The image or container, for messages.
    pub(crate) path: &'a Path,
    pub(crate) place: &'a MountPlace,
    pub(crate) launch: &'a WorkerLauncher<'a>,
    pub(crate) user: &'a dyn MountUser,
}

impl Supervision<'_> {
    /// Mounts the disk until it is unmounted. `ready` is called when its user has begun to use it.
    pub(crate) fn run(&self, job: Job<'_>, ready: &mut dyn FnMut()) -> Result<()> {
        let file_error = |source: std::io::Error| Error::File {
            action: "serve",
            path: self.path.to_owned(),
            source,
        };
        let memory = rustix::fs::memfd_create("holdfast-writes", MemfdFlags::CLOEXEC);
        let memory = File::from(memory.map_err(|errno| file_error(errno.into()))?);
        let log = WriteLog::create(memory.try_clone().map_err(file_error)?)?;
        let (mount, device) = self.place.mount(FileAccess::Writable)?;
        let mut supervisor = Supervisor {
            path: self.path,
            device,
            memory,
            log,
            launch: self.launch,
            user: self.user,
            job,
            predecessor_count: 0,
            restarts: VecDeque::new(),
        };
        let mut worker = supervisor.start()?;
        supervisor.wait_until_served(&mut worker)?;
        std::thread::scope(|scope| {
            let watched = supervisor.watch(worker, self.place, scope, ready);
            if watched.is_err() {
                // The threads of the user would wait for an answer for ever.
                supervisor.abandon();
            }
            watched
        })?;
        mount.unmounted();
        Ok(())
    }
}

fn unlocked(options: &OpenOptions) -> OpenOptions {
    OpenOptions {
        locking: Locking::HeldElsewhere,
        ..options.clone()
    }
}

struct Supervisor<'a> {
    path: &'a Path,
    device: OwnedFd,
    memory: File,
    log: WriteLog,
    launch: &'a WorkerLauncher<'a>,
    user: &'a dyn MountUser,
    job: Job<'a>,
    predecessor_count: u32,
    /// Times of the last starts of successors.
    restarts: VecDeque<Duration>,
}

impl Supervisor<'_> {
    fn error(&self, source: impl Into<std::io::Error>) -> Error {
        Error::File {
            action: "serve",
            path: self.path.to_owned(),
            source: source.into(),
        }
    }

    /// Closes the device, which ends all requests with an error if no worker runs.
    fn abandon(&mut self) {
        if let Ok(nothing) = File::open("/dev/null") {
            self.device = nothing.into();
        }
    }

    fn start(&self) -> Result<HandedProcess> {
        let files = || Ok((self.device.try_clone()?, OwnedFd::from(self.memory.try_clone()?)));
        let (device, memory) = files().map_err(|error: std::io::Error| self.error(error))?;
        (self.launch)(self.predecessor_count, device, memory).map_err(|error| self.error(error))
    }

    /// Waits until the kernel has negotiated with the first worker.
    fn wait_until_served(&self, worker: &mut HandedProcess) -> Result<()> {
        let deadline = self.job.clock.now() + START_PATIENCE;
        while WorkerState::of(&self.log)? == WorkerState::Starting {
            let is_late = self.job.clock.now() >= deadline;
            if is_late {
                worker.kill().ok();
            }
            let status = worker.status().map_err(|error| self.error(error))?;
            if is_late || status.is_some() {
                let reason = status.map_or_else(|| "it does not answer".to_owned(), |status| status.to_string());
                return Err(self.error(std::io::Error::other(format!("its server has ended: {reason}"))));
            }
            self.job.clock.sleep(LOOK_INTERVAL / 10);
        }
        Ok(())
    }

    /// Serves until the file is unmounted. The user of the file attaches to it meanwhile.
    fn watch<'scope>(
        &mut self,
        mut worker: HandedProcess,
        place: &MountPlace,
        scope: &'scope std::thread::Scope<'scope, '_>,
        ready: &mut dyn FnMut(),
    ) -> Result<()>
    where
        Self: 'scope,
    {
        let (send, attached) = channel();
        let user = self.user;
        scope.spawn(move || send.send(user.attach()));
        let (mut is_stopping, mut is_attached, mut failure) = (false, false, None);
        loop {
            match attached.try_recv() {
                Ok(Ok(())) => {
                    is_attached = true;
                    ready();
                }
                Ok(Err(error)) => failure = Some(error),
                Err(_) => {}
            }
            let is_done = failure.is_some() || is_attached && self.user.is_detached();
            if !is_stopping && is_done {
                is_stopping = true;
                self.stop(place)?;
            }
            if let Some(status) = worker.status().map_err(|error| self.error(error))? {
                if status.success() {
                    return failure.map_or(Ok(()), Err);
                }
                let ended = format!("the server of {} has ended ({status})", self.path.display());
                if !self.may_restart()? {
                    return Err(self.error(std::io::Error::other(ended)));
                }
                self.predecessor_count += 1;
                worker = self.start()?;
                self.job.progress.warning(&format!("{ended}; another one continues"));
            }
            if !is_stopping && self.job.interrupt.check().is_err() {
                is_stopping = true;
                self.stop(place)?;
            }
            self.job.clock.sleep(LOOK_INTERVAL);
        }
    }

    /// Whether a successor can continue, and has a chance to do better.
    fn may_restart(&mut self) -> Result<bool> {
        let now = self.job.clock.now();
        while self
            .restarts
            .front()
            .is_some_and(|start| now.saturating_sub(*start) > RESTART_WINDOW)
        {
            self.restarts.pop_front();
        }
        self.restarts.push_back(now);
        Ok(self.restarts.len() <= RESTART_COUNT_MAX && WorkerState::of(&self.log)? == WorkerState::WithSuccessors)
    }

    /// Unmounts on request. Nothing that programs have written is lost: the worker ends when they have closed the file.
    fn stop(&self, place: &MountPlace) -> Result<()> {
        match unmount_unused_fuse(&place.folder, self.job.clock) {
            Err(FuseMountError::InUse { folder }) => {
                self.job.progress.warning(&format!(
                    "programs still use files below {}: they are served until the programs close them",
                    folder.display()
                ));
                Ok(unmount_fuse(&folder, UnmountMode::Detach)?)
            }
            // Another process was quicker.
            Err(FuseMountError::Unmount { source, .. })
                if source.raw_os_error() == Some(Errno::INVAL.raw_os_error()) =>
            {
                Ok(())
            }
            result => Ok(result?),
        }
    }
}

/// What a worker serves.
pub struct ImageWorkerRequest {
    /// The image.
    pub path: PathBuf,
    /// How it is opened; its format is set.
    pub options: OpenOptions,
    /// Number of workers that have ended.
    pub predecessor_count: u32,
    /// The opened `/dev/fuse`.
    pub device: OwnedFd,
    /// The file of the log of writes.
    pub log: File,
    /// Receives errors of reads and writes.
    pub events: Arc<dyn MountEvents>,
}

/// Serves an image as a worker of [`WritableImageMount::supervise`], until it is unmounted. `ready` is called when the
/// file can be used.
pub fn serve_writable_image(request: ImageWorkerRequest, job: Job<'_>, ready: &mut dyn FnMut()) -> Result<()> {
    let path = &request.path;
    let image = open_mut(path, &unlocked(&request.options)).map_err(|error| Error::from(error).on(path))?;
    let format = image.layers().first().map_or(Format::Raw, |layer| layer.format);
    let name = MountedImage::of(path, format, image.size_bytes()).file;
    let files = WorkerFiles {
        path: path.clone(),
        predecessor_count: request.predecessor_count,
        device: request.device,
        log: request.log,
        events: request.events,
    };
    serve_as_worker(image, name, files, job, ready)
}

/// What a supervisor hands to a worker.
pub(crate) struct WorkerFiles {
    /// The image or container, for messages.
    pub(crate) path: PathBuf,
    pub(crate) predecessor_count: u32,
    pub(crate) device: OwnedFd,
    pub(crate) log: File,
    pub(crate) events: Arc<dyn MountEvents>,
}

/// Repeats the writes of the predecessor, and serves `disk` as the file `name` until it is unmounted.
pub(crate) fn serve_as_worker(
    disk: impl BlockDeviceMut + 'static,
    name: String,
    files: WorkerFiles,
    job: Job<'_>,
    ready: &mut dyn FnMut(),
) -> Result<()> {
    let log = WriteLog::open(files.log.try_clone().map_err(DeviceError::layer)?)?;
    let state = WriteLog::open(files.log)?;
    let start = match files.predecessor_count {
        0 => SessionStart::New,
        predecessor_count => {
            let replayed = log.replay(&disk)?;
            job.progress.note(&format!(
                "{} writes of the server before were repeated",
                replayed.record_count
            ));
            SessionStart::Successor { predecessor_count }
        }
    };
    // Under memory pressure, the kernel must not wait for this process to write its own pages. Needs the rights of root.
    configure_io_flusher_behavior(true).ok();
    let device: Arc<dyn BlockDeviceMut> = Arc::new(LoggedDevice::new(disk, log)?);
    let mut root = Directory::new(0);
    let entry = TreeEntry::File {
        content: Arc::new(WritableContent {
            name: name.clone(),
            device: Arc::clone(&device),
        }),
        modified_ms: 0,
    };
    root.insert(name, entry).map_err(|error| Error::File {
        action: "serve",
        path: files.path.clone(),
        source: std::io::Error::other(error),
    })?;
    let tree = Arc::new(FileTree::new(&root, owner_of_process()));
    let server = FuseServer::start(files.device, tree, files.events, start).map_err(Error::Serve)?;
    let mut reported = WorkerState::Starting;
    while !server.is_ended() {
        let now = match server.negotiation() {
            Negotiation::Pending => WorkerState::Starting,
            Negotiation::WithSuccessors => WorkerState::WithSuccessors,
            Negotiation::WithoutSuccessors => WorkerState::WithoutSuccessors,
        };
        if now != reported {
            ready();
            state.set_note(now.number())?;
            reported = now;
        }
        job.clock.sleep(LOOK_INTERVAL / 10);
    }
    device.flush()?;
    Ok(())
}

/// A file with a disk that can be written.
struct WritableContent {
    name: String,
    device: Arc<dyn BlockDeviceMut>,
}

impl FileContent for WritableContent {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn identity(&self) -> String {
        self.name.clone()
    }

    fn access(&self) -> FileAccess {
        FileAccess::Writable
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        Ok(ExportDevice::Writable(Arc::clone(&self.device)))
    }
}
