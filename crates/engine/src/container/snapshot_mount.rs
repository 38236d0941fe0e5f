//! Snapshots of containers, mounted read-only beside them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::BlockDevice as _;
use holdfast_host::loop_device::loop_devices_of;
use holdfast_image::{ContainerTree, PointInTime};
use holdfast_serve::fuse::MountEvents;

use super::attach::{
    FileSystemMount, FoundFileSystem, Replay, disk_mounted_on, find_file_system, unmount_file_systems,
};
use super::place::ContainerPlace;
use super::serve::MountedDisk;
use super::state::{CONSISTENCY_PROPERTY, SnapshotState};
use super::temporary::ServedDisk;
use crate::job::{Error, Job, Result};
use crate::restore::mount::LOOK_INTERVAL;

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

    /// Mounts it on `folder` until it is unmounted or the job is interrupted.
    ///
    /// # Errors
    /// It cannot be mounted.
    pub fn serve(
        &self,
        folder: &Path,
        runtime: &Path,
        events: Arc<dyn MountEvents>,
        job: Job<'_>,
        ready: &mut dyn FnMut(),
    ) -> Result<()> {
        let Some(file_system) = self.file_system else {
            let disk = ServedDisk::read_only_at(folder, Arc::clone(&self.point) as _, events)?;
            ready();
            while !disk.is_ended() && job.interrupt.check().is_ok() {
                job.clock.sleep(LOOK_INTERVAL);
            }
            return disk.end(job);
        };
        let disk = ServedDisk::read_only(runtime, Arc::clone(&self.point) as _, events)?;
        let mount = FileSystemMount {
            disk: &disk.file(),
            file_system,
            folder,
            is_read_only: true,
            growth: None,
        };
        // A frozen XFS has a log that says nothing new.
        if mount.mount()?.replay == Replay::Skipped && !self.is_consistent {
            job.progress.warning(
                "the snapshot was not consistent: its journal is not replayed, and files that were written at that time may be missing or incomplete",
            );
        }
        ready();
        while !loop_devices_of(&disk.file()).is_empty() {
            if job.interrupt.check().is_err() {
                unmount_file_systems(&disk.file())?;
            }
            job.clock.sleep(LOOK_INTERVAL);
        }
        disk.end(job)
    }
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
    unmount_file_systems(&disk)?;
    // Its server ends then.
    let deadline = job.clock.now() + PATIENCE;
    while disk.exists() && job.clock.now() < deadline {
        job.clock.sleep(LOOK_INTERVAL / 10);
    }
    Ok(true)
}
