//! Reads and writes stored refcounts: the refcount table and its blocks.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::sync::Arc;

use holdfast_block::to_usize;

use super::geometry::{OFFSET_MASK, POINTER_BYTES, Qcow2Geometry};
use super::header::{Qcow2Header, REFCOUNT_TABLE_BYTES_MAX};
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::{rows, to_words};
use crate::model::shared_cache::SharedCache;

/// Refcount `index` of a block of counters of `1 << order` bits; big-endian, lowest bits first if they share a byte.
pub(crate) fn get(block: &[u8], index: u64, order: u32) -> u64 {
    let index = to_usize(index);
    match order {
        0..=2 => {
            let bits = 1 << order;
            let per_byte = 8 / bits;
            let mask = (1u16 << bits) - 1;
            let [byte] = count_at(block, index / per_byte);
            u64::from(u16::from(byte) >> (index % per_byte * bits) & mask)
        }
        3 => u64::from(u8::from_be_bytes(count_at(block, index))),
        4 => u64::from(u16::from_be_bytes(count_at(block, index))),
        5 => u64::from(u32::from_be_bytes(count_at(block, index))),
        _ => u64::from_be_bytes(count_at(block, index)),
    }
}

fn count_at<const N: usize>(block: &[u8], index: usize) -> [u8; N] {
    *rows(block, 0)
        .get(index)
        .expect("a block has a count for each of its clusters")
}

/// Sets refcount `index`; `value` must fit.
#[expect(clippy::indexing_slicing, reason = "a block has a count for each of its clusters")]
pub(crate) fn set(block: &mut [u8], index: u64, order: u32, value: u64) {
    let index = to_usize(index);
    let bytes = value.to_be_bytes();
    if order < 3 {
        let bits = 1 << order;
        let per_byte = 8 / bits;
        let shift = index % per_byte * bits;
        let mask = ((1u16 << bits) - 1) << shift;
        let [_, mask] = mask.to_be_bytes();
        let byte = &mut block[index / per_byte];
        *byte = *byte & !mask | bytes[7] << shift & mask;
    } else {
        let width = 1 << (order - 3);
        block[index * width..(index + 1) * width].copy_from_slice(&bytes[8 - width..]);
    }
}

/// Reads the refcount table, after checking that it is inside the file.
pub(crate) fn load_table(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<Vec<u64>> {
    let offset = header.refcount_table_offset;
    let damaged = |detail: String| corrupt(image, "refcount table", offset, detail);
    let geometry = header.geometry;
    let table_bytes = header.refcount_table_clusters * geometry.cluster_bytes();
    if table_bytes == 0 || table_bytes > REFCOUNT_TABLE_BYTES_MAX.max(geometry.cluster_bytes()) {
        return Err(damaged(format!("{} clusters", header.refcount_table_clusters)));
    }
    if offset == 0 || !geometry.is_aligned(offset) {
        return Err(damaged("not at the start of a cluster".to_owned()));
    }
    let file_bytes = file.length_bytes()?;
    if offset.checked_add(table_bytes).is_none_or(|end| end > file_bytes) {
        return Err(damaged(format!(
            "its {table_bytes} bytes extend past the end of the file ({file_bytes} bytes)"
        )));
    }
    let mut bytes = vec![0; to_usize(table_bytes)];
    file.read_at(&mut bytes, offset)?;
    let mut table = to_words(&bytes);
    for entry in &mut table {
        *entry &= OFFSET_MASK;
    }
    Ok(table)
}

/// Reads the refcount block at `offset`.
pub(crate) fn read_block(file: &dyn ImageFile, geometry: Qcow2Geometry, offset: u64, image: &str) -> Result<Vec<u8>> {
    let damaged = |detail: &str| corrupt(image, "refcount block", offset, detail);
    if !geometry.is_aligned(offset) {
        return Err(damaged("not at the start of a cluster"));
    }
    if offset.saturating_add(geometry.cluster_bytes()) > file.length_bytes()? {
        return Err(damaged("past the end of the file"));
    }
    let mut block = vec![0; to_usize(geometry.cluster_bytes())];
    file.read_at(&mut block, offset)?;
    Ok(block)
}

/// The refcounts of an unchanging image, read on demand.
pub(crate) struct StoredRefcounts<'a> {
    file: &'a dyn ImageFile,
    geometry: Qcow2Geometry,
    image: &'a str,
    /// Offsets of the blocks; 0 for none.
    pub(crate) table: Vec<u64>,
    blocks: SharedCache<Vec<u8>>,
}

const BLOCK_CACHE_BYTES: u64 = 16 << 20;

impl<'a> StoredRefcounts<'a> {
    pub(crate) fn load(file: &'a dyn ImageFile, header: &Qcow2Header, image: &'a str) -> Result<Self> {
        Ok(Self {
            file,
            geometry: header.geometry,
            image,
            table: load_table(file, header, image)?,
            blocks: SharedCache::new(BLOCK_CACHE_BYTES),
        })
    }

    /// Without any refcounts: all are 0.
    pub(crate) fn none(file: &'a dyn ImageFile, header: &Qcow2Header, image: &'a str) -> Self {
        Self {
            file,
            geometry: header.geometry,
            image,
            table: Vec::new(),
            blocks: SharedCache::new(BLOCK_CACHE_BYTES),
        }
    }

    /// Block `index` of the table, if it exists.
    pub(crate) fn block(&self, index: u64) -> Result<Option<Arc<Vec<u8>>>> {
        let offset = self.table.get(to_usize(index)).copied().unwrap_or_default();
        if offset == 0 {
            return Ok(None);
        }
        if let Some(block) = self.blocks.get(offset) {
            return Ok(Some(block));
        }
        let block = Arc::new(read_block(self.file, self.geometry, offset, self.image)?);
        self.blocks
            .insert(offset, Arc::clone(&block), self.geometry.cluster_bytes());
        Ok(Some(block))
    }

    /// The refcount of a host cluster; 0 if there is no block for it.
    pub(crate) fn of(&self, cluster: u64) -> Result<u64> {
        let entries = self.geometry.refcount_block_entries();
        let block = self.block(cluster / entries)?;
        Ok(block.map_or(0, |block| get(&block, cluster % entries, self.geometry.refcount_order)))
    }
}

/// Whether the end of the file truncates the refcount table or one of its blocks.
///
/// For files that are complete otherwise: then only refcounts can be missing. A pointer further outside the file is
/// itself damaged, and says nothing about the end of the file.
pub(crate) fn is_cut_off(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<bool> {
    let file_bytes = file.length_bytes()?;
    let geometry = header.geometry;
    let cluster_bytes = geometry.cluster_bytes();
    let table_bytes = header.refcount_table_clusters.saturating_mul(cluster_bytes);
    let is_truncated = |offset: u64, length: u64| {
        let end = offset.saturating_add(length);
        let block_count = geometry.clusters_for(end).div_ceil(geometry.refcount_block_entries());
        let missing_max = table_bytes.saturating_add(block_count.saturating_mul(cluster_bytes));
        end.checked_sub(file_bytes)
            .is_some_and(|missing| missing > 0 && missing <= missing_max)
    };
    if is_truncated(header.refcount_table_offset, table_bytes) {
        return Ok(true);
    }
    match load_table(file, header, image) {
        Err(error) if error.is_corrupt() => Ok(false),
        table => Ok(table?
            .iter()
            .any(|offset| *offset > 0 && is_truncated(*offset, cluster_bytes))),
    }
}

/// The end of the last cluster with a stored refcount; 0 if there is none.
pub(crate) fn last_used_end(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<u64> {
    let stored = StoredRefcounts::load(file, header, image)?;
    let geometry = header.geometry;
    let entries = geometry.refcount_block_entries();
    for index in (0..stored.table.len() as u64).rev() {
        let Some(block) = stored.block(index)? else { continue };
        let is_used = |within: &u64| get(&block, *within, geometry.refcount_order) > 0;
        if let Some(within) = (0..entries).rev().find(is_used) {
            let clusters = index.saturating_mul(entries).saturating_add(within + 1);
            return Ok(clusters.saturating_mul(geometry.cluster_bytes()));
        }
    }
    Ok(0)
}

/// The number of clusters for the refcount table and blocks of a new file: `(table clusters, block clusters)`, enough
/// for these and `other_clusters` more.
pub(crate) fn clusters_for(geometry: Qcow2Geometry, other_clusters: u64) -> (u64, u64) {
    let (mut table, mut blocks) = (1, 1);
    loop {
        let total = other_clusters + table + blocks;
        let blocks_needed = total.div_ceil(geometry.refcount_block_entries());
        let table_needed = geometry.clusters_for(blocks_needed * POINTER_BYTES).max(1);
        if (table_needed, blocks_needed) == (table, blocks) {
            return (table, blocks);
        }
        table = table_needed.max(table);
        blocks = blocks_needed.max(blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::{clusters_for, get, set};
    use crate::formats::qcow2::geometry::{L2Kind, Qcow2Geometry};

    #[test]
    fn setting_a_refcount_keeps_its_neighbours() {
        for order in 0..=6 {
            let geometry = Qcow2Geometry {
                cluster_bits: 9,
                refcount_order: order,
                l2_kind: L2Kind::Standard,
            };
            let entries = geometry.refcount_block_entries();
            let mut block = vec![0; 512];
            let value = |index: u64| index.wrapping_mul(0x9e37_79b9_7f4a_7c15) & geometry.refcount_max();
            for index in (0..entries).chain(0..entries) {
                set(&mut block, index, order, value(index));
            }
            for index in 0..entries {
                assert_eq!(get(&block, index, order), value(index), "order {order} index {index}");
            }
        }
    }

    #[test]
    fn new_refcount_table_counts_itself() {
        for order in 0..=6 {
            for other in [0, 1, 60, 64, 255, 256, 4000, 100_000] {
                let geometry = Qcow2Geometry {
                    cluster_bits: 9,
                    refcount_order: order,
                    l2_kind: L2Kind::Standard,
                };
                let (table, blocks) = clusters_for(geometry, other);
                assert!(blocks * geometry.refcount_block_entries() >= other + table + blocks);
                assert!(table * 512 / 8 >= blocks);
            }
        }
    }
}
