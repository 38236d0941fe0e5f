//! Snapshots of containers, mounted read-only beside them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::BlockDevice as _;
use holdfast_host::fuse_mount::{MountReaders, UnmountMode, unmount_fuse};
use holdfast_host::loop_device::loop_devices_of;
use holdfast_host::provider::Mounts;
use holdfast_image::{ContainerTree, PointInTime};
use holdfast_serve::fuse::{Directory, FileContent, MountEvents, TreeEntry};
use holdfast_serve::nbd::ExportDevice;

use super::attach::{
    FileSystemMount, FoundFileSystem, Replay, disk_mounted_on, find_file_system, mount_points, unmount_all,
};
use super::place::{ContainerPlace, DISK_FILE, DISK_PREFIX};
use super::serve::MountedDisk;
use super::state::{CONSISTENCY_PROPERTY, SnapshotState};
use crate::job::{Error, Job, Result};
use crate::restore::mount::{LOOK_INTERVAL, MountPlace};

/// A snapshot of a container that is mounted read-only, beside the container itself.
pub struct MountedSnapshot {
    point: Arc<PointInTime>,
    file_system: Option<FoundFileSystem>,
    /// Whether its file system was frozen or not mounted.
    is_consistent: bool,
}

impl MountedSnapshot {
    /// Opens the snapshot `name`. Its layers are not merged while this exists.
    ///
    /// # Errors
    /// There is no such snapshot, or it has no file system that can be mounted.
    pub fn open(place: &ContainerPlace, name: &str, disk: MountedDisk) -> Result<Self> {
        let on = |error: holdfast_image::Error| Error::from(error).on(&place.folder);
        let tree = ContainerTree::open(&place.folder).map_err(on)?;
        let id = tree.find_snapshot(name).map_err(on)?;
        let point = Arc::new(PointInTime::open(&place.folder, id).map_err(on)?);
        let file_system = match disk {
            MountedDisk::FileSystem => Some(find_file_system(Arc::clone(&point) as _, &place.folder)?),
            MountedDisk::File => None,
        };
        let is_consistent = tree
            .snapshots()
            .iter()
            .find(|(known, _)| *known == id)
            .and_then(|(_, entry)| entry.properties.get(CONSISTENCY_PROPERTY))
            .is_some_and(|word| word != SnapshotState::Crash.word());
        Ok(Self {
            point,
            file_system,
            is_consistent,
        })
    }

    /// Size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.point.size_bytes()
    }

    /// The name of the file system, if it is mounted.
    pub fn file_system(&self) -> Option<&'static str> {
        self.file_system.map(|found| found.kind.name())
    }

    /// Serves its disk as a raw file in `folder`.
    ///
    /// # Errors
    /// The folder cannot be mounted.
    pub fn serve(self, request: &SnapshotServeRequest, job: Job<'_>, ready: &mut dyn FnMut()) -> Result<()> {
        let folder = &request.folder;
        let place = MountPlace {
            source: format!("holdfast:{}", request.name),
            folder: folder.clone(),
            readers: request.readers,
            events: Arc::clone(&request.events),
        };
        let mut root = Directory::new(0);
        let entry = TreeEntry::File {
            content: Arc::new(PointContent(Arc::clone(&self.point))),
            modified_ms: 0,
        };
        root.insert(DISK_FILE, entry).map_err(|error| Error::File {
            action: "serve",
            path: folder.clone(),
            source: std::io::Error::other(error),
        })?;
        let file = folder.join(DISK_FILE);
        place.serve(&root, job, &mut |server, _| {
            ready();
            let begin = job.clock.now();
            let mut is_attached = false;
            while !server.is_ended() && job.interrupt.check().is_ok() {
                job.clock.sleep(LOOK_INTERVAL);
                if request.until == ServeUntil::Unmounted {
                    continue;
                }
                let is_used = !loop_devices_of(&file).is_empty();
                let is_late = job.clock.now() > begin + ATTACH_PATIENCE;
                if !is_used && (is_attached || is_late) {
                    break;
                }
                is_attached |= is_used;
            }
        })?;
        // From here on, the layers can be merged.
        drop((root, self));
        if request.until == ServeUntil::Detached {
            std::fs::remove_dir(folder).ok();
        }
        Ok(())
    }
}

/// How long the command that has started a server may take to attach to its file.
const ATTACH_PATIENCE: Duration = Duration::from_secs(60);

/// When the server of a snapshot ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServeUntil {
    /// When its folder is unmounted.
    Unmounted,
    /// When no block device uses the file any more. The folder is deleted then.
    Detached,
}

/// How the disk of a snapshot is served.
pub struct SnapshotServeRequest {
    /// What the list of mounts shows.
    pub name: String,
    /// An empty folder: an absolute path without symbolic links.
    pub folder: PathBuf,
    /// Which users can use the file.
    pub readers: MountReaders,
    /// When the server ends.
    pub until: ServeUntil,
    /// Receives errors of reads.
    pub events: Arc<dyn MountEvents>,
}

struct PointContent(Arc<PointInTime>);

impl FileContent for PointContent {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn identity(&self) -> String {
        DISK_FILE.to_owned()
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        Ok(ExportDevice::ReadOnly(Arc::clone(&self.0) as _))
    }
}

/// Mounts the file system of a snapshot on `folder`. `serve` starts a process that serves its disk in a folder until
/// it is detached, and waits until it does.
///
/// # Errors
/// The file system cannot be mounted.
pub fn mount_snapshot(
    snapshot: MountedSnapshot,
    folder: &Path,
    runtime: &Path,
    serve: &mut dyn FnMut(&Path) -> Result<()>,
    job: Job<'_>,
) -> Result<()> {
    let (file_system, is_consistent) = (snapshot.file_system, snapshot.is_consistent);
    let Some(file_system) = file_system else {
        return Ok(());
    };
    let disk_folder = tempfile::Builder::new()
        .prefix(DISK_PREFIX)
        .tempdir_in(runtime)
        .map_err(|source| Error::File {
            action: "create a folder in",
            path: runtime.to_owned(),
            source,
        })?;
    serve(disk_folder.path())?;
    // The layers stay pinned by the server.
    drop(snapshot);
    let mount = FileSystemMount {
        disk: &disk_folder.path().join(DISK_FILE),
        file_system,
        folder,
        is_read_only: true,
        growth: None,
    };
    match mount.mount() {
        Ok(mounted) => {
            // A frozen XFS has a log that says nothing new.
            if mounted.replay == Replay::Skipped && !is_consistent {
                job.progress.warning(
                    "the snapshot was not consistent: its journal is not replayed, and files that were written at that time may be missing or incomplete",
                );
            }
            // The server deletes it.
            drop(disk_folder.keep());
            Ok(())
        }
        Err(error) => {
            unmount_fuse(disk_folder.path(), UnmountMode::Detach).ok();
            Err(error)
        }
    }
}

/// A file system that is mounted read-only while something reads it.
pub(crate) struct ServedFileSystem<'a> {
    pub(crate) file_system: FoundFileSystem,
    /// The name of the file with its disk.
    pub(crate) file: &'a str,
    /// The folder for mount points.
    pub(crate) runtime: &'a Path,
    /// Starts a process that serves the disk in a folder, and waits until it does.
    pub(crate) serve: &'a dyn Fn(&Path) -> Result<()>,
}

/// Mounts a file system while `work` reads it.
pub(crate) fn with_served_file_system<T>(
    served: &ServedFileSystem<'_>,
    job: Job<'_>,
    work: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let failed = |source| Error::File {
        action: "create a folder in",
        path: served.runtime.to_owned(),
        source,
    };
    let own = tempfile::Builder::new()
        .prefix(DISK_PREFIX)
        .tempdir_in(served.runtime)
        .map_err(failed)?;
    let (disk_folder, root) = (own.path().join("disk"), own.path().join("root"));
    for folder in [&disk_folder, &root] {
        std::fs::create_dir(folder).map_err(failed)?;
    }
    (served.serve)(&disk_folder)?;
    let disk = disk_folder.join(served.file);
    let mount = FileSystemMount {
        disk: &disk,
        file_system: served.file_system,
        folder: &root,
        is_read_only: true,
        growth: None,
    };
    let done = mount.mount().and_then(|_| {
        let done = work(&root);
        let unmounted = unmount_all(&mount_points(&disk), job.clock);
        let done = done?;
        unmounted?;
        Ok(done)
    });
    let deadline = job.clock.now() + PATIENCE;
    // It is in use until the system has released the block device.
    while unmount_fuse(&disk_folder, UnmountMode::Unused).is_err() && job.clock.now() < deadline {
        job.clock.sleep(LOOK_INTERVAL / 10);
    }
    done
}

/// Waits until the file system of a snapshot is unmounted. It is unmounted if the job is interrupted.
///
/// # Errors
/// Programs use it.
pub fn wait_for_unmount(folder: &Path, job: Job<'_>) -> Result<()> {
    while disk_mounted_on(folder).is_some() {
        if job.interrupt.check().is_err() {
            unmount_snapshot(folder, job)?;
        }
        job.clock.sleep(LOOK_INTERVAL);
    }
    Ok(())
}

/// Whether the file system of a container, or of one of its snapshots, is mounted on `folder`.
pub fn is_mounted_from_container(folder: &Path, runtime: &Path, mounts: &Mounts) -> bool {
    disk_mounted_on(folder).is_some() || ContainerPlace::mounted_on(folder, runtime, mounts).is_some()
}

/// Unmounts the file system of a snapshot on `folder`. Returns whether there is one.
///
/// # Errors
/// Programs use it.
pub fn unmount_snapshot(folder: &Path, job: Job<'_>) -> Result<bool> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let Some(disk) = disk_mounted_on(folder) else {
        return Ok(false);
    };
    unmount_all(&mount_points(&disk), job.clock)?;
    // Its server ends with its own file system, and deletes its folder.
    let deadline = job.clock.now() + PATIENCE;
    if let Some(served) = disk.parent() {
        while served.exists() && job.clock.now() < deadline {
            // It is in use until the system has released the block device.
            unmount_fuse(served, UnmountMode::Unused).ok();
            job.clock.sleep(LOOK_INTERVAL / 10);
        }
    }
    Ok(true)
}
