//! Checks the consistency of an image's metadata.
//!
//! Every reference to every host cluster is counted, from the L1 tables down, and compared with the stored refcounts.
//! A cluster with too low a refcount could be reused while in use: a corruption. One with too high a refcount is
//! leaked: wasted space. The `copied` flag must be set if, and only if, the refcount is 1.

mod bitmaps;
mod cross_linked;
mod data_file;
mod past_end;
mod refcounts;
mod truncated;

use std::collections::hash_map::Entry as Slot;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::entry::{COPIED, ClusterKind, DataLocation, L1_RESERVED, L2Entry, LOST_PLACE, Sharing};
use super::features::report_marks;
use super::geometry::{OFFSET_MASK, POINTER_BYTES, Qcow2Geometry};
use super::header::Qcow2Header;
use super::mapping::{L2Table, entry_in, read_l2_as_is};
use super::refcount::StoredRefcounts;
use super::refcount_table::RefcountTable;
use super::snapshot;
use crate::file::ImageFile;
use crate::model::bytes::to_words;
use crate::model::mapped_extent::KnownLength;
use crate::model::qcow2_info::TableLocation;
use crate::{CheckReport, Error, ProblemKind, Result, Severity};
use truncated::TruncatedContent;
pub(crate) use truncated::is_truncated;

/// Checks the image in `file`. `data` is its external data file, if it has one that was opened.
pub(crate) fn check(
    file: &Arc<dyn ImageFile>,
    header: &Qcow2Header,
    image: &str,
    data: Option<&dyn ImageFile>,
) -> Result<CheckReport> {
    let mut report = compared(&**file, data, header, image)?;
    report_marks(header.incompatible, &mut report);
    Ok(report)
}

/// Whether there is no problem except leaks. Marks by other programs are ignored.
pub(super) fn is_sound(
    file: &dyn ImageFile,
    data: Option<&dyn ImageFile>,
    header: &Qcow2Header,
    image: &str,
) -> Result<bool> {
    match compared(file, data, header, image) {
        Ok(report) => Ok(report.corruption_count == 0),
        Err(error) if error.is_corrupt() => Ok(false),
        Err(error) => Err(error),
    }
}

fn compared(
    file: &dyn ImageFile,
    data: Option<&dyn ImageFile>,
    header: &Qcow2Header,
    image: &str,
) -> Result<CheckReport> {
    let mut checker = Checker::new(file, header, image, StoredRefcounts::load(file, header, image)?)?;
    checker.data_bytes = data.map(ImageFile::length_bytes).transpose()?;
    checker.claim_refcounts()?;
    checker.walk()?;
    checker.compare();
    let past_disk_end = "clusters past the end of the disk";
    checker.report.add_unreferenced(past_disk_end, checker.past_end_count);
    Ok(checker.report)
}

/// Counts references in the image `file`, except those of its refcount structures, and finds invalid ones. Refcounts
/// are not read.
pub(super) fn count_uses<'a>(file: &'a dyn ImageFile, header: &'a Qcow2Header, image: &'a str) -> Result<Checker<'a>> {
    let mut checker = Checker::new(file, header, image, StoredRefcounts::none(file, header, image))?;
    checker.walk()?;
    Ok(checker)
}

pub(super) struct Checker<'a> {
    file: &'a dyn ImageFile,
    header: &'a Qcow2Header,
    geometry: Qcow2Geometry,
    image: &'a str,
    stored: StoredRefcounts<'a>,
    file_bytes: u64,
    /// Length of the external data file, if there is one and it was opened.
    data_bytes: Option<u64>,
    /// References to each cluster.
    pub(super) counts: RefcountTable,
    /// The kind of metadata in a cluster; the first one found.
    pub(super) metadata: HashMap<u64, &'static str>,
    /// The readable L2 tables.
    pub(super) l2_tables: BTreeMap<u64, L2Use>,
    /// Number of invalid references and unreadable structures; clusters that they refer to were not counted.
    pub(super) damage_count: u64,
    /// Entries with reserved bits set.
    pub(super) reserved_count: u64,
    /// Clusters past the end of the disk that nothing else uses.
    past_end_count: u64,
    /// Structures that the end of the file truncates.
    pub(super) truncated: TruncatedContent,
    /// The largest disk size of a snapshot.
    snapshot_disk_bytes: u64,
    /// Whether some of the damage concerns bitmaps.
    pub(super) has_damaged_bitmaps: bool,
    report: CheckReport,
}

/// How an L2 table is used.
#[derive(Debug, Clone, Copy)]
pub(super) struct L2Use {
    /// Number of L1 entries that refer to it.
    pub(super) count: u32,
    /// The index of the first of these entries in its table. The others have the same index: snapshots do not move
    /// data.
    pub(super) index: u64,
    /// Whether it is part of the active state.
    pub(super) is_active: bool,
}

impl<'a> Checker<'a> {
    fn new(
        file: &'a dyn ImageFile,
        header: &'a Qcow2Header,
        image: &'a str,
        stored: StoredRefcounts<'a>,
    ) -> Result<Self> {
        Ok(Self {
            file,
            header,
            geometry: header.geometry,
            image,
            stored,
            file_bytes: file.length_bytes()?,
            data_bytes: None,
            counts: RefcountTable::default(),
            metadata: HashMap::new(),
            l2_tables: BTreeMap::new(),
            damage_count: 0,
            reserved_count: 0,
            past_end_count: 0,
            truncated: TruncatedContent::default(),
            snapshot_disk_bytes: 0,
            has_damaged_bitmaps: false,
            report: CheckReport {
                cluster_count: header.geometry.clusters_for(header.size_bytes),
                ..CheckReport::default()
            },
        })
    }

    /// Counts everything that the header refers to, except the refcounts.
    fn walk(&mut self) -> Result<()> {
        self.claim("header", 0..1)?;
        let tables = self.claim_snapshots()?;
        self.claim_bitmaps()?;
        let l2_tables = self.claim_l1_tables(&tables)?;
        for offset in l2_tables.keys() {
            self.mark("l2 table", self.geometry.cluster_of(*offset));
        }
        let known = KnownLength::default();
        for (offset, used) in &l2_tables {
            let range = *offset..offset + self.geometry.cluster_bytes();
            if !self.count("l2 table", range, used.count)? {
                continue;
            }
            self.check_table_end(*offset, *used);
            match read_l2_as_is(self.file, &known, self.geometry, *offset, self.image) {
                Ok(table) => self.check_l2(&table, *offset, *used)?,
                Err(error) => self.structure(&error),
            }
        }
        self.l2_tables = l2_tables;
        self.report_cross_linked()
    }

    /// Records a problem that leaves references uncounted.
    fn damage(&mut self, kind: ProblemKind) {
        self.damage_count += 1;
        self.corruption(kind);
    }

    fn corruption(&mut self, kind: ProblemKind) {
        self.report.add(Severity::Corruption, kind);
    }

    fn structure(&mut self, error: &Error) {
        self.damage(ProblemKind::Structure {
            detail: error.to_string(),
        });
    }

    /// Counts one reference to clusters that only `what` may use.
    fn claim(&mut self, what: &'static str, clusters: Range<u64>) -> Result<()> {
        let range = self.geometry.offset_of(clusters.start)..self.geometry.offset_of(clusters.end);
        if self.count(what, range, 1)? {
            for cluster in clusters {
                self.mark(what, cluster);
            }
        }
        Ok(())
    }

    fn mark(&mut self, what: &'static str, cluster: u64) {
        match self.metadata.entry(cluster) {
            Slot::Vacant(slot) => {
                slot.insert(what);
            }
            Slot::Occupied(slot) => {
                let (first, offset) = (*slot.get(), self.geometry.offset_of(cluster));
                self.has_damaged_bitmaps |= first.starts_with("bitmap") || what.starts_with("bitmap");
                self.damage(ProblemKind::Overlap {
                    offset,
                    first,
                    second: what,
                });
            }
        }
    }

    /// Whether `range` begins in the file, and ends in its last cluster at most. Whether that cluster is complete is
    /// checked elsewhere.
    pub(super) fn is_inside(&self, range: &Range<u64>) -> bool {
        range.end <= self.file_bytes || range.end - self.file_bytes < self.geometry.cluster_bytes()
    }

    /// Counts `uses` references to the clusters of `range`; false if that is outside the file.
    fn count(&mut self, what: &'static str, range: Range<u64>, uses: u32) -> Result<bool> {
        if !self.is_inside(&range) {
            self.has_damaged_bitmaps |= what.starts_with("bitmap");
            self.damage(ProblemKind::Pointer {
                what,
                offset: range.start,
            });
            return Ok(false);
        }
        let last = self.geometry.clusters_for(range.end);
        for cluster in self.geometry.cluster_of(range.start)..last {
            self.counts.add(cluster, uses, self.image)?;
        }
        Ok(true)
    }

    /// Counts the snapshot table; returns the L1 tables, the active one first.
    fn claim_snapshots(&mut self) -> Result<Vec<TableLocation>> {
        let mut tables = vec![self.header.l1];
        match snapshot::load(self.file, self.header, self.image) {
            Ok((snapshots, table_bytes)) => {
                let start = self.geometry.cluster_of(self.header.snapshot_table_offset);
                if table_bytes > 0 {
                    self.claim("snapshot table", start..start + self.geometry.clusters_for(table_bytes))?;
                }
                self.snapshot_disk_bytes = snapshots.iter().map(|snapshot| snapshot.disk_bytes).max().unwrap_or(0);
                tables.extend(snapshots.iter().map(|snapshot| snapshot.l1));
            }
            Err(error) => self.structure(&error),
        }
        Ok(tables)
    }

    /// Counts the L1 tables; returns the L2 tables that they refer to, each once, so that the work is bounded by the
    /// file size.
    fn claim_l1_tables(&mut self, tables: &[TableLocation]) -> Result<BTreeMap<u64, L2Use>> {
        let mut l2_tables: BTreeMap<u64, L2Use> = BTreeMap::new();
        let mut read_bytes = 0;
        for (number, table) in tables.iter().enumerate() {
            let what = if number == 0 {
                "active l1 table"
            } else {
                "snapshot l1 table"
            };
            let table_bytes = table.entries * POINTER_BYTES;
            read_bytes += table_bytes;
            if read_bytes > self.file_bytes.next_multiple_of(self.geometry.cluster_bytes()) {
                let detail = "the l1 tables are larger than the file: some overlap".to_owned();
                self.damage(ProblemKind::Structure { detail });
                break;
            }
            let start = self.geometry.cluster_of(table.offset);
            if table_bytes > 0 {
                self.claim(what, start..start + self.geometry.clusters_for(table_bytes))?;
            }
            let mut bytes = vec![0; to_usize(table_bytes)];
            self.file.read_at(&mut bytes, table.offset)?;
            for (index, word) in (0..).zip(to_words(&bytes)) {
                self.check_reserved(word & L1_RESERVED, what, index * self.geometry.l2_coverage_bytes());
                let offset = word & OFFSET_MASK;
                if offset == 0 {
                    if word & COPIED != 0 {
                        let (disk_offset, detail) = (index * self.geometry.l2_coverage_bytes(), LOST_PLACE.to_owned());
                        self.damage(ProblemKind::Entry { disk_offset, detail });
                    }
                    continue;
                }
                if !self.can_be_table(offset) {
                    self.damage(ProblemKind::Pointer {
                        what: "l2 table",
                        offset,
                    });
                    continue;
                }
                let is_active = number == 0;
                let used = l2_tables.entry(offset).or_insert(L2Use {
                    count: 0,
                    index,
                    is_active,
                });
                used.count = used.count.saturating_add(1);
                self.check_index(offset, *used, index);
                if is_active {
                    self.check_copied(offset, word & COPIED != 0)?;
                }
            }
        }
        Ok(l2_tables)
    }

    /// Whether `offset` is a valid location of an L2 table.
    pub(super) fn can_be_table(&self, offset: u64) -> bool {
        self.geometry.is_aligned(offset) && offset < self.file_bytes
    }

    /// Whether the cluster at `offset` ends in the file.
    pub(super) fn is_whole_in_file(&self, offset: u64) -> bool {
        offset.saturating_add(self.geometry.cluster_bytes()) <= self.file_bytes
    }

    fn check_copied(&mut self, offset: u64, is_copied: bool) -> Result<()> {
        let refcount = self.stored.of(self.geometry.cluster_of(offset))?;
        if is_copied != (refcount == 1) {
            self.corruption(ProblemKind::CopiedFlag { offset, refcount });
        }
        Ok(())
    }

    /// Reports reserved bits, like QEMU's check. Readers of both ignore them.
    fn check_reserved(&mut self, bits: u64, what: &str, disk_offset: u64) {
        if bits != 0 {
            self.reserved_count += 1;
            let detail = format!("reserved bits of the {what}: {bits:#x}");
            self.corruption(ProblemKind::Entry { disk_offset, detail });
        }
    }

    fn check_l2(&mut self, table: &L2Table, table_offset: u64, used: L2Use) -> Result<()> {
        let entries = self.geometry.l2_entries();
        for index in 0..entries {
            let entry = entry_in(table, index, self.geometry);
            if entry == L2Entry::default() {
                continue;
            }
            let disk_offset = self.geometry.offset_of(used.index * entries + index);
            self.check_reserved(entry.reserved(self.geometry), "l2 table", disk_offset);
            self.check_entry(entry, used, used.is_active.then_some(disk_offset))?;
            self.check_data_end(entry, table_offset, index, disk_offset, used)?;
        }
        Ok(())
    }

    /// Where the data is stored.
    pub(super) fn place(&self) -> DataLocation {
        if self.header.has_data_file() {
            DataLocation::External
        } else {
            DataLocation::Inside
        }
    }

    /// Decodes an entry of this image; an invalid one gives the reason.
    pub(super) fn meaning_of(&self, entry: L2Entry) -> Result<ClusterKind, String> {
        match entry.meaning(self.geometry, self.place())? {
            ClusterKind::Zero { .. } if !self.header.has_zero_clusters() => {
                Err("zero cluster in a version 2 image".to_owned())
            }
            meaning => Ok(meaning),
        }
    }

    fn check_entry(&mut self, entry: L2Entry, used: L2Use, disk_offset: Option<u64>) -> Result<()> {
        let is_active = disk_offset.is_some();
        let shown_offset = disk_offset.unwrap_or_default();
        let meaning = match self.meaning_of(entry) {
            Ok(ClusterKind::Unallocated) if entry.word & COPIED != 0 => Err(LOST_PLACE.to_owned()),
            meaning => meaning,
        };
        let host = match meaning {
            Err(detail) => {
                self.damage(ProblemKind::Entry {
                    disk_offset: shown_offset,
                    detail,
                });
                return Ok(());
            }
            Ok(ClusterKind::Compressed(compressed)) => {
                let is_shown = self.count_inside_disk(disk_offset, used, compressed.offset)?;
                self.report.compressed_count += u64::from(is_shown);
                if entry.word & COPIED != 0 {
                    let detail = "compressed cluster with the copied flag".to_owned();
                    self.corruption(ProblemKind::Entry {
                        disk_offset: shown_offset,
                        detail,
                    });
                }
                return self.count_data(compressed.sectors(), used.count, RefcountTable::mark_compressed);
            }
            Ok(
                ClusterKind::Data { host }
                | ClusterKind::Zero { host: Some(host) }
                | ClusterKind::Subclusters { host: Some(host), .. },
            ) => host,
            Ok(_) => return Ok(()),
        };
        self.count_inside_disk(disk_offset, used, host.offset)?;
        if self.place() == DataLocation::External {
            self.check_in_data_file(host.offset, disk_offset);
            return Ok(());
        }
        if is_active {
            self.check_copied(host.offset, host.sharing == Sharing::Exclusive)?;
        }
        let range = host.offset..host.offset + self.geometry.cluster_bytes();
        self.count_data(range, used.count, RefcountTable::mark_uncompressed)
    }

    /// Counts `uses` references to the clusters of `range`, and records each cluster by `note`.
    fn count_data(&mut self, range: Range<u64>, uses: u32, note: fn(&mut RefcountTable, u64)) -> Result<()> {
        let clusters = self.geometry.cluster_of(range.start)..self.geometry.clusters_for(range.end);
        for cluster in clusters.clone() {
            if let Some(first) = self.metadata.get(&cluster) {
                let (first, offset) = (*first, self.geometry.offset_of(cluster));
                self.has_damaged_bitmaps |= first.starts_with("bitmap");
                self.damage(ProblemKind::Overlap {
                    offset,
                    first,
                    second: "data",
                });
            }
        }
        if self.count("data cluster", range, uses)? {
            clusters.for_each(|cluster| note(&mut self.counts, cluster));
        }
        Ok(())
    }
}
