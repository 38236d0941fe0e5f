//! Restores a footer from its copy, or the copy from the footer; completes a footer of 511 bytes; corrects the
//! checksum of a footer that is valid otherwise. In mode `All`, it frees entries that point outside the file, and
//! copies a block with two entries for the second one.

use std::collections::HashSet;

use holdfast_block::to_usize;

use super::footer::{AT_CHECKSUM, FOOTER_BYTES, FOOTER_BYTES_SHORT, Footer};
use super::header::VhdHeader;
use super::sparse::SparseHeader;
use super::tables::for_each_sector;
use super::{FREE, SECTOR_BYTES, checksum};
use crate::Result;
use crate::allocation_table::copy_room;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::put;
use crate::model::info::ImageKind;
use crate::model::repair_action::{RepairAction, RepairMode};

pub(crate) fn repair(
    file: &dyn ImageFile,
    image: &str,
    mode: RepairMode,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    if mode < RepairMode::Safe {
        return Ok(());
    }
    if let Err(error) = VhdHeader::load(file, image)
        && !seal_footer(file, image, actions)?
    {
        return Err(error);
    }
    let mut header = VhdHeader::load(file, image)?;
    lengthen(file, &mut header, actions)?;
    repair_copies(file, &header, image, actions)?;
    let header = VhdHeader::load(file, image)?;
    match &header.sparse {
        Some(sparse) if mode == RepairMode::All => {
            discard_invalid_blocks(file, &header, sparse, actions)?;
            copy_shared_blocks(file, &VhdHeader::load(file, image)?, sparse, image, actions)
        }
        _ => Ok(()),
    }
}

/// Corrects the checksum of a footer that is valid otherwise; false if there is none.
fn seal_footer(file: &dyn ImageFile, image: &str, actions: &mut Vec<RepairAction>) -> Result<bool> {
    let file_bytes = file.length_bytes()?;
    let places = [FOOTER_BYTES, FOOTER_BYTES_SHORT, file_bytes].map(|back| file_bytes.checked_sub(back));
    for at in places.into_iter().flatten() {
        let mut bytes = [0; to_usize(FOOTER_BYTES)];
        file.read_at(&mut bytes, at)?;
        let sum = checksum(&bytes, AT_CHECKSUM);
        put(&mut bytes, AT_CHECKSUM, &sum.to_be_bytes());
        let Ok(footer) = Footer::parse(&bytes, at, image) else {
            continue;
        };
        // Without the checksum, all other fields must be plausible.
        let is_right = match footer.kind {
            ImageKind::Fixed => {
                footer.header_offset == u64::MAX && footer.disk_bytes() == at && footer.current_bytes <= at
            }
            _ => SparseHeader::load(file, file_bytes, &footer, image).is_ok(),
        };
        if is_right {
            // A footer of 511 bytes keeps its length here.
            let length = to_usize(FOOTER_BYTES.min(file_bytes - at));
            file.write_at(bytes.get(..length).unwrap_or(&bytes), at)?;
            file.sync()?;
            actions.push(RepairAction::Rewritten {
                what: "the checksum of the footer",
                from: "its other fields, which are valid",
            });
            return Ok(true);
        }
    }
    Ok(false)
}

/// Appends the last byte, zero, to a footer of 511 bytes, as old versions of Virtual PC wrote it.
fn lengthen(file: &dyn ImageFile, header: &mut VhdHeader, actions: &mut Vec<RepairAction>) -> Result<()> {
    if !header.is_footer_short {
        return Ok(());
    }
    file.set_length(file.length_bytes()? + FOOTER_BYTES - FOOTER_BYTES_SHORT)?;
    file.sync()?;
    header.is_footer_short = false;
    actions.push(RepairAction::Number {
        what: "the length of the footer",
        before: FOOTER_BYTES_SHORT,
        after: FOOTER_BYTES,
    });
    Ok(())
}

/// Restores the footer at the end from its copy, or the copy from the footer.
fn repair_copies(file: &dyn ImageFile, header: &VhdHeader, image: &str, actions: &mut Vec<RepairAction>) -> Result<()> {
    let Some(sparse) = &header.sparse else { return Ok(()) };
    if header.has_footer_at_end {
        let mut copy = vec![0; to_usize(FOOTER_BYTES)];
        file.read_at(&mut copy, 0)?;
        if copy != *header.footer_bytes {
            file.write_at(&*header.footer_bytes, 0)?;
            file.sync()?;
            actions.push(RepairAction::Rewritten {
                what: "the copy of the footer at the start",
                from: "the footer at the end",
            });
        }
        return Ok(());
    }
    let place = place_of_footer(file, sparse)?;
    file.write_at(&*header.footer_bytes, place)?;
    file.sync()?;
    if file.length_bytes()? != place + FOOTER_BYTES {
        return Err(corrupt(image, "footer", place, "other data follows its place"));
    }
    actions.push(RepairAction::Rewritten {
        what: "the footer at the end",
        from: "its copy at the start",
    });
    Ok(())
}

/// Where a missing footer goes: over the damaged one, or to the end of the file.
fn place_of_footer(file: &dyn ImageFile, sparse: &SparseHeader) -> Result<u64> {
    let file_bytes = file.length_bytes()?;
    let end = file_bytes.next_multiple_of(SECTOR_BYTES);
    let last = end - SECTOR_BYTES;
    let whole = sparse.bitmap_bytes() + sparse.block_bytes;
    let mut used_end = sparse.tables_end;
    for_each_sector(file, sparse, |sector| {
        let start = u64::from(sector) * SECTOR_BYTES;
        if sector != FREE && start < file_bytes {
            used_end = used_end.max(start + whole);
        }
    })?;
    Ok(if used_end <= last { last } else { end })
}

/// Frees blocks that begin past the end or overlap the tables, and extends truncated ones.
fn discard_invalid_blocks(
    file: &dyn ImageFile,
    header: &VhdHeader,
    sparse: &SparseHeader,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let room_end = header.footer_start(file.length_bytes()?);
    let whole = sparse.bitmap_bytes() + sparse.block_bytes;
    let (mut lost, mut cut, mut index) = (Vec::new(), Vec::new(), 0);
    for_each_sector(file, sparse, |sector| {
        let start = u64::from(sector) * SECTOR_BYTES;
        if sector != FREE && (start < sparse.tables_end || start >= room_end) {
            lost.push(index);
        } else if sector != FREE && start + whole > room_end {
            cut.push((index, start + whole));
        }
        index += 1;
    })?;
    for index in &lost {
        file.write_at(&FREE.to_be_bytes(), sparse.entry_offset(*index))?;
    }
    file.sync()?;
    if let Some(end) = cut.iter().map(|(_, end)| *end).max() {
        // While the footer moves, the copy at the start is used.
        file.write_at(&*header.footer_bytes, end)?;
        file.sync()?;
        file.punch(room_end..end.min(room_end + FOOTER_BYTES))?;
        file.sync()?;
    }
    let firsts = [("blocks", lost.first().copied(), lost.len())];
    let ends = [("ends of blocks", cut.first().map(|(index, _)| *index), cut.len())];
    for (what, first, count) in firsts.into_iter().chain(ends) {
        if let Some(first) = first {
            actions.push(RepairAction::EntriesDiscarded {
                what,
                count: count as u64,
                unit_bytes: sparse.block_bytes,
                first_disk_offset: Some(first * sparse.block_bytes),
            });
        }
    }
    Ok(())
}

/// Copies blocks with two entries for the second one.
fn copy_shared_blocks(
    file: &dyn ImageFile,
    header: &VhdHeader,
    sparse: &SparseHeader,
    image: &str,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let (mut twice, mut seen, mut index) = (Vec::new(), HashSet::new(), 0);
    for_each_sector(file, sparse, |sector| {
        if sector != FREE && !seen.insert(sector) {
            twice.push((index, u64::from(sector) * SECTOR_BYTES));
        }
        index += 1;
    })?;
    let Some((first, _)) = twice.first() else { return Ok(()) };
    let whole = sparse.bitmap_bytes() + sparse.block_bytes;
    let mut end = header.footer_start(file.length_bytes()?).next_multiple_of(SECTOR_BYTES);
    let mut entries = Vec::new();
    for (index, from) in &twice {
        let sector = u32::try_from(end / SECTOR_BYTES).ok().filter(|sector| *sector != FREE);
        let Some(sector) = sector else {
            return Err(corrupt(
                image,
                "table",
                sparse.table_offset,
                "its entries cannot refer to a block at the end of the file",
            ));
        };
        copy_room(file, *from, end, whole)?;
        end += whole;
        entries.push((*index, sector));
    }
    file.write_at(&*header.footer_bytes, end)?;
    file.sync()?;
    for (index, sector) in entries {
        file.write_at(&sector.to_be_bytes(), sparse.entry_offset(index))?;
    }
    file.sync()?;
    actions.push(RepairAction::Separated {
        count: twice.len() as u64,
        unit_bytes: sparse.block_bytes,
        first_disk_offset: first * sparse.block_bytes,
    });
    Ok(())
}
