//! A block device or raw file as the target of a disk: it exists already, keeps its size, and its content may be needed.

use std::ops::Deref;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, FileDeviceMut, IoMode};
use holdfast_host::writers_of_device;
use holdfast_image::{Format, ImageMut, OpenOptions};

use crate::job::{Error, Result};

/// What to do if the target exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overwrite {
    /// Keep it, and refuse the job.
    Refuse,
    /// Replace it when the new image is complete.
    Replace,
}

/// Whether `path` is a block device, possibly behind symbolic links like those of LVM.
pub fn is_block_device(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// A block device or raw file that is locked against other processes until this is dropped.
///
/// The operating system refuses a device with a mounted file system or an array. A lock keeps QEMU away from a file,
/// but from a device only if QEMU uses the same device node, and libvirt gives its machines separate nodes. So writers
/// of the device are searched for, here and in [`check_alone`](Self::check_alone).
pub struct LockedDevice {
    _lock: ImageMut,
    device: FileDeviceMut,
    path: PathBuf,
}

impl LockedDevice {
    /// Opens `path` for writing.
    pub(crate) fn open(path: &Path, mode: IoMode) -> Result<Self> {
        let device = FileDeviceMut::open(path, mode)?;
        let lock = lock(path)?;
        let locked = Self {
            _lock: lock,
            device,
            path: path.to_owned(),
        };
        locked.check_alone()?;
        Ok(locked)
    }

    /// Checks that no other process has the device open for writing.
    pub(crate) fn check_alone(&self) -> Result<()> {
        let Ok(found) = self.path.metadata() else {
            return Ok(());
        };
        if !found.file_type().is_block_device() {
            return Ok(());
        }
        match writers_of_device(found.rdev()).first() {
            None => Ok(()),
            Some(writer) => Err(Error::DeviceInUse {
                path: self.path.clone(),
                process: writer.pid,
                program: writer.arguments.first().cloned().unwrap_or_default(),
            }),
        }
    }
}

impl Deref for LockedDevice {
    type Target = FileDeviceMut;

    fn deref(&self) -> &FileDeviceMut {
        &self.device
    }
}

/// Locks a file of any format against machines until the result is dropped.
pub(crate) fn lock(path: &Path) -> Result<ImageMut> {
    let options = OpenOptions {
        format: Some(Format::Raw),
        ..OpenOptions::default()
    };
    holdfast_image::open_mut(path, &options).map_err(|error| Error::from(error).on(path))
}

/// Opens the block device at `path` for a disk of `disk_bytes`, if overwriting is allowed and the disk fits.
///
/// The operating system refuses a device in use (a mounted file system, a member of an array).
pub fn open_block_target(path: &Path, overwrite: Overwrite, disk_bytes: u64) -> Result<LockedDevice> {
    if overwrite == Overwrite::Refuse {
        return Err(Error::DeviceExists { path: path.to_owned() });
    }
    let target = LockedDevice::open(path, IoMode::Buffered)?;
    let target_bytes = target.size_bytes();
    if target_bytes < disk_bytes {
        return Err(Error::TargetTooSmall {
            path: path.to_owned(),
            target_bytes,
            disk_bytes,
        });
    }
    Ok(target)
}
