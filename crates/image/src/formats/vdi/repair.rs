//! Corrects the count of stored blocks. In mode `All`, it frees entries that point outside the file, and copies a
//! block with two entries for the second one.

use std::collections::HashSet;

use super::header::{AT_STORED, VdiHeader};
use super::tables::for_each_number;
use super::{FREE, ZERO};
use crate::Result;
use crate::allocation_table::{TruncatedBlock, copy_room};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::repair_action::{RepairAction, RepairMode};

pub(crate) fn repair(
    file: &dyn ImageFile,
    image: &str,
    mode: RepairMode,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let header = VdiHeader::load(file, image)?;
    if mode < RepairMode::Safe {
        return Ok(());
    }
    let file_bytes = file.length_bytes()?;
    let mut cut_off = TruncatedBlock::default();
    let (mut lost, mut twice, mut seen, mut next) = (Vec::new(), Vec::new(), HashSet::new(), 0);
    for_each_number(file, &header, |index, entry| {
        if entry >= ZERO {
            return;
        }
        if mode == RepairMode::All && header.host(entry) >= file_bytes {
            lost.push(index);
            return;
        }
        cut_off.examine(header.host(entry), index, header.block_bytes, header.disk_bytes);
        next = next.max(entry + 1);
        if !seen.insert(entry) {
            twice.push((index, entry));
        }
    })?;
    free_lost(file, &header, &lost, actions)?;
    if mode == RepairMode::All {
        cut_off.extend_file(file, actions)?;
    }
    let first_copy = next;
    if mode == RepairMode::All {
        // Cannot overflow: there are fewer of them than entries in the map.
        next = u32::try_from(u64::from(next) + twice.len() as u64)
            .ok()
            .filter(|next| *next < ZERO)
            .ok_or_else(|| corrupt(image, "block map", header.map_offset, "no block number is left"))?;
    }
    // VirtualBox stores the next block at this number: the count must not be below the numbers in the map, nor above
    // the room in the file.
    let room = (file_bytes.saturating_sub(header.data_offset) / header.stride()).min(header.block_count);
    let most = next.max(u32::try_from(room).unwrap_or(next));
    let count = header.stored_count.clamp(next, most);
    if count != header.stored_count {
        file.write_at(&count.to_le_bytes(), AT_STORED as u64)?;
        file.sync()?;
        actions.push(RepairAction::Number {
            what: "the number of stored blocks",
            before: header.stored_count.into(),
            after: count.into(),
        });
    }
    if mode == RepairMode::All
        && let Some((first, _)) = twice.first()
    {
        copy_shared_blocks(file, &header, &twice, first_copy)?;
        actions.push(RepairAction::Separated {
            count: twice.len() as u64,
            unit_bytes: header.block_bytes,
            first_disk_offset: first * header.block_bytes,
        });
    }
    Ok(())
}

/// Frees the entries of blocks past the end of the file.
fn free_lost(file: &dyn ImageFile, header: &VdiHeader, lost: &[u64], actions: &mut Vec<RepairAction>) -> Result<()> {
    for index in lost {
        file.write_at(&FREE.to_le_bytes(), header.entry_offset(*index))?;
    }
    file.sync()?;
    if let Some(first) = lost.first() {
        actions.push(RepairAction::EntriesDiscarded {
            what: "blocks",
            count: lost.len() as u64,
            unit_bytes: header.block_bytes,
            first_disk_offset: Some(first * header.block_bytes),
        });
    }
    Ok(())
}

/// Gives each entry a copy of its block, with numbers from `first` on.
fn copy_shared_blocks(file: &dyn ImageFile, header: &VdiHeader, twice: &[(u64, u32)], first: u32) -> Result<()> {
    for ((_, from), number) in twice.iter().zip(first..) {
        copy_room(file, header.host(*from), header.host(number), header.block_bytes)?;
    }
    file.sync()?;
    for ((index, _), number) in twice.iter().zip(first..) {
        file.write_at(&number.to_le_bytes(), header.entry_offset(*index))?;
    }
    Ok(file.sync()?)
}
