//! Creates images.

use holdfast_block::to_usize;

use super::footer::{CREATOR, ChsGeometry, FOOTER_BYTES, Footer};
use super::sparse::{HEADER_BYTES, SparseHeader};
use super::tables::DISK_BYTES_MAX;
use super::{SECTOR_BYTES, locator};
use crate::file::ImageFile;
use crate::model::identity::ImageId;
use crate::model::info::ImageKind;
use crate::{Error, Result};

/// The block size that all programs use.
pub(crate) const BLOCK_BYTES: u64 = 2 << 20;
/// 2000-01-01 UTC, in seconds since 1970.
const EPOCH_S: u64 = 946_684_800;

/// Parameters of a new image.
pub(crate) struct NewVhd {
    /// A multiple of 512.
    pub(crate) size_bytes: u64,
    /// A power of two.
    pub(crate) block_bytes: u64,
    pub(crate) kind: ImageKind,
    pub(crate) id: ImageId,
    /// Time of creation in seconds since 1970.
    pub(crate) created_s: u64,
    /// The parent: its UUID, time of creation, and path as stored in the image.
    pub(crate) parent: Option<(ImageId, u32, String)>,
}

/// Writes an empty image into the empty `file`; durable when this returns.
pub(crate) fn write_empty(file: &dyn ImageFile, new: &NewVhd) -> Result<()> {
    if new.size_bytes > DISK_BYTES_MAX {
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!("a VHD supports at most {DISK_BYTES_MAX} bytes (2040 GiB); a VHDX supports more"),
        });
    }
    let is_fixed = new.kind == ImageKind::Fixed;
    let footer = Footer {
        kind: new.kind,
        header_offset: if is_fixed { u64::MAX } else { FOOTER_BYTES },
        timestamp: u32::try_from(new.created_s.saturating_sub(EPOCH_S)).unwrap_or(u32::MAX),
        creator: CREATOR,
        original_bytes: new.size_bytes,
        current_bytes: new.size_bytes,
        geometry: ChsGeometry::of(new.size_bytes),
        id: new.id,
    }
    .to_bytes();
    if is_fixed {
        file.set_length(new.size_bytes)?;
        file.write_at(&footer, new.size_bytes)?;
        return Ok(file.sync()?);
    }
    let locators_offset = FOOTER_BYTES + HEADER_BYTES;
    let (parent, parent_timestamp, name) = match &new.parent {
        Some((id, timestamp, name)) => (*id, *timestamp, name.as_str()),
        None => (ImageId::NIL, 0, ""),
    };
    let (locators, data) = if new.parent.is_some() {
        locator::to_bytes(name, locators_offset)
    } else {
        (Vec::new(), Vec::new())
    };
    let table_offset = locators_offset + data.len() as u64;
    let entry_count = new.size_bytes.div_ceil(new.block_bytes);
    let table_bytes = (entry_count * 4).next_multiple_of(SECTOR_BYTES);
    let header = SparseHeader {
        offset: FOOTER_BYTES,
        table_offset,
        entry_count,
        block_bytes: new.block_bytes,
        parent,
        parent_timestamp,
        parent_names: Vec::new(),
        tables_end: table_offset + table_bytes,
    };
    file.write_at(&header.to_bytes(name, &locators), FOOTER_BYTES)?;
    file.write_at(&data, locators_offset)?;
    file.write_at(&vec![0xff; to_usize(table_bytes)], table_offset)?;
    // Footer and copy are written last: without them the file is not a valid image.
    file.sync()?;
    file.write_at(&footer, header.tables_end)?;
    file.write_at(&footer, 0)?;
    Ok(file.sync()?)
}
