//! Allocates and frees host clusters in memory; a commit (`commit.rs`) stores the result.
//!
//! Invariants, which reduce the effect of any crash to a leak:
//! - A stored refcount is never below the number of stored references. An increment is stored and synced before the
//!   reference is; a decrement is applied ([`Allocator::apply_releases`]) only after the removal of the reference was
//!   synced.
//! - A cluster is allocated only if its refcount in memory is 0, so never while a stored reference to it exists.
//! - A cluster with metadata is never allocated, even if its refcount is 0: that is damage, and an error.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::geometry::{POINTER_BYTES, Qcow2Geometry};
use super::header::{Qcow2Header, REFCOUNT_TABLE_BYTES_MAX};
use super::refcount::{get, load_table, read_block, set};
use super::refcount_changes::{ChangedBlock, ChangedRefcountTable, RefcountChanges};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::{Error, Result};

/// Memory for refcount blocks without pending changes.
const CLEAN_BLOCK_BYTES_MAX: u64 = 8 << 20;

pub(crate) struct Allocator {
    image: Arc<str>,
    file: Arc<dyn ImageFile>,
    geometry: Qcow2Geometry,
    table: Vec<u64>,
    table_offset: u64,
    table_change: TableChange,
    blocks: BTreeMap<u64, CachedRefcountBlock>,
    /// All clusters below are in use.
    hint: u64,
    /// Clusters whose refcount is decremented after the next commit, once for each occurrence.
    releases: Vec<u64>,
    /// Clusters with metadata, and its kind.
    metadata: HashMap<u64, &'static str>,
}

struct CachedRefcountBlock {
    bytes: Vec<u8>,
    state: BlockState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockState {
    Clean,
    /// A commit is writing it, and it did not change since.
    Storing,
    Changed,
}

/// How the table in memory differs from the stored one.
enum TableChange {
    None,
    Entries(BTreeSet<u64>),
    Moved,
}

impl Allocator {
    pub(crate) fn load(file: &Arc<dyn ImageFile>, header: &Qcow2Header, image: &Arc<str>) -> Result<Self> {
        let mut allocator = Self {
            image: Arc::clone(image),
            file: Arc::clone(file),
            geometry: header.geometry,
            table: load_table(&**file, header, image)?,
            table_offset: header.refcount_table_offset,
            table_change: TableChange::None,
            blocks: BTreeMap::new(),
            hint: 0,
            releases: Vec::new(),
            metadata: HashMap::new(),
        };
        allocator.protect("header", 0, 1)?;
        allocator.protect(
            "refcount table",
            header.refcount_table_offset,
            header.refcount_table_clusters,
        )?;
        for index in 0..allocator.table.len() {
            let offset = allocator.table[index];
            if offset != 0 {
                allocator.protect("refcount block", offset, 1)?;
            }
        }
        Ok(allocator)
    }

    /// Marks clusters as metadata; fails if they are marked already.
    pub(crate) fn protect(&mut self, what: &'static str, offset: u64, clusters: u64) -> Result<()> {
        let first = self.geometry.cluster_of(offset);
        for cluster in first..first + clusters {
            if let Some(other) = self.metadata.insert(cluster, what) {
                let at = self.geometry.offset_of(cluster);
                return Err(corrupt(&self.image, "metadata", at, format!("both {other} and {what}")));
            }
        }
        Ok(())
    }

    /// The kind of metadata in the cluster at `offset`, if any: it must not be overwritten with data.
    pub(crate) fn metadata_at(&self, offset: u64) -> Option<&'static str> {
        self.metadata.get(&self.geometry.cluster_of(offset)).copied()
    }

    /// Allocates 1 to `count_max` adjacent clusters; returns their offsets.
    pub(crate) fn allocate(&mut self, count_max: u64) -> Result<Range<u64>> {
        let entries = self.geometry.refcount_block_entries();
        let order = self.geometry.refcount_order;
        let mut cluster = self.hint;
        loop {
            let index = cluster / entries;
            self.ensure_block(index)?;
            let block = self.block(index)?;
            let is_free = |within: &u64| get(&block.bytes, *within, order) == 0;
            let Some(first) = (cluster % entries..entries).find(is_free) else {
                cluster = (index + 1) * entries;
                self.hint = cluster;
                continue;
            };
            let count = (first..entries.min(first + count_max)).take_while(is_free).count() as u64;
            block.state = BlockState::Changed;
            for within in first..first + count {
                set(&mut block.bytes, within, order, 1);
            }
            let found = index * entries + first..index * entries + first + count;
            self.hint = found.end;
            self.check_free(&found)?;
            return Ok(self.geometry.offset_of(found.start)..self.geometry.offset_of(found.end));
        }
    }

    /// Allocates `count` adjacent clusters; returns their offsets.
    ///
    /// # Errors
    /// [`Error::NotResizable`] if they do not fit into one refcount block.
    pub(crate) fn allocate_row(&mut self, count: u64) -> Result<Range<u64>> {
        // The first cluster of an uncounted range is needed for its refcount block.
        if count >= self.geometry.refcount_block_entries() {
            return Err(Error::NotResizable {
                image: self.image.to_string(),
                detail: format!(
                    "its tables would need {count} adjacent clusters of {} bytes; convert it to larger clusters first",
                    self.geometry.cluster_bytes()
                ),
            });
        }
        let mut too_short = Vec::new();
        let row = loop {
            let found = self.allocate(count)?;
            if found.end - found.start == self.geometry.offset_of(count) {
                break found;
            }
            too_short.push(found);
        };
        for found in too_short {
            self.free_unreferenced(found)?;
        }
        Ok(row)
    }

    fn check_free(&self, clusters: &Range<u64>) -> Result<()> {
        for cluster in clusters.clone() {
            if let Some(what) = self.metadata.get(&cluster) {
                let detail = format!("the refcount of a {what} is 0");
                return Err(corrupt(
                    &self.image,
                    "refcount",
                    self.geometry.offset_of(cluster),
                    detail,
                ));
            }
        }
        Ok(())
    }

    /// Allocates a cluster for metadata.
    pub(crate) fn allocate_metadata(&mut self, what: &'static str) -> Result<u64> {
        let offset = self.allocate(1)?.start;
        self.protect(what, offset, 1)?;
        Ok(offset)
    }

    /// Frees clusters at once that no reference exists to, in memory or stored: a write into them failed.
    pub(crate) fn free_unreferenced(&mut self, offsets: Range<u64>) -> Result<()> {
        for cluster in self.geometry.cluster_of(offsets.start)..self.geometry.cluster_of(offsets.end) {
            self.release(cluster)?;
        }
        Ok(())
    }

    /// Decrements the refcount of the cluster at `offset` after the removal of its reference is stored.
    pub(crate) fn release_later(&mut self, offset: u64) {
        self.release_cluster_later(self.geometry.cluster_of(offset));
    }

    /// The same for host cluster `cluster`.
    pub(crate) fn release_cluster_later(&mut self, cluster: u64) {
        self.releases.push(cluster);
    }

    /// Number of pending decrements.
    pub(crate) fn release_count(&self) -> usize {
        self.releases.len()
    }

    /// Takes the pending decrements, which are those of references that were removed so far.
    pub(crate) fn take_releases(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.releases)
    }

    /// Applies decrements that were taken; returns the offsets of the clusters that are free now.
    ///
    /// Must be called only after the removal of all their references was synced.
    pub(crate) fn apply_releases(&mut self, releases: Vec<u64>) -> Result<Vec<u64>> {
        let mut freed = Vec::new();
        for cluster in releases {
            if self.release(cluster)? == 0 {
                self.metadata.remove(&cluster);
                freed.push(self.geometry.offset_of(cluster));
            }
        }
        freed.sort_unstable();
        Ok(freed)
    }

    fn release(&mut self, cluster: u64) -> Result<u64> {
        let entries = self.geometry.refcount_block_entries();
        let order = self.geometry.refcount_order;
        let offset = self.geometry.offset_of(cluster);
        let damaged = corrupt(&self.image, "refcount", offset, "a cluster in use has refcount 0");
        if self
            .table
            .get(to_usize(cluster / entries))
            .is_none_or(|block| *block == 0)
        {
            return Err(damaged);
        }
        let block = self.block(cluster / entries)?;
        let Some(count) = get(&block.bytes, cluster % entries, order).checked_sub(1) else {
            return Err(damaged);
        };
        set(&mut block.bytes, cluster % entries, order, count);
        block.state = BlockState::Changed;
        if count == 0 {
            self.hint = self.hint.min(cluster);
        }
        Ok(count)
    }

    /// Block `index`, which must exist.
    fn block(&mut self, index: u64) -> Result<&mut CachedRefcountBlock> {
        if !self.blocks.contains_key(&index) {
            let clean_max = to_usize(CLEAN_BLOCK_BYTES_MAX / self.geometry.cluster_bytes()).max(4);
            if self.blocks.len() >= clean_max {
                self.blocks.retain(|_, block| block.state != BlockState::Clean);
            }
            let offset = self.table[to_usize(index)];
            let bytes = read_block(&*self.file, self.geometry, offset, &self.image)?;
            self.blocks.insert(
                index,
                CachedRefcountBlock {
                    bytes,
                    state: BlockState::Clean,
                },
            );
        }
        Ok(self.blocks.get_mut(&index).expect("it was just put there"))
    }

    /// Makes sure that block `index` exists.
    fn ensure_block(&mut self, index: u64) -> Result<()> {
        if index >= self.table.len() as u64 {
            return self.grow_table(index);
        }
        if self.table[to_usize(index)] != 0 {
            return Ok(());
        }
        // The block's range has no refcounts yet, so its first cluster is free and stores the block itself.
        let cluster = index * self.geometry.refcount_block_entries();
        self.add_blocks(index, cluster, 1, 0)?;
        match &mut self.table_change {
            TableChange::None => self.table_change = TableChange::Entries([index].into()),
            TableChange::Entries(indexes) => {
                indexes.insert(index);
            }
            TableChange::Moved => {}
        }
        Ok(())
    }

    /// Adds blocks `index..index + blocks` in host clusters from `cluster` on; counts these and the `others` clusters
    /// after them.
    fn add_blocks(&mut self, index: u64, cluster: u64, blocks: u64, others: u64) -> Result<()> {
        self.check_free(&(cluster..cluster + blocks + others))?;
        let entries = self.geometry.refcount_block_entries();
        for number in 0..blocks {
            let mut bytes = vec![0; to_usize(self.geometry.cluster_bytes())];
            let used = (blocks + others).saturating_sub(number * entries).min(entries);
            for within in 0..used {
                set(&mut bytes, within, self.geometry.refcount_order, 1);
            }
            self.blocks.insert(
                index + number,
                CachedRefcountBlock {
                    bytes,
                    state: BlockState::Changed,
                },
            );
            let offset = self.geometry.offset_of(cluster + number);
            self.table[to_usize(index + number)] = offset;
            self.protect("refcount block", offset, 1)?;
        }
        Ok(())
    }

    /// Moves the table, enlarged, together with its own refcount blocks past all clusters with refcounts.
    fn grow_table(&mut self, index: u64) -> Result<()> {
        let entries = self.geometry.refcount_block_entries();
        let mut blocks = 1;
        let table_clusters = loop {
            let table = self.geometry.clusters_for((index + index / 2 + blocks) * POINTER_BYTES);
            if blocks * entries >= blocks + table {
                break table;
            }
            blocks += 1;
        };
        let table_bytes = self.geometry.offset_of(table_clusters);
        if table_bytes > REFCOUNT_TABLE_BYTES_MAX.max(self.geometry.cluster_bytes()) {
            return Err(Error::NotWritable {
                image: self.image.to_string(),
                detail: "its refcount table cannot grow any further; convert it to larger clusters first".to_owned(),
            });
        }
        let cluster = index * entries;
        let old_clusters = self.geometry.clusters_for(self.table.len() as u64 * POINTER_BYTES);
        for number in 0..old_clusters {
            self.release_later(self.table_offset + self.geometry.offset_of(number));
        }
        self.table.resize(to_usize(table_bytes / POINTER_BYTES), 0);
        self.add_blocks(index, cluster, blocks, table_clusters)?;
        self.table_offset = self.geometry.offset_of(cluster + blocks);
        self.protect("refcount table", self.table_offset, table_clusters)?;
        self.table_change = TableChange::Moved;
        Ok(())
    }

    /// Whether changes are pending.
    pub(crate) fn is_changed(&self) -> bool {
        !self.releases.is_empty()
            || !matches!(self.table_change, TableChange::None)
            || self.blocks.values().any(|block| block.state == BlockState::Changed)
    }

    /// Writes changed blocks. A higher count before its reference is only a leak.
    pub(crate) fn store_blocks(&mut self) -> Result<()> {
        for (index, block) in &mut self.blocks {
            if block.state == BlockState::Changed {
                self.file.write_at(&block.bytes, self.table[to_usize(*index)])?;
                block.state = BlockState::Clean;
            }
        }
        Ok(())
    }

    /// Takes all changes, to store them while further ones are made.
    pub(crate) fn take_changes(&mut self) -> RefcountChanges {
        let mut blocks = Vec::new();
        for (index, block) in &mut self.blocks {
            if block.state == BlockState::Changed {
                block.state = BlockState::Storing;
                blocks.push(ChangedBlock {
                    index: *index,
                    offset: self.table[to_usize(*index)],
                    bytes: block.bytes.clone(),
                });
            }
        }
        let table_offset = self.table_offset;
        let table = match std::mem::replace(&mut self.table_change, TableChange::None) {
            TableChange::None => ChangedRefcountTable::None,
            TableChange::Entries(indexes) => ChangedRefcountTable::Entries {
                table_offset,
                blocks: indexes
                    .into_iter()
                    .map(|index| (index, self.table[to_usize(index)]))
                    .collect(),
            },
            TableChange::Moved => ChangedRefcountTable::Moved {
                table_offset,
                table: self.table.clone(),
            },
        };
        RefcountChanges {
            cluster_bytes: self.geometry.cluster_bytes(),
            blocks,
            table,
        }
    }

    /// The taken changes are durable.
    pub(crate) fn changes_stored(&mut self) {
        for block in self.blocks.values_mut() {
            if block.state == BlockState::Storing {
                block.state = BlockState::Clean;
            }
        }
    }

    /// Makes taken changes pending again: they were not stored.
    pub(crate) fn put_back(&mut self, changes: RefcountChanges) {
        for changed in changes.blocks {
            if let Some(block) = self.blocks.get_mut(&changed.index) {
                block.state = BlockState::Changed;
            }
        }
        match (changes.table, &mut self.table_change) {
            (ChangedRefcountTable::None, _) | (_, TableChange::Moved) => {}
            (ChangedRefcountTable::Moved { .. }, change) => *change = TableChange::Moved,
            (ChangedRefcountTable::Entries { blocks, .. }, TableChange::Entries(indexes)) => {
                indexes.extend(blocks.into_keys());
            }
            (ChangedRefcountTable::Entries { blocks, .. }, change @ TableChange::None) => {
                *change = TableChange::Entries(blocks.into_keys().collect());
            }
        }
    }
}
