//! What killed processes of containers leave in the runtime folder: mounts without a server, block devices, folders.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::freeze::thaw_file_system;
use holdfast_host::fuse_mount::{UnmountMode, dead_fuse_mounts, unmount_fuse};
use holdfast_host::loop_device::loop_devices_of;
use holdfast_host::provider::Mounts;
use rustix::mount::UnmountFlags;

use super::attach::mount_points;
use super::place::DISK_PREFIX;
use super::place::{DISK_FILE, RUNTIME_PREFIX};

/// How long the kernel may take until it releases a block device.
const PATIENCE: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_millis(50);

/// A folder in the runtime folder that belongs to a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RuntimeRemains {
    /// The folder.
    pub(crate) folder: PathBuf,
    /// The container, if its disk is mounted there.
    pub(crate) container: Option<PathBuf>,
    /// Where the file system of the disk is still mounted.
    pub(crate) mount_points: Vec<PathBuf>,
    /// Its state.
    pub(crate) state: RuntimeState,
    /// Its last change, in milliseconds since 1970.
    pub(crate) changed_ms: Option<i64>,
}

/// The state of a folder in the runtime folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuntimeState {
    /// The disk is served.
    Served,
    /// The disk is mounted, and its server is dead.
    Dead,
    /// Nothing is mounted.
    Unmounted,
}

/// Whether a folder in the runtime folder is that of a mounted container.
pub(crate) fn is_of_mount(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with(RUNTIME_PREFIX)
}

/// The folders of containers in `runtime`, also those that are in use.
pub(crate) fn runtime_remains(runtime: &Path) -> Vec<RuntimeRemains> {
    let Ok(entries) = runtime.canonicalize().and_then(std::fs::read_dir) else {
        return Vec::new();
    };
    let mounts = Mounts::read().unwrap_or_default();
    let dead = dead_fuse_mounts();
    let mut remains = Vec::new();
    for folder in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // The doctor deletes empty folders of all kinds.
        let is_empty = std::fs::read_dir(&folder).is_ok_and(|mut entries| entries.next().is_none());
        if is_empty || !name.starts_with(RUNTIME_PREFIX) && !name.starts_with(DISK_PREFIX) {
            continue;
        }
        let disk = folder.join("disk");
        let source = mounts.source_of(&disk);
        let container = source
            .and_then(|source| source.strip_prefix("holdfast:"))
            .map(PathBuf::from);
        remains.push(RuntimeRemains {
            state: match source {
                Some(_) if dead.contains(&disk) => RuntimeState::Dead,
                Some(_) => RuntimeState::Served,
                None => RuntimeState::Unmounted,
            },
            container: container.filter(|container| container.is_absolute()),
            mount_points: mount_points(&disk.join(DISK_FILE)),
            changed_ms: folder.symlink_metadata().ok().map(|found| found.mtime() * 1000),
            folder,
        });
    }
    remains.sort_by(|a, b| a.folder.cmp(&b.folder));
    remains
}

/// Unmounts what is mounted from the disk in `folder`, whose server is dead, and deletes the folder.
///
/// # Errors
/// Something cannot be unmounted or deleted.
pub(crate) fn clear_runtime_remains(folder: &Path, clock: &dyn Clock) -> std::io::Result<()> {
    let disk_folder = folder.join("disk");
    let disk = disk_folder.join(DISK_FILE);
    for point in mount_points(&disk).iter().rev() {
        // A frozen file system cannot be unmounted.
        thaw_file_system(point).ok();
        rustix::mount::unmount(point, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)?;
    }
    let deadline = clock.now() + PATIENCE;
    while !loop_devices_of(&disk).is_empty() && clock.now() < deadline {
        clock.sleep(INTERVAL);
    }
    if Mounts::read().unwrap_or_default().source_of(&disk_folder).is_some() {
        unmount_fuse(&disk_folder, UnmountMode::Detach).map_err(std::io::Error::other)?;
    }
    std::fs::remove_file(folder.join("control")).ok();
    for below in ["root", "disk"] {
        match std::fs::remove_dir(folder.join(below)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    std::fs::remove_dir(folder)
}
