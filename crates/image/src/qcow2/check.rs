//! Compares the metadata of an image with itself.
//!
//! Every use of every host cluster is counted, from the L1 tables down, and held against the stored refcounts. A cluster
//! with a stored count below its uses would be given away while in use: a corruption. One above is a leak: wasted
//! space. The `copied` flag must say exactly whether the count is 1.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::entry::{COPIED, DataPlace, Entry, Meaning, Sharing};
use super::geometry::{Geometry, OFFSET_MASK, POINTER_BYTES};
use super::header::{AUTOCLEAR_BITMAPS, Header, TableAt};
use super::mapping::{L2Table, entry_in, read_l2};
use super::refcount::{StoredRefcounts, get};
use super::{bitmap, snapshot};
use crate::bytes::to_words;
use crate::file::ImageFile;
use crate::run::KnownLength;
use crate::{CheckReport, Error, ProblemKind, Result, Severity};

/// Checks the image in `file`, whose header was read.
pub(crate) fn check(file: &Arc<dyn ImageFile>, header: &Header, image: &str) -> Result<CheckReport> {
    let mut checker = Checker {
        file: &**file,
        header,
        geometry: header.geometry,
        image,
        stored: StoredRefcounts::load(&**file, header, image)?,
        file_bytes: file.length_bytes()?,
        counts: Counts::default(),
        metadata: HashMap::new(),
        report: CheckReport {
            cluster_count: header.geometry.clusters_for(header.size_bytes),
            ..CheckReport::default()
        },
    };
    checker.run()?;
    Ok(checker.report)
}

struct Checker<'a> {
    file: &'a dyn ImageFile,
    header: &'a Header,
    geometry: Geometry,
    image: &'a str,
    stored: StoredRefcounts<'a>,
    file_bytes: u64,
    counts: Counts,
    metadata: HashMap<u64, &'static str>,
    report: CheckReport,
}

/// How an L2 table is used: by how many L1 entries, and by which of the active table.
#[derive(Debug, Clone, Copy, Default)]
struct L2Use {
    count: u32,
    active_index: Option<u64>,
}

impl Checker<'_> {
    fn run(&mut self) -> Result<()> {
        self.claim("header", 0..1)?;
        self.claim_refcounts()?;
        let tables = self.claim_snapshots()?;
        self.claim_bitmaps()?;
        let l2_tables = self.claim_l1_tables(&tables)?;
        for offset in l2_tables.keys() {
            self.mark("l2 table", self.geometry.cluster_of(*offset));
        }
        let known = KnownLength::default();
        for (offset, used) in l2_tables {
            let range = offset..offset + self.geometry.cluster_bytes();
            if !self.count("l2 table", range, used.count)? {
                continue;
            }
            match read_l2(self.file, &known, self.geometry, offset, self.image) {
                Ok(table) => self.check_l2(&table, used)?,
                Err(error) => self.structure(&error),
            }
        }
        self.compare();
        Ok(())
    }

    fn corruption(&mut self, kind: ProblemKind) {
        self.report.add(Severity::Corruption, kind);
    }

    fn structure(&mut self, error: &Error) {
        self.corruption(ProblemKind::Structure {
            detail: error.to_string(),
        });
    }

    /// Counts one use of clusters `clusters`, which only `what` may use.
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
        if let Some(first) = self.metadata.insert(cluster, what) {
            let offset = self.geometry.offset_of(cluster);
            self.corruption(ProblemKind::Overlap {
                offset,
                first,
                second: what,
            });
        }
    }

    /// Counts `uses` of the clusters that `range` touches; false where that leads out of the file.
    fn count(&mut self, what: &'static str, range: Range<u64>, uses: u32) -> Result<bool> {
        // The last cluster may be cut off by the end of the file, but must begin in it.
        if range.end > self.file_bytes && range.end - self.file_bytes >= self.geometry.cluster_bytes() {
            self.corruption(ProblemKind::Pointer {
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

    fn claim_refcounts(&mut self) -> Result<()> {
        let start = self.geometry.cluster_of(self.header.refcount_table_offset);
        self.claim("refcount table", start..start + self.header.refcount_table_clusters)?;
        let entries = self.geometry.refcount_block_entries();
        let index_end = self.geometry.cluster_of(OFFSET_MASK).div_ceil(entries);
        let mut seen = HashSet::new();
        for index in 0..self.stored.table.len() {
            let offset = self.stored.table[index];
            if offset == 0 {
                continue;
            }
            let is_in_file = self.geometry.is_aligned(offset) && offset < self.file_bytes;
            if is_in_file && (index as u64) < index_end {
                let cluster = self.geometry.cluster_of(offset);
                self.claim("refcount block", cluster..cluster + 1)?;
                // Each block is walked once: a table full of one block would make the work grow with the square of the file.
                if !seen.insert(offset) {
                    self.stored.table[index] = 0;
                }
            } else {
                self.corruption(ProblemKind::Pointer {
                    what: "refcount block",
                    offset,
                });
                self.stored.table[index] = 0;
            }
        }
        Ok(())
    }

    /// Counts the snapshot table; gives the L1 tables, the active one first.
    fn claim_snapshots(&mut self) -> Result<Vec<TableAt>> {
        let mut tables = vec![self.header.l1];
        match snapshot::load(self.file, self.header, self.image) {
            Ok((snapshots, table_bytes)) => {
                let start = self.geometry.cluster_of(self.header.snapshot_table_offset);
                if table_bytes > 0 {
                    self.claim("snapshot table", start..start + self.geometry.clusters_for(table_bytes))?;
                }
                tables.extend(snapshots.iter().map(|snapshot| snapshot.l1));
            }
            Err(error) => self.structure(&error),
        }
        Ok(tables)
    }

    fn claim_bitmaps(&mut self) -> Result<()> {
        if self.header.autoclear & AUTOCLEAR_BITMAPS == 0 {
            return Ok(());
        }
        let found = bitmap::directory(self.header, self.file_bytes, self.image)
            .and_then(|directory| Ok((directory, bitmap::load(self.file, self.header, self.image)?)));
        let (directory, bitmaps) = match found {
            Ok(found) => found,
            Err(error) => {
                self.structure(&error);
                return Ok(());
            }
        };
        if let Some(directory) = directory {
            let start = self.geometry.cluster_of(directory.offset);
            let clusters = self.geometry.clusters_for(directory.length_bytes);
            self.claim("bitmap directory", start..start + clusters)?;
        }
        let mut table_bytes = 0;
        for bitmap in bitmaps {
            // Tables that overlap would make the work grow beyond the file.
            table_bytes += bitmap.table.entries * POINTER_BYTES;
            if table_bytes > self.file_bytes {
                let detail = "the bitmap tables are larger than the file: some overlap".to_owned();
                self.corruption(ProblemKind::Structure { detail });
                break;
            }
            let start = self.geometry.cluster_of(bitmap.table.offset);
            let clusters = self.geometry.clusters_for(bitmap.table.entries * POINTER_BYTES);
            self.claim("bitmap table", start..start + clusters)?;
            for word in bitmap::load_table(self.file, bitmap.table)? {
                if let bitmap::TableEntry::Cluster(offset) = bitmap::table_entry(word) {
                    let cluster = self.geometry.cluster_of(offset);
                    self.claim("bitmap", cluster..cluster + 1)?;
                }
            }
        }
        Ok(())
    }

    /// Counts the L1 tables; gives the L2 tables that they name, each once, so that the work is bounded by the file.
    fn claim_l1_tables(&mut self, tables: &[TableAt]) -> Result<BTreeMap<u64, L2Use>> {
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
                self.corruption(ProblemKind::Structure { detail });
                break;
            }
            let start = self.geometry.cluster_of(table.offset);
            if table_bytes > 0 {
                self.claim(what, start..start + self.geometry.clusters_for(table_bytes))?;
            }
            let mut bytes = vec![0; to_usize(table_bytes)];
            self.file.read_at(&mut bytes, table.offset)?;
            for (index, word) in (0..).zip(to_words(&bytes)) {
                let offset = word & OFFSET_MASK;
                if offset == 0 {
                    continue;
                }
                if !self.geometry.is_aligned(offset) || offset >= self.file_bytes {
                    self.corruption(ProblemKind::Pointer {
                        what: "l2 table",
                        offset,
                    });
                    continue;
                }
                let used = l2_tables.entry(offset).or_default();
                used.count = used.count.saturating_add(1);
                if number == 0 {
                    used.active_index = Some(index);
                    self.check_copied(offset, word & COPIED != 0)?;
                }
            }
        }
        Ok(l2_tables)
    }

    fn check_copied(&mut self, offset: u64, is_copied: bool) -> Result<()> {
        let refcount = self.stored.of(self.geometry.cluster_of(offset))?;
        if is_copied != (refcount == 1) {
            self.corruption(ProblemKind::CopiedFlag { offset, refcount });
        }
        Ok(())
    }

    fn check_l2(&mut self, table: &L2Table, used: L2Use) -> Result<()> {
        let entries = self.geometry.l2_entries();
        for index in 0..entries {
            let entry = entry_in(table, index, self.geometry);
            if entry == Entry::default() {
                continue;
            }
            let disk_offset = used
                .active_index
                .map(|l1_index| self.geometry.offset_of(l1_index.saturating_mul(entries) + index));
            self.check_entry(entry, used, disk_offset)?;
        }
        Ok(())
    }

    fn check_entry(&mut self, entry: Entry, used: L2Use, disk_offset: Option<u64>) -> Result<()> {
        let place = if self.header.has_data_file() {
            DataPlace::External
        } else {
            DataPlace::Inside
        };
        let is_active = disk_offset.is_some();
        let shown_offset = disk_offset.unwrap_or_default();
        let meaning = match entry.meaning(self.geometry, place) {
            Ok(Meaning::Zero { .. }) if !self.header.has_zero_clusters() => {
                Err("zero cluster in a version 2 image".to_owned())
            }
            other => other,
        };
        let host = match meaning {
            Err(detail) => {
                self.corruption(ProblemKind::Entry {
                    disk_offset: shown_offset,
                    detail,
                });
                return Ok(());
            }
            Ok(Meaning::Compressed(compressed)) => {
                self.report.allocated_count += u64::from(is_active);
                self.report.compressed_count += u64::from(is_active);
                if entry.word & COPIED != 0 {
                    let detail = "compressed cluster with the copied flag".to_owned();
                    self.corruption(ProblemKind::Entry {
                        disk_offset: shown_offset,
                        detail,
                    });
                }
                return self.count_data(compressed.sectors(), used.count);
            }
            Ok(
                Meaning::Data { host }
                | Meaning::Zero { host: Some(host) }
                | Meaning::Subclusters { host: Some(host), .. },
            ) => host,
            Ok(_) => return Ok(()),
        };
        self.report.allocated_count += u64::from(is_active);
        if place == DataPlace::External {
            if self.header.is_data_file_raw() && disk_offset.is_some_and(|offset| offset != host.offset) {
                let detail = format!("at {} of the raw data file", host.offset);
                self.corruption(ProblemKind::Entry {
                    disk_offset: shown_offset,
                    detail,
                });
            }
            return Ok(());
        }
        if is_active {
            self.check_copied(host.offset, host.sharing == Sharing::Alone)?;
        }
        self.count_data(host.offset..host.offset + self.geometry.cluster_bytes(), used.count)
    }

    fn count_data(&mut self, range: Range<u64>, uses: u32) -> Result<()> {
        for cluster in self.geometry.cluster_of(range.start)..self.geometry.clusters_for(range.end) {
            if let Some(first) = self.metadata.get(&cluster) {
                let offset = self.geometry.offset_of(cluster);
                self.corruption(ProblemKind::Overlap {
                    offset,
                    first,
                    second: "data",
                });
            }
        }
        self.count("data cluster", range, uses)?;
        Ok(())
    }

    /// Holds what was counted against what is stored.
    fn compare(&mut self) {
        let entries = self.geometry.refcount_block_entries();
        let order = self.geometry.refcount_order;
        for index in 0..self.stored.table.len() as u64 {
            let block = match self.stored.block(index) {
                Ok(Some(block)) => block,
                Ok(None) => continue,
                Err(error) => {
                    self.structure(&error);
                    continue;
                }
            };
            for within in 0..entries {
                let cluster = index * entries + within;
                let counted = self.counts.take(cluster);
                self.compare_one(cluster, get(&block, within, order), counted);
            }
        }
        // What is left has no refcount block at all.
        for (cluster, counted) in self.counts.rest() {
            self.compare_one(cluster, 0, counted);
        }
    }

    fn compare_one(&mut self, cluster: u64, stored: u64, counted: u64) {
        let offset = self.geometry.offset_of(cluster);
        if counted > 0 || stored > 0 {
            self.report.image_end = self.report.image_end.max(offset + self.geometry.cluster_bytes());
        }
        let severity = match stored.cmp(&counted) {
            std::cmp::Ordering::Equal => return,
            std::cmp::Ordering::Less => Severity::Corruption,
            std::cmp::Ordering::Greater => Severity::Leak,
        };
        self.report.add(
            severity,
            ProblemKind::Refcount {
                offset,
                stored,
                counted,
            },
        );
    }
}

const PAGE_CLUSTERS: u64 = 32;
/// Memory for counting: 512 MiB of pages, enough for 8 TiB of 64 KiB clusters that are all in use.
const PAGE_COUNT_MAX: usize = 4 << 20;

/// Uses per host cluster, sparse by pages: a file may claim to be of any length.
#[derive(Default)]
struct Counts {
    pages: HashMap<u64, [u32; to_usize(PAGE_CLUSTERS)]>,
}

impl Counts {
    fn add(&mut self, cluster: u64, uses: u32, image: &str) -> Result<()> {
        if self.pages.len() > PAGE_COUNT_MAX {
            return Err(Error::UnsupportedFeature {
                image: image.to_owned(),
                feature: format!("more than {PAGE_COUNT_MAX} groups of clusters"),
                detail: "the check keeps its counts in memory, which has a bound".to_owned(),
            });
        }
        let page = self.pages.entry(cluster / PAGE_CLUSTERS).or_default();
        let count = &mut page[to_usize(cluster % PAGE_CLUSTERS)];
        *count = count.saturating_add(uses);
        Ok(())
    }

    fn take(&mut self, cluster: u64) -> u64 {
        match self.pages.get_mut(&(cluster / PAGE_CLUSTERS)) {
            Some(page) => u64::from(std::mem::take(&mut page[to_usize(cluster % PAGE_CLUSTERS)])),
            None => 0,
        }
    }

    fn rest(&self) -> Vec<(u64, u64)> {
        let mut rest: Vec<_> = self
            .pages
            .iter()
            .flat_map(|(number, page)| {
                let clusters = number * PAGE_CLUSTERS..;
                clusters.zip(page.iter().map(|count| u64::from(*count)))
            })
            .filter(|(_, count)| *count > 0)
            .collect();
        rest.sort_unstable();
        rest
    }
}
