//! The sector size of a disk, which its guest needs to find partitions and file systems.
//!
//! A disk with 4096-byte sectors that is shown with 512-byte sectors has the same bytes, but its guest finds nothing on
//! it. Only a VHDX stores the size; for a VDI it is detected. A block device has a sector size too. It is the size of
//! the guest's disk only if the partition table was written for it: a machine may use a volume with 4096-byte sectors,
//! and see sectors of 512 bytes.

use std::collections::BTreeMap;
use std::path::Path;

use holdfast_block::{BlockDevice, FileDevice, IoMode};
use holdfast_image::{Format, Image, USUAL_SECTOR_BYTES};

use crate::files::block_target::is_block_device;
use crate::job::{Progress, Result};
use crate::notes::{NOTE_SECTOR_BYTES, note};

/// Signature of a GPT partition table, in the second sector.
const TABLE_SIGNATURE: &[u8; 8] = b"EFI PART";

/// The sector size of the disk in an image at `path`.
pub(crate) fn sector_of_image(path: &Path, image: &Image) -> Result<u64> {
    let is_raw = image.layers().first().is_some_and(|layer| layer.format == Format::Raw);
    if is_raw && is_block_device(path) {
        return sector_of_block_device(&FileDevice::open(path, IoMode::Buffered)?);
    }
    Ok(image.sector_bytes())
}

/// The sector size of the disk on a block device: that of the device, if it has a partition table for sectors of that size.
pub(crate) fn sector_of_block_device(device: &FileDevice) -> Result<u64> {
    let sector_bytes = u64::from(device.block_size_bytes());
    if sector_bytes == USUAL_SECTOR_BYTES {
        return Ok(USUAL_SECTOR_BYTES);
    }
    let has_table = |offset: u64| -> Result<bool> {
        let mut found = [0; TABLE_SIGNATURE.len()];
        if offset + found.len() as u64 <= device.size_bytes() {
            device.read_at(&mut found, offset)?;
        }
        Ok(found == *TABLE_SIGNATURE)
    };
    let is_of_device = has_table(sector_bytes)? && !has_table(USUAL_SECTOR_BYTES)?;
    Ok(if is_of_device { sector_bytes } else { USUAL_SECTOR_BYTES })
}

/// Warns if a disk with sectors of `sector_bytes` is written to a block device with another sector size.
pub(crate) fn warn_of_other_sectors(target: &dyn BlockDevice, sector_bytes: u64, what: &str, progress: &dyn Progress) {
    if u64::from(target.block_size_bytes()) != sector_bytes {
        warn_of_lost_sector(sector_bytes, what, progress);
    }
}

/// The sector size in the notes of a disk.
pub(crate) fn noted_sector(notes: &BTreeMap<String, String>) -> u64 {
    let noted = note(notes, NOTE_SECTOR_BYTES).and_then(|text| text.parse().ok());
    noted.filter(|bytes| *bytes == 4096).unwrap_or(USUAL_SECTOR_BYTES)
}

/// The sector size that an image of `format` gets for a disk of `size_bytes`, called `what`, whose sectors have
/// `sector_bytes`. Warns if it differs.
pub(crate) fn kept_sector(
    format: Format,
    size_bytes: u64,
    sector_bytes: u64,
    what: &str,
    progress: &dyn Progress,
) -> u64 {
    if sector_bytes == USUAL_SECTOR_BYTES || format == Format::Vhdx && size_bytes.is_multiple_of(sector_bytes) {
        return sector_bytes;
    }
    warn_of_lost_sector(sector_bytes, what, progress);
    USUAL_SECTOR_BYTES
}

/// Warns that the target does not store the sector size.
pub(crate) fn warn_of_lost_sector(sector_bytes: u64, what: &str, progress: &dyn Progress) {
    if sector_bytes != USUAL_SECTOR_BYTES {
        progress.warning(&format!(
            "{what} has sectors of {sector_bytes} bytes, which is not kept here: attach the image as such a disk (logical_block_size='{sector_bytes}'), or its guest does not find its partitions"
        ));
    }
}
