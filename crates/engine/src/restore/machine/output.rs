//! The targets that disks and small files are written to.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::Path;

use holdfast_block::{BlockDeviceMut, FileDeviceMut, IoMode};
use holdfast_image::ImageMut;
use holdfast_repo::DiskRecord;

use super::planned_file::PlannedFile;
use super::present_image::open_image;
use crate::files::block_target::{LockedDevice, is_block_device};
use crate::job::{Error, Result};

/// The target of a disk.
pub(super) enum OutputDevice {
    Plain(FileDeviceMut),
    Image(ImageMut),
    BlockDevice(LockedDevice),
}

impl OutputDevice {
    pub(super) fn as_device(&self) -> &dyn BlockDeviceMut {
        match self {
            Self::Plain(device) => device,
            Self::Image(image) => image,
            Self::BlockDevice(device) => &**device,
        }
    }
}

/// Opens an existing target, with a lock.
pub(super) fn open_present(file: &PlannedFile, record: &DiskRecord) -> Result<OutputDevice> {
    let opened = if is_block_device(&file.to) {
        OutputDevice::BlockDevice(LockedDevice::open(&file.to, IoMode::LargeDirect)?)
    } else {
        OutputDevice::Image(open_image(&file.to, file.format)?)
    };
    let target_bytes = opened.as_device().size_bytes();
    if target_bytes < record.size_bytes {
        return Err(Error::TargetTooSmall {
            path: file.to.clone(),
            target_bytes,
            disk_bytes: record.size_bytes,
        });
    }
    Ok(opened)
}

/// Writes a small file as a new one, with the owner and the mode of the file at `path` that it will replace.
pub(super) fn write_whole(partial: &Path, bytes: &[u8], path: &Path) -> std::io::Result<()> {
    let mut file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(partial)?;
    file.write_all(bytes)?;
    if let Ok(before) = path.metadata() {
        fchown(&file, Some(before.uid()), Some(before.gid()))?;
        file.set_permissions(before.permissions())?;
    }
    file.sync_all()
}
