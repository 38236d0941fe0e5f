//! The supervisor of a disk that is mounted for writing: holds what outlives a worker, and starts the next one.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use holdfast_block::WriteLog;
use holdfast_host::HandedProcess;
use holdfast_host::fuse_mount::{FuseMountError, UnmountMode, unmount_fuse, unmount_unused_fuse};
use holdfast_serve::fuse::FileAccess;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::worker::WorkerState;
use super::{LOOK_INTERVAL, MountPlace};
use crate::job::{Error, Job, Result};

/// How long a worker may take to open the image and to negotiate with the kernel.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// More workers than this in [`RESTART_WINDOW`] end for a reason that another one does not remove.
const RESTART_COUNT_MAX: usize = 10;
const RESTART_WINDOW: Duration = Duration::from_secs(60);

/// Starts a worker with the number of its predecessors, the opened `/dev/fuse` as its standard input, and the file of the
/// log as its standard output.
pub type WorkerLauncher<'a> = dyn Fn(u32, OwnedFd, OwnedFd) -> std::io::Result<HandedProcess> + 'a;

/// What uses the file of a mounted disk on this host, such as a file system above it. Its methods run beside the
/// supervisor: they may wait for the file.
pub(crate) trait MountUser: Sync {
    /// Begins to use the file.
    fn attach(&self) -> Result<()>;

    /// Whether it has ended the use, so that the file can be unmounted.
    fn is_detached(&self) -> bool;
}

/// Where a worker serves a disk to the system.
pub(crate) trait SupervisedPlace: Sync {
    /// Prepares the place. Returns what the workers get as their standard input.
    fn open(&self) -> Result<OwnedFd>;

    /// Ends the service on request. Nothing that programs have written is lost: the worker ends when they have closed the
    /// disk.
    fn close(&self, job: Job<'_>) -> Result<()>;

    /// Ends the service at once: no worker will answer.
    fn abandon(&self);
}

/// A place that is abandoned on drop.
struct OpenPlace<'a> {
    place: &'a dyn SupervisedPlace,
    is_open: bool,
}

impl Drop for OpenPlace<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.place.abandon();
        }
    }
}

/// A disk to mount for writing.
pub(crate) struct Supervision<'a> {
    /// The image or container, for messages.
    pub(crate) path: &'a Path,
    pub(crate) place: &'a dyn SupervisedPlace,
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
        let device = self.place.open()?;
        let mut open = OpenPlace {
            place: self.place,
            is_open: true,
        };
        let mut supervisor = MountSupervisor {
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
                self.place.abandon();
            }
            watched
        })?;
        open.is_open = false;
        Ok(())
    }
}

struct MountSupervisor<'a> {
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

impl MountSupervisor<'_> {
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
        place: &dyn SupervisedPlace,
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
                place.close(self.job)?;
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
                place.close(self.job)?;
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
}

impl SupervisedPlace for MountPlace {
    fn open(&self) -> Result<OwnedFd> {
        let (mount, device) = self.mount(FileAccess::Writable)?;
        // From here on, the caller closes the place.
        mount.unmounted();
        Ok(device)
    }

    fn close(&self, job: Job<'_>) -> Result<()> {
        match unmount_unused_fuse(&self.folder, job.clock) {
            Err(FuseMountError::InUse { folder }) => {
                job.progress.warning(&format!(
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

    fn abandon(&self) {
        unmount_fuse(&self.folder, UnmountMode::Detach).ok();
    }
}
