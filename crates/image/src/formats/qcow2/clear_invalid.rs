//! Clears table entries that point outside the file or into metadata: they were unreadable before, too.

use std::ops::Range;

use holdfast_block::to_usize;

use super::check::{Checker, count_uses};
use super::entry::{COPIED, ClusterKind, DataLocation, L2Entry};
use super::features::AUTOCLEAR_BITMAPS;
use super::geometry::{OFFSET_MASK, POINTER_BYTES};
use super::header::{AUTOCLEAR_AT, Qcow2Header, load_header};
use super::mapping::{entry_in, read_l2_as_is, set_entry_in};
use super::snapshot;
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::{from_words, to_words};
use crate::model::mapped_extent::KnownLength;
use crate::model::qcow2_info::TableLocation;
use crate::model::repair_action::RepairAction;

/// Clears unreadable bitmaps, invalid L1 entries and invalid L2 entries: in this order, each durably before the next.
pub(super) fn discard_invalid(file: &dyn ImageFile, image: &str, actions: &mut Vec<RepairAction>) -> Result<()> {
    let mut header = load_header(file, image)?;
    if count_uses(file, &header, image)?.has_damaged_bitmaps {
        let kept = header.autoclear & !AUTOCLEAR_BITMAPS;
        file.write_at(&kept.to_be_bytes(), AUTOCLEAR_AT)?;
        file.sync()?;
        actions.push(RepairAction::BitmapsDiscarded);
        header = load_header(file, image)?;
    }
    discard_truncated(file, &header, image, actions)?;
    let tables = l1_tables(file, &header, image)?;
    let uses = count_uses(file, &header, image)?;
    let mut lost = InvalidEntries::default();
    for table in tables {
        drop_tables(file, &header, &uses, table, &mut lost)?;
    }
    file.sync()?;
    actions.extend(lost.action("tables of clusters", header.geometry.l2_coverage_bytes()));
    let uses = count_uses(file, &header, image)?;
    let mut lost = InvalidEntries::default();
    drop_clusters(file, &header, &uses, image, &mut lost)?;
    file.sync()?;
    actions.extend(lost.action("clusters", header.geometry.cluster_bytes()));
    Ok(())
}

/// Clears what the end of the file truncates. Truncated compressed clusters go before the file is extended: with
/// zeroes in place of the missing bytes they could decompress to wrong data.
fn discard_truncated(
    file: &dyn ImageFile,
    header: &Qcow2Header,
    image: &str,
    actions: &mut Vec<RepairAction>,
) -> Result<()> {
    let cut = count_uses(file, header, image)?.truncated;
    let mut lost = InvalidEntries::default();
    for (place, disk_offset) in cut.compressed {
        file.write_at(&[0; to_usize(POINTER_BYTES)], place)?;
        lost.add(disk_offset);
    }
    file.sync()?;
    actions.extend(lost.action("compressed clusters", header.geometry.cluster_bytes()));
    let file_bytes = file.length_bytes()?;
    if cut.end > file_bytes {
        file.set_length(cut.end)?;
        file.sync()?;
        actions.push(RepairAction::EntriesDiscarded {
            what: "ends of clusters",
            count: 1,
            unit_bytes: cut.end - file_bytes,
            first_disk_offset: cut.first_disk_offset,
        });
    }
    Ok(())
}

/// The L1 table of the disk or of an internal snapshot.
#[derive(Clone, Copy)]
pub(super) struct L1Table {
    pub(super) location: TableLocation,
    /// Whether it is that of the disk.
    pub(super) is_active: bool,
}

/// The L1 tables of all disk states, the active one first.
pub(super) fn l1_tables(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<Vec<L1Table>> {
    let (snapshots, _) = snapshot::load(file, header, image)?;
    let table = |location, is_active| L1Table { location, is_active };
    let mut tables = vec![table(header.l1, true)];
    tables.extend(snapshots.iter().map(|snapshot| table(snapshot.l1, false)));
    // The same limit as in the check, which reads all of them, too.
    let file_end = file.length_bytes()?.next_multiple_of(header.geometry.cluster_bytes());
    if tables
        .iter()
        .map(|table| table.location.entries * POINTER_BYTES)
        .sum::<u64>()
        > file_end
    {
        return Err(corrupt(image, "l1 table", header.l1.offset, "tables overlap"));
    }
    Ok(tables)
}

/// The entries that were cleared, for the report.
#[derive(Default)]
struct InvalidEntries {
    count: u64,
    first_disk_offset: Option<u64>,
}

impl InvalidEntries {
    fn add(&mut self, disk_offset: Option<u64>) {
        self.count += 1;
        self.first_disk_offset = match (self.first_disk_offset, disk_offset) {
            (Some(first), Some(offset)) => Some(first.min(offset)),
            (first, offset) => first.or(offset),
        };
    }

    fn action(self, what: &'static str, unit_bytes: u64) -> Option<RepairAction> {
        (self.count > 0).then_some(RepairAction::EntriesDiscarded {
            what,
            count: self.count,
            unit_bytes,
            first_disk_offset: self.first_disk_offset,
        })
    }
}

/// Clears invalid entries of an L1 table.
fn drop_tables(
    file: &dyn ImageFile,
    header: &Qcow2Header,
    uses: &Checker<'_>,
    table: L1Table,
    lost: &mut InvalidEntries,
) -> Result<()> {
    let geometry = header.geometry;
    let L1Table { location, is_active } = table;
    let mut bytes = vec![0; to_usize(location.entries * POINTER_BYTES)];
    file.read_at(&mut bytes, location.offset)?;
    for (index, word) in (0..).zip(to_words(&bytes)) {
        let offset = word & OFFSET_MASK;
        let kind = uses.metadata.get(&geometry.cluster_of(offset));
        let is_table = uses.can_be_table(offset) && kind.is_none_or(|kind| *kind == "l2 table");
        if word & (OFFSET_MASK | COPIED) == 0 || offset != 0 && is_table {
            continue;
        }
        file.write_at(&[0; 8], location.offset + index * POINTER_BYTES)?;
        lost.add(is_active.then(|| index * geometry.l2_coverage_bytes()));
    }
    Ok(())
}

/// Clears invalid entries of L2 tables.
fn drop_clusters(
    file: &dyn ImageFile,
    header: &Qcow2Header,
    uses: &Checker<'_>,
    image: &str,
    lost: &mut InvalidEntries,
) -> Result<()> {
    let geometry = header.geometry;
    let known = KnownLength::default();
    for (offset, used) in &uses.l2_tables {
        let mut table = read_l2_as_is(file, &known, geometry, *offset, image)?;
        let mut count = 0;
        for index in 0..geometry.l2_entries() {
            let entry = entry_in(&table, index, geometry);
            if entry == L2Entry::default() || can_be_data(uses, header, entry) {
                continue;
            }
            set_entry_in(&mut table, index, L2Entry::default(), geometry);
            let disk_offset = geometry.offset_of(used.index * geometry.l2_entries() + index);
            lost.add(used.is_active.then_some(disk_offset));
            count += 1;
        }
        if count > 0 {
            file.write_at(&from_words(&table), *offset)?;
        }
    }
    Ok(())
}

/// Whether an entry refers to a possible data cluster, or to none.
fn can_be_data(uses: &Checker<'_>, header: &Qcow2Header, entry: L2Entry) -> bool {
    let geometry = header.geometry;
    let range: Range<u64> = match uses.meaning_of(entry) {
        Err(_) => return false,
        Ok(ClusterKind::Unallocated) => return entry.word & COPIED == 0,
        Ok(ClusterKind::Compressed(compressed)) => compressed.sectors(),
        Ok(
            ClusterKind::Data { host }
            | ClusterKind::Zero { host: Some(host) }
            | ClusterKind::Subclusters { host: Some(host), .. },
        ) if uses.place() == DataLocation::Inside => host.offset..host.offset + geometry.cluster_bytes(),
        Ok(_) => return true,
    };
    let mut clusters = geometry.cluster_of(range.start)..geometry.clusters_for(range.end);
    uses.is_inside(&range) && clusters.all(|cluster| !uses.metadata.contains_key(&cluster))
}
