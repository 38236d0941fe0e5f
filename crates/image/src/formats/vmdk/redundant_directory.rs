//! Compares the primary and the redundant grain directory of an extent. Both should have the same content, each with
//! tables of its own.
//!
//! Reads use the primary one; the redundant one is for repairs. If an entry is invalid in one of them, the other one
//! is used. It is also used if only it refers to a grain that no other entry of the disk uses. If both are valid and
//! differ, the repair cannot decide; an empty primary entry proves nothing.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use holdfast_block::to_usize;

use super::SECTOR_BYTES;
use super::extent::{HEADER_BYTES, SparseExtent};
use super::overlap::MetadataOverlaps;
use crate::Result;
use crate::allocation_table::for_each_entry;
use crate::file::ImageFile;

/// One of the two directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DirectorySide {
    First,
    Second,
}

/// A difference or an invalid entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DirectoryFinding {
    /// The table of one side is missing, and that of the other side is at `from`.
    Table {
        side: DirectorySide,
        number: u64,
        from: u64,
    },
    /// Neither side has a valid table.
    LostTable { number: u64 },
    /// A table overlaps a grain, or the entry of that grain is wrong: it cannot be repaired.
    Uncertain,
    /// The entry at `place` of the file must become `value`, as on the other side.
    Entry {
        side: DirectorySide,
        place: u64,
        value: u32,
    },
    /// The entries differ, and both are valid. If the first one is right, the second one, at `place`, must become
    /// `value`.
    Doubt { place: u64, value: u32 },
    /// The entries at `places`, on all sides, are invalid.
    LostEntry { disk_offset: u64, places: Vec<u64> },
}

/// Both directories of an extent.
pub(super) struct DirectoryPair<'a> {
    file: &'a dyn ImageFile,
    extent: &'a SparseExtent,
    file_bytes: u64,
    /// Ranges that contain metadata, sorted.
    metadata: Vec<Range<u64>>,
    /// Offsets of tables that overlap other metadata.
    clashes: HashSet<u64>,
    first: Vec<u64>,
    second: Option<Vec<u64>>,
    overlaid: MetadataOverlaps,
}

impl<'a> DirectoryPair<'a> {
    pub(super) fn load(file: &'a dyn ImageFile, extent: &'a SparseExtent) -> Result<Self> {
        let file_bytes = file.length_bytes()?;
        let directory_bytes = extent.table_count() * 4;
        let first = extent.tables_of(file, extent.directory)?;
        let mut metadata = extent.fixed_metadata();
        // A table that overlaps other metadata, or is past the end, cannot be written.
        let free = |start: u64, metadata: &[Range<u64>]| {
            let end = start.saturating_add(directory_bytes);
            end <= file_bytes && metadata.iter().all(|range| range.end <= start || range.start >= end)
        };
        let table_bytes = extent.table_entries * 4;
        let beside_tables = |start: u64| {
            let end = start.saturating_add(directory_bytes);
            let mut tables = first.iter().filter(|place| **place != 0);
            tables.all(|place| place + table_bytes <= start || *place >= end)
        };
        let second = match extent.second_directory {
            Some(place) if free(place, &metadata) && beside_tables(place) => {
                Some((place, extent.tables_of(file, place)?))
            }
            _ => None,
        };
        let of_second = second.as_ref().map(|(place, tables)| (*place, &tables[..]));
        let overlaid = MetadataOverlaps::find(file, extent, &first, of_second)?;
        let second = second.filter(|_| !overlaid.second_directory).map(|(place, tables)| {
            metadata.push(place..place + directory_bytes);
            tables
        });
        let mut tables = first.clone();
        // Both sides may share one table.
        let both = first.iter().zip(second.iter().flatten());
        tables.extend(
            both.filter(|(first, second)| first != second)
                .map(|(_, second)| *second),
        );
        metadata.extend(
            tables
                .into_iter()
                .filter(|place| *place != 0 && !overlaid.invalid_tables.contains(place))
                .map(|place| place..place + table_bytes),
        );
        metadata.sort_unstable_by_key(|range| range.start);
        let (mut clashes, mut last) = (HashSet::new(), 0..0);
        for range in &metadata {
            if range.start < last.end {
                clashes.extend([range.start, last.start]);
            }
            if range.end > last.end {
                last = range.clone();
            }
        }
        Ok(Self {
            file,
            extent,
            file_bytes,
            metadata,
            clashes,
            first,
            second,
            overlaid,
        })
    }

    /// How many directories and tables overlap grains.
    pub(super) fn overlaid_count(&self) -> u64 {
        let directories = [self.overlaid.first_directory, self.overlaid.second_directory];
        let directories = directories.into_iter().filter(|is_overlaid| *is_overlaid).count();
        (directories + self.overlaid.invalid_tables.len()) as u64
    }

    fn can_be_table(&self, place: u64) -> bool {
        place >= HEADER_BYTES
            && place + self.extent.table_entries * 4 <= self.file_bytes
            && !self.clashes.contains(&place)
            && !self.overlaid.invalid_tables.contains(&place)
    }

    /// Replaces a finding on the table at `table` if that may be a grain, which must not be written to.
    fn in_table(&self, table: u64, finding: DirectoryFinding) -> DirectoryFinding {
        if self.overlaid.uncertain_tables.contains(&table) {
            DirectoryFinding::Uncertain
        } else {
            finding
        }
    }

    fn can_be_entry(&self, sector: u32) -> bool {
        if sector == 0 || sector == 1 && self.extent.has_zero_grains {
            return true;
        }
        let host = u64::from(sector) * SECTOR_BYTES;
        let end = host + self.extent.grain_bytes;
        let next = self.metadata.partition_point(|range| range.start < end);
        let before = next.checked_sub(1).and_then(|index| self.metadata.get(index));
        host < self.file_bytes && before.is_none_or(|range| range.end <= host)
    }

    /// Offsets of the directories that may be written: not of one past the end of the file, or of one that may be a grain.
    pub(super) fn writable_directories(&self) -> Vec<u64> {
        let second = self.extent.second_directory.filter(|_| self.second.is_some());
        let first = Some(self.extent.directory).filter(|_| !self.overlaid.first_directory);
        let second = second.filter(|_| !self.overlaid.is_second_uncertain);
        first.into_iter().chain(second).collect()
    }

    /// Calls `visit` for each difference and each invalid entry.
    pub(super) fn for_each(&self, mut visit: impl FnMut(DirectoryFinding) -> Result<()>) -> Result<()> {
        // The first directory is guest data, and the second one cannot replace it.
        if self.overlaid.first_directory {
            return Ok(());
        }
        let used = self.used_elsewhere()?;
        for (number, first) in (0..).zip(self.first.iter().copied()) {
            let second = self
                .second
                .as_ref()
                .and_then(|second| second.get(to_usize(number)).copied());
            match (self.can_be_table(first), second) {
                (true, Some(second)) if second != first && self.can_be_table(second) => {
                    self.compare(number, first, Some(second), &used, &mut visit)?;
                }
                (true, _) => {
                    self.compare(number, first, None, &used, &mut visit)?;
                    if second.is_some() {
                        let side = DirectorySide::Second;
                        let from = first;
                        visit(if self.overlaid.is_second_uncertain {
                            DirectoryFinding::Uncertain
                        } else {
                            DirectoryFinding::Table { side, number, from }
                        })?;
                    }
                }
                (false, Some(second)) if self.can_be_table(second) => {
                    self.compare(number, second, None, &used, &mut visit)?;
                    let side = DirectorySide::First;
                    visit(DirectoryFinding::Table {
                        side,
                        number,
                        from: second,
                    })?;
                }
                (false, second) => {
                    let is_second_lost = second.is_some_and(|second| second != 0);
                    if first != 0 || is_second_lost && !self.overlaid.is_second_uncertain {
                        visit(DirectoryFinding::LostTable { number })?;
                    } else if is_second_lost {
                        visit(DirectoryFinding::Uncertain)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn table(&self, place: u64) -> Result<Vec<u32>> {
        let mut table = Vec::new();
        for_each_entry(self.file, place, self.extent.table_entries, |_, entry| {
            table.push(u32::from_le_bytes(entry));
        })?;
        Ok(table)
    }

    /// Calls `visit` with the entries of both sides, as far as both are readable.
    fn for_each_pair(&self, mut visit: impl FnMut(u32, u32)) -> Result<()> {
        for (number, first) in self.first.iter().copied().enumerate() {
            let second = self.second.as_ref().and_then(|second| second.get(number));
            let second = second.copied().unwrap_or(first);
            let readable: Vec<u64> = [first, second]
                .into_iter()
                .filter(|place| self.can_be_table(*place))
                .collect();
            let (Some(one), Some(other)) = (readable.first(), readable.last()) else {
                continue;
            };
            let table = self.table(*one)?;
            let others = if one == other {
                table.clone()
            } else {
                self.table(*other)?
            };
            table
                .into_iter()
                .zip(others)
                .for_each(|(first, second)| visit(first, second));
        }
        Ok(())
    }

    /// Grains that only one side has for a range, but that overlap those of another range on which both sides agree.
    fn used_elsewhere(&self) -> Result<HashSet<u32>> {
        let mut questioned = BTreeSet::new();
        self.for_each_pair(|first, second| {
            if first != second {
                questioned.extend([first, second].into_iter().filter(|sector| *sector > 1));
            }
        })?;
        let mut used = HashSet::new();
        if !questioned.is_empty() {
            let distance_max = u32::try_from(self.extent.grain_bytes / SECTOR_BYTES - 1).unwrap_or(u32::MAX);
            self.for_each_pair(|first, second| {
                if first == second && first > 1 {
                    let over = first.saturating_sub(distance_max)..=first.saturating_add(distance_max);
                    used.extend(questioned.range(over));
                }
            })?;
        }
        Ok(used)
    }

    /// Compares the table at `place` with that of the other side, if there is one.
    fn compare(
        &self,
        number: u64,
        place: u64,
        other_place: Option<u64>,
        used: &HashSet<u32>,
        visit: &mut impl FnMut(DirectoryFinding) -> Result<()>,
    ) -> Result<()> {
        let table = self.table(place)?;
        let other = match other_place {
            Some(place) => self.table(place)?,
            None => table.clone(),
        };
        // If there is one table only, there are no findings on a second one.
        let second_place = other_place.unwrap_or(place);
        for (index, (first, second)) in (0..).zip(table.into_iter().zip(other)) {
            let disk_offset = number * self.extent.table_coverage() + index * self.extent.grain_bytes;
            let is_free = |sector: u32| self.can_be_entry(sector) && (first == second || !used.contains(&sector));
            let doubt = || {
                let place = second_place + index * 4;
                self.in_table(second_place, DirectoryFinding::Doubt { place, value: first })
            };
            let entry = |side: DirectorySide, value: u32| {
                let table = if side == DirectorySide::Second {
                    second_place
                } else {
                    place
                };
                let place = table + index * 4;
                self.in_table(table, DirectoryFinding::Entry { side, place, value })
            };
            let finding = match (is_free(first), is_free(second)) {
                // Both refer to grains of other entries.
                (false, false) if self.can_be_entry(first) && self.can_be_entry(second) => doubt(),
                (false, false)
                    if [place, second_place]
                        .iter()
                        .any(|place| self.overlaid.uncertain_tables.contains(place)) =>
                {
                    DirectoryFinding::Uncertain
                }
                (false, false) => DirectoryFinding::LostEntry {
                    disk_offset,
                    places: [Some(place), other_place]
                        .into_iter()
                        .flatten()
                        .map(|place| place + index * 4)
                        .collect(),
                },
                _ if first == second => continue,
                // The original value is on neither side.
                (false, true) if second == 0 && self.can_be_entry(first) => doubt(),
                (is_right, true) if !is_right || first == 0 => entry(DirectorySide::First, second),
                (true, true) if second != 0 => doubt(),
                _ => entry(DirectorySide::Second, first),
            };
            visit(finding)?;
        }
        Ok(())
    }
}
