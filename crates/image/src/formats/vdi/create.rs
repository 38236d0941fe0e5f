//! Creates images.

use super::header::{VdiHeader, VdiKind};
use super::{FREE, ZERO};
use crate::allocation_table::write_entries;
use crate::file::ImageFile;
use crate::model::bytes::round_up;
use crate::model::identity::ImageId;
use crate::{Error, Result};

/// The block size of VirtualBox, and the only one that QEMU supports. The map and the blocks are aligned to it, so
/// that file systems can share them.
pub(crate) const BLOCK_BYTES: u64 = 1 << 20;

/// Parameters of a new image.
pub(crate) struct NewVdi {
    pub(crate) size_bytes: u64,
    /// A power of two.
    pub(crate) block_bytes: u64,
    pub(crate) sector_bytes: u64,
    pub(crate) kind: VdiKind,
    pub(crate) id: ImageId,
    pub(crate) parent: ImageId,
    pub(crate) parent_modification: ImageId,
}

/// Writes an empty image into the empty `file`; durable when this returns.
pub(crate) fn write_empty(file: &dyn ImageFile, new: &NewVdi) -> Result<()> {
    let block_bytes = new.block_bytes;
    let block_count = new.size_bytes.div_ceil(block_bytes);
    if block_count * 4 > u64::from(ZERO) {
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!("a VDI supports at most {} bytes", u64::from(ZERO) / 4 * block_bytes),
        });
    }
    let map_offset = block_bytes;
    let data_offset = round_up(map_offset + block_count * 4, block_bytes);
    let stored_count = match new.kind {
        VdiKind::Fixed => u32::try_from(block_count).unwrap_or(u32::MAX),
        VdiKind::Dynamic | VdiKind::Differencing => 0,
    };
    let header = VdiHeader {
        kind: new.kind,
        map_offset,
        data_offset,
        disk_bytes: new.size_bytes,
        block_bytes,
        sector_bytes: new.sector_bytes,
        extra_bytes: 0,
        block_count,
        stored_count,
        id: new.id,
        modification: ImageId::random()?,
        parent: new.parent,
        parent_modification: new.parent_modification,
        creator: String::new(),
    };
    file.set_length(data_offset + u64::from(stored_count) * block_bytes)?;
    write_entries(file, map_offset, block_count, |number| {
        let entry = match new.kind {
            VdiKind::Fixed => u32::try_from(number).unwrap_or(FREE),
            VdiKind::Dynamic | VdiKind::Differencing => FREE,
        };
        entry.to_le_bytes()
    })?;
    // The header is written last: without it the file is not a valid image.
    file.sync()?;
    file.write_at(&header.to_bytes(), 0)?;
    Ok(file.sync()?)
}
