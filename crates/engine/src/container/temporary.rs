//! A disk that this process serves as a file, while it needs it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut};
use holdfast_host::fuse_mount::{
    FuseMountError, FuseMountRequest, MountAccess, MountReaders, UnmountMode, mount_fuse, unmount_fuse,
};
use holdfast_serve::fuse::{Directory, FileContent, FileTree, FuseServer, MountEvents, SessionStart, TreeEntry};
use holdfast_serve::nbd::ExportDevice;

use super::attach::{FileSystemMount, FoundFileSystem, unmount_file_systems};
use super::place::DISK_FILE;
use crate::job::{Error, Job, Result};
use crate::restore::mount::{LOOK_INTERVAL, WritableContent, owner_of_process};

/// Prefix of the folders of such disks.
pub(super) const DISK_PREFIX: &str = "holdfast-disk-";
/// How long the end of the last requests may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A disk as a file in a FUSE file system of this process. It is unmounted on drop.
pub(crate) struct ServedDisk {
    folder: PathBuf,
    server: FuseServer,
    /// The folder of this disk alone; none if the user has chosen one.
    own: Option<tempfile::TempDir>,
}

struct ReadOnlyContent(Arc<dyn BlockDevice>);

impl FileContent for ReadOnlyContent {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn identity(&self) -> String {
        DISK_FILE.to_owned()
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        Ok(ExportDevice::ReadOnly(Arc::clone(&self.0)))
    }
}

impl ServedDisk {
    /// Serves a disk that cannot be written, in a new folder in `runtime`.
    pub(crate) fn read_only(runtime: &Path, disk: Arc<dyn BlockDevice>, events: Arc<dyn MountEvents>) -> Result<Self> {
        Self::in_new_folder(runtime, Arc::new(ReadOnlyContent(disk)), MountAccess::ReadOnly, events)
    }

    /// Serves a disk that cannot be written, in `folder`.
    pub(super) fn read_only_at(
        folder: &Path,
        disk: Arc<dyn BlockDevice>,
        events: Arc<dyn MountEvents>,
    ) -> Result<Self> {
        let content = Arc::new(ReadOnlyContent(disk));
        let server = serve(folder, content, MountAccess::ReadOnly, events)?;
        Ok(Self {
            folder: folder.to_owned(),
            server,
            own: None,
        })
    }

    /// Serves a disk that can be written, in a new folder in `runtime`.
    pub(super) fn writable(
        runtime: &Path,
        disk: Arc<dyn BlockDeviceMut>,
        events: Arc<dyn MountEvents>,
    ) -> Result<Self> {
        let content = Arc::new(WritableContent::new(DISK_FILE.to_owned(), disk));
        Self::in_new_folder(runtime, content, MountAccess::Writable, events)
    }

    fn in_new_folder(
        runtime: &Path,
        content: Arc<dyn FileContent>,
        access: MountAccess,
        events: Arc<dyn MountEvents>,
    ) -> Result<Self> {
        let failed = |source| Error::File {
            action: "create a folder in",
            path: runtime.to_owned(),
            source,
        };
        let own = tempfile::Builder::new()
            .prefix(DISK_PREFIX)
            .tempdir_in(runtime)
            .map_err(failed)?;
        let folder = own.path().join("disk");
        std::fs::create_dir(&folder).map_err(failed)?;
        let server = serve(&folder, content, access, events)?;
        Ok(Self {
            folder,
            server,
            own: Some(own),
        })
    }

    /// The disk as a file.
    pub(super) fn file(&self) -> PathBuf {
        self.folder.join(DISK_FILE)
    }

    pub(super) fn is_ended(&self) -> bool {
        self.server.is_ended()
    }

    /// Mounts the file system of the disk while `work` runs.
    pub(crate) fn with_file_system<T>(
        &self,
        file_system: FoundFileSystem,
        access: MountAccess,
        work: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        let root = self.folder.with_file_name("root");
        let failed = |source| Error::File {
            action: "create",
            path: root.clone(),
            source,
        };
        std::fs::create_dir(&root).map_err(failed)?;
        let mount = FileSystemMount {
            disk: &self.file(),
            file_system,
            folder: &root,
            is_read_only: access == MountAccess::ReadOnly,
            growth: None,
        };
        mount.mount()?;
        let done = work(&root);
        let unmounted = unmount_file_systems(&self.file());
        let done = done?;
        unmounted?;
        std::fs::remove_dir(&root).map_err(failed)?;
        Ok(done)
    }

    /// Unmounts the disk, and waits for the last requests.
    pub(crate) fn end(self, job: Job<'_>) -> Result<()> {
        let deadline = job.clock.now() + PATIENCE;
        while !self.server.is_ended() {
            match unmount_fuse(&self.folder, UnmountMode::Unused) {
                // The system releases the block device of the file after its file system was unmounted.
                Err(FuseMountError::InUse { .. }) if job.clock.now() < deadline => {}
                Err(error) if !self.server.is_ended() => return Err(error.into()),
                _ => {}
            }
            if job.clock.now() >= deadline {
                break;
            }
            job.clock.sleep(LOOK_INTERVAL / 10);
        }
        Ok(())
    }
}

impl Drop for ServedDisk {
    fn drop(&mut self) {
        if !self.server.is_ended() {
            // The error that ends the job is reported instead.
            unmount_file_systems(&self.file()).ok();
            unmount_fuse(&self.folder, UnmountMode::Detach).ok();
        }
        if let Some(own) = &self.own {
            std::fs::remove_dir(own.path().join("root")).ok();
        }
    }
}

fn serve(
    folder: &Path,
    content: Arc<dyn FileContent>,
    access: MountAccess,
    events: Arc<dyn MountEvents>,
) -> Result<FuseServer> {
    let mut root = Directory::new(0);
    let entry = TreeEntry::File {
        content,
        modified_ms: 0,
    };
    root.insert(DISK_FILE, entry).map_err(|error| Error::File {
        action: "serve",
        path: folder.to_owned(),
        source: std::io::Error::other(error),
    })?;
    let device = mount_fuse(&FuseMountRequest {
        source: "holdfast:disk",
        folder,
        readers: MountReaders::Owner,
        access,
    })?;
    let tree = Arc::new(FileTree::new(&root, owner_of_process()));
    FuseServer::start(device, tree, events, SessionStart::New).map_err(Error::Serve)
}
