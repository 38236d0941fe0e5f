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

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::BlockDevice as _;
use holdfast_image::{Format, ImageLock, Locking, OpenOptions, open_mut};
use holdfast_serve::fuse::MountEvents;

use super::MountPlace;
use super::image::MountedImage;
use super::supervision::{MountUser, Supervision, WorkerLauncher};
use super::worker::{WorkerFiles, serve_as_worker};
use crate::job::{Error, Job, Result};

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

struct NoUser;

impl MountUser for NoUser {
    fn attach(&self) -> Result<()> {
        Ok(())
    }

    fn is_detached(&self) -> bool {
        false
    }
}

fn unlocked(options: &OpenOptions) -> OpenOptions {
    OpenOptions {
        locking: Locking::HeldElsewhere,
        ..options.clone()
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
