//! Refcounts in memory: references to each host cluster, counted from all tables.

use std::collections::HashMap;
use std::ops::Range;

use holdfast_block::to_usize;

use crate::{Error, Result};

const PAGE_CLUSTERS: u64 = 32;
/// Memory for counting: 560 MiB of pages, enough for 8 TiB of 64 KiB clusters that are all in use.
const PAGE_COUNT_MAX: usize = 4 << 20;

/// References to each host cluster, in sparse pages: a file may claim any length.
#[derive(Default)]
pub(super) struct RefcountTable {
    pages: HashMap<u64, Page>,
}

/// The state of adjacent clusters; each set has a bit per cluster.
#[derive(Default)]
struct Page {
    uses: [u32; to_usize(PAGE_CLUSTERS)],
    /// Clusters that an entry uses uncompressed.
    uncompressed: u32,
    /// Clusters that more than one entry uses uncompressed. Disk states that share a table share its entries.
    cross_linked_uses: u32,
    /// Clusters with compressed data, which any number of entries can use.
    compressed: u32,
}

impl Page {
    fn cross_linked(&self) -> u32 {
        self.cross_linked_uses | (self.uncompressed & self.compressed)
    }
}

impl RefcountTable {
    /// Adds references to a cluster.
    pub(super) fn add(&mut self, cluster: u64, uses: u32, image: &str) -> Result<()> {
        if self.pages.len() > PAGE_COUNT_MAX {
            return Err(Error::UnsupportedFeature {
                image: image.to_owned(),
                feature: format!("more than {PAGE_COUNT_MAX} groups of clusters"),
                detail: "the check would need too much memory".to_owned(),
            });
        }
        let page = self.pages.entry(cluster / PAGE_CLUSTERS).or_default();
        let count = &mut page.uses[to_usize(cluster % PAGE_CLUSTERS)];
        *count = count.saturating_add(uses);
        Ok(())
    }

    /// Removes references to a cluster.
    pub(super) fn remove(&mut self, cluster: u64, uses: u32) {
        if let Some(page) = self.pages.get_mut(&(cluster / PAGE_CLUSTERS)) {
            let count = &mut page.uses[to_usize(cluster % PAGE_CLUSTERS)];
            *count = count.saturating_sub(uses);
        }
    }

    /// Records that an entry uses a counted cluster uncompressed.
    pub(super) fn mark_uncompressed(&mut self, cluster: u64) {
        if let Some(page) = self.pages.get_mut(&(cluster / PAGE_CLUSTERS)) {
            let bit = 1 << (cluster % PAGE_CLUSTERS);
            page.cross_linked_uses |= page.uncompressed & bit;
            page.uncompressed |= bit;
        }
    }

    /// Records that a counted cluster has compressed data.
    pub(super) fn mark_compressed(&mut self, cluster: u64) {
        if let Some(page) = self.pages.get_mut(&(cluster / PAGE_CLUSTERS)) {
            page.compressed |= 1 << (cluster % PAGE_CLUSTERS);
        }
    }

    /// Whether more than one entry uses a cluster, at least one of them uncompressed.
    pub(super) fn is_cross_linked(&self, cluster: u64) -> bool {
        let page = self.pages.get(&(cluster / PAGE_CLUSTERS));
        page.is_some_and(|page| page.cross_linked() >> (cluster % PAGE_CLUSTERS) & 1 != 0)
    }

    /// Whether a cluster has compressed data.
    pub(super) fn has_compressed(&self, cluster: u64) -> bool {
        let page = self.pages.get(&(cluster / PAGE_CLUSTERS));
        page.is_some_and(|page| page.compressed >> (cluster % PAGE_CLUSTERS) & 1 != 0)
    }

    /// Ranges with all cross-linked clusters, split so that each has at most `count_max` of them and a page more.
    pub(super) fn cross_linked(&self, count_max: u64) -> Vec<Range<u64>> {
        let cross_linked = self.pages.iter().filter(|(_, page)| page.cross_linked() != 0);
        let mut pages: Vec<(u64, u32)> = cross_linked
            .map(|(number, page)| (*number, page.cross_linked().count_ones()))
            .collect();
        pages.sort_unstable();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut count = count_max;
        for (number, clusters) in pages {
            let range = number * PAGE_CLUSTERS..(number + 1) * PAGE_CLUSTERS;
            match ranges.last_mut() {
                Some(last) if count < count_max => last.end = range.end,
                _ => {
                    ranges.push(range);
                    count = 0;
                }
            }
            count += u64::from(clusters);
        }
        ranges
    }

    /// References to a cluster.
    pub(super) fn of(&self, cluster: u64) -> u64 {
        self.pages
            .get(&(cluster / PAGE_CLUSTERS))
            .map_or(0, |page| u64::from(page.uses[to_usize(cluster % PAGE_CLUSTERS)]))
    }

    /// Removes and returns the references to a cluster.
    pub(super) fn take(&mut self, cluster: u64) -> u64 {
        match self.pages.get_mut(&(cluster / PAGE_CLUSTERS)) {
            Some(page) => u64::from(std::mem::take(&mut page.uses[to_usize(cluster % PAGE_CLUSTERS)])),
            None => 0,
        }
    }

    /// All clusters in use, in order, with their number of references.
    pub(super) fn rest(&self) -> Vec<(u64, u64)> {
        let mut rest: Vec<_> = self
            .pages
            .iter()
            .flat_map(|(number, page)| {
                let clusters = number * PAGE_CLUSTERS..;
                clusters.zip(page.uses.iter().map(|count| u64::from(*count)))
            })
            .filter(|(_, count)| *count > 0)
            .collect();
        rest.sort_unstable();
        rest
    }
}
