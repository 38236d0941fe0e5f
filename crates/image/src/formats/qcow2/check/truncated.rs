//! Finds structures that the end of the file truncates.
//!
//! An interrupted copy or a full file system leaves a file that ends too early, often in the middle of a cluster.
//! Writers store a table in full, and a cluster (or subcluster) up to the end of the disk. Of a compressed cluster
//! they store its bytes, but its entry counts whole sectors: whether bytes are missing shows only when it is
//! decompressed.

use std::collections::HashSet;

use holdfast_block::to_usize;

use super::super::codec::Decoder;
use super::super::entry::{ClusterKind, DataLocation, L2Entry};
use super::super::geometry::POINTER_BYTES;
use super::super::header::Qcow2Header;
use super::{Checker, L2Use, count_uses};
use crate::allocation_table::end_of_block;
use crate::file::ImageFile;
use crate::model::mapped_extent::Compressed;
use crate::{ProblemKind, Result};

/// Limit of the bytes that are decompressed to check whether compressed clusters at the end of the file are complete:
/// the last sector of a consistent image touches a few.
const DECOMPRESSED_BYTES_MAX: u64 = 256 << 20;

/// Data that is missing because the file is too short.
#[derive(Default)]
pub(in crate::formats::qcow2) struct TruncatedContent {
    /// The length that the file needs at least; 0 if no uncompressed data is missing.
    pub(in crate::formats::qcow2) end: u64,
    /// Disk offset of the first truncated structure; none if only snapshots are affected.
    pub(in crate::formats::qcow2) first_disk_offset: Option<u64>,
    /// Truncated compressed clusters: offset of the entry in the file, and offset on the disk.
    pub(in crate::formats::qcow2) compressed: Vec<(u64, Option<u64>)>,
    whole: HashSet<u64>,
    decompressed_bytes: u64,
}

impl TruncatedContent {
    pub(in crate::formats::qcow2) fn is_empty(&self) -> bool {
        self.end == 0 && self.compressed.is_empty()
    }

    fn extend(&mut self, end: u64, disk_offset: Option<u64>) {
        self.end = self.end.max(end);
        self.first_disk_offset = match (self.first_disk_offset, disk_offset) {
            (Some(first), Some(offset)) => Some(first.min(offset)),
            (first, offset) => first.or(offset),
        };
    }
}

/// Whether the file ends before the end of the data that its tables refer to.
pub(crate) fn is_truncated(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<bool> {
    let uses = count_uses(file, header, image)?;
    // References outside the file are damage, too.
    Ok(!uses.truncated.is_empty() || uses.damage_count > 0)
}

impl Checker<'_> {
    /// Checks the end of the L2 table at `offset`, whose start is inside the file.
    pub(super) fn check_table_end(&mut self, offset: u64, used: L2Use) {
        let end = offset + self.geometry.cluster_bytes();
        if end <= self.file_bytes {
            return;
        }
        let disk_offset = used.index * self.geometry.l2_coverage_bytes();
        self.truncated.extend(end, used.is_active.then_some(disk_offset));
        let detail = format!(
            "l2 table at {offset} for disk offset {disk_offset} is cut off: the file ends at {}",
            self.file_bytes
        );
        self.damage(ProblemKind::Structure { detail });
    }

    /// Checks the end of the data of entry `index` in the table at `table_offset`; it maps `disk_offset`.
    pub(super) fn check_data_end(
        &mut self,
        entry: L2Entry,
        table_offset: u64,
        index: u64,
        disk_offset: u64,
        used: L2Use,
    ) -> Result<()> {
        if self.place() == DataLocation::External {
            return Ok(());
        }
        let geometry = self.geometry;
        let shown = used.is_active.then_some(disk_offset);
        let disk_bytes = if used.is_active && used.count == 1 {
            self.header.size_bytes
        } else {
            self.header.size_bytes.max(self.snapshot_disk_bytes)
        };
        let whole = |host| {
            end_of_block(
                host,
                geometry.cluster_of(disk_offset),
                geometry.cluster_bytes(),
                disk_bytes,
            )
        };
        let (host, end) = match self.meaning_of(entry) {
            Ok(ClusterKind::Data { host }) => (host.offset, whole(host.offset)),
            Ok(ClusterKind::Subclusters {
                host: Some(host),
                allocated,
                ..
            }) if allocated != 0 => {
                let held = u64::from(u32::BITS - allocated.leading_zeros()) * geometry.subcluster_bytes();
                (host.offset, whole(host.offset).min(host.offset + held))
            }
            Ok(ClusterKind::Compressed(compressed)) => {
                if disk_offset < disk_bytes && !self.is_compressed_whole(compressed)? {
                    let place = table_offset + index * geometry.l2_entry_words() * POINTER_BYTES;
                    self.truncated.compressed.push((place, shown));
                    self.report_truncated(compressed.offset, disk_offset);
                }
                return Ok(());
            }
            _ => return Ok(()),
        };
        // Data that does not begin inside the file was reported as an invalid pointer.
        if end > self.file_bytes && self.is_inside(&(host..host + geometry.cluster_bytes())) {
            self.truncated.extend(end, shown);
            self.report_truncated(host, disk_offset);
        }
        Ok(())
    }

    fn report_truncated(&mut self, host: u64, disk_offset: u64) {
        let detail = format!("its cluster at {host} is cut off: the file ends at {}", self.file_bytes);
        self.damage(ProblemKind::Entry { disk_offset, detail });
    }

    /// Whether a compressed cluster can be decompressed from its bytes inside the file.
    fn is_compressed_whole(&mut self, compressed: Compressed) -> Result<bool> {
        let sectors = compressed.sectors();
        if sectors.end <= self.file_bytes
            || !self.is_inside(&sectors)
            || self.truncated.whole.contains(&compressed.offset)
        {
            return Ok(true);
        }
        let cluster_bytes = self.geometry.cluster_bytes();
        self.truncated.decompressed_bytes += cluster_bytes;
        let held = self.file_bytes.saturating_sub(compressed.offset);
        if held == 0 || self.truncated.decompressed_bytes > DECOMPRESSED_BYTES_MAX {
            return Ok(false);
        }
        let mut input = vec![0; to_usize(held)];
        self.file.read_at(&mut input, compressed.offset)?;
        let mut cluster = vec![0; to_usize(cluster_bytes)];
        let is_whole = Decoder::new(self.header.compression)
            .decompress(&input, &mut cluster)
            .is_ok();
        if is_whole {
            self.truncated.whole.insert(compressed.offset);
        }
        Ok(is_whole)
    }
}
