//! Directories and tables that lie in a grain of the disk: there they are guest data, which must be neither believed nor written to.
//!
//! A pointer that was damaged leads to somewhere, and bytes of a guest may look like a table. A table that lies in a grain of another one, and has
//! nothing of a table in it, is none. Where it could be one, the entry that leads to the grain may be what is damaged: nobody knows.

use std::collections::HashSet;
use std::ops::Range;

use super::SECTOR_BYTES;
use super::extent::{HEADER_BYTES, SparseExtent};
use crate::Result;
use crate::allocation_table::for_each_entry;
use crate::file::ImageFile;

/// What lies in grains.
#[derive(Debug, Default)]
pub(super) struct MetadataOverlaps {
    /// Whether the first directory does.
    pub(super) first_directory: bool,
    /// Whether the second one does, and leads to no table.
    pub(super) second_directory: bool,
    /// Whether the second one does, though it leads to tables.
    pub(super) is_second_unsure: bool,
    /// Tables that are none.
    pub(super) bogus: HashSet<u64>,
    /// Tables that may be tables.
    pub(super) unsure: HashSet<u64>,
}

/// The tables that directories lead to, by their places, in order.
struct GrainTables {
    places: Vec<u64>,
    bytes: u64,
    /// For each one, whether it lies in a grain.
    is_overlaid: Vec<bool>,
    /// For each one, itself or one behind it: none between both is without a mark.
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

    /// The first one from `index` on that has no mark.
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

    /// Marks all that lie in a `grain` of the table `own`, but itself. Each is marked once, however many grains lie over it.
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
    /// Looks for it. `first` and `second` are the places of the tables by the two directories, the latter with its own place.
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
            for_each_entry(file, (place, extent.table_entries), |_, entry| {
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
            first_directory: is_first_overlaid && !leads_to_tables(first, is_inside),
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
                found.unsure.insert(*place);
            } else {
                found.bogus.insert(*place);
            }
        }
        if let Some((_, places)) = second.filter(|_| is_second_overlaid) {
            let is_table = |place: &u64| is_inside(place) && !found.bogus.contains(place);
            found.is_second_unsure = leads_to_tables(places, is_table);
            found.second_directory = !found.is_second_unsure;
        }
        Ok(found)
    }
}

/// Whether the first directory of an extent is none, as far as one look at it tells, and the second one can be read for it: the header leads to where grains
/// are, and not to tables, or to zeroes where the second one has tables with grains.
pub(super) fn is_first_lost(file: &dyn ImageFile, extent: &SparseExtent) -> Result<bool> {
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
    if !is_zero && (!is_among_grains(extent.directory) || leads_to_tables(&first_tables, is_inside)) {
        return Ok(false);
    }
    let second_tables = extent.tables_of(file, second)?;
    if !leads_to_tables(&second_tables, is_inside) {
        return Ok(false);
    }
    // Where no table has a grain, zeroes are right.
    Ok(is_among_grains(extent.directory) || has_grain(file, extent, &second_tables)?)
}

/// Whether one of the tables leads to a grain.
fn has_grain(file: &dyn ImageFile, extent: &SparseExtent, tables: &[u64]) -> Result<bool> {
    for place in tables.iter().filter(|place| **place != 0) {
        let mut is_used = false;
        for_each_entry(file, (*place, extent.table_entries), |_, entry| {
            is_used |= u32::from_le_bytes(entry) != 0;
        })?;
        if is_used {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a directory has what one has.
fn leads_to_tables(places: &[u64], is_inside: impl Fn(&u64) -> bool) -> bool {
    let mut used = places.iter().filter(|place| **place != 0).peekable();
    used.peek().is_some() && used.all(is_inside)
}
