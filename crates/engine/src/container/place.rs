//! Where the parts of a mounted container are.

use std::path::{Path, PathBuf};

use holdfast_host::loop_device::loop_devices_of;
use holdfast_host::nbd_device::{find_nbd_device, nbd_devices, nbd_partitions};
use holdfast_host::provider::Mounts;
use holdfast_image::ContainerTree;

use crate::job::{Error, Result};
use crate::machine::state::scratch::CONTAINER_FOLDERS;

/// Prefix of the folders with the disks of mounted snapshots.
pub(super) const DISK_PREFIX: &str = "holdfast-disk-";
/// Prefix of the folders on which containers are mounted while they are created.
pub(super) const MOUNT_PREFIX: &str = "holdfast-mount-";
/// How the sources of FUSE file systems begin.
pub(super) const SOURCE_PREFIX: &str = "holdfast:";
/// The note of a pause, and its name until it is complete.
const PAUSE_NOTE: &str = "paused";
const PARTIAL_PAUSE_NOTE: &str = "paused.new";
const PAUSE_LOCK: &str = "pause.lock";
/// The disk in the FUSE file system.
pub(super) const DISK_FILE: &str = "disk.raw";

/// What makes a block device of the disk of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskTransport {
    /// A file of FUSE, and a loop device.
    #[default]
    Fuse,
    /// The NBD client of the kernel.
    Nbd,
}

/// A container, and the places that it has while it is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerPlace {
    /// The folder of the container, without symbolic links.
    pub folder: PathBuf,
    /// Its identity.
    pub id: String,
    /// The folder for sockets and mount points of this host.
    runtime: PathBuf,
}

impl ContainerPlace {
    /// Finds the container at `path`: its folder, or a file in it.
    ///
    /// # Errors
    /// It is no container, or it is damaged.
    pub fn find(path: &Path, runtime: &Path) -> Result<Self> {
        let canonical = path.canonicalize().map_err(|source| Error::File {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        let folder = match canonical.parent() {
            Some(parent) if !canonical.is_dir() => parent.to_owned(),
            _ => canonical,
        };
        let tree = ContainerTree::open(&folder).map_err(|error| Error::from(error).on(&folder))?;
        let id = if tree.is_parallels() {
            // A descriptor may have no identity.
            blake3::hash(folder.as_os_str().as_encoded_bytes()).to_hex()[..32].to_owned()
        } else {
            tree.id().to_string()
        };
        Ok(Self {
            folder,
            id,
            runtime: runtime.to_owned(),
        })
    }

    /// The container whose file system or disk is mounted on `folder`, an absolute path without symbolic links.
    pub fn mounted_on(folder: &Path, runtime: &Path, mounts: &Mounts) -> Option<Self> {
        let fuse_source = |disk_folder: &Path| {
            let source = mounts.source_of(disk_folder)?;
            source.strip_prefix(SOURCE_PREFIX).map(PathBuf::from)
        };
        if let Some(container) = fuse_source(folder) {
            return Self::find(&container, runtime).ok();
        }
        let over_nbd = nbd_devices().into_iter().find_map(|(device, backend)| {
            let container = backend.strip_prefix(SOURCE_PREFIX)?;
            let is_shown = |device: &PathBuf| mounts.points_of_device(device).iter().any(|point| point == folder);
            with_partitions(&device)
                .iter()
                .any(is_shown)
                .then(|| PathBuf::from(container))
        });
        if let Some(container) = over_nbd {
            return Self::find(&container, runtime).ok();
        }
        let found = runtime_folders(runtime).into_iter().find_map(|own| {
            let disk = own.join("disk").join(DISK_FILE);
            let mut points = loop_devices_of(&disk)
                .into_iter()
                .flat_map(|device| mounts.points_of_device(&device));
            points
                .any(|point| point == folder)
                .then(|| fuse_source(&own.join("disk")))
                .flatten()
        });
        Self::find(&found?, runtime).ok()
    }

    /// The folder of the socket and the disk.
    pub(crate) fn runtime_folder(&self) -> PathBuf {
        self.runtime.join(format!("{CONTAINER_FOLDERS}{}", self.id))
    }

    /// The mount point of the FUSE file system with the disk.
    pub fn disk_folder(&self) -> PathBuf {
        self.runtime_folder().join("disk")
    }

    /// The disk as a file, if the container is mounted with its file system.
    pub fn disk_file(&self) -> PathBuf {
        self.disk_folder().join(DISK_FILE)
    }

    /// The source of the FUSE file system in the list of mounts, or the name of what the NBD device shows.
    pub(super) fn source(&self) -> String {
        format!("{SOURCE_PREFIX}{}", self.folder.display())
    }

    /// The NBD device of the disk.
    pub(super) fn nbd_device(&self) -> Option<PathBuf> {
        find_nbd_device(&self.source())
    }

    /// The block devices of the disk and of its partitions.
    fn block_devices(&self) -> Vec<PathBuf> {
        let over_nbd = self
            .nbd_device()
            .into_iter()
            .flat_map(|device| with_partitions(&device));
        loop_devices_of(&self.disk_file()).into_iter().chain(over_nbd).collect()
    }

    /// What makes a block device of its disk while it is mounted.
    pub fn transport(&self) -> DiskTransport {
        match self.nbd_device() {
            Some(_) => DiskTransport::Nbd,
            None => DiskTransport::Fuse,
        }
    }

    /// Where the file system of the disk is mounted, in the namespace of this process.
    pub fn mount_points(&self) -> Vec<PathBuf> {
        let mounts = Mounts::read().unwrap_or_default();
        let devices = self.block_devices();
        devices
            .iter()
            .flat_map(|device| mounts.points_of_device(device))
            .collect()
    }

    /// The mount points of the FUSE file system with the disk.
    pub(super) fn fuse_points(&self) -> Vec<PathBuf> {
        Mounts::read().unwrap_or_default().points_of_source(&self.source())
    }

    /// The socket of the worker.
    pub fn socket(&self) -> PathBuf {
        self.runtime_folder().join("control")
    }

    /// The note of a process that has paused the container of a runtime.
    pub(super) fn pause_note(&self) -> PathBuf {
        self.runtime_folder().join(PAUSE_NOTE)
    }

    /// The lock of the process that has paused it. The file is never renamed.
    pub(super) fn pause_lock(&self) -> PathBuf {
        self.runtime_folder().join(PAUSE_LOCK)
    }

    /// Creates the folders, which only the current user can access.
    pub(super) fn make(&self) -> Result<()> {
        use std::os::unix::fs::DirBuilderExt as _;
        for folder in [self.runtime_folder(), self.disk_folder()] {
            let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
            match made {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(Error::File {
                        action: "create",
                        path: folder,
                        source: error,
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Deletes the folders, the socket and the note of a pause, as far as they are not in use.
    pub(super) fn clear(&self) {
        std::fs::remove_file(self.socket()).ok();
        remove_ended_pause(&self.runtime_folder());
        std::fs::remove_dir(self.disk_folder()).ok();
        std::fs::remove_dir(self.runtime_folder()).ok();
    }
}

fn with_partitions(device: &Path) -> Vec<PathBuf> {
    let partitions = nbd_partitions(device).into_iter().map(|(partition, _)| partition);
    std::iter::once(device.to_owned()).chain(partitions).collect()
}

/// Deletes the files of a pause in the runtime folder of a container, unless the process that pauses it, or its runc
/// or CRIU, is alive: these hold the lock.
pub(super) fn remove_ended_pause(folder: &Path) {
    let lock = std::fs::File::open(folder.join(PAUSE_LOCK));
    if lock.is_ok_and(|lock| holdfast_block::is_locked(&lock).unwrap_or(true)) {
        return;
    }
    for name in [PAUSE_NOTE, PARTIAL_PAUSE_NOTE, PAUSE_LOCK] {
        std::fs::remove_file(folder.join(name)).ok();
    }
}

/// The runtime folders of containers in `runtime`.
pub(crate) fn runtime_folders(runtime: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(runtime) else {
        return Vec::new();
    };
    let is_container = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| name.starts_with(CONTAINER_FOLDERS))
    };
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(is_container)
        .collect()
}
