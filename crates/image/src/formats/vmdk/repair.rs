//! Restores what one directory has lost from the other one, and clears the mark of an extent that was not closed. In
//! mode `All`, it discards invalid entries.

use super::SECTOR_BYTES;
use super::check::check_sparse;
use super::extent::{AT_IS_OPEN, SparseExtent};
use super::redundant_directory::{DirectoryFinding, DirectoryPair, DirectorySide};
use super::tables::{OpenedVmdk, VmdkExtentKind};
use crate::allocation_table::copy_room;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::repair_action::{RepairAction, RepairMode};
use crate::{CheckReport, Result};

/// Repairs each sparse extent of an image.
pub(crate) fn repair(opened: &OpenedVmdk, mode: RepairMode, actions: &mut Vec<RepairAction>) -> Result<()> {
    if mode < RepairMode::Safe {
        return Ok(());
    }
    for part in &opened.parts {
        if let VmdkExtentKind::Sparse { window, extent } = &part.kind
            && !extent.is_compressed
        {
            let file = &**opened.files.at(*window)?;
            repair_extent(file, extent, part.start, mode, actions)?;
        }
    }
    Ok(())
}

/// What was repaired, for the report.
#[derive(Default)]
struct RepairedExtents {
    first_count: u64,
    second_count: u64,
    lost_tables: Vec<u64>,
    lost_grains: u64,
    first_lost_grain: Option<u64>,
    /// New tables: offset of the directory entry, and offset of the table.
    tables: Vec<(u64, u64)>,
}

fn repair_extent(
    file: &dyn ImageFile,
    extent: &SparseExtent,
    disk_start: u64,
    mode: RepairMode,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let mut done = RepairedExtents::default();
    let mut end = file.length_bytes()?.next_multiple_of(SECTOR_BYTES);
    let table_bytes = (extent.table_entries * 4).next_multiple_of(SECTOR_BYTES);
    let directory = |side: DirectorySide| match side {
        DirectorySide::First => extent.directory,
        DirectorySide::Second => extent.second_directory.unwrap_or(extent.directory),
    };
    let directories = DirectoryPair::load(file, extent)?;
    directories.for_each(|finding| {
        let side = match finding {
            DirectoryFinding::Entry { side, place, value } => {
                file.write_at(&value.to_le_bytes(), place)?;
                side
            }
            DirectoryFinding::Table { side, number, from } => {
                copy_room(file, from, end, extent.table_entries * 4)?;
                done.tables.push((directory(side) + number * 4, end));
                end += table_bytes;
                side
            }
            DirectoryFinding::LostEntry { disk_offset, places } if mode == RepairMode::All => {
                for place in places {
                    file.write_at(&[0; 4], place)?;
                }
                done.lost_grains += 1;
                done.first_lost_grain.get_or_insert(disk_start + disk_offset);
                return Ok(());
            }
            DirectoryFinding::LostTable { number } if mode == RepairMode::All => {
                done.lost_tables.push(number);
                return Ok(());
            }
            DirectoryFinding::Doubt { place, value } if mode == RepairMode::All => {
                file.write_at(&value.to_le_bytes(), place)?;
                DirectorySide::Second
            }
            DirectoryFinding::Doubt { .. }
            | DirectoryFinding::LostEntry { .. }
            | DirectoryFinding::LostTable { .. }
            | DirectoryFinding::Uncertain => {
                return Ok(());
            }
        };
        match side {
            DirectorySide::First => done.first_count += 1,
            DirectorySide::Second => done.second_count += 1,
        }
        Ok(())
    })?;
    done.write_directories(file, &directories.writable_directories())?;
    done.report(extent, disk_start, actions);
    close(file, extent, disk_start, actions)
}

impl RepairedExtents {
    /// Writes tables before the entries that refer to them.
    fn write_directories(&self, file: &dyn ImageFile, directories: &[u64]) -> Result<()> {
        file.sync()?;
        for (place, table) in &self.tables {
            let sector = u32::try_from(table / SECTOR_BYTES).map_err(|_| {
                corrupt(
                    "the extent",
                    "directory",
                    *place,
                    "its entries cannot refer to a table at the end of the file",
                )
            })?;
            file.write_at(&sector.to_le_bytes(), *place)?;
        }
        for number in &self.lost_tables {
            for directory in directories {
                file.write_at(&[0; 4], directory + number * 4)?;
            }
        }
        file.sync()?;
        Ok(())
    }

    fn report(self, extent: &SparseExtent, disk_start: u64, actions: &mut Vec<RepairAction>) {
        for (what, count) in [
            ("the first directory and its tables", self.first_count),
            ("the second directory and its tables", self.second_count),
        ] {
            if count > 0 {
                actions.push(RepairAction::FromSecondCopy { what, count });
            }
        }
        if let Some(first) = self.lost_tables.first() {
            actions.push(RepairAction::EntriesDiscarded {
                what: "tables of grains",
                count: self.lost_tables.len() as u64,
                unit_bytes: extent.table_coverage(),
                first_disk_offset: Some(disk_start + first * extent.table_coverage()),
            });
        }
        if self.lost_grains > 0 {
            actions.push(RepairAction::EntriesDiscarded {
                what: "grains",
                count: self.lost_grains,
                unit_bytes: extent.grain_bytes,
                first_disk_offset: self.first_lost_grain,
            });
        }
    }
}

/// Clears the mark of an open extent, if the extent is undamaged.
fn close(file: &dyn ImageFile, extent: &SparseExtent, disk_start: u64, actions: &mut Vec<RepairAction>) -> Result<()> {
    let mut report = CheckReport::default();
    check_sparse(file, extent, disk_start, &mut report)?;
    if extent.is_open && report.corruption_count == 0 {
        file.write_at(&[0], AT_IS_OPEN)?;
        file.sync()?;
        actions.push(RepairAction::MarkCleared {
            mark: "was not closed cleanly",
        });
    }
    Ok(())
}
