//! The worker of a disk that is mounted for writing: repeats the writes of its predecessor, and serves the disk.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_block::{BlockDeviceMut, Error as DeviceError, LoggedDevice, WriteLog};
use holdfast_serve::fuse::{
    Directory, FileAccess, FileContent, FileTree, FuseServer, MountEvents, Negotiation, SessionStart, TreeEntry,
};
use holdfast_serve::nbd::ExportDevice;
use rustix::process::configure_io_flusher_behavior;

use super::{LOOK_INTERVAL, owner_of_process};
use crate::job::{Error, Job, Result};

/// What a worker has reported in the note of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerState {
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

    pub(super) fn of(log: &WriteLog) -> Result<Self> {
        let note = log.note()?;
        let found = Self::ALL.into_iter().find(|state| state.number() == note);
        Ok(found.unwrap_or(Self::Starting))
    }
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

/// A disk with the writes of the worker before, in a worker.
pub(crate) struct WorkerDisk {
    pub(crate) device: Arc<dyn BlockDeviceMut>,
    state: WriteLog,
}

impl WorkerDisk {
    /// Repeats the writes that the image may have lost, and logs those that follow.
    pub(crate) fn prepare(
        disk: impl BlockDeviceMut + 'static,
        log: File,
        predecessor_count: u32,
        job: Job<'_>,
    ) -> Result<Self> {
        let state = WriteLog::open(log.try_clone().map_err(DeviceError::layer)?)?;
        let log = WriteLog::open(log)?;
        if predecessor_count > 0 {
            let replayed = log.replay(&disk)?;
            job.progress.note(&format!(
                "{} writes of the server before were repeated",
                replayed.record_count
            ));
        }
        // Under memory pressure, the kernel must not wait for this process to write its own pages. Needs the rights of
        // root.
        configure_io_flusher_behavior(true).ok();
        Ok(Self {
            device: Arc::new(LoggedDevice::new(disk, log)?),
            state,
        })
    }

    /// Reports that the disk can be used, also after the end of this worker.
    pub(crate) fn report_successors(&self) -> Result<()> {
        Ok(self.state.set_note(WorkerState::WithSuccessors.number())?)
    }
}

/// Repeats the writes of the predecessor, and serves `disk` as the file `name` until it is unmounted.
pub(crate) fn serve_as_worker(
    disk: impl BlockDeviceMut + 'static,
    name: String,
    files: WorkerFiles,
    job: Job<'_>,
    ready: &mut dyn FnMut(),
) -> Result<()> {
    let WorkerDisk { device, state } = WorkerDisk::prepare(disk, files.log, files.predecessor_count, job)?;
    let start = match files.predecessor_count {
        0 => SessionStart::New,
        predecessor_count => SessionStart::Successor { predecessor_count },
    };
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
