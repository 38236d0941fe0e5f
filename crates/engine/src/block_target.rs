//! A block device that a disk is written to: it is there already, keeps its size, and holds what somebody may miss.

use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use holdfast_block::{BlockDevice as _, FileDeviceMut, IoMode};

use crate::error::{Error, Result};
use crate::new_image::Overwrite;

/// Whether there is a block device at `path`, perhaps behind symbolic links as those of LVM.
pub(crate) fn is_block_device(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Opens the block device at `path` for a disk of `disk_bytes`, where that is allowed and fits.
///
/// One that the system uses (a mounted file system, a member of an array) is refused by the operating system.
pub(crate) fn open_block_target(path: &Path, overwrite: Overwrite, disk_bytes: u64) -> Result<FileDeviceMut> {
    if overwrite == Overwrite::Refuse {
        return Err(Error::DeviceExists { path: path.to_owned() });
    }
    let target = FileDeviceMut::open(path, IoMode::Buffered)?;
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
