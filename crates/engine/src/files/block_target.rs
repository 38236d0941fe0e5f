//! A block device, or a raw file, that a disk is written to: it is there already, keeps its size, and its content may be needed.

use std::ops::Deref;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, FileDeviceMut, IoMode};
use holdfast_host::writers_of_device;
use holdfast_image::{Format, ImageMut, OpenOptions};

use crate::job::{Error, Result};

/// What to do about a file that is where the new image is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overwrite {
    /// It stays, and the job is refused.
    Refuse,
    /// The new image takes its place, when it is complete.
    Replace,
}

/// Whether there is a block device at `path`, perhaps behind symbolic links as those of LVM.
pub fn is_block_device(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// A block device, or a raw file, that no other process uses while this is there.
///
/// A file system or an array on a device is refused by the operating system. A QEMU is kept out of a file by a lock; of a device only where
/// it has the same device file, and libvirt gives its machines others. So its writers are looked for, here and by
/// [`check_alone`](Self::check_alone).
pub(crate) struct LockedDevice {
    // Before the device: closing either of the two ends the lock.
    _lock: ImageMut,
    device: FileDeviceMut,
    path: PathBuf,
}

impl LockedDevice {
    /// Opens what is at `path` for writing.
    pub(crate) fn open(path: &Path, mode: IoMode) -> Result<Self> {
        let device = FileDeviceMut::open(path, mode)?;
        // To open and close the file again would end the lock, so it comes last.
        let lock = lock(path)?;
        let locked = Self {
            _lock: lock,
            device,
            path: path.to_owned(),
        };
        locked.check_alone()?;
        Ok(locked)
    }

    /// Looks that no other process has the device open for writing.
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

/// Keeps machines from using a file of any format until the answer is dropped.
pub(crate) fn lock(path: &Path) -> Result<ImageMut> {
    let options = OpenOptions {
        format: Some(Format::Raw),
        ..OpenOptions::default()
    };
    holdfast_image::open_mut(path, &options).map_err(|error| Error::from(error).on(path))
}

/// Opens the block device at `path` for a disk of `disk_bytes`, where that is allowed and fits.
///
/// One that the system uses (a mounted file system, a member of an array) is refused by the operating system.
pub(crate) fn open_block_target(path: &Path, overwrite: Overwrite, disk_bytes: u64) -> Result<LockedDevice> {
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
