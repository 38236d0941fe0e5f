//! The size of a disk's sectors, by which its guest finds partitions and file systems.
//!
//! A disk of 4096-byte sectors that is shown with sectors of 512 bytes has the same bytes, and its guest finds nothing on it. Only a VHDX says the size; of a
//! VDI it is read.

use std::collections::BTreeMap;

use holdfast_image::{Format, USUAL_SECTOR_BYTES};

use crate::Progress;

/// Note of a disk: the size of its sectors, where it is not the usual one.
pub(crate) const NOTE_SECTOR: &str = "sector_bytes";

/// What the notes of a disk say.
pub(crate) fn noted_sector(notes: &BTreeMap<String, String>) -> u64 {
    let noted = notes.get(NOTE_SECTOR).and_then(|text| text.parse().ok());
    noted.filter(|bytes| *bytes == 4096).unwrap_or(USUAL_SECTOR_BYTES)
}

/// The size of the sectors that an image of `format` gets for a disk of `size_bytes`, called `what`, whose sectors have `sector_bytes`. Warns where
/// it is not the same.
pub(crate) fn kept_sector(
    (format, size_bytes): (Format, u64),
    sector_bytes: u64,
    what: &str,
    progress: &dyn Progress,
) -> u64 {
    if sector_bytes == USUAL_SECTOR_BYTES || format == Format::Vhdx && size_bytes.is_multiple_of(sector_bytes) {
        return sector_bytes;
    }
    tell_of_lost_sector(sector_bytes, what, progress);
    USUAL_SECTOR_BYTES
}

/// Warns that a target does not say the size of the sectors.
pub(crate) fn tell_of_lost_sector(sector_bytes: u64, what: &str, progress: &dyn Progress) {
    if sector_bytes != USUAL_SECTOR_BYTES {
        progress.warning(&format!(
            "{what} has sectors of {sector_bytes} bytes, which is not kept here: give the machine such a disk (logical_block_size='{sector_bytes}'), or its guest does not find its partitions"
        ));
    }
}
