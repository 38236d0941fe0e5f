//! What killed processes of containers leave in the runtime folder: mounts without a server, block devices, folders.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::freeze::thaw_file_system;
use holdfast_host::fuse_mount::{UnmountMode, dead_fuse_mounts, unmount_fuse};
use holdfast_host::loop_device::loop_devices_of;
use holdfast_host::nbd_device::{disconnect_nbd, nbd_devices};
use holdfast_host::provider::Mounts;
use holdfast_image::ContainerLock;
use rustix::mount::UnmountFlags;

use super::attach::mount_points;
use super::place::{ContainerPlace, DISK_FILE, DISK_PREFIX, MOUNT_PREFIX, SOURCE_PREFIX, remove_ended_pause};
use crate::machine::state::scratch::CONTAINER_FOLDERS;

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
    pub(crate) state: FoundRuntimeState,
    /// Its last change, in milliseconds since 1970.
    pub(crate) changed_ms: Option<i64>,
}

/// The state of a folder in the runtime folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FoundRuntimeState {
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
    name.starts_with(CONTAINER_FOLDERS)
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
        let prefixes = [CONTAINER_FOLDERS, DISK_PREFIX, MOUNT_PREFIX];
        if !prefixes.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        // The doctor deletes empty folders of all kinds. A file system in the place of the folder has a disk in another one.
        let is_empty = std::fs::read_dir(&folder).is_ok_and(|mut entries| entries.next().is_none());
        let own_source = mounts.source_of(&folder);
        if is_empty || own_source.is_some_and(|source| !source.starts_with(SOURCE_PREFIX)) {
            continue;
        }
        if let Some(place) = place_over_nbd(&folder) {
            remains.push(RuntimeRemains {
                state: match ContainerLock::is_held(&place.folder) {
                    Ok(false) => FoundRuntimeState::Dead,
                    _ => FoundRuntimeState::Served,
                },
                mount_points: place.mount_points(),
                changed_ms: folder.symlink_metadata().ok().map(|found| found.mtime() * 1000),
                container: Some(place.folder),
                folder,
            });
            continue;
        }
        let disk = disk_folder_in(&folder, &mounts);
        let source = mounts.source_of(&disk);
        let container = source.and_then(|source| source.strip_prefix(SOURCE_PREFIX));
        let container = container.map(|container| match container.rsplit_once('@') {
            // A snapshot is served as CONTAINER@SNAPSHOT.
            Some((container, _)) if name.starts_with(DISK_PREFIX) => PathBuf::from(container),
            _ => PathBuf::from(container),
        });
        remains.push(RuntimeRemains {
            state: match source {
                Some(_) if dead.contains(&disk) => FoundRuntimeState::Dead,
                Some(_) => FoundRuntimeState::Served,
                None => FoundRuntimeState::Unmounted,
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

/// The container with this runtime folder, if it has a block device of NBD.
fn place_over_nbd(folder: &Path) -> Option<ContainerPlace> {
    let runtime = folder.parent()?;
    let mut containers = nbd_devices().into_iter().filter_map(|(_, backend)| {
        let container = backend.strip_prefix(SOURCE_PREFIX)?;
        ContainerPlace::find(Path::new(container), runtime).ok()
    });
    containers.find(|place| place.runtime_folder() == folder)
}

/// Where the disk of a folder is mounted: the disk of a mounted snapshot, and that of a container that is being created,
/// in the place of the folder itself; other disks in a folder in it.
fn disk_folder_in(folder: &Path, mounts: &Mounts) -> PathBuf {
    match mounts.source_of(folder) {
        Some(source) if source.starts_with(SOURCE_PREFIX) => folder.to_owned(),
        _ => folder.join("disk"),
    }
}

/// Unmounts what is mounted from the disk in `folder`, whose server is dead, and deletes the folder.
///
/// # Errors
/// Something cannot be unmounted or deleted.
pub(crate) fn clear_runtime_remains(folder: &Path, clock: &dyn Clock) -> std::io::Result<()> {
    let disk_folder = disk_folder_in(folder, &Mounts::read().unwrap_or_default());
    let disk = disk_folder.join(DISK_FILE);
    let over_nbd = place_over_nbd(folder);
    if let Some(device) = over_nbd.as_ref().and_then(ContainerPlace::nbd_device) {
        // Requests end with an error, so that nothing waits for the server.
        disconnect_nbd(&device)?;
    }
    let points = over_nbd.map_or_else(|| mount_points(&disk), |place| place.mount_points());
    for point in points.iter().rev() {
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
    remove_ended_pause(folder);
    for below in ["root", "disk"] {
        match std::fs::remove_dir(folder.join(below)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    std::fs::remove_dir(folder)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use holdfast_block::{LockOutcome, ManualClock, lock_file};

    use super::{FoundRuntimeState, clear_runtime_remains, runtime_remains};

    /// Notes of a pause once kept the folder from being deleted.
    #[test]
    fn folders_of_killed_processes_are_cleared_with_their_notes() {
        let runtime = tempfile::tempdir().unwrap();
        for name in ["holdfast-container-1", "holdfast-mount-1", "holdfast-other-1"] {
            let folder = runtime.path().join(name);
            std::fs::create_dir_all(folder.join("disk")).unwrap();
            for file in ["control", "pause.lock", "paused", "paused.new"] {
                File::create(folder.join(file)).unwrap();
            }
        }
        std::fs::create_dir(runtime.path().join("holdfast-disk-empty")).unwrap();
        let found = runtime_remains(runtime.path());
        let names: Vec<_> = found
            .iter()
            .map(|remains| remains.folder.file_name().unwrap().to_str().unwrap())
            .collect();
        assert_eq!(names, ["holdfast-container-1", "holdfast-mount-1"]);
        for remains in found {
            assert_eq!(remains.state, FoundRuntimeState::Unmounted);
            clear_runtime_remains(&remains.folder, &ManualClock::new()).unwrap();
            assert!(!remains.folder.exists());
        }
    }

    #[test]
    fn the_note_of_a_pause_that_goes_on_is_kept() {
        let runtime = tempfile::tempdir().unwrap();
        let folder = runtime.path().join("holdfast-container-1");
        std::fs::create_dir(&folder).unwrap();
        File::create(folder.join("paused")).unwrap();
        let file = File::create(folder.join("pause.lock")).unwrap();
        let LockOutcome::Locked(lock) = lock_file(&file).unwrap() else {
            panic!("the test needs a file system with locks");
        };
        clear_runtime_remains(&folder, &ManualClock::new()).unwrap_err();
        assert!(folder.join("paused").exists());
        drop(lock);
        clear_runtime_remains(&folder, &ManualClock::new()).unwrap();
        assert!(!folder.exists());
    }
}
