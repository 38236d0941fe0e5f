//! Un-shares cross-linked clusters: the second owner gets a copy at the end of the file, because the right owner is
//! unknown.
//!
//! Tables come first: two references to an L2 table share every cluster in it. A copy is durable and has its refcount
//! before an entry refers to it.

use holdfast_block::to_usize;

use super::check::Checker;
use super::clear_invalid::{L1Table, l1_tables};
use super::entry::{COPIED, ClusterKind, DataLocation};
use super::geometry::{OFFSET_MASK, POINTER_BYTES, Qcow2Geometry};
use super::header::Qcow2Header;
use super::mapping::{L2Table, entry_in, read_l2_as_is, set_entry_in};
use super::refcount_table::RefcountTable;
use crate::Result;
use crate::file::ImageFile;
use crate::model::bytes::{from_words, to_words};
use crate::model::mapped_extent::KnownLength;
use crate::model::repair_action::RepairAction;

/// Copies without references yet.
pub(super) struct ClusterCopies<'a> {
    file: &'a dyn ImageFile,
    geometry: Qcow2Geometry,
    /// References to the copies.
    pub(super) counts: RefcountTable,
    /// The offset of a table word, and its new value.
    changes: Vec<(u64, u64)>,
    /// Bytes of the disk for each of them.
    unit_bytes: u64,
    first_disk_offset: u64,
    end: u64,
}

impl<'a> ClusterCopies<'a> {
    /// Copies the shared L2 tables, or the shared clusters if there are no such tables. Adds the copies to `uses`.
    pub(super) fn make(
        file: &'a dyn ImageFile,
        header: &Qcow2Header,
        uses: &mut Checker<'_>,
        image: &str,
    ) -> Result<Option<Self>> {
        let geometry = header.geometry;
        let mut copies = Self {
            file,
            geometry,
            counts: RefcountTable::default(),
            changes: Vec::new(),
            unit_bytes: geometry.l2_coverage_bytes(),
            first_disk_offset: u64::MAX,
            end: geometry.offset_of(geometry.clusters_for(file.length_bytes()?)),
        };
        for table in l1_tables(file, header, image)? {
            copies.copy_tables(table, uses, image)?;
        }
        if copies.changes.is_empty() {
            copies.unit_bytes = geometry.cluster_bytes();
            copies.copy_clusters(uses, image)?;
        }
        file.sync()?;
        Ok((!copies.changes.is_empty()).then_some(copies))
    }

    pub(super) fn count(&self) -> u64 {
        self.changes.len() as u64
    }

    /// Redirects all but the first of the references to the copies, durably.
    pub(super) fn redirect(self) -> Result<RepairAction> {
        for (place, word) in &self.changes {
            self.file.write_at(&word.to_be_bytes(), *place)?;
        }
        self.file.sync()?;
        Ok(RepairAction::Separated {
            count: self.count(),
            unit_bytes: self.unit_bytes,
            first_disk_offset: self.first_disk_offset,
        })
    }

    fn copy_tables(&mut self, l1: L1Table, uses: &mut Checker<'_>, image: &str) -> Result<()> {
        let L1Table { location, is_active } = l1;
        let mut bytes = vec![0; to_usize(location.entries * POINTER_BYTES)];
        self.file.read_at(&mut bytes, location.offset)?;
        for (index, word) in (0..).zip(to_words(&bytes)) {
            let offset = word & OFFSET_MASK;
            if uses.l2_tables.get(&offset).is_none_or(|used| used.index == index) {
                continue;
            }
            let mut table = read_l2_as_is(self.file, &KnownLength::default(), self.geometry, offset, image)?;
            self.clear_copied(&mut table, uses);
            let copied = if is_active { COPIED } else { 0 };
            let place = location.offset + index * POINTER_BYTES;
            let word = (word & !OFFSET_MASK & !COPIED) | copied;
            let disk_offset = index * self.geometry.l2_coverage_bytes();
            self.put(&from_words(&table), place, word, disk_offset)?;
            let cluster = self.geometry.cluster_of(self.end) - 1;
            self.counts.add(cluster, 1, image)?;
            uses.counts.add(cluster, 1, image)?;
            uses.counts.remove(self.geometry.cluster_of(offset), 1);
        }
        Ok(())
    }

    /// Clears copied flags: the original table refers to the same clusters.
    fn clear_copied(&self, table: &mut L2Table, uses: &Checker<'_>) {
        for index in 0..self.geometry.l2_entries() {
            let mut entry = entry_in(table, index, self.geometry);
            let host = uses.meaning_of(entry).ok().and_then(ClusterKind::host);
            if host.is_some() && uses.place() == DataLocation::Inside {
                entry.word &= !COPIED;
                set_entry_in(table, index, entry, self.geometry);
            }
        }
    }

    fn copy_clusters(&mut self, uses: &mut Checker<'_>, image: &str) -> Result<()> {
        let geometry = self.geometry;
        let mut moved = Vec::new();
        uses.for_each_cross_linked(|cross_linked| {
            let used = cross_linked.used;
            let mut data = vec![0; to_usize(geometry.cluster_bytes())];
            self.file.read_at(&mut data, cross_linked.host)?;
            let copied = if used.is_active && used.count == 1 { COPIED } else { 0 };
            let word = (cross_linked.word & !OFFSET_MASK & !COPIED) | copied;
            self.put(&data, cross_linked.entry_offset, word, cross_linked.disk_offset)?;
            moved.push((geometry.cluster_of(cross_linked.host), used.count));
            self.counts.add(geometry.cluster_of(self.end) - 1, used.count, image)
        })?;
        let start = geometry.cluster_of(self.end) - moved.len() as u64;
        for (cluster, (host, count)) in (start..).zip(moved) {
            uses.counts.remove(host, count);
            uses.counts.add(cluster, count, image)?;
        }
        Ok(())
    }

    /// Appends a copy of a cluster. `word` at `place` is the reference to redirect, without its offset.
    fn put(&mut self, cluster: &[u8], place: u64, word: u64, disk_offset: u64) -> Result<()> {
        self.file.write_at(cluster, self.end)?;
        self.changes.push((place, word | self.end));
        self.first_disk_offset = self.first_disk_offset.min(disk_offset);
        self.end += self.geometry.cluster_bytes();
        Ok(())
    }
}
