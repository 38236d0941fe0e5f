//! Replays the log, and restores a damaged header or region table from its copy. In mode `All`, it discards a log that
//! cannot be replayed, and frees blocks with invalid entries.

use std::sync::Arc;

use super::MIB;
use super::header::{RedundantStructure, VhdxHeader, broken_copies, repair_regions};
use super::opened::OpenedVhdx;
use super::tables::{BatEntry, for_each_block, is_of_bits, state};
use crate::allocation_table::TruncatedBlock;
use crate::file::{Access, ImageFile};
use crate::model::identity::ImageId;
use crate::model::repair_action::{RepairAction, RepairMode};
use crate::{Error, Result};

pub(crate) fn repair(
    file: &Arc<dyn ImageFile>,
    image: &str,
    mode: RepairMode,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    if mode < RepairMode::Safe {
        return Ok(());
    }
    let broken = broken_copies(&**file)?;
    if broken.contains(&RedundantStructure::Regions) && repair_regions(&**file)? {
        actions.push(RepairAction::Rewritten {
            what: "a region table",
            from: "its copy",
        });
    }
    let opened = match OpenedVhdx::load(Arc::clone(file), Access::Write, image) {
        Err(Error::Corrupt { what: "log", .. }) if mode == RepairMode::All => {
            let mut header = VhdxHeader::load(&**file, image)?;
            header.log = ImageId::NIL;
            header.store_next(&**file, image)?;
            actions.push(RepairAction::LogDiscarded);
            OpenedVhdx::load(Arc::clone(file), Access::Write, image)?
        }
        other => other?,
    };
    if opened.has_log {
        actions.push(RepairAction::LogReplayed);
    }
    if broken.contains(&RedundantStructure::Header) {
        // Discarding the log has written the header already.
        if broken_copies(&**file)?.contains(&RedundantStructure::Header) {
            let mut header = VhdxHeader::load(&**file, image)?;
            header.store_next(&**file, image)?;
        }
        actions.push(RepairAction::Rewritten {
            what: "a header",
            from: "its copy",
        });
    }
    if mode == RepairMode::All {
        discard_invalid_blocks(&opened, actions)?;
    }
    Ok(())
}

/// Frees blocks past the end of the file or with an invalid state, and clears reserved bits.
fn discard_invalid_blocks(opened: &OpenedVhdx, actions: &mut Vec<RepairAction>) -> Result<()> {
    let metadata = &opened.metadata;
    let file_bytes = opened.file.length_bytes()?;
    let (mut lost, mut odd, mut cut_off) = (Vec::new(), Vec::new(), TruncatedBlock::default());
    for_each_block(&*opened.file, opened.bat, metadata, |number, entry| {
        let is_lost = match entry.state() {
            _ if is_of_bits(metadata, number) => false,
            state::FULL | state::PARTIAL => entry.offset() < MIB || entry.offset() >= file_bytes,
            state::NOT_PRESENT | state::UNDEFINED | state::ZERO | state::UNMAPPED => false,
            _ => true,
        };
        if !is_lost && !is_of_bits(metadata, number) && entry.has_reserved() {
            odd.push((number, BatEntry::new(entry.state(), entry.offset())));
        }
        if is_lost {
            lost.push(number);
        } else if matches!(entry.state(), state::FULL | state::PARTIAL) && !is_of_bits(metadata, number) {
            let of_disk = super::check::disk_offset(opened, number) / metadata.block_bytes;
            cut_off.examine(entry.offset(), of_disk, metadata.block_bytes, metadata.disk_bytes);
        }
    })?;
    cut_off.extend_file(&*opened.file, actions)?;
    let put = |number: u64, entry: BatEntry| {
        let place = opened.bat.offset + number * 8;
        opened.file.write_at(&entry.0.to_le_bytes(), place)
    };
    if !odd.is_empty() {
        odd.iter().try_for_each(|(number, entry)| put(*number, *entry))?;
        opened.file.sync()?;
        let count = odd.len() as u64;
        actions.push(RepairAction::ReservedBits { count });
    }
    let Some(first) = lost.first() else { return Ok(()) };
    for number in &lost {
        put(*number, BatEntry::new(state::NOT_PRESENT, 0))?;
    }
    opened.file.sync()?;
    actions.push(RepairAction::EntriesDiscarded {
        what: "blocks",
        count: lost.len() as u64,
        unit_bytes: metadata.block_bytes,
        first_disk_offset: Some(super::check::disk_offset(opened, *first)),
    });
    Ok(())
}
