//! Changes the size: grows the block allocation table if needed, in its region or in a new one, zeroes data past the
//! old end, then writes the size to the metadata.
//!
//! Like all writes of this module, it does not use the log: writes in place have at most eight bytes, and one of the
//! two region tables is valid at any time.

use std::sync::Arc;

use holdfast_block::to_usize;

use super::header::{REGION_BAT, Region, move_region};
use super::metadata::{DISK_BYTES_MAX, Metadata};
use super::opened::OpenedVhdx;
use super::tables::{BatEntry, VhdxTables, for_each_block, is_of_bits, state};
use super::{MIB, check};
use crate::allocation_table::clear_room;
use crate::allocation_table::resize::{refuse_differencing, require_sound, zero_tables};
use crate::file::{Access, ImageFile};
use crate::model::identity::ImageId;
use crate::{Error, Result};

/// Unit of copying a table.
const COPY_BYTES: u64 = MIB;

/// Resizes the disk to `after_bytes`, durably.
pub(crate) fn resize(file: &Arc<dyn ImageFile>, image: &str, after_bytes: u64) -> Result<()> {
    let mut opened = OpenedVhdx::load(Arc::clone(file), Access::Write, image)?;
    require_sound(&check::check(&opened)?, image)?;
    if opened.metadata.has_parent {
        return Err(refuse_differencing(image));
    }
    let sector_bytes = opened.metadata.sector_bytes;
    if after_bytes > DISK_BYTES_MAX || !after_bytes.is_multiple_of(sector_bytes) {
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!(
                "a VHDX supports at most {DISK_BYTES_MAX} bytes (64 TiB), in sectors of {sector_bytes} bytes"
            ),
        });
    }
    let before_bytes = opened.metadata.disk_bytes;
    let size_at = opened.size_at;
    // The header must get a new FileWriteGuid before anything else in the file changes (MS-VHDX 2.2.2).
    opened.header.file_write = ImageId::random()?;
    opened.header.data_write = ImageId::random()?;
    opened.header.store_next(&**file, image)?;
    let write_size = || -> Result<()> {
        file.write_at(&after_bytes.to_le_bytes(), size_at)?;
        Ok(file.sync()?)
    };
    let zero_past = |from: u64, to: u64| -> Result<()> {
        let mut opened = OpenedVhdx::load(Arc::clone(file), Access::Write, image)?;
        opened.metadata.disk_bytes = to;
        zero_tables(file, image, Box::new(VhdxTables::new(image.into(), opened)), from..to)
    };
    if after_bytes > before_bytes {
        grow_table(&**file, &opened, after_bytes)?;
        zero_past(before_bytes, after_bytes)?;
        return write_size();
    }
    write_size()?;
    zero_past(after_bytes, before_bytes)
}

/// Grows the table for a disk of `after_bytes`, durably.
fn grow_table(file: &dyn ImageFile, opened: &OpenedVhdx, after_bytes: u64) -> Result<()> {
    let before = &opened.metadata;
    let after = Metadata {
        disk_bytes: after_bytes,
        ..before.clone()
    };
    let mut end = file.length_bytes()?;
    for_each_block(file, opened.bat, before, |number, entry| {
        if !is_of_bits(before, number) && entry.state() >= state::FULL {
            end = end.max(entry.offset().saturating_add(before.block_bytes));
        }
    })?;
    let mut end = end.next_multiple_of(MIB);
    let needed = after.entry_count() * 8;
    let bat = if needed <= opened.bat.length_bytes {
        opened.bat
    } else {
        let bat = Region {
            offset: end,
            length_bytes: needed.next_multiple_of(MIB),
        };
        end += bat.length_bytes;
        clear_room(file, bat.offset..end)?;
        copy(file, opened.bat.offset, bat.offset, before.entry_count() * 8)?;
        bat
    };
    let first = before.block_count();
    write_new_entries(file, bat, before, &after, end)?;
    if after.is_fixed {
        clear_room(file, end..end + (after.block_count() - first) * after.block_bytes)?;
    }
    file.sync()?;
    if bat != opened.bat {
        move_region(file, REGION_BAT, bat)?;
    }
    Ok(())
}

/// Writes entries for the new part of the disk: of blocks from `place` on in a fixed image, else of absent ones.
fn write_new_entries(file: &dyn ImageFile, bat: Region, before: &Metadata, after: &Metadata, place: u64) -> Result<()> {
    const COUNT_AT_ONCE: u64 = 64 << 10;
    let first = before.block_count();
    let mut number = before.entry_count();
    while number < after.entry_count() {
        let end = after.entry_count().min(number + COUNT_AT_ONCE);
        let entries = (number..end).map(|number| {
            let index = number - number / (after.chunk_blocks() + 1);
            if after.is_fixed && !is_of_bits(after, number) {
                BatEntry::new(state::FULL, place + (index - first) * after.block_bytes)
            } else {
                BatEntry(0)
            }
        });
        let bytes: Vec<u8> = entries.flat_map(|entry| entry.0.to_le_bytes()).collect();
        file.write_at(&bytes, bat.offset + number * 8)?;
        number = end;
    }
    Ok(())
}

fn copy(file: &dyn ImageFile, from: u64, to: u64, length: u64) -> Result<()> {
    let mut done = 0;
    while done < length {
        let mut piece = vec![0; to_usize((length - done).min(COPY_BYTES))];
        file.read_at(&mut piece, from + done)?;
        file.write_at(&piece, to + done)?;
        done += piece.len() as u64;
    }
    Ok(())
}
