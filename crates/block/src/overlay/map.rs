//! The map of an overlay: which clusters are absent, data or zero.
//!
//! The map has two bits for each cluster, in sectors of 512 bytes with a checksum each. A sector of zeroes means that
//! all its clusters are absent; such sectors take no memory. The layout is in `docs/format/overlay.md`.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::corrupt;
use super::header::{BackingId, CLUSTERS_PER_SECTOR, Geometry, SECTOR_BYTES};
use crate::{BlockDevice, ExtentKind, Record, Result, for_each_extent, to_usize};

const SECTOR_LENGTH: usize = 512;
const RESERVED_AT: usize = 504;
const CRC_AT: usize = RESERVED_AT + 4;
const _: () = assert!(CRC_AT + 4 == SECTOR_LENGTH);

const _: () = assert!(CLUSTERS_PER_SECTOR == RESERVED_AT as u64 * 4);

/// Size of the pieces in which the map is read.
const PIECE_BYTES: u64 = 1 << 18;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClusterState {
    Absent = 0,
    Data = 1,
    Zero = 2,
}

impl ClusterState {
    fn from_bits(bits: u8) -> Option<Self> {
        [Self::Absent, Self::Data, Self::Zero]
            .into_iter()
            .find(|state| *state as u8 == bits)
    }
}

type States = Box<[u8; RESERVED_AT]>;

/// The map in memory. The sectors in `changed` are newer than the stored ones.
#[derive(Debug)]
pub(super) struct Map {
    geometry: Geometry,
    sectors: BTreeMap<u64, States>,
    changed: BTreeSet<u64>,
}

#[expect(clippy::indexing_slicing, reason = "the index is one of a cluster of the sector")]
fn bits_at(states: &[u8; RESERVED_AT], index: u64) -> u8 {
    states[to_usize(index / 4)] >> (index % 4 * 2) & 3
}

impl Map {
    /// A map with only absent clusters.
    pub(super) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            sectors: BTreeMap::new(),
            changed: BTreeSet::new(),
        }
    }

    /// Reads the stored map; holes are skipped.
    pub(super) fn load(store: &dyn BlockDevice, geometry: Geometry, backing_id: BackingId) -> Result<Self> {
        let mut map = Self::new(geometry);
        for_each_extent(store, geometry.map_range(), |extent| {
            if extent.kind == ExtentKind::Zero {
                return Ok(());
            }
            let mut at = extent.offset / SECTOR_BYTES * SECTOR_BYTES;
            let end = extent.end().next_multiple_of(SECTOR_BYTES);
            while at < end {
                let mut bytes = vec![0; to_usize((end - at).min(PIECE_BYTES))];
                store.read_at(&mut bytes, at)?;
                for sector_bytes in bytes.as_chunks().0 {
                    map.load_sector(sector_bytes, at, backing_id)?;
                    at += SECTOR_BYTES;
                }
            }
            Ok(())
        })?;
        Ok(map)
    }

    fn load_sector(&mut self, bytes: &[u8; SECTOR_LENGTH], offset: u64, backing_id: BackingId) -> Result<()> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let wrong = |detail: &str| corrupt("overlay map", offset, detail);
        let sector = (offset - self.geometry.map_range().start) / SECTOR_BYTES;
        let fields = Record::new(bytes);
        let stored = fields.le_u32::<CRC_AT>();
        if stored != checksum(&bytes[..CRC_AT], sector, backing_id) {
            return Err(wrong("the checksum of this sector is wrong"));
        }
        let states: States = Box::new(*fields.field::<0, RESERVED_AT>());
        let first = sector * CLUSTERS_PER_SECTOR;
        for index in 0..CLUSTERS_PER_SECTOR {
            match ClusterState::from_bits(bits_at(&states, index)) {
                None => return Err(wrong("a cluster is in no known state")),
                Some(state) if state != ClusterState::Absent && first + index >= self.geometry.cluster_count() => {
                    return Err(wrong("it has clusters past the end of the device"));
                }
                Some(_) => {}
            }
        }
        self.sectors.insert(sector, states);
        Ok(())
    }

    /// The state of the first of `clusters`, which is not empty, and the first cluster in another state (or the end).
    pub(super) fn run(&self, clusters: Range<u64>) -> (ClusterState, u64) {
        let first = self.state(clusters.start);
        let mut at = clusters.start + 1;
        while at < clusters.end {
            let sector = at / CLUSTERS_PER_SECTOR;
            match self.sectors.get(&sector) {
                None if first == ClusterState::Absent => at = (sector + 1) * CLUSTERS_PER_SECTOR,
                None => return (first, at),
                Some(states) => {
                    let end = clusters.end.min((sector + 1) * CLUSTERS_PER_SECTOR);
                    let base = sector * CLUSTERS_PER_SECTOR;
                    match (at..end).find(|cluster| bits_at(states, cluster - base) != first as u8) {
                        Some(other) => return (first, other),
                        None => at = end,
                    }
                }
            }
        }
        (first, clusters.end)
    }

    fn state(&self, cluster: u64) -> ClusterState {
        let bits = self
            .sectors
            .get(&(cluster / CLUSTERS_PER_SECTOR))
            .map_or(0, |states| bits_at(states, cluster % CLUSTERS_PER_SECTOR));
        ClusterState::from_bits(bits).expect("states were checked when they were loaded")
    }

    #[expect(clippy::indexing_slicing, reason = "the index is one of a cluster of the sector")]
    pub(super) fn set(&mut self, clusters: Range<u64>, state: ClusterState) {
        let mut cluster = clusters.start;
        while cluster < clusters.end {
            let sector = cluster / CLUSTERS_PER_SECTOR;
            let base = sector * CLUSTERS_PER_SECTOR;
            let end = clusters.end.min(base + CLUSTERS_PER_SECTOR);
            let states = self.sectors.entry(sector).or_insert_with(|| Box::new([0; RESERVED_AT]));
            if end - cluster == CLUSTERS_PER_SECTOR {
                states.fill(state as u8 * 0b0101_0101);
            } else {
                for index in cluster - base..end - base {
                    let shift = index % 4 * 2;
                    let byte = &mut states[to_usize(index / 4)];
                    *byte = *byte & !(3 << shift) | (state as u8) << shift;
                }
            }
            self.changed.insert(sector);
            cluster = end;
        }
    }

    /// Returns the stored form of the sectors that changed since the last call. If the caller fails to write them, it
    /// must [mark](Self::mark_changed) them again.
    pub(super) fn take_changed(&mut self, backing_id: BackingId) -> BTreeMap<u64, [u8; SECTOR_LENGTH]> {
        std::mem::take(&mut self.changed)
            .into_iter()
            .map(|sector| (sector, self.encode_sector(sector, backing_id)))
            .collect()
    }

    pub(super) fn mark_changed(&mut self, sectors: impl Iterator<Item = u64>) {
        self.changed.extend(sectors);
    }

    /// Marks all sectors that are not entirely absent, for the case that the stored map is not reliable any more.
    pub(super) fn mark_all_changed(&mut self) {
        self.changed.extend(self.sectors.keys());
    }

    fn encode_sector(&self, sector: u64, backing_id: BackingId) -> [u8; SECTOR_LENGTH] {
        let mut bytes = [0; SECTOR_LENGTH];
        if let Some(states) = self.sectors.get(&sector) {
            bytes[..RESERVED_AT].copy_from_slice(&states[..]);
        }
        let crc = checksum(&bytes[..CRC_AT], sector, backing_id);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

/// Also covers the identity of the backing and the number of the sector, so that a misplaced sector is detected.
fn checksum(bytes: &[u8], sector: u64, backing_id: BackingId) -> u32 {
    let crc = crc32c::crc32c(&backing_id.0);
    let crc = crc32c::crc32c_append(crc, &sector.to_le_bytes());
    crc32c::crc32c_append(crc, bytes)
}
