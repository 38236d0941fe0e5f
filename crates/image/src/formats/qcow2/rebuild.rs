//! Writes a new refcount table for all clusters in use to the end of the file. The old table is valid until the
//! header refers to the new one.

use std::collections::BTreeMap;

use holdfast_block::to_usize;

use super::geometry::{POINTER_BYTES, Qcow2Geometry};
use super::header::{Qcow2Header, REFCOUNT_TABLE_AT, REFCOUNT_TABLE_BYTES_MAX};
use super::refcount::set;
use super::refcount_table::RefcountTable;
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::from_words;

/// Writes the refcounts in `counts`, to which it adds those of the new tables; returns how many clusters are in use.
pub(super) fn rebuild(
    file: &dyn ImageFile,
    header: &Qcow2Header,
    counts: &mut RefcountTable,
    image: &str,
) -> Result<u64> {
    let geometry = header.geometry;
    let entries = geometry.refcount_block_entries();
    let used = counts.rest();
    if let Some((cluster, uses)) = used.iter().find(|(_, uses)| *uses > geometry.refcount_max()) {
        let detail = format!("{uses} references exceed the maximum refcount");
        return Err(corrupt(image, "refcount", geometry.offset_of(*cluster), detail));
    }
    let start = geometry.clusters_for(file.length_bytes()?);
    let layout = RefcountLayout::new(geometry, start, &used);
    let table_bytes = layout.table_clusters * geometry.cluster_bytes();
    if table_bytes > REFCOUNT_TABLE_BYTES_MAX.max(geometry.cluster_bytes()) {
        let detail = "the file is too large for new ones".to_owned();
        return Err(corrupt(image, "refcount table", header.refcount_table_offset, detail));
    }
    for cluster in start..layout.end {
        counts.add(cluster, 1, image)?;
    }
    let all = counts.rest();
    let mut table = vec![0; to_usize(table_bytes / POINTER_BYTES)];
    for (index, cluster) in &layout.blocks {
        table[to_usize(*index)] = geometry.offset_of(*cluster);
    }
    for group in all.chunk_by(|left, right| left.0 / entries == right.0 / entries) {
        let Some(cluster) = group
            .first()
            .and_then(|(first, _)| layout.blocks.get(&(first / entries)))
        else {
            continue;
        };
        let mut block = vec![0; to_usize(geometry.cluster_bytes())];
        for (used, uses) in group {
            set(&mut block, used % entries, geometry.refcount_order, *uses);
        }
        file.write_at(&block, geometry.offset_of(*cluster))?;
    }
    file.write_at(&from_words(&table), geometry.offset_of(start))?;
    file.sync()?;
    // Both fields are in one sector, which is written atomically.
    let mut fields = geometry.offset_of(start).to_be_bytes().to_vec();
    fields.extend(u32::try_from(layout.table_clusters).unwrap_or(u32::MAX).to_be_bytes());
    file.write_at(&fields, REFCOUNT_TABLE_AT)?;
    file.sync()?;
    Ok(all.len() as u64)
}

/// The locations of the new table and its blocks, the table first.
struct RefcountLayout {
    table_clusters: u64,
    /// The cluster of each block, by its index in the table.
    blocks: BTreeMap<u64, u64>,
    end: u64,
}

impl RefcountLayout {
    /// A layout for these clusters, and those of the table and blocks themselves, from cluster `start` on.
    fn new(geometry: Qcow2Geometry, start: u64, used: &[(u64, u64)]) -> Self {
        let entries = geometry.refcount_block_entries();
        let mut indexes: Vec<u64> = used.iter().map(|(cluster, _)| cluster / entries).collect();
        indexes.dedup();
        let mut end = start + 1;
        loop {
            // The blocks for clusters from `start` on come last, because no cluster in use follows them.
            let known = indexes.partition_point(|index| *index < start / entries);
            let needed: Vec<u64> = indexes[..known]
                .iter()
                .copied()
                .chain(start / entries..end.div_ceil(entries))
                .collect();
            let table_entries = needed.last().map_or(1, |last| last + 1);
            let table_clusters = geometry.clusters_for(table_entries * POINTER_BYTES);
            let needed_end = start + table_clusters + needed.len() as u64;
            if needed_end <= end {
                return Self {
                    table_clusters,
                    blocks: needed.into_iter().zip(start + table_clusters..).collect(),
                    end: needed_end,
                };
            }
            end = needed_end;
        }
    }
}
