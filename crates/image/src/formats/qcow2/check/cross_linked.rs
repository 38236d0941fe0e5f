//! Finds cross-linked clusters: two offsets of the disk refer to one host cluster, and it is unknown which one is
//! right.
//!
//! Refcounts do not show them, because QEMU sets a refcount to 2 where it counts two references. But a cluster keeps
//! its offset on the disk in all snapshots that share it: snapshots copy tables and move no data. So all tables
//! together may refer to a cluster from one offset only. Compressed clusters share host clusters with each other, and
//! with nothing else.
//!
//! Usually no two tables refer to one cluster, and nothing more is read. If they do, as with snapshots, all tables are
//! read again, and the offsets are recorded for as many clusters at a time as memory allows.

use std::collections::HashMap;

use super::super::entry::ClusterKind;
use super::super::geometry::POINTER_BYTES;
use super::super::mapping::{entry_in, read_l2_as_is};
use super::{Checker, L2Use};
use crate::model::mapped_extent::KnownLength;
use crate::{CheckReport, ProblemKind, Result, Severity};

/// Clusters whose offsets are recorded at a time: some 100 MiB.
const OWNER_COUNT_MAX: u64 = 4 << 20;

/// An L2 entry that refers to a cluster of another range of the disk.
pub(in crate::formats::qcow2) struct CrossLinked {
    /// Offset of the entry in the file.
    pub(in crate::formats::qcow2) entry_offset: u64,
    pub(in crate::formats::qcow2) word: u64,
    pub(in crate::formats::qcow2) host: u64,
    /// How its table is used.
    pub(in crate::formats::qcow2) used: L2Use,
    /// Offset on the disk that the entry maps.
    pub(in crate::formats::qcow2) disk_offset: u64,
    /// Offset on the disk that the other entry maps; none if the cluster has compressed data.
    owner: Option<u64>,
}

impl CrossLinked {
    fn problem(&self) -> ProblemKind {
        let other = match self.owner {
            Some(owner) => format!("disk offset {owner}"),
            None => "compressed clusters".to_owned(),
        };
        ProblemKind::Shared {
            what: if self.used.is_active {
                "cluster"
            } else {
                "cluster in a snapshot"
            },
            offset: self.host,
            disk_offset: self.disk_offset,
            other,
        }
    }
}

impl Checker<'_> {
    /// Reports an L2 table to which L1 entries with different indexes refer.
    pub(super) fn check_index(&mut self, offset: u64, used: L2Use, index: u64) {
        if used.index != index {
            let coverage = self.geometry.l2_coverage_bytes();
            let detail = format!(
                "its table at {offset} is also used for disk offset {}",
                used.index * coverage
            );
            let disk_offset = index * coverage;
            self.damage(ProblemKind::Entry { disk_offset, detail });
        }
    }

    /// Reports all cross-linked clusters.
    pub(super) fn report_cross_linked(&mut self) -> Result<()> {
        let mut found = CheckReport::default();
        self.for_each_cross_linked(|cross_linked| {
            found.add(Severity::Corruption, cross_linked.problem());
            Ok(())
        })?;
        self.damage_count += found.corruption_count;
        self.report.take_problems(found);
        Ok(())
    }

    /// Calls `visit` with each entry that refers to a cluster of another range of the disk; the first entry counts as
    /// the owner.
    pub(in crate::formats::qcow2) fn for_each_cross_linked(
        &self,
        mut visit: impl FnMut(CrossLinked) -> Result<()>,
    ) -> Result<()> {
        let geometry = self.geometry;
        let entries = geometry.l2_entries();
        let known = KnownLength::default();
        for clusters in self.counts.cross_linked(OWNER_COUNT_MAX) {
            let mut owners: HashMap<u64, u64> = HashMap::new();
            for (table_offset, used) in &self.l2_tables {
                let table = match read_l2_as_is(self.file, &known, geometry, *table_offset, self.image) {
                    // The table was reported before, and nothing in it was counted.
                    Err(error) if error.is_corrupt() => continue,
                    table => table?,
                };
                for index in 0..entries {
                    let entry = entry_in(&table, index, geometry);
                    let Some(host) = self.meaning_of(entry).ok().and_then(ClusterKind::host) else {
                        continue;
                    };
                    let cluster = geometry.cluster_of(host.offset);
                    if !clusters.contains(&cluster) || !self.counts.is_cross_linked(cluster) {
                        continue;
                    }
                    let disk_offset = geometry.offset_of(used.index * entries + index);
                    let has_compressed = self.counts.has_compressed(cluster);
                    let owner = (!has_compressed).then(|| *owners.entry(cluster).or_insert(disk_offset));
                    if owner == Some(disk_offset) {
                        continue;
                    }
                    visit(CrossLinked {
                        entry_offset: table_offset + index * geometry.l2_entry_words() * POINTER_BYTES,
                        word: entry.word,
                        host: host.offset,
                        used: *used,
                        disk_offset,
                        owner,
                    })?;
                }
            }
        }
        Ok(())
    }
}
