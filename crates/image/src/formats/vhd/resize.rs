//! Changes the size: grows the table if needed, zeroes data past the old end, then writes the size to both footers.
//!
//! The table grows in place; blocks in its way are moved to the end first.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{Record, to_usize};

use super::footer::{FOOTER_BYTES, Footer};
use super::header::VhdHeader;
use super::sparse::{AT_CHECKSUM, AT_ENTRY_COUNT, HEADER_BYTES, SparseHeader};
use super::tables::{DISK_BYTES_MAX, for_each_sector};
use super::{FREE, SECTOR_BYTES, check, checksum};
use crate::allocation_table::resize::{refuse_differencing, require_sound, zero_tables};
use crate::allocation_table::{clear_room, copy_room};
use crate::file::ImageFile;
use crate::model::bytes::put;
use crate::model::info::ImageKind;
use crate::{Error, Result};

/// Unit of writes of a table.
const WRITE_BYTES: u64 = 1 << 20;
/// Alignment of the data of moved blocks.
const ALIGNMENT: u64 = 4096;

/// Resizes the disk to `after_bytes`, a multiple of 512, durably.
pub(crate) fn resize(file: &Arc<dyn ImageFile>, image: &str, after_bytes: u64) -> Result<()> {
    let header = VhdHeader::load(&**file, image)?;
    require_sound(&check::check(&**file, &header)?, image)?;
    if header.footer.kind == ImageKind::Differencing {
        return Err(refuse_differencing(image));
    }
    if header.is_footer_short {
        return Err(Error::NotResizable {
            image: image.to_owned(),
            detail: "its footer has 511 bytes; run holdfast image check --repair first".to_owned(),
        });
    }
    if after_bytes > DISK_BYTES_MAX {
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!("a VHD supports at most {DISK_BYTES_MAX} bytes (2040 GiB); a VHDX supports more"),
        });
    }
    match &header.sparse {
        None => resize_fixed(&**file, &header, after_bytes),
        Some(sparse) => resize_sparse(file, image, &header, sparse, after_bytes),
    }
}

/// Resizes a fixed image, whose footer moves.
fn resize_fixed(file: &dyn ImageFile, header: &VhdHeader, after_bytes: u64) -> Result<()> {
    let footer = Footer::resized(&header.footer_bytes, after_bytes);
    let before_bytes = header.footer.disk_bytes();
    let old_end = file.length_bytes()?;
    if after_bytes < before_bytes {
        // The old footer is valid until the file is truncated.
        file.write_at(&footer, after_bytes)?;
        file.sync()?;
        file.set_length(after_bytes + FOOTER_BYTES)?;
        return Ok(file.sync()?);
    }
    let old_place = old_end - FOOTER_BYTES;
    let place = if after_bytes <= old_place {
        old_place
    } else {
        after_bytes.max(old_end)
    };
    // A footer with the old size at the new end; then the range between, which is not part of the disk yet, is zeroed;
    // then the new size.
    if place != old_place {
        file.write_at(&*header.footer_bytes, place)?;
        file.sync()?;
    }
    file.punch(before_bytes..place)?;
    file.sync()?;
    file.write_at(&footer, place)?;
    Ok(file.sync()?)
}

fn resize_sparse(
    file: &Arc<dyn ImageFile>,
    image: &str,
    header: &VhdHeader,
    sparse: &SparseHeader,
    after_bytes: u64,
) -> Result<()> {
    let before_bytes = header.footer.disk_bytes();
    let needed = after_bytes.div_ceil(sparse.block_bytes);
    if needed > sparse.entry_count {
        grow_table(&**file, image, header, sparse, needed)?;
    }
    let footer = Footer::resized(&header.footer_bytes, after_bytes);
    let zero_past = |from: u64, to: u64, disk_bytes: u64| -> Result<()> {
        let mut header = VhdHeader::load(&**file, image)?;
        header.footer = Footer::parse(&Footer::resized(&header.footer_bytes, disk_bytes), 0, image)?;
        zero_tables(
            file,
            image,
            super::tables::of(image.into(), header, Arc::clone(file)),
            from..to,
        )
    };
    if after_bytes > before_bytes {
        zero_past(before_bytes, after_bytes, after_bytes)?;
        return store_footers(&**file, image, &footer);
    }
    store_footers(&**file, image, &footer)?;
    zero_past(after_bytes, before_bytes, before_bytes)
}

/// Writes both footers durably, one after the other: one of them is valid at any time.
fn store_footers(file: &dyn ImageFile, image: &str, footer: &[u8]) -> Result<()> {
    file.write_at(footer, 0)?;
    file.sync()?;
    let has_footer_at_end = VhdHeader::load(file, image)?.has_footer_at_end;
    let end = file.length_bytes()?;
    let place = if has_footer_at_end {
        end - FOOTER_BYTES
    } else {
        end.next_multiple_of(SECTOR_BYTES)
    };
    file.write_at(footer, place)?;
    Ok(file.sync()?)
}

/// Grows the table to `needed` entries, durably.
fn grow_table(file: &dyn ImageFile, image: &str, header: &VhdHeader, sparse: &SparseHeader, needed: u64) -> Result<()> {
    let old_end = sparse.table_offset + sparse.entry_count * 4;
    let new_end = (sparse.table_offset + needed * 4).next_multiple_of(SECTOR_BYTES);
    require_room(image, sparse, old_end..new_end)?;
    // While the footer is not at the end, its copy is used.
    file.write_at(&*header.footer_bytes, 0)?;
    file.sync()?;
    let end = move_blocks(file, image, header, sparse, new_end)?;
    if end < new_end + FOOTER_BYTES {
        clear_room(file, end.min(new_end)..new_end)?;
        file.write_at(&*header.footer_bytes, new_end)?;
        file.sync()?;
    }
    let mut at = old_end;
    while at < new_end {
        let length = (new_end - at).min(WRITE_BYTES);
        file.write_at(&vec![0xff; to_usize(length)], at)?;
        at += length;
    }
    file.sync()?;
    // The number of entries and the checksum are in the first sector of the header, which is written atomically.
    let mut bytes = [0; to_usize(HEADER_BYTES)];
    file.read_at(&mut bytes, sparse.offset)?;
    let count = u32::try_from(needed).unwrap_or(u32::MAX);
    put(&mut bytes, AT_ENTRY_COUNT, &count.to_be_bytes());
    let sum = checksum(&bytes, AT_CHECKSUM);
    put(&mut bytes, AT_CHECKSUM, &sum.to_be_bytes());
    file.write_at(
        Record::new(&bytes).field::<0, { to_usize(SECTOR_BYTES) }>(),
        sparse.offset,
    )?;
    Ok(file.sync()?)
}

/// Fails if anything but blocks is in `room`, into which the table grows.
fn require_room(image: &str, sparse: &SparseHeader, room: Range<u64>) -> Result<()> {
    let what = if sparse.tables_end > room.start {
        "the block map of XenServer"
    } else if sparse.offset < room.end && sparse.offset + HEADER_BYTES > room.start {
        "the header"
    } else {
        return Ok(());
    };
    Err(Error::NotResizable {
        image: image.to_owned(),
        detail: format!("{what} follows its block table, which therefore cannot grow; convert it first"),
    })
}

/// Moves the blocks that begin before `limit` to the end of the file, durably; returns its new end.
fn move_blocks(
    file: &dyn ImageFile,
    image: &str,
    header: &VhdHeader,
    sparse: &SparseHeader,
    limit: u64,
) -> Result<u64> {
    let whole = sparse.bitmap_bytes() + sparse.block_bytes;
    let mut file_end = file.length_bytes()?;
    let mut end = if header.has_footer_at_end {
        file_end - FOOTER_BYTES
    } else {
        file_end
    };
    let (mut moving, mut index) = (Vec::new(), 0);
    for_each_sector(file, sparse, |sector| {
        let start = u64::from(sector) * SECTOR_BYTES;
        if sector != FREE && start < limit {
            moving.push((index, start));
        }
        index += 1;
    })?;
    if moving.is_empty() {
        return Ok(file_end);
    }
    end = end.max(limit);
    let mut entries = Vec::new();
    for (index, start) in &moving {
        let place = (end + sparse.bitmap_bytes()).next_multiple_of(ALIGNMENT) - sparse.bitmap_bytes();
        let sector = u32::try_from(place / SECTOR_BYTES)
            .ok()
            .filter(|sector| *sector != FREE);
        let sector = sector.ok_or_else(|| Error::NotResizable {
            image: image.to_owned(),
            detail: "the file has reached the maximum size of its format; convert it to another format".to_owned(),
        })?;
        copy_room(file, *start, place, whole)?;
        end = place + whole;
        file.write_at(&*header.footer_bytes, end)?;
        file_end = end + FOOTER_BYTES;
        entries.push((*index, sector));
    }
    file.sync()?;
    for (index, sector) in entries {
        file.write_at(&sector.to_be_bytes(), sparse.entry_offset(index))?;
    }
    file.sync()?;
    for (_, start) in moving {
        file.punch(start.max(limit)..(start + whole).max(limit))?;
    }
    Ok(file_end)
}
