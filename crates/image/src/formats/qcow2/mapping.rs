//! Maps offsets of the disk by the L1 and L2 tables; caches the latter.

use std::collections::BTreeMap;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::entry::{ClusterKind, DataLocation, L2Entry};
use super::geometry::{OFFSET_MASK, POINTER_BYTES, Qcow2Geometry};
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::to_words;
use crate::model::mapped_extent::{KnownLength, MappedExtent, MappedKind};
use crate::model::qcow2_info::TableLocation;
use crate::model::shared_cache::SharedCache;

pub(crate) type L2Table = Vec<u64>;

/// The tables of one disk state: the active one, or a snapshot's.
pub(crate) struct Mapping {
    pub(crate) image: Arc<str>,
    pub(crate) file: Arc<dyn ImageFile>,
    pub(crate) geometry: Qcow2Geometry,
    pub(crate) place: DataLocation,
    /// The stored L1 entries.
    pub(crate) l1: Vec<u64>,
    /// L2 tables with pending changes, by L1 index.
    pub(crate) changed: BTreeMap<u64, Arc<L2Table>>,
    /// L2 tables that a commit is storing: older than `changed`, newer than the file.
    pub(crate) storing: BTreeMap<u64, Arc<L2Table>>,
    cache: SharedCache<L2Table>,
    file_length: KnownLength,
    zero_clusters: bool,
}

/// The arguments of [`Mapping::load`].
pub(crate) struct MappingParts {
    pub(crate) image: Arc<str>,
    pub(crate) file: Arc<dyn ImageFile>,
    pub(crate) geometry: Qcow2Geometry,
    pub(crate) place: DataLocation,
    pub(crate) version: u32,
    pub(crate) l1: TableLocation,
    pub(crate) cache_bytes: u64,
}

impl Mapping {
    /// Reads the L1 table, whose location was checked by
    /// [`Qcow2Header::check_l1`](super::header::Qcow2Header::check_l1).
    pub(crate) fn load(parts: MappingParts) -> Result<Self> {
        let mut bytes = vec![0; to_usize(parts.l1.entries * POINTER_BYTES)];
        parts.file.read_at(&mut bytes, parts.l1.offset)?;
        Ok(Self {
            image: parts.image,
            file: parts.file,
            geometry: parts.geometry,
            place: parts.place,
            l1: to_words(&bytes),
            changed: BTreeMap::new(),
            storing: BTreeMap::new(),
            cache: SharedCache::new(parts.cache_bytes),
            file_length: KnownLength::default(),
            zero_clusters: parts.version >= 3,
        })
    }

    /// Limits the memory for cached tables, and drops those that are cached.
    pub(crate) fn limit_cache(&mut self, cache_bytes: u64) {
        self.cache = SharedCache::new(cache_bytes);
    }

    /// The L2 table of L1 entry `index`, if there is one.
    pub(crate) fn table(&self, index: u64) -> Result<Option<Arc<L2Table>>> {
        if let Some(table) = self.changed.get(&index).or_else(|| self.storing.get(&index)) {
            return Ok(Some(Arc::clone(table)));
        }
        let offset = self.l1.get(to_usize(index)).map_or(0, |entry| entry & OFFSET_MASK);
        if offset == 0 {
            return Ok(None);
        }
        if let Some(table) = self.cache.get(offset) {
            return Ok(Some(table));
        }
        let table = Arc::new(read_l2(
            &*self.file,
            &self.file_length,
            self.geometry,
            offset,
            &self.image,
        )?);
        self.cache
            .insert(offset, Arc::clone(&table), self.geometry.cluster_bytes());
        Ok(Some(table))
    }

    /// Caches a table that was stored at `offset`.
    pub(crate) fn cache_table(&self, offset: u64, table: Arc<L2Table>) {
        self.cache.insert(offset, table, self.geometry.cluster_bytes());
    }

    /// Drops a cached table whose cluster was freed.
    pub(crate) fn evict(&self, offset: u64) {
        self.cache.remove(offset);
    }

    /// The entry of guest cluster `cluster`.
    pub(crate) fn entry(&self, cluster: u64) -> Result<L2Entry> {
        let entries = self.geometry.l2_entries();
        Ok(self.table(cluster / entries)?.map_or(L2Entry::default(), |table| {
            entry_in(&table, cluster % entries, self.geometry)
        }))
    }

    /// Decodes `entry` of guest cluster `cluster`; fails if it is invalid.
    pub(crate) fn meaning(&self, entry: L2Entry, cluster: u64) -> Result<ClusterKind> {
        let damaged = |detail: String| {
            let at = self.geometry.offset_of(cluster);
            corrupt(&self.image, "l2 entry", 0, format!("{detail} (for disk offset {at})"))
        };
        let meaning = entry.meaning(self.geometry, self.place).map_err(damaged)?;
        if matches!(meaning, ClusterKind::Zero { .. }) && !self.zero_clusters {
            return Err(damaged("zero cluster in a version 2 image".to_owned()));
        }
        match meaning.invalid_host_offset(self.place, self.geometry.offset_of(cluster)) {
            Some(host) => Err(damaged(format!(
                "it refers to {host} of the data file, which belongs to another cluster"
            ))),
            None => Ok(meaning),
        }
    }

    /// The extent that begins at `offset`, at most `length_max` long.
    ///
    /// Adjacent clusters that are also adjacent on the host are one extent.
    pub(crate) fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        let coverage = self.geometry.l2_coverage_bytes();
        let mut current: Option<(u64, Option<Arc<L2Table>>)> = None;
        MappedExtent::of_pieces(length_max, |done| {
            let at = offset + done;
            let index = at / coverage;
            if current.as_ref().is_none_or(|(known, _)| *known != index) {
                current = Some((index, self.table(index)?));
            }
            match &current {
                Some((_, Some(table))) => self.piece(table, at),
                _ => Ok(MappedExtent {
                    length: coverage - at % coverage,
                    kind: MappedKind::Absent,
                }),
            }
        })
    }

    /// The extent at `at` inside its cluster (and subcluster).
    fn piece(&self, table: &L2Table, at: u64) -> Result<MappedExtent> {
        let geometry = self.geometry;
        let cluster = geometry.cluster_of(at);
        let within = geometry.offset_in_cluster(at);
        let rest = geometry.cluster_bytes() - within;
        let entry = entry_in(table, cluster % geometry.l2_entries(), geometry);
        let (length, kind) = match self.meaning(entry, cluster)? {
            ClusterKind::Unallocated => (rest, MappedKind::Absent),
            ClusterKind::Zero { .. } => (rest, MappedKind::Zero),
            ClusterKind::Data { host } => (
                rest,
                MappedKind::Data {
                    host: host.offset + within,
                },
            ),
            ClusterKind::Compressed(compressed) => (rest, MappedKind::Compressed(compressed)),
            ClusterKind::Subclusters { host, allocated, zero } => {
                let size = geometry.subcluster_bytes();
                let bit = 1 << (within / size);
                let kind = match host {
                    Some(host) if allocated & bit != 0 => MappedKind::Data {
                        host: host.offset + within,
                    },
                    _ if zero & bit != 0 => MappedKind::Zero,
                    _ => MappedKind::Absent,
                };
                (size - within % size, kind)
            }
        };
        Ok(MappedExtent { length, kind })
    }
}

/// Entry `index` of an L2 table.
pub(crate) fn entry_in(table: &L2Table, index: u64, geometry: Qcow2Geometry) -> L2Entry {
    let words = geometry.l2_entry_words();
    let at = to_usize(index * words);
    L2Entry {
        word: table[at],
        bitmap: if words == 2 { table[at + 1] } else { 0 },
    }
}

/// Replaces entry `index` of an L2 table.
pub(crate) fn set_entry_in(table: &mut L2Table, index: u64, entry: L2Entry, geometry: Qcow2Geometry) {
    let words = geometry.l2_entry_words();
    let at = to_usize(index * words);
    table[at] = entry.word;
    if words == 2 {
        table[at + 1] = entry.bitmap;
    }
}

/// Reads the L2 table at host `offset`, which must be completely inside the file.
pub(crate) fn read_l2(
    file: &dyn ImageFile,
    file_length: &KnownLength,
    geometry: Qcow2Geometry,
    offset: u64,
    image: &str,
) -> Result<L2Table> {
    let length = geometry.cluster_bytes();
    if geometry.is_aligned(offset) && file_length.held(file, offset, offset.saturating_add(length))? < length {
        return Err(corrupt(image, "l2 table", offset, "past the end of the file"));
    }
    read_l2_as_is(file, file_length, geometry, offset, image)
}

/// Reads the L2 table at host `offset`, which must begin inside the file; entries past the end of the file are zero.
/// For a check, which reports the truncation, and for a repair.
pub(crate) fn read_l2_as_is(
    file: &dyn ImageFile,
    file_length: &KnownLength,
    geometry: Qcow2Geometry,
    offset: u64,
    image: &str,
) -> Result<L2Table> {
    if !geometry.is_aligned(offset) {
        return Err(corrupt(image, "l2 table", offset, "not at the start of a cluster"));
    }
    if !file_length.contains(file, offset)? {
        return Err(corrupt(image, "l2 table", offset, "past the end of the file"));
    }
    let mut bytes = vec![0; to_usize(geometry.cluster_bytes())];
    file.read_at(&mut bytes, offset)?;
    Ok(to_words(&bytes))
}
