//! Changes the size: grows the block map, which has to fit before the blocks, zeroes data past the old end, then
//! writes the size to the header.

use std::sync::Arc;

use super::check::check;
use super::header::{AT_BLOCKS, AT_DISK, VdiHeader, VdiKind};
use super::tables::{VdiTables, for_each_number};
use super::{FREE, ZERO};
use crate::allocation_table::resize::{refuse_differencing, require_sound, zero_tables};
use crate::allocation_table::{clear_room, write_entries};
use crate::file::ImageFile;
use crate::{Error, Result};

/// Resizes the disk to `after_bytes`, durably.
pub(crate) fn resize(file: &Arc<dyn ImageFile>, image: &str, after_bytes: u64) -> Result<()> {
    let header = VdiHeader::load(&**file, image)?;
    require_sound(&check(&**file, &header)?, image)?;
    if header.kind == VdiKind::Differencing {
        return Err(refuse_differencing(image));
    }
    let before_bytes = header.disk_bytes;
    let zero_past = |from: u64, to: u64| -> Result<()> {
        let mut header = VdiHeader::load(&**file, image)?;
        header.disk_bytes = to;
        zero_tables(
            file,
            image,
            Box::new(VdiTables::new(image.into(), header, Arc::clone(file))),
            from..to,
        )
    };
    if after_bytes > before_bytes {
        grow_map(&**file, image, &header, after_bytes)?;
        zero_past(before_bytes, after_bytes)?;
        return write_size(&**file, after_bytes);
    }
    write_size(&**file, after_bytes)?;
    zero_past(after_bytes, before_bytes)
}

/// Changes one sector of the header, which is written atomically.
fn write_size(file: &dyn ImageFile, size_bytes: u64) -> Result<()> {
    file.write_at(&size_bytes.to_le_bytes(), AT_DISK as u64)?;
    Ok(file.sync()?)
}

/// Grows the block map for a disk of `after_bytes`, durably.
fn grow_map(file: &dyn ImageFile, image: &str, header: &VdiHeader, after_bytes: u64) -> Result<()> {
    let needed = after_bytes.div_ceil(header.block_bytes);
    if needed <= header.block_count {
        return Ok(());
    }
    let room = ((header.data_offset - header.map_offset) / 4).min(u64::from(ZERO) / 4);
    if needed > room {
        return Err(Error::NotResizable {
            image: image.to_owned(),
            detail: format!(
                "the space before its blocks only suffices for the map of {} bytes; convert it first",
                room.saturating_mul(header.block_bytes)
            ),
        });
    }
    let added = needed - header.block_count;
    let first_entry_at = header.entry_offset(header.block_count);
    let mut stored_count = header.stored_count;
    if header.kind == VdiKind::Fixed {
        let mut next = 0;
        for_each_number(file, header, |_, entry| {
            if entry < ZERO {
                next = next.max(entry + 1);
            }
        })?;
        // There are fewer than u32::MAX / 4 blocks, and as many numbers; those of a consistent image are smaller.
        let number = |index: u64| u32::try_from(u64::from(next) + index).unwrap_or(FREE);
        stored_count = number(added);
        let end = |number: u32| header.host(number).saturating_sub(header.extra_bytes);
        clear_room(file, end(next)..end(stored_count))?;
        write_entries(file, first_entry_at, added, |index| number(index).to_le_bytes())?;
    } else {
        write_entries(file, first_entry_at, added, |_| FREE.to_le_bytes())?;
    }
    file.sync()?;
    // Both numbers are adjacent in one sector.
    let mut field = [0; 8];
    field[..4].copy_from_slice(&u32::try_from(needed).unwrap_or(u32::MAX).to_le_bytes());
    field[4..].copy_from_slice(&stored_count.to_le_bytes());
    file.write_at(&field, AT_BLOCKS as u64)?;
    Ok(file.sync()?)
}
