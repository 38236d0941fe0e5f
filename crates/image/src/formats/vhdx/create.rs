//! Creates images.

use super::MIB;
use super::header::{HeaderSlot, Region, VhdxHeader, write_start};
use super::metadata::{DISK_BYTES_MAX, Metadata, VhdxParent};
use super::tables::{BatEntry, is_of_bits, state};
use crate::allocation_table::write_entries;
use crate::file::ImageFile;
use crate::model::identity::ImageId;
use crate::model::info::ImageKind;
use crate::{Error, Result};

const LOG_BYTES: u32 = 1 << 20;

/// Parameters of a new image.
pub(crate) struct NewVhdx {
    /// A multiple of the sector size.
    pub(crate) size_bytes: u64,
    /// A power of two, 1 MiB to 256 MiB.
    pub(crate) block_bytes: u64,
    /// 512 or 4096.
    pub(crate) sector_bytes: u64,
    pub(crate) kind: ImageKind,
    pub(crate) id: ImageId,
    pub(crate) parent: Option<VhdxParent>,
}

/// The default block size for a disk size: small disks waste little space, and large ones do not need too large a
/// table.
pub(crate) fn block_bytes_for(size_bytes: u64) -> u64 {
    if size_bytes <= 2 << 40 { 2 * MIB } else { 32 * MIB }
}

/// Writes an empty image into the empty `file`; durable when this returns.
pub(crate) fn write_empty(file: &dyn ImageFile, new: &NewVhdx) -> Result<()> {
    if new.size_bytes > DISK_BYTES_MAX {
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!("a VHDX supports at most {DISK_BYTES_MAX} bytes (64 TiB)"),
        });
    }
    let metadata = Metadata {
        disk_bytes: new.size_bytes,
        block_bytes: new.block_bytes,
        is_fixed: new.kind == ImageKind::Fixed,
        has_parent: new.parent.is_some(),
        sector_bytes: new.sector_bytes,
        physical_sector_bytes: 4096,
        id: new.id,
        parent: new.parent.clone(),
    };
    let region = |offset, length_bytes: u64| Region {
        offset,
        length_bytes: length_bytes.next_multiple_of(MIB),
    };
    let of_metadata = region(2 * MIB, MIB);
    let bat = region(3 * MIB, (metadata.entry_count() * 8).max(1));
    let blocks = bat.offset + bat.length_bytes;
    if metadata.is_fixed {
        file.set_length(blocks + metadata.block_count() * new.block_bytes)?;
        write_entries(file, bat.offset, metadata.entry_count(), |number| {
            let chunk = metadata.chunk_blocks() + 1;
            let entry = if is_of_bits(&metadata, number) {
                BatEntry(0)
            } else {
                BatEntry::new(state::FULL, blocks + (number - number / chunk) * new.block_bytes)
            };
            entry.0.to_le_bytes()
        })?;
    } else {
        file.set_length(blocks)?;
    }
    file.write_at(&metadata.to_bytes(), of_metadata.offset)?;
    let header = |slot, sequence| -> Result<VhdxHeader> {
        Ok(VhdxHeader {
            slot,
            sequence,
            file_write: ImageId::random()?,
            data_write: ImageId::random()?,
            log: ImageId::NIL,
            log_bytes: LOG_BYTES,
            log_offset: MIB,
        })
    };
    for header in [header(HeaderSlot::First, 1)?, header(HeaderSlot::Second, 2)?] {
        let (offset, bytes) = header.to_bytes();
        file.write_at(&bytes, offset)?;
    }
    write_start(file, bat, of_metadata)
}
