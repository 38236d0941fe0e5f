//! The supervisor of a mounted container, and the end of a mount.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice as _, FileDevice, IoMode, error_text};
use holdfast_host::Tools;
use holdfast_host::fuse_mount::{MountReaders, UnmountMode, unmount_fuse};
use holdfast_host::loop_device::loop_devices_of;
use holdfast_host::nbd_device::check_nbd;
use holdfast_image::{ContainerLock, ContainerTree, LiveChain, LiveOptions};
use holdfast_serve::fuse::MountEvents;
use rustix::mount::{UnmountFlags, unmount};

use super::attach::{FileSystemMount, FoundFileSystem, adopt_size, find_file_system, unmount_all};
use super::control::{ContainerControlRequest, ControlClient};
use super::nbd::{NbdPlace, adopt_nbd_size, find_device, nbd_error, release_on_unmount};
use super::place::{ContainerPlace, DISK_FILE, DiskTransport};
use super::relocation::{RelocatedUse, Relocation};
use crate::job::error::ContainerError;
use crate::job::{Error, Job, Result};
use crate::restore::mount::{MountPlace, MountUser, Supervision, WorkerLauncher};

/// The property of a container whose disk has grown while it was not mounted.
pub(crate) const GROW_PROPERTY: &str = "filesystem.grow";

/// What of a container is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountedDisk {
    /// Its file system.
    FileSystem,
    /// Its disk as a raw file.
    File,
}

/// Starts the processes that serve a container in a folder, and waits until it is mounted.
///
/// The process that serves a disk must not use the file system above it: a thread that waits for the disk keeps the
/// system from ending the process.
pub type ContainerMounter<'a> = dyn Fn(&ContainerPlace, &Path, MountedDisk) -> Result<()> + 'a;

/// A container to mount.
#[derive(Debug, Clone)]
pub struct ContainerMountRequest {
    /// The container.
    pub place: ContainerPlace,
    /// An empty folder: an absolute path without symbolic links.
    pub folder: PathBuf,
    /// What is mounted.
    pub disk: MountedDisk,
    /// What makes a block device of the disk.
    pub transport: DiskTransport,
    /// Which users can use the raw file.
    pub readers: MountReaders,
    /// Whether it is mounted although it was migrated to another host.
    pub relocated: RelocatedUse,
}

/// A container that can be mounted for writing.
pub struct ContainerMount<'a> {
    request: &'a ContainerMountRequest,
    file_system: Option<FoundFileSystem>,
    size_bytes: u64,
    must_grow: bool,
    tools: &'a (dyn Tools + 'a),
    /// Held while the container is mounted, also between two workers.
    _lock: ContainerLock,
}

impl<'a> ContainerMount<'a> {
    /// Locks a container, and checks that it can be written.
    ///
    /// # Errors
    /// It is in use or damaged, or has no file system that can be mounted.
    pub fn open(request: &'a ContainerMountRequest, tools: &'a dyn Tools) -> Result<Self> {
        let folder = &request.place.folder;
        let on = |error: holdfast_image::Error| Error::from(error).on(folder);
        if request.transport == DiskTransport::Nbd {
            check_nbd().map_err(|source| nbd_error(&request.place, source))?;
        }
        let lock = ContainerLock::take(folder).map_err(on)?;
        lock.share_with_children().map_err(|source| Error::File {
            action: "share the lock of",
            path: folder.clone(),
            source,
        })?;
        if request.relocated == RelocatedUse::Refuse {
            Relocation::refuse(&request.place)?;
        }
        let chain = Arc::new(LiveChain::open(folder, LiveOptions::default()).map_err(on)?);
        let size_bytes = chain.size_bytes();
        let must_grow = chain.tree().properties().contains_key(GROW_PROPERTY);
        let file_system = match request.disk {
            MountedDisk::FileSystem => Some(find_file_system(chain, folder)?),
            MountedDisk::File => None,
        };
        Ok(Self {
            request,
            file_system,
            size_bytes,
            must_grow,
            tools,
            _lock: lock,
        })
    }

    /// Size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The name of the file system, if it is mounted.
    pub fn file_system(&self) -> Option<&'static str> {
        self.file_system.map(|found| found.kind.name())
    }

    /// The mount point of the FUSE file system.
    pub fn disk_folder(&self) -> PathBuf {
        match self.request.disk {
            MountedDisk::FileSystem => self.request.place.disk_folder(),
            MountedDisk::File => self.request.folder.clone(),
        }
    }

    fn disk_file(&self) -> PathBuf {
        self.disk_folder().join(DISK_FILE)
    }

    /// Mounts the container until it is unmounted, which is the normal end.
    ///
    /// # Errors
    /// It cannot be mounted or served.
    pub fn supervise(
        &self,
        events: Arc<dyn MountEvents>,
        launch: &WorkerLauncher<'_>,
        job: Job<'_>,
        ready: &mut dyn FnMut(),
    ) -> Result<()> {
        if self.request.relocated == RelocatedUse::TakeBack {
            Relocation::end(&self.request.place)?;
        }
        self.request.place.make()?;
        let place = MountPlace {
            source: self.request.place.source(),
            folder: self.disk_folder(),
            readers: self.request.readers,
            events,
        };
        let nbd_place = NbdPlace(&self.request.place);
        let supervision = Supervision {
            path: &self.request.place.folder,
            place: match self.request.transport {
                DiskTransport::Fuse => &place,
                DiskTransport::Nbd => &nbd_place,
            },
            launch,
            user: self,
        };
        let served = supervision.run(job, ready);
        self.request.place.clear();
        served
    }
}

impl MountUser for ContainerMount<'_> {
    fn attach(&self) -> Result<()> {
        let Some(file_system) = self.file_system else {
            return Ok(());
        };
        let place = &self.request.place;
        let device = match self.request.transport {
            DiskTransport::Fuse => None,
            DiskTransport::Nbd => Some(find_device(place)?),
        };
        let disk = self.disk_file();
        let mount = FileSystemMount {
            disk: device.as_deref().unwrap_or(&disk),
            file_system,
            folder: &self.request.folder,
            is_read_only: false,
            growth: self.must_grow.then_some(self.tools),
        };
        let mounted = match &device {
            None => mount.mount()?,
            Some(device) => {
                let mounted = mount.mount_directly()?;
                if let Err(error) = release_on_unmount(place, device) {
                    unmount(&self.request.folder, UnmountFlags::DETACH).ok();
                    return Err(error);
                }
                mounted
            }
        };
        if mounted.has_grown {
            // Until this is stored, the next mount tries it again.
            forget_growth(place).ok();
        }
        Ok(())
    }

    fn is_detached(&self) -> bool {
        self.file_system.is_some()
            && match self.request.transport {
                DiskTransport::Fuse => loop_devices_of(&self.disk_file()).is_empty(),
                DiskTransport::Nbd => self.request.place.nbd_device().is_none(),
            }
    }
}

/// Records that the file system has the size of the disk.
fn forget_growth(place: &ContainerPlace) -> Result<()> {
    let tree = ContainerTree::open(&place.folder)?;
    let mut properties = tree.properties().clone();
    properties.remove(GROW_PROPERTY);
    if let Some(mut client) = ControlClient::connect(place)? {
        client.request(ContainerControlRequest::SetProperties { properties })?;
    }
    Ok(())
}

/// What [`unmount_container`] has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnmountedContainer {
    /// The mount points of its file system.
    pub points: Vec<PathBuf>,
    /// Whether all processes of the container have ended.
    pub is_complete: bool,
}

/// Unmounts a container, and waits until everything is written.
///
/// # Errors
/// It is not mounted, or programs use it.
pub fn unmount_container(place: &ContainerPlace, job: Job<'_>) -> Result<UnmountedContainer> {
    const PATIENCE: Duration = Duration::from_secs(30);
    const INTERVAL: Duration = Duration::from_millis(10);
    let disk = place.disk_file();
    let points = place.mount_points();
    unmount_all(&points, job.clock)?;
    let is_held = || ContainerLock::is_held(&place.folder).unwrap_or(false);
    if points.is_empty() && !is_held() {
        return Err(ContainerError::NotMounted {
            container: place.folder.clone(),
        }
        .into());
    }
    // The supervisor does this too; it may have been killed.
    let deadline = job.clock.now() + PATIENCE;
    while is_held() && job.clock.now() < deadline {
        if loop_devices_of(&disk).is_empty() {
            for point in place.fuse_points() {
                // It is in use until the system has released the block device.
                unmount_fuse(&point, UnmountMode::Unused).ok();
            }
        }
        job.clock.sleep(INTERVAL);
    }
    let is_complete = !is_held();
    if is_complete {
        place.clear();
    }
    Ok(UnmountedContainer { points, is_complete })
}

/// Lets the block device and the file system of a mounted container adopt the size of its disk. Returns whether both
/// have.
pub(super) fn grow_mounted(place: &ContainerPlace, tools: &dyn Tools, job: Job<'_>) -> Result<bool> {
    let over_nbd = adopt_nbd_size(place)?;
    let disk = over_nbd.clone().unwrap_or_else(|| place.disk_file());
    let device = match over_nbd {
        Some(device) => Some(device),
        None => adopt_size(&disk)?.into_iter().next(),
    };
    let (Some(device), Some(point)) = (device, place.mount_points().into_iter().next()) else {
        return Ok(true);
    };
    let found = find_file_system(Arc::new(FileDevice::open(&disk, IoMode::Buffered)?), &place.folder)?;
    if found.partition_bytes.is_some() {
        job.progress.warning(
            "the disk has a partition table: the partition and its file system keep their size; grow them with the tools of the partition table",
        );
        return Ok(true);
    }
    match found.kind.grow(&device, &point, tools) {
        Ok(()) => Ok(true),
        Err(error) => {
            job.progress.warning(&format!(
                "the file system cannot grow while it is mounted: {}",
                error_text(&error)
            ));
            Ok(false)
        }
    }
}
