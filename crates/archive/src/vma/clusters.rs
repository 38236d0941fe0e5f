//! Records which clusters of a disk were read.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::collections::HashMap;

use super::format::CLUSTER_BYTES;

const BITS_PER_WORD: u32 = u64::BITS;
const WORDS_PER_PAGE: u32 = 64;
const CLUSTERS_PER_PAGE: u32 = WORDS_PER_PAGE * BITS_PER_WORD;

/// One bit per cluster, in pages that are allocated on demand, since a malicious header may claim a huge
/// disk.
#[derive(Debug)]
pub(super) struct Clusters {
    pages: HashMap<u32, Box<[u64; WORDS_PER_PAGE as usize]>>,
    missing_count: u64,
}

impl Clusters {
    /// An empty set for a disk of this size.
    pub(super) fn new(size_bytes: u64) -> Self {
        Self {
            pages: HashMap::new(),
            missing_count: size_bytes.div_ceil(CLUSTER_BYTES),
        }
    }

    /// Marks a cluster as read; false if it already was.
    pub(super) fn insert(&mut self, cluster: u32) -> bool {
        let page = self.pages.entry(cluster / CLUSTERS_PER_PAGE);
        let page = page.or_insert_with(|| Box::new([0; WORDS_PER_PAGE as usize]));
        let word = page.get_mut((cluster % CLUSTERS_PER_PAGE / BITS_PER_WORD) as usize);
        let word = word.expect("a page has a word for each of its clusters");
        let bit = 1 << (cluster % BITS_PER_WORD);
        let is_new = *word & bit == 0;
        *word |= bit;
        self.missing_count -= u64::from(is_new);
        is_new
    }

    /// The number of clusters that were not read yet.
    pub(super) fn missing_count(&self) -> u64 {
        self.missing_count
    }
}
