//! `mount`: snapshots or an image as files, until they are unmounted or the job is interrupted.

mod content;
mod image;
mod names;
mod snapshots;
mod supervision;
mod tree;
mod worker;
mod writable;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_host::fuse_mount::{
    FuseMountError, FuseMountRequest, MountAccess, MountReaders, UnmountMode, mount_fuse, unmount_fuse,
    unmount_unused_fuse,
};
use holdfast_serve::fuse::{Directory, FileAccess, FileOwner, FileTree, FuseServer, MountEvents, SessionStart};

pub use self::image::{ImageMount, MountedImage};
pub use self::snapshots::{MountContent, MountRequest, MountedContent, mount};
pub use self::supervision::WorkerLauncher;
pub(crate) use self::supervision::{MountUser, SupervisedPlace, Supervision};
pub(crate) use self::worker::{WorkerDisk, WorkerFiles, serve_as_worker};
pub use self::writable::{ImageWorkerRequest, WritableImageMount, serve_writable_image};
use crate::job::{Error, Job, Result};

/// The interval between two checks for the end of the mount.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long pending reads may take after the file system is unmounted.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where and for which users files are mounted.
pub struct MountPlace {
    /// Name of the source in the list of mounts.
    pub source: String,
    /// An empty folder: an absolute path without symbolic links.
    pub folder: PathBuf,
    /// Which users can read the files.
    pub readers: MountReaders,
    /// Receives errors of reads.
    pub events: Arc<dyn MountEvents>,
}

impl MountPlace {
    /// Mounts a file system, which must then be served with the returned device.
    fn mount(&self, access: FileAccess) -> Result<(Mount<'_>, OwnedFd)> {
        let device = mount_fuse(&FuseMountRequest {
            source: &self.source,
            folder: &self.folder,
            readers: self.readers,
            access: match access {
                FileAccess::ReadOnly => MountAccess::ReadOnly,
                FileAccess::Writable => MountAccess::Writable,
            },
        })?;
        let mount = Mount {
            folder: &self.folder,
            is_mounted: true,
        };
        Ok((mount, device))
    }

    /// Mounts files, and serves them while `watch` runs. It returns when they are unmounted or the job is interrupted.
    pub(crate) fn serve(
        &self,
        root: &Directory,
        job: Job<'_>,
        watch: &mut dyn FnMut(&FuseServer, &FileTree),
    ) -> Result<()> {
        let tree = Arc::new(FileTree::new(root, owner_of_process()));
        let (mount, device) = self.mount(FileAccess::ReadOnly)?;
        let server = FuseServer::start(device, Arc::clone(&tree), Arc::clone(&self.events), SessionStart::New)
            .map_err(Error::Serve)?;
        watch(&server, &tree);
        mount.end(&server, job)
    }
}

/// Files belong to the user who mounts them.
fn owner_of_process() -> FileOwner {
    FileOwner {
        user: rustix::process::geteuid().as_raw(),
        group: rustix::process::getegid().as_raw(),
    }
}

/// A mounted folder. It is unmounted on drop.
struct Mount<'a> {
    folder: &'a Path,
    is_mounted: bool,
}

impl Mount<'_> {
    /// Called when the folder is unmounted.
    fn unmounted(mut self) {
        self.is_mounted = false;
    }

    /// Unmounts the folder, if the user has not done that, and waits for pending reads.
    fn end(mut self, server: &FuseServer, job: Job<'_>) -> Result<()> {
        self.is_mounted = false;
        if !server.is_ended() {
            match unmount_unused_fuse(self.folder, job.clock) {
                Ok(()) => {}
                Err(FuseMountError::InUse { .. }) => {
                    job.progress.warning(&format!(
                        "programs still use files below {}; they can no longer read them",
                        self.folder.display()
                    ));
                    unmount_fuse(self.folder, UnmountMode::Detach)?;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
        let deadline = job.clock.now() + PATIENCE;
        while !server.is_ended() && job.clock.now() < deadline {
            job.clock.sleep(LOOK_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        if self.is_mounted {
            // The error that ends the job is reported instead.
            unmount_fuse(self.folder, UnmountMode::Detach).ok();
        }
    }
}
