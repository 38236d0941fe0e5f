//! From the disk of a container to its mounted file system.

use std::ffi::CString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BlockDevice, Clock};
use holdfast_guest_files::{Content, DiskSource, Volume, find_volumes};
use holdfast_host::loop_device::{LoopDevice, LoopRequest, file_of_loop_device, loop_devices_of, refresh_loop_size};
use holdfast_host::nbd_device::nbd_partitions;
use holdfast_host::provider::Mounts;
use holdfast_host::{Answer, Tools, retry_while_in_use};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use super::place::DISK_FILE;
use crate::job::error::ContainerError;
use crate::job::{Error, Result};

/// A file system that Linux mounts from a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystemKind {
    /// ext2, ext3 or ext4, mounted as ext4.
    Ext4,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
}

impl FileSystemKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Ext4, Self::Xfs, Self::Btrfs];

    /// The name of the kind for the kernel and for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    fn of(content: Content) -> Option<Self> {
        match content {
            Content::Ext2 | Content::Ext3 | Content::Ext4 => Some(Self::Ext4),
            Content::Xfs => Some(Self::Xfs),
            Content::Btrfs => Some(Self::Btrfs),
            _ => None,
        }
    }

    /// Options to mount it read-only without replaying its journal.
    fn without_replay(self) -> &'static str {
        match self {
            Self::Ext4 => "noload",
            Self::Xfs => "norecovery,nouuid",
            Self::Btrfs => "rescue=nologreplay",
        }
    }

    /// Options that its mounts always have.
    fn options(self) -> &'static str {
        match self {
            Self::Ext4 | Self::Btrfs => "",
            // A snapshot beside its container has the same UUID.
            Self::Xfs => "nouuid",
        }
    }

    /// Creates the file system in `file`, which is not a block device.
    pub(super) fn make(self, file: &Path, tools: &dyn Tools) -> Result<()> {
        let file = file.to_string_lossy();
        let (program, arguments): (&str, Vec<&str>) = match self {
            Self::Ext4 => ("mkfs.ext4", vec!["-q", "-F", &file]),
            Self::Xfs => ("mkfs.xfs", vec!["-q", "-f", &file]),
            Self::Btrfs => ("mkfs.btrfs", vec!["-q", "-f", &file]),
        };
        run(tools, program, &arguments, self.package()).map(drop)
    }

    /// Lets the file system, which is not mounted, use the whole device. Only ext4 can, and only ext4 needs it: the
    /// kernel may refuse to grow it while it is mounted.
    pub(super) fn grow_unmounted(self, device: &Path, tools: &dyn Tools) -> Result<()> {
        if self != Self::Ext4 {
            return Ok(());
        }
        let device = device.to_string_lossy();
        // Its exit code tells corrections; resize2fs refuses a file system that is not clean.
        tools.ask("e2fsck", &["-f", "-p", &device]).ok();
        run(tools, "resize2fs", &[&device], self.package()).map(drop)
    }

    /// Lets the mounted file system use the whole device.
    pub(super) fn grow(self, device: &Path, folder: &Path, tools: &dyn Tools) -> Result<()> {
        let (device, folder) = (device.to_string_lossy(), folder.to_string_lossy());
        let (program, arguments): (&str, Vec<&str>) = match self {
            Self::Ext4 => ("resize2fs", vec![&device]),
            Self::Xfs => ("xfs_growfs", vec![&folder]),
            Self::Btrfs => ("btrfs", vec!["filesystem", "resize", "max", &folder]),
        };
        run(tools, program, &arguments, self.package()).map(drop)
    }

    /// The Debian package with its programs.
    fn package(self) -> &'static str {
        match self {
            Self::Ext4 => "e2fsprogs",
            Self::Xfs => "xfsprogs",
            Self::Btrfs => "btrfs-progs",
        }
    }
}

fn run(tools: &dyn Tools, program: &str, arguments: &[&str], package: &'static str) -> Result<Answer> {
    let failed = |reason: String| {
        Error::from(ContainerError::Program {
            program: program.to_owned(),
            package,
            reason,
        })
    };
    let answer = tools
        .ask(program, arguments)
        .map_err(|error| failed(holdfast_block::error_text(&error)))?;
    if answer.is_success {
        return Ok(answer);
    }
    let last_line = answer.stderr.trim().lines().next_back().unwrap_or_default().to_owned();
    Err(failed(last_line))
}

/// The file system on a disk, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FoundFileSystem {
    pub(crate) kind: FileSystemKind,
    pub(super) offset: u64,
    /// Its length if it is in a partition.
    pub(crate) partition_bytes: Option<u64>,
}

/// Finds the only file system on the disk of the container at `container`.
pub(crate) fn find_file_system(disk: Arc<dyn BlockDevice>, container: &Path) -> Result<FoundFileSystem> {
    let size_bytes = disk.size_bytes();
    let source = DiskSource {
        name: "disk".to_owned(),
        device: disk,
    };
    let found = find_volumes(&[source]).map_err(|error| crate::GuestFilesError::Read {
        volume: container.display().to_string(),
        path: String::new(),
        source: error,
    })?;
    let mut usable = found.volumes.iter().filter_map(|volume| place_of(volume, size_bytes));
    let failed = |what: &'static str| {
        Err(Error::from(ContainerError::NoFileSystem {
            container: container.to_owned(),
            what,
        }))
    };
    match (usable.next(), usable.next()) {
        (Some(file_system), None) => Ok(file_system),
        (Some(_), Some(_)) => failed("more than one file system"),
        (None, _) => failed("no file system that can be mounted"),
    }
}

fn place_of(volume: &Volume, disk_bytes: u64) -> Option<FoundFileSystem> {
    let kind = FileSystemKind::of(volume.content)?;
    let [segment] = volume.segments[..] else { return None };
    let is_whole = segment.start_bytes == 0 && segment.size_bytes == disk_bytes;
    Some(FoundFileSystem {
        kind,
        offset: segment.start_bytes,
        partition_bytes: (!is_whole).then_some(segment.size_bytes),
    })
}

/// A file system to mount.
#[derive(Clone, Copy)]
pub(super) struct FileSystemMount<'a> {
    /// The disk as a file, or its block device of NBD.
    pub(super) disk: &'a Path,
    pub(super) file_system: FoundFileSystem,
    pub(super) folder: &'a Path,
    pub(super) is_read_only: bool,
    /// Runs the programs that let the file system grow to the size of the disk, if it has to.
    pub(super) growth: Option<&'a dyn Tools>,
}

/// What is known about a mounted file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MountedFileSystem {
    pub(super) replay: Replay,
    /// Whether it has the size of the disk, if it had to grow.
    pub(super) has_grown: bool,
}

/// Whether the journal of a file system was replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replay {
    /// As usual.
    Possible,
    /// Read-only, with a journal that was not replayed.
    Skipped,
}

impl FileSystemMount<'_> {
    /// Mounts it through a loop device, which is released when it is unmounted.
    pub(super) fn mount(&self) -> Result<MountedFileSystem> {
        let device = LoopDevice::attach(&LoopRequest {
            file: self.disk,
            offset: self.file_system.offset,
            length: self.file_system.partition_bytes.unwrap_or(0),
            is_read_only: self.is_read_only,
        });
        let device = device.map_err(|source| {
            Error::from(ContainerError::LoopDevice {
                file: self.disk.to_owned(),
                source,
            })
        })?;
        let mounted = self.mount_from(device.path());
        if mounted.is_err() {
            device.detach().ok();
        }
        mounted
    }

    /// Mounts it from the block device of the disk.
    pub(super) fn mount_directly(&self) -> Result<MountedFileSystem> {
        if self.file_system.partition_bytes.is_none() {
            return self.mount_from(self.disk);
        }
        // The kernel looks for partitions when a device is opened.
        let opened = File::open(self.disk);
        let partitions = nbd_partitions(self.disk);
        let found = partitions
            .into_iter()
            .find(|(_, start)| *start == self.file_system.offset);
        match (opened, found) {
            (Ok(_), Some((partition, _))) => self.mount_from(&partition),
            (Err(error), _) => Err(self.failed(error)),
            (Ok(_), None) => Err(self.failed(Errno::NXIO.into())),
        }
    }

    fn failed(&self, source: std::io::Error) -> Error {
        Error::from(ContainerError::Mount {
            folder: self.folder.to_owned(),
            kind: self.file_system.kind.name(),
            source,
        })
    }

    fn mount_from(&self, device: &Path) -> Result<MountedFileSystem> {
        let kind = self.file_system.kind;
        let growth = self.growth.filter(|_| self.file_system.partition_bytes.is_none());
        let grown_before = growth.map(|tools| kind.grow_unmounted(device, tools).is_ok());
        let replay = match self.mount_device(device, kind.options()) {
            Ok(()) => Replay::Possible,
            Err(_) if self.is_read_only && self.mount_device(device, kind.without_replay()).is_ok() => Replay::Skipped,
            Err(error) => return Err(self.failed(error)),
        };
        let has_grown = match (kind, growth) {
            (FileSystemKind::Ext4, _) | (_, None) => grown_before == Some(true),
            (kind, Some(tools)) => kind.grow(device, self.folder, tools).is_ok(),
        };
        Ok(MountedFileSystem { replay, has_grown })
    }

    fn mount_device(&self, device: &Path, options: &str) -> std::io::Result<()> {
        let options = CString::new(options)?;
        let flags = if self.is_read_only {
            MountFlags::RDONLY
        } else {
            MountFlags::empty()
        };
        let kind = self.file_system.kind.name();
        Ok(rustix::mount::mount(device, self.folder, kind, flags, &*options)?)
    }
}

/// Where the file system of a disk is mounted, in the namespace of this process.
pub(super) fn mount_points(disk: &Path) -> Vec<PathBuf> {
    let mounts = Mounts::read().unwrap_or_default();
    loop_devices_of(disk)
        .iter()
        .flat_map(|device| mounts.points_of_device(device))
        .collect()
}

/// The disk, served by this program, whose file system is mounted on `folder`.
pub(super) fn disk_mounted_on(folder: &Path) -> Option<PathBuf> {
    let mounts = Mounts::read().ok()?;
    let source = mounts.source_of(folder)?;
    let disk = file_of_loop_device(Path::new(source))?;
    (disk.file_name() == Some(DISK_FILE.as_ref())).then_some(disk)
}

/// Unmounts the mount points of a file system.
pub(super) fn unmount_all(points: &[PathBuf], clock: &dyn Clock) -> Result<()> {
    points.iter().rev().try_for_each(|point| unmount(point, clock))
}

fn unmount(folder: &Path, clock: &dyn Clock) -> Result<()> {
    let unmount = || rustix::mount::unmount(folder, UnmountFlags::NOFOLLOW);
    retry_while_in_use(clock, |errno| *errno == Errno::BUSY, unmount).map_err(|errno| {
        Error::from(match errno {
            Errno::BUSY => ContainerError::InUse {
                folder: folder.to_owned(),
            },
            errno => ContainerError::Unmount {
                folder: folder.to_owned(),
                source: errno.into(),
            },
        })
    })
}

/// Lets the block devices of a disk that has grown adopt its size. Returns them.
pub(super) fn adopt_size(disk: &Path) -> Result<Vec<PathBuf>> {
    let failed = |source: std::io::Error| Error::File {
        action: "resize the block device of",
        path: disk.to_owned(),
        source,
    };
    // The kernel keeps the size of a file for some seconds.
    let file = File::open(disk).map_err(failed)?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    rustix::fs::statx(&file, "", flags, StatxFlags::SIZE).map_err(|errno| failed(errno.into()))?;
    let devices = loop_devices_of(disk);
    for device in &devices {
        refresh_loop_size(device).map_err(failed)?;
    }
    Ok(devices)
}
