//! Writes a whole image once, from start to end.
//!
//! Everything is appended in large writes: data, L2 tables when the next one begins, refcount blocks when they are
//! full. Nothing is read back or synced in between, and the header comes last, after a sync: until then the file has
//! no magic number and is no valid image. Memory is one L2 table, one refcount block, the L1 table (at most 32 MiB)
//! and a write buffer.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::entry::{L2Entry, compressed_offset_end};
use super::geometry::{POINTER_BYTES, Qcow2Geometry};
use super::header::{Qcow2Header, REFCOUNT_TABLE_BYTES_MAX};
use super::mapping::{L2Table, set_entry_in};
use super::refcount::{get, set};
use crate::file::{HostFile, ImageFile};
use crate::model::bytes::from_words;
use crate::pipeline::copy_pipeline::PlacedWrite;
use crate::{Compression, Error, Result};

/// Small writes are collected up to this size.
const BUFFER_BYTES: usize = 1 << 20;
/// Limit of preallocation at the end of the file: file systems write faster, and in parallel, before the end of a
/// file.
const GROWTH_BYTES_MAX: u64 = 256 << 20;

/// Fills a new qcow2 image from start to end, faster than random writes.
///
/// Offsets only increase. Ranges that are left out are absent: they read as zero or from the backing file.
pub struct BulkWriter {
    stream: AppendedFile,
    data_file: Option<Arc<dyn ImageFile>>,
    header: Qcow2Header,
    path: Option<PathBuf>,
    l1: Vec<u64>,
    current: Option<(u64, L2Table)>,
    refcounts: RefcountStream,
    position: u64,
}

/// The file with its write buffer at the end.
struct AppendedFile {
    file: Arc<dyn ImageFile>,
    buffer: Vec<u8>,
    written: u64,
    /// Length of the file, with preallocated space.
    length: u64,
}

/// Refcounts of a file that is only appended to: blocks before the end do not change any more.
struct RefcountStream {
    geometry: Qcow2Geometry,
    block: Vec<u8>,
    next: Vec<u8>,
    offsets: Vec<u64>,
}

impl BulkWriter {
    pub(crate) fn new(
        file: Arc<dyn ImageFile>,
        data_file: Option<Arc<dyn ImageFile>>,
        header: Qcow2Header,
        path: Option<PathBuf>,
    ) -> Result<Self> {
        let geometry = header.geometry;
        let mut writer = Self {
            stream: AppendedFile {
                file,
                buffer: Vec::with_capacity(BUFFER_BYTES + to_usize(geometry.cluster_bytes())),
                written: geometry.cluster_bytes(),
                length: 0,
            },
            data_file,
            path,
            l1: vec![0; to_usize(header.l1.entries)],
            current: None,
            refcounts: RefcountStream {
                geometry,
                block: vec![0; to_usize(geometry.cluster_bytes())],
                next: vec![0; to_usize(geometry.cluster_bytes())],
                offsets: Vec::new(),
            },
            position: 0,
            header,
        };
        writer.count(0..1)?;
        Ok(writer)
    }

    /// Cluster size, the unit of appended data.
    pub fn cluster_bytes(&self) -> u64 {
        self.header.geometry.cluster_bytes()
    }

    /// Size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.header.size_bytes
    }

    /// Whether ranges that are left out read from a backing file.
    pub(crate) fn has_backing(&self) -> bool {
        self.header.backing_name.is_some()
    }

    /// The compression for [`append_compressed`](Self::append_compressed).
    pub fn compression(&self) -> Compression {
        self.header.compression
    }

    /// Stores whole clusters at `offset` of the disk; only the last one of the disk may be shorter.
    ///
    /// `offset` must be a multiple of the cluster size, and not before the end of earlier data.
    pub fn append(&mut self, data: &[u8], offset: u64) -> Result<()> {
        for PlacedWrite { bytes, file_offset } in self.place(data.len(), offset)? {
            self.data_file().write_at(&data[bytes], file_offset)?;
        }
        Ok(())
    }

    /// Allocates space for the clusters that [`append`](Self::append) would store. The caller writes them, at any time
    /// and in any order before [`finish`](Self::finish).
    pub(crate) fn place(&mut self, length: usize, offset: u64) -> Result<Vec<PlacedWrite>> {
        let clusters = self.advance(offset, length as u64)?;
        if self.data_file.is_some() {
            self.set_entries(clusters, |cluster, geometry| {
                L2Entry::data(geometry.offset_of(cluster), geometry)
            })?;
            return Ok(vec![PlacedWrite {
                bytes: 0..length,
                file_offset: offset,
            }]);
        }
        let geometry = self.header.geometry;
        let mut placed = Vec::new();
        let mut done = 0;
        let mut cluster = clusters.start;
        while cluster < clusters.end {
            // The previous L2 table is stored first: otherwise it would split this range.
            let entries = geometry.l2_entries();
            let end = clusters.end.min((cluster / entries + 1) * entries);
            self.begin_table(cluster / entries)?;
            let host = self.take(end - cluster)?;
            let piece = to_usize(geometry.offset_of(end - cluster)).min(length - done);
            self.stream.leave_out(piece)?;
            self.stream.align(geometry)?;
            placed.push(PlacedWrite {
                bytes: done..done + piece,
                file_offset: host,
            });
            let first = cluster;
            self.set_entries(first..end, |cluster, geometry| {
                L2Entry::data(host + geometry.offset_of(cluster - first), geometry)
            })?;
            done += piece;
            cluster = end;
        }
        Ok(placed)
    }

    /// The file for [placed](Self::place) data.
    pub(crate) fn data_file(&self) -> &Arc<dyn ImageFile> {
        self.data_file.as_ref().unwrap_or(&self.stream.file)
    }

    /// Stores one cluster that a [`ClusterCompressor`](crate::ClusterCompressor) made smaller.
    pub fn append_compressed(&mut self, compressed: &[u8], offset: u64) -> Result<()> {
        let geometry = self.header.geometry;
        if self.data_file.is_some() || compressed.is_empty() || compressed.len() as u64 >= geometry.cluster_bytes() {
            return Err(Error::InvalidOption {
                option: "compressed cluster",
                detail: format!("{} bytes do not fit into a compressed cluster", compressed.len()),
            });
        }
        let held = geometry
            .cluster_bytes()
            .min(self.header.size_bytes.saturating_sub(offset));
        let clusters = self.advance(offset, held)?;
        self.begin_table(clusters.start / geometry.l2_entries())?;
        let host = self.stream.end();
        let uses = host / geometry.cluster_bytes()..geometry.clusters_for(host + compressed.len() as u64);
        // The refcount width limits how many compressed clusters share a host cluster.
        let is_crowded = !geometry.is_aligned(host) && self.refcounts.get(uses.start) >= geometry.refcount_max();
        if is_crowded || self.refcounts.is_full(geometry.cluster_of(host)) {
            self.stream.align(geometry)?;
            self.place_block()?;
        }
        let host = self.stream.end();
        if host + compressed.len() as u64 >= compressed_offset_end(geometry) {
            return Err(self.too_large());
        }
        self.stream.append(compressed)?;
        let entry = L2Entry::compressed(host, compressed.len() as u64, geometry);
        let sectors = host & !511..(host + compressed.len() as u64).next_multiple_of(512);
        self.count(geometry.cluster_of(sectors.start)..geometry.clusters_for(sectors.end))?;
        self.set_entries(clusters, |_, _| entry)
    }

    /// Makes whole clusters read as zero instead of from the backing file.
    pub fn append_zeroes(&mut self, range: Range<u64>) -> Result<()> {
        if !self.header.has_zero_clusters() {
            return Err(Error::InvalidOption {
                option: "version",
                detail: "version 2 does not support zero clusters".to_owned(),
            });
        }
        if self.header.is_data_file_raw() {
            // The file reads as zero there; the gap is filled before the next data, or at the end.
            return Ok(());
        }
        let clusters = self.advance(range.start, range.end.saturating_sub(range.start))?;
        self.set_entries(clusters, |_, geometry| L2Entry::zero(geometry))
    }

    /// Stores the tables, then the header; the image is complete and durable when this returns.
    pub fn finish(mut self) -> Result<()> {
        let geometry = self.header.geometry;
        self.fill_gap(self.header.size_bytes)?;
        self.end_table()?;
        self.stream.align(geometry)?;
        self.place_block()?;
        self.header.l1.offset = self.stream.end();
        self.stream.append(&from_words(&self.l1))?;
        self.stream.align(geometry)?;
        self.finish_refcounts(geometry.cluster_of(self.header.l1.offset))?;
        self.stream.finish()?;
        if let Some(data_file) = &self.data_file {
            data_file.sync()?;
        }
        self.stream.file.sync()?;
        self.stream.file.write_at(&self.header.encode()?, 0)?;
        self.stream.file.sync()?;
        match &self.path {
            Some(path) => HostFile::sync_directory(path),
            None => Ok(()),
        }
    }

    /// Checks that `length` bytes at `offset` are whole clusters after the earlier ones; returns the clusters.
    fn advance(&mut self, offset: u64, length: u64) -> Result<Range<u64>> {
        let geometry = self.header.geometry;
        let end = offset.saturating_add(length);
        let is_whole = geometry.is_aligned(offset) && (geometry.is_aligned(length) || end == self.header.size_bytes);
        if !is_whole || offset < self.position || end > self.header.size_bytes {
            return Err(Error::InvalidOption {
                option: "bulk write",
                detail: format!(
                    "{length} bytes at {offset} are not whole clusters between {} and {}",
                    self.position, self.header.size_bytes
                ),
            });
        }
        self.fill_gap(offset)?;
        self.position = end;
        Ok(geometry.cluster_of(offset)..geometry.clusters_for(end))
    }

    fn set_entries(&mut self, clusters: Range<u64>, entry: impl Fn(u64, Qcow2Geometry) -> L2Entry) -> Result<()> {
        let geometry = self.header.geometry;
        for cluster in clusters {
            self.begin_table(cluster / geometry.l2_entries())?;
            let (_, table) = self.current.as_mut().expect("just begun");
            set_entry_in(
                table,
                cluster % geometry.l2_entries(),
                entry(cluster, geometry),
                geometry,
            );
        }
        Ok(())
    }

    /// Starts L2 table `index`, after storing the previous one.
    fn begin_table(&mut self, index: u64) -> Result<()> {
        if self.current.as_ref().is_some_and(|(current, _)| *current == index) {
            return Ok(());
        }
        self.end_table()?;
        let words = to_usize(self.header.geometry.cluster_bytes() / POINTER_BYTES);
        self.current = Some((index, vec![0; words]));
        Ok(())
    }

    fn end_table(&mut self) -> Result<()> {
        if let Some((index, table)) = self.current.take() {
            self.stream.align(self.header.geometry)?;
            let offset = self.take(1)?;
            self.stream.append(&from_words(&table))?;
            self.l1[to_usize(index)] = offset | super::entry::COPIED;
        }
        Ok(())
    }

    /// With a raw data file, every entry must refer to it, also those of ranges that were left out.
    fn fill_gap(&mut self, end: u64) -> Result<()> {
        if !self.header.is_data_file_raw() {
            return Ok(());
        }
        // The data file is as long as the disk, and reads as zero there.
        let geometry = self.header.geometry;
        let clusters = geometry.clusters_for(self.position)..geometry.clusters_for(end);
        self.set_entries(clusters, |cluster, geometry| {
            L2Entry::data(geometry.offset_of(cluster), geometry)
        })
    }

    /// Appends `clusters` clusters, at a cluster boundary; returns their offset.
    fn take(&mut self, clusters: u64) -> Result<u64> {
        self.stream.align(self.header.geometry)?;
        self.place_block()?;
        let offset = self.stream.end();
        let first = self.header.geometry.cluster_of(offset);
        // At most as many as an L2 table maps, which a refcount block can count.
        self.count(first..first + clusters)?;
        Ok(offset)
    }

    fn count(&mut self, clusters: Range<u64>) -> Result<()> {
        self.refcounts.add(clusters);
        if self.header.geometry.offset_of(self.refcounts.offsets.len() as u64 / 8) > REFCOUNT_TABLE_BYTES_MAX {
            return Err(self.too_large());
        }
        Ok(())
    }

    /// Stores the refcount block whose clusters are all before the end.
    fn place_block(&mut self) -> Result<()> {
        let geometry = self.header.geometry;
        while self.refcounts.is_full(geometry.cluster_of(self.stream.end())) {
            let offset = self.stream.end();
            let block = self.refcounts.finish_block(offset);
            self.stream.append(&block)?;
            let cluster = geometry.cluster_of(offset);
            self.refcounts.add(cluster..cluster + 1);
        }
        Ok(())
    }

    /// Stores the last refcount blocks and the refcount table, which count themselves, too.
    ///
    /// Clusters from `first` on have no refcounts yet.
    fn finish_refcounts(&mut self, first: u64) -> Result<()> {
        let geometry = self.header.geometry;
        let entries = geometry.refcount_block_entries();
        let end = geometry.cluster_of(self.stream.end());
        let stored = self.refcounts.offsets.len() as u64;
        let (mut blocks, mut table) = (0, 0);
        loop {
            let blocks_needed = (end + blocks + table).div_ceil(entries) - stored;
            let table_needed = geometry.clusters_for((stored + blocks_needed) * POINTER_BYTES);
            if (blocks_needed, table_needed) == (blocks, table) {
                break;
            }
            (blocks, table) = (blocks_needed.max(blocks), table_needed.max(table));
        }
        if geometry.offset_of(table) > REFCOUNT_TABLE_BYTES_MAX.max(geometry.cluster_bytes()) {
            return Err(self.too_large());
        }
        for number in stored..stored + blocks {
            let uses = first.max(number * entries)..(end + blocks + table).min((number + 1) * entries);
            self.refcounts.add(uses);
            let block = self.refcounts.finish_block(geometry.offset_of(end + number - stored));
            self.stream.append(&block)?;
        }
        self.header.refcount_table_offset = self.stream.end();
        self.header.refcount_table_clusters = table;
        self.stream.append(&from_words(&self.refcounts.offsets))?;
        self.stream.align(geometry)
    }

    fn too_large(&self) -> Error {
        Error::InvalidOption {
            option: "cluster size",
            detail: format!(
                "clusters of {} bytes are too small for the amount of data",
                self.cluster_bytes()
            ),
        }
    }
}

impl AppendedFile {
    fn end(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    fn append(&mut self, data: &[u8]) -> Result<()> {
        self.buffer.extend_from_slice(data);
        if self.buffer.len() >= BUFFER_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Reserves `length` bytes, which the caller writes.
    fn leave_out(&mut self, length: usize) -> Result<()> {
        self.flush()?;
        self.written += length as u64;
        self.grow();
        Ok(())
    }

    /// Pads the current cluster with zeroes.
    fn align(&mut self, geometry: Qcow2Geometry) -> Result<()> {
        let within = geometry.offset_in_cluster(self.end());
        if within > 0 {
            let missing = to_usize(geometry.cluster_bytes() - within);
            self.buffer.resize(self.buffer.len() + missing, 0);
        }
        if self.buffer.len() >= BUFFER_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    fn flush(&mut self) -> Result<()> {
        if !self.buffer.is_empty() {
            let start = self.written;
            self.written += self.buffer.len() as u64;
            self.grow();
            self.file.write_at(&self.buffer, start)?;
            self.buffer.clear();
        }
        Ok(())
    }

    fn grow(&mut self) {
        if self.written > self.length {
            self.length = self.written + self.written.min(GROWTH_BYTES_MAX);
            // This is only an optimization: if the file cannot be that long, the write will fail.
            self.file.set_length(self.length).ok();
        }
    }

    /// Truncates the file to its content.
    fn finish(&mut self) -> Result<()> {
        self.flush()?;
        Ok(self.file.set_length(self.written)?)
    }
}

impl RefcountStream {
    fn entries(&self) -> u64 {
        self.geometry.refcount_block_entries()
    }

    /// The block with the refcount of `cluster`: the current one, or the next one.
    fn slot(&mut self, cluster: u64) -> (&mut Vec<u8>, u64) {
        let entries = self.entries();
        let within = cluster - self.offsets.len() as u64 * entries;
        assert!(within < 2 * entries, "counts two blocks ahead of what is stored");
        if within < entries {
            (&mut self.block, within)
        } else {
            (&mut self.next, within - entries)
        }
    }

    fn add(&mut self, clusters: Range<u64>) {
        let order = self.geometry.refcount_order;
        for cluster in clusters {
            let (block, within) = self.slot(cluster);
            let count = get(block, within, order);
            set(block, within, order, count + 1);
        }
    }

    fn get(&mut self, cluster: u64) -> u64 {
        let order = self.geometry.refcount_order;
        let (block, within) = self.slot(cluster);
        get(block, within, order)
    }

    /// Whether the current block counts no clusters from `end` on.
    fn is_full(&self, end: u64) -> bool {
        end >= (self.offsets.len() as u64 + 1) * self.entries()
    }

    /// Finishes the current block, which is stored at `offset`.
    fn finish_block(&mut self, offset: u64) -> Vec<u8> {
        self.offsets.push(offset);
        let empty = vec![0; self.block.len()];
        std::mem::replace(&mut self.block, std::mem::replace(&mut self.next, empty))
    }
}
