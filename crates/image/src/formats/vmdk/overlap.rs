//! Finds directories and tables that overlap a grain of the disk: their bytes are guest data there, and must be
//! neither trusted nor written.
//!
//! A damaged pointer can lead anywhere, and guest data can look like a table. A table that overlaps a grain of another
//! table, and has no plausible entries, is invalid. If its entries are plausible, the entry that refers to the grain
//! may be the damaged one: that cannot be decided.

use std::collections::HashSet;
use std::ops::Range;

use super::SECTOR_BYTES;
use super::extent::{HEADER_BYTES, SparseExtent};
use crate::Result;
use crate::allocation_table::for_each_entry;
use crate::file::ImageFile;

/// Directories and tables that overlap grains.
#[derive(Debug, Default)]
pub(super) struct MetadataOverlaps {
    /// Whether the first directory overlaps a grain.
    pub(super) first_directory: bool,
    /// Whether the second one overlaps a grain, and refers to no tables.
    pub(super) second_directory: bool,
    /// Whether the second one overlaps a grain, but refers to tables.
    pub(super) is_second_uncertain: bool,
    /// Invalid tables.
    pub(super) invalid_tables: HashSet<u64>,
    /// Tables that overlap a grain, but may be valid.
    pub(super) uncertain_tables: HashSet<u64>,
}

/// The tables of both directories, sorted by offset.
struct GrainTables {
    places: Vec<u64>,
    bytes: u64,
    /// For each table, whether it overlaps a grain.
    is_overlaid: Vec<bool>,
    /// For each table, its own index or a later one: all tables in between are marked.
    next: Vec<usize>,
}

impl GrainTables {
    fn new(mut places: Vec<u64>, bytes: u64) -> Self {
        places.sort_unstable();
        places.dedup();
        Self {
            bytes,
            is_overlaid: vec![false; places.len()],
            next: (0..=places.len()).collect(),
            places,
        }
    }

    /// The first table from `index` on that is not marked.
    #[expect(
        clippy::indexing_slicing,
        reason = "no entry of `next` is larger than its last index"
    )]
    fn unmarked(&mut self, index: usize) -> usize {
        let mut found = index;
        while self.next[found] != found {
            found = self.next[found];
        }
        let mut at = index;
        while self.next[at] != found {
            at = std::mem::replace(&mut self.next[at], found);
        }
        found
    }

    /// Marks all tables that overlap a `grain` of the table `own`, except itself. Each table is marked only once,
    /// which bounds the time.
    #[expect(clippy::indexing_slicing, reason = "`at` is less than the number of tables")]
    fn mark(&mut self, grain: &Range<u64>, own: usize) {
        let bytes = self.bytes;
        let start = self.places.partition_point(|place| place + bytes <= grain.start);
        let end = self.places.partition_point(|place| *place < grain.end);
        let mut at = self.unmarked(start);
        while at < end {
            if at != own {
                self.is_overlaid[at] = true;
                self.next[at] = at + 1;
            }
            at = self.unmarked(at + 1);
        }
    }
}

impl MetadataOverlaps {
    /// Finds overlaps. `first` and `second` are the table offsets in the two directories; the second one comes with
    /// its own offset.
    pub(super) fn find(
        file: &dyn ImageFile,
        extent: &SparseExtent,
        first: &[u64],
        second: Option<(u64, &[u64])>,
    ) -> Result<Self> {
        let file_bytes = file.length_bytes()?;
        let table_bytes = extent.table_entries * 4;
        let is_inside = |place: &u64| *place >= HEADER_BYTES && place.saturating_add(table_bytes) <= file_bytes;
        let all = first.iter().chain(second.iter().flat_map(|(_, places)| places.iter()));
        let mut tables = GrainTables::new(all.copied().filter(is_inside).collect(), table_bytes);
        let directory = |place: u64| place..place.saturating_add(extent.table_count() * 4);
        let directories = [Some(extent.directory), second.map(|(place, _)| place)];
        let [mut is_first_overlaid, mut is_second_overlaid] = [false; 2];
        let mut looks_like_one = Vec::new();
        for (own, place) in tables.places.clone().into_iter().enumerate() {
            let (mut is_used, mut is_sound) = (false, true);
            for_each_entry(file, place, extent.table_entries, |_, entry| {
                let sector = u32::from_le_bytes(entry);
                if sector == 0 || sector == 1 && extent.has_zero_grains {
                    return;
                }
                let host = u64::from(sector) * SECTOR_BYTES;
                is_used = true;
                is_sound &= (HEADER_BYTES..file_bytes).contains(&host);
                let grain = host..host + extent.grain_bytes;
                tables.mark(&grain, own);
                let are_overlaid = [&mut is_first_overlaid, &mut is_second_overlaid];
                for (place, is_overlaid) in directories.into_iter().zip(are_overlaid) {
                    let range = place.map(directory).unwrap_or_default();
                    *is_overlaid |= range.start < grain.end && grain.start < range.end;
                }
            })?;
            looks_like_one.push(is_used && is_sound);
        }
        let mut found = Self {
            first_directory: is_first_overlaid && !has_plausible_entries(first, is_inside),
            ..Self::default()
        };
        let looks = tables.is_overlaid.iter().zip(&looks_like_one);
        for (place, (_, looks_like_one)) in tables
            .places
            .iter()
            .zip(looks)
            .filter(|(_, (is_overlaid, _))| **is_overlaid)
        {
            if *looks_like_one {
                found.uncertain_tables.insert(*place);
            } else {
                found.invalid_tables.insert(*place);
            }
        }
        if let Some((_, places)) = second.filter(|_| is_second_overlaid) {
            let is_table = |place: &u64| is_inside(place) && !found.invalid_tables.contains(place);
            found.is_second_uncertain = has_plausible_entries(places, is_table);
            found.second_directory = !found.is_second_uncertain;
        }
        Ok(found)
    }
}

/// Whether the first directory of an extent is invalid, judged without reading all tables, and the second one can be
/// read instead: the header's pointer leads into the grains and not to tables, or to zeroes while the second one has
/// tables with grains.
pub(super) fn is_first_directory_invalid(file: &dyn ImageFile, extent: &SparseExtent) -> Result<bool> {
    let directory_bytes = extent.table_count() * 4;
    let Some(second) = extent.second_directory.filter(|_| !extent.is_compressed) else {
        return Ok(false);
    };
    let is_among_grains = |place: u64| place.saturating_add(directory_bytes) > extent.overhead;
    if is_among_grains(second) {
        return Ok(false);
    }
    let (file_bytes, table_bytes) = (file.length_bytes()?, extent.table_entries * 4);
    let is_inside = |place: &u64| *place >= HEADER_BYTES && place.saturating_add(table_bytes) <= file_bytes;
    let first_tables = extent.tables_of(file, extent.directory)?;
    let is_zero = first_tables.iter().all(|place| *place == 0);
    if !is_zero && (!is_among_grains(extent.directory) || has_plausible_entries(&first_tables, is_inside)) {
        return Ok(false);
    }
    let second_tables = extent.tables_of(file, second)?;
    if !has_plausible_entries(&second_tables, is_inside) {
        return Ok(false);
    }
    // If no table has a grain, zeroes are right.
    Ok(is_among_grains(extent.directory) || has_grain(file, extent, &second_tables)?)
}

/// Whether one of the tables has a grain.
fn has_grain(file: &dyn ImageFile, extent: &SparseExtent, tables: &[u64]) -> Result<bool> {
    for place in tables.iter().filter(|place| **place != 0) {
        let mut is_used = false;
        for_each_entry(file, *place, extent.table_entries, |_, entry| {
            is_used |= u32::from_le_bytes(entry) != 0;
        })?;
        if is_used {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a directory has plausible entries.
fn has_plausible_entries(places: &[u64], is_inside: impl Fn(&u64) -> bool) -> bool {
    let mut used = places.iter().filter(|place| **place != 0).peekable();
    used.peek().is_some() && used.all(is_inside)
}
