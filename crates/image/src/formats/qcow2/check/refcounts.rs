//! Checks the refcount structures, and compares stored refcounts with the counted references.

use std::collections::HashSet;

use super::super::geometry::OFFSET_MASK;
use super::super::refcount::get;
use super::Checker;
use crate::{ProblemKind, Result, Severity};

impl Checker<'_> {
    /// Counts the refcount table and its blocks.
    pub(super) fn claim_refcounts(&mut self) -> Result<()> {
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
            let is_in_file = self.geometry.is_aligned(offset) && self.is_whole_in_file(offset);
            if is_in_file && (index as u64) < index_end {
                let cluster = self.geometry.cluster_of(offset);
                self.claim("refcount block", cluster..cluster + 1)?;
                // Each block is read once: a table that refers to one block repeatedly would make the work grow with
                // the square of the file size.
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

    /// Compares counted references with stored refcounts.
    pub(super) fn compare(&mut self) {
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
        // The remaining clusters have no refcount block.
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
