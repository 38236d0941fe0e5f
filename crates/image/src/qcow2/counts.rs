//! How often each host cluster is used, as counted from all that refers to it.

use std::collections::HashMap;

use holdfast_block::to_usize;

use crate::{Error, Result};

const PAGE_CLUSTERS: u64 = 32;
/// Memory for counting: 512 MiB of pages, enough for 8 TiB of 64 KiB clusters that are all in use.
const PAGE_COUNT_MAX: usize = 4 << 20;

/// Uses per host cluster, sparse by pages: a file may claim to be of any length.
#[derive(Default)]
pub(super) struct Counts {
    pages: HashMap<u64, [u32; to_usize(PAGE_CLUSTERS)]>,
}

impl Counts {
    /// Counts more uses of a cluster.
    pub(super) fn add(&mut self, cluster: u64, uses: u32, image: &str) -> Result<()> {
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

    /// Uses of a cluster.
    pub(super) fn of(&self, cluster: u64) -> u64 {
        self.pages
            .get(&(cluster / PAGE_CLUSTERS))
            .map_or(0, |page| u64::from(page[to_usize(cluster % PAGE_CLUSTERS)]))
    }

    /// Uses of a cluster, which are forgotten.
    pub(super) fn take(&mut self, cluster: u64) -> u64 {
        match self.pages.get_mut(&(cluster / PAGE_CLUSTERS)) {
            Some(page) => u64::from(std::mem::take(&mut page[to_usize(cluster % PAGE_CLUSTERS)])),
            None => 0,
        }
    }

    /// All clusters that are used, in order, and how often.
    pub(super) fn rest(&self) -> Vec<(u64, u64)> {
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
