//! Clears the mark of an open image, and truncates unused space at the end. In mode `All`, it frees invalid entries,
//! and copies a cluster with two entries for the second one.

use std::collections::HashSet;

use super::check::check;
use super::header::{AT_EXTENSION, AT_IN_USE, CLOSED_WITHOUT_EXTENSIONS, HEADER_BYTES, PloopHeader};
use super::tables::for_each_cluster;
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
    let header = PloopHeader::load(file, image)?;
    if mode == RepairMode::All {
        discard_and_separate(file, &header, image, actions)?;
    }
    truncate_unused(file, &header, actions)?;
    // The lock proves that no process has it open: the mark is a leftover of a process that did not close it.
    if mode >= RepairMode::Safe && header.is_open && check(file, &header)?.corruption_count == 0 {
        file.sync()?;
        // Extensions, such as bitmaps, may be outdated.
        file.write_at(&CLOSED_WITHOUT_EXTENSIONS.to_le_bytes(), AT_IN_USE)?;
        file.sync()?;
        actions.push(RepairAction::MarkCleared {
            mark: "was not closed cleanly",
        });
    }
    Ok(())
}

fn discard_and_separate(
    file: &dyn ImageFile,
    header: &PloopHeader,
    image: &str,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let (file_bytes, cluster) = (file.length_bytes()?, header.cluster_bytes);
    let (mut lost, mut twice, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
    let mut cut_off = TruncatedBlock::default();
    for_each_cluster(file, header, |index, host| {
        let is_aligned = host.wrapping_sub(header.data_offset).is_multiple_of(cluster);
        if host < header.data_offset || host >= file_bytes || !is_aligned {
            lost.push(index);
            return;
        }
        cut_off.examine(host, index, cluster, header.disk_bytes);
        if !seen.insert(host) {
            twice.push((index, host));
        }
    })?;
    let entry_at = |index: u64| HEADER_BYTES + index * 4;
    for index in &lost {
        file.write_at(&[0; 4], entry_at(*index))?;
    }
    file.sync()?;
    if let Some(first) = lost.first() {
        actions.push(RepairAction::EntriesDiscarded {
            what: "clusters",
            count: lost.len() as u64,
            unit_bytes: cluster,
            first_disk_offset: Some(first * cluster),
        });
    }
    cut_off.extend_file(file, actions)?;
    let Some((first, _)) = twice.first() else { return Ok(()) };
    let start = header.data_offset + (file_bytes.saturating_sub(header.data_offset)).next_multiple_of(cluster);
    let mut entries = Vec::new();
    for (number, (index, from)) in (0..).zip(&twice) {
        let place = start + number * cluster;
        let entry = u32::try_from(place / header.entry_bytes());
        let (Ok(entry), true) = (entry, place.is_multiple_of(header.entry_bytes())) else {
            return Err(corrupt(
                image,
                "table",
                entry_at(*index),
                "its entries cannot refer to a cluster at the end of the file",
            ));
        };
        copy_room(file, *from, place, cluster)?;
        entries.push((*index, entry));
    }
    file.sync()?;
    for (index, entry) in entries {
        file.write_at(&entry.to_le_bytes(), entry_at(index))?;
    }
    file.sync()?;
    actions.push(RepairAction::Separated {
        count: twice.len() as u64,
        unit_bytes: cluster,
        first_disk_offset: first * cluster,
    });
    Ok(())
}

/// Truncates everything after the last cluster.
fn truncate_unused(file: &dyn ImageFile, header: &PloopHeader, actions: &mut Vec<RepairAction>) -> Result<()> {
    let mut extension = [0; 8];
    file.read_at(&mut extension, AT_EXTENSION)?;
    if extension != [0; 8] {
        // An extension has its own location, which may be there.
        return Ok(());
    }
    let (report, file_bytes) = (check(file, header)?, file.length_bytes()?);
    let end = report.image_end;
    // An incomplete cluster at the end is a write that was interrupted.
    if report.corruption_count > 0 || end.saturating_add(header.cluster_bytes) > file_bytes {
        return Ok(());
    }
    file.set_length(end)?;
    file.sync()?;
    actions.push(RepairAction::Truncated {
        bytes: file_bytes - end,
    });
    Ok(())
}
