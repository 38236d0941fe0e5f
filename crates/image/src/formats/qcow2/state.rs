//! The state of an image that is written.
//!
//! Data is written at once, into clusters without stored references (or in place, if the image does not share the
//! cluster). Metadata stays in memory until a commit stores it, in the order that `commit.rs` describes.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::allocator::Allocator;
use super::check::is_truncated;
use super::entry::{COPIED, ClusterKind, DataLocation, HostCluster, L2Entry, Sharing};
use super::features::{AUTOCLEAR_RAW_DATA_FILE, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DIRTY};
use super::geometry::{OFFSET_MASK, POINTER_BYTES, Qcow2Geometry};
use super::header::{AUTOCLEAR_AT, INCOMPATIBLE_AT};
use super::layer::Qcow2Layer;
use super::mapping::set_entry_in;
use super::refcount::last_used_end;
use super::snapshot;
use crate::error::corrupt;
use crate::{Error, Result};

/// Memory for changed L2 tables before they are stored.
const CHANGED_BYTES_MAX: u64 = 16 << 20;
/// Limit of freed clusters that wait for a commit.
const RELEASE_COUNT_MAX: usize = 1 << 20;

pub(crate) struct Qcow2State {
    pub(crate) layer: Qcow2Layer,
    pub(crate) allocator: Allocator,
    /// Indexes of changed L1 entries.
    pub(super) changed_l1: BTreeSet<u64>,
    /// L1 indexes of changed tables in clusters without stored references.
    pub(super) new_tables: BTreeSet<u64>,
    health: Health,
}

/// Whether the image may still be written.
enum Health {
    Good,
    /// No: after a failed sync or because of damage, the stored state is unknown or untrusted. Holds the reason.
    Poisoned(String),
}

impl Qcow2State {
    pub(crate) fn new(layer: Qcow2Layer) -> Result<Self> {
        let not_writable = |detail: &str| Error::NotWritable {
            image: layer.image.to_string(),
            detail: detail.to_owned(),
        };
        let header = &layer.header;
        if header.incompatible & INCOMPATIBLE_CORRUPT != 0 {
            return Err(not_writable(
                "it is marked as corrupt; repair it with holdfast image check --repair, or restore it",
            ));
        }
        if header.incompatible & INCOMPATIBLE_DIRTY != 0 {
            return Err(not_writable(
                "it was not closed cleanly and its refcounts may be wrong; run holdfast image check --repair",
            ));
        }
        // A write past the end would replace the missing data with zeroes.
        if last_used_end(&*layer.file, header, &layer.image)? > layer.file.length_bytes()?
            && is_truncated(&*layer.file, header, &layer.image)?
        {
            return Err(corrupt(
                &layer.image,
                "file",
                layer.file.length_bytes()?,
                "it was cut off: it ends inside a cluster that is in use",
            ));
        }
        let mut allocator = Allocator::load(&layer.file, header, &layer.image)?;
        let geometry = header.geometry;
        let l1_clusters = |entries: u64| geometry.clusters_for(entries * POINTER_BYTES);
        allocator.protect("l1 table", header.l1.offset, l1_clusters(header.l1.entries))?;
        let (snapshots, table_bytes) = snapshot::load(&*layer.file, header, &layer.image)?;
        allocator.protect(
            "snapshot table",
            header.snapshot_table_offset,
            geometry.clusters_for(table_bytes),
        )?;
        for found in snapshots {
            allocator.protect("snapshot l1 table", found.l1.offset, l1_clusters(found.l1.entries))?;
        }
        for entry in layer
            .mapping
            .l1
            .iter()
            .map(|entry| entry & OFFSET_MASK)
            .filter(|offset| *offset != 0)
        {
            allocator.protect("l2 table", entry, 1)?;
        }
        Ok(Self {
            layer,
            allocator,
            changed_l1: BTreeSet::new(),
            new_tables: BTreeSet::new(),
            health: Health::Good,
        })
    }

    pub(crate) fn geometry(&self) -> Qcow2Geometry {
        self.layer.header.geometry
    }

    pub(crate) fn place(&self) -> DataLocation {
        self.layer.mapping.place
    }

    /// Fails after an error that left the stored state unknown.
    pub(crate) fn check_health(&self) -> Result<()> {
        match &self.health {
            Health::Good => Ok(()),
            Health::Poisoned(reason) => Err(Error::NotWritable {
                image: self.layer.image.to_string(),
                detail: format!("an earlier error leaves its state unknown ({reason}); open it again"),
            }),
        }
    }

    /// Autoclear features that are not maintained here; they must be cleared before the first write.
    pub(crate) fn stale_autoclear(&self) -> u64 {
        self.layer.header.autoclear & !AUTOCLEAR_RAW_DATA_FILE
    }

    /// Clears them durably before the first write, so that other programs do not use outdated bitmaps.
    pub(crate) fn clear_autoclear(&mut self) -> Result<()> {
        let kept = self.layer.header.autoclear & AUTOCLEAR_RAW_DATA_FILE;
        if kept != self.layer.header.autoclear {
            self.layer.file.write_at(&kept.to_be_bytes(), AUTOCLEAR_AT)?;
            self.layer.file.sync().map_err(|error| {
                let error = Error::from(error);
                self.poison(&error);
                error
            })?;
            self.layer.header.autoclear = kept;
        }
        Ok(())
    }

    /// Marks the image as corrupt, to keep other programs from writing, and refuses further writes here.
    pub(crate) fn mark_corrupt(&mut self, reason: &Error) {
        self.health = Health::Poisoned(reason.to_string());
        if self.layer.header.version >= 3 {
            let marked = self.layer.header.incompatible | INCOMPATIBLE_CORRUPT;
            let stored = self.layer.file.write_at(&marked.to_be_bytes(), INCOMPATIBLE_AT);
            // The caller gets the original error, even if the mark could not be written.
            if stored.and_then(|()| self.layer.file.sync()).is_ok() {
                self.layer.header.incompatible = marked;
            }
        }
    }

    /// Refuses all writes from now on, after a failed sync.
    ///
    /// The kernel may have dropped the pages: a second attempt would report success for lost writes.
    pub(crate) fn poison(&mut self, reason: &Error) {
        self.health = Health::Poisoned(reason.to_string());
    }

    /// Whether metadata changes are pending.
    pub(crate) fn is_changed(&self) -> bool {
        !self.layer.mapping.changed.is_empty() || !self.changed_l1.is_empty() || self.allocator.is_changed()
    }

    /// Whether pending changes exceed their memory limit: the caller must commit.
    pub(crate) fn is_large(&self) -> bool {
        let changed_bytes = self.layer.mapping.changed.len() as u64 * self.geometry().cluster_bytes();
        changed_bytes > CHANGED_BYTES_MAX || self.allocator.release_count() > RELEASE_COUNT_MAX
    }

    /// Replaces the entry of guest cluster `cluster`. The host cluster of the old entry (`meaning`) is released unless
    /// it is kept.
    pub(crate) fn replace(
        &mut self,
        cluster: u64,
        old: ClusterKind,
        entry: L2Entry,
        old_host: OldCluster,
    ) -> Result<()> {
        let geometry = self.geometry();
        let entries = geometry.l2_entries();
        let index = cluster / entries;
        self.ensure_table(index)?;
        let table = self.layer.mapping.changed.get_mut(&index).expect("just ensured");
        set_entry_in(Arc::make_mut(table), cluster % entries, entry, geometry);
        if old_host == OldCluster::Released {
            self.release(old);
        }
        Ok(())
    }

    fn release(&mut self, meaning: ClusterKind) {
        match meaning {
            ClusterKind::Compressed(compressed) => {
                self.layer.evict_compressed(compressed.offset);
                let sectors = compressed.sectors();
                let geometry = self.geometry();
                for cluster in geometry.cluster_of(sectors.start)..geometry.clusters_for(sectors.end) {
                    self.allocator.release_later(geometry.offset_of(cluster));
                }
            }
            ClusterKind::Data { host }
            | ClusterKind::Zero { host: Some(host) }
            | ClusterKind::Subclusters { host: Some(host), .. } => {
                if self.place() == DataLocation::Inside {
                    self.allocator.release_later(host.offset);
                }
            }
            ClusterKind::Unallocated
            | ClusterKind::Zero { host: None }
            | ClusterKind::Subclusters { host: None, .. } => {}
        }
    }

    /// Prepares L2 table `index` for changes: loads it, and moves it to a cluster of its own.
    fn ensure_table(&mut self, index: u64) -> Result<()> {
        if self.layer.mapping.changed.contains_key(&index) {
            return Ok(());
        }
        let words = to_usize(self.geometry().cluster_bytes() / POINTER_BYTES);
        let table = self
            .layer
            .mapping
            .table(index)?
            .unwrap_or_else(|| Arc::new(vec![0; words]));
        let stored = self.layer.mapping.l1[to_usize(index)];
        if stored & OFFSET_MASK == 0 || stored & COPIED == 0 {
            let offset = self.allocator.allocate_metadata("l2 table")?;
            if stored & OFFSET_MASK != 0 {
                self.allocator.release_later(stored & OFFSET_MASK);
            }
            self.layer.mapping.l1[to_usize(index)] = offset | COPIED;
            self.changed_l1.insert(index);
            self.new_tables.insert(index);
        }
        self.layer.mapping.changed.insert(index, table);
        Ok(())
    }

    /// The decoded entry of guest cluster `cluster`.
    pub(crate) fn meaning(&self, cluster: u64) -> Result<ClusterKind> {
        self.layer.mapping.meaning(self.layer.mapping.entry(cluster)?, cluster)
    }

    /// The adjacent host bytes that can be overwritten for disk bytes `offset..offset + length`.
    pub(crate) fn in_place(&self, offset: u64, length: u64) -> Result<Option<Range<u64>>> {
        let geometry = self.geometry();
        let mut found: Option<Range<u64>> = None;
        let mut at = offset;
        while at < offset + length {
            let within = geometry.offset_in_cluster(at);
            let piece = (geometry.cluster_bytes() - within).min(offset + length - at);
            let host = match self.meaning(geometry.cluster_of(at))? {
                ClusterKind::Data { host } => host,
                ClusterKind::Subclusters {
                    host: Some(host),
                    allocated,
                    ..
                } if subcluster_mask(geometry, within..within + piece) & !allocated == 0 => host,
                _ => break,
            };
            let start = host.offset + within;
            match &mut found {
                _ if host.sharing == Sharing::Shared => break,
                None => found = Some(start..start + piece),
                Some(range) if range.end == start => range.end += piece,
                Some(_) => break,
            }
            self.check_data_host(host)?;
            at += piece;
        }
        Ok(found)
    }

    /// Fails for data in a metadata cluster, to which only a damaged entry refers.
    pub(crate) fn check_data_host(&self, host: HostCluster) -> Result<()> {
        match self.allocator.metadata_at(host.offset) {
            Some(what) if self.place() == DataLocation::Inside => {
                let detail = format!("its data cluster overlaps a {what}");
                Err(corrupt(&self.layer.image, "l2 entry", host.offset, detail))
            }
            _ => Ok(()),
        }
    }
}

/// What happens to the host cluster of a replaced entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OldCluster {
    /// The new entry uses it, too.
    Kept,
    /// This disk state does not use it any more.
    Released,
}

/// One bit for every subcluster that bytes `within` of a cluster touch.
pub(crate) fn subcluster_mask(geometry: Qcow2Geometry, within: Range<u64>) -> u32 {
    let size = geometry.subcluster_bytes();
    let first = within.start / size;
    let count = within.end.div_ceil(size) - first;
    if count == 0 {
        return 0;
    }
    (u32::MAX >> (32 - count)) << first
}
