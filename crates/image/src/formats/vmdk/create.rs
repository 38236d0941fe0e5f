//! Creates images: one sparse file with an embedded descriptor.

use holdfast_block::to_usize;

use super::SECTOR_BYTES;
use super::descriptor::{Descriptor, VmdkParent};
use super::extent::SparseExtent;
use crate::allocation_table::write_entries;
use crate::file::ImageFile;
use crate::model::identity::ImageId;
use crate::{Error, Result};

/// The grain size that all programs use.
pub(crate) const GRAIN_BYTES: u64 = 64 << 10;
pub(crate) const TABLE_ENTRIES: u64 = 512;
pub(crate) const DESCRIPTOR_SECTORS: u64 = 20;

/// Parameters of a new image.
pub(crate) struct NewVmdk {
    /// A multiple of 512.
    pub(crate) size_bytes: u64,
    pub(crate) grain_bytes: u64,
    /// Its file name.
    pub(crate) name: String,
    pub(crate) id: ImageId,
    pub(crate) parent: Option<VmdkParent>,
}

/// Writes an empty image into the empty `file`; durable when this returns.
pub(crate) fn write_empty(file: &dyn ImageFile, new: &NewVmdk) -> Result<()> {
    let table_sectors = (TABLE_ENTRIES * 4).div_ceil(SECTOR_BYTES);
    let table_count = new.size_bytes.div_ceil(new.grain_bytes * TABLE_ENTRIES);
    let directory_sectors = (table_count * 4).div_ceil(SECTOR_BYTES).max(1);
    let block = directory_sectors + table_count * table_sectors;
    let second = 1 + DESCRIPTOR_SECTORS;
    let first = second + block;
    let overhead = (first + block).next_multiple_of(new.grain_bytes / SECTOR_BYTES);
    if overhead + new.size_bytes.div_ceil(SECTOR_BYTES) > u64::from(u32::MAX) {
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!(
                "a sparse VMDK cannot have {} bytes: the maximum is 2 TiB",
                new.size_bytes
            ),
        });
    }
    let extent = SparseExtent {
        disk_bytes: new.size_bytes,
        grain_bytes: new.grain_bytes,
        descriptor: Some((SECTOR_BYTES, DESCRIPTOR_SECTORS * SECTOR_BYTES)),
        table_entries: TABLE_ENTRIES,
        directory: first * SECTOR_BYTES,
        second_directory: Some(second * SECTOR_BYTES),
        has_zero_grains: false,
        is_compressed: false,
        is_open: false,
        overhead: overhead * SECTOR_BYTES,
    };
    file.set_length(overhead * SECTOR_BYTES)?;
    for start in [second, first] {
        write_entries(file, start * SECTOR_BYTES, table_count, |index| {
            let sector = start + directory_sectors + index * table_sectors;
            u32::try_from(sector).unwrap_or(u32::MAX).to_le_bytes()
        })?;
    }
    let random = ImageId::random()?.0;
    let content_id = u32::from_be_bytes(random[..4].try_into().expect("four bytes")) & 0x7fff_ffff;
    let text = Descriptor::text(
        &new.name,
        new.size_bytes / SECTOR_BYTES,
        new.id,
        content_id,
        new.parent.as_ref(),
    );
    if text.len() > to_usize(DESCRIPTOR_SECTORS * SECTOR_BYTES) {
        return Err(Error::InvalidOption {
            option: "parent",
            detail: "its path is too long for the descriptor".to_owned(),
        });
    }
    file.write_at(text.as_bytes(), SECTOR_BYTES)?;
    // The header is written last: without it the file is not a valid image.
    file.sync()?;
    file.write_at(&extent.to_bytes(), 0)?;
    Ok(file.sync()?)
}
