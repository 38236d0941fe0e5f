//! The header and the geometry of an overlay's store. The layout is in `docs/format/overlay.md`.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::fmt;
use std::ops::Range;

use super::corrupt;
use crate::{BlockDevice, BlockDeviceMut, Error, Record, Result};

/// The version that is written.
pub const OVERLAY_VERSION: u32 = 1;

pub(super) const SECTOR_BYTES: u64 = 512;
/// Number of clusters per map sector.
pub(super) const CLUSTERS_PER_SECTOR: u64 = 2016;
const SECTOR_LENGTH: usize = 512;
/// A page. Regions that are aligned to it never share a page of the store.
const ALIGNMENT_BYTES: u64 = 4096;

const CLUSTER_SIZE_BYTES_MIN: u32 = 512;
const CLUSTER_SIZE_BYTES_MAX: u32 = 1 << 20;
/// Bounds the map to 1 GiB of memory: a fully written overlay of 16 TiB with clusters of 4096 bytes.
const CLUSTER_COUNT_MAX: u64 = 1 << 32;

const MAGIC: [u8; 8] = *b"HFOVERLY";
const VERSION_AT: usize = MAGIC.len();
const STATE_AT: usize = VERSION_AT + 4;
const SIZE_AT: usize = STATE_AT + 4;
const CLUSTER_SIZE_AT: usize = SIZE_AT + 8;
const RESERVED_AT: usize = CLUSTER_SIZE_AT + 4;
const BACKING_ID_AT: usize = RESERVED_AT + 4;
const MAP_OFFSET_AT: usize = BACKING_ID_AT + 16;
const DATA_OFFSET_AT: usize = MAP_OFFSET_AT + 8;
const CRC_AT: usize = DATA_OFFSET_AT + 8;
const _: () = assert!(CRC_AT == 64 && CRC_AT + 4 <= SECTOR_LENGTH);

/// The identity of an overlay's backing, given by the caller: a snapshot's id, a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BackingId(pub [u8; 16]);

impl fmt::Display for BackingId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// Options of a new overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverlayOptions {
    /// Identity of the backing; required again when the overlay is opened.
    pub backing_id: BackingId,
    /// The unit of copying from the backing at the first write: a power of two from 512 bytes to 1 MiB.
    pub cluster_size_bytes: u32,
}

impl OverlayOptions {
    /// Options with clusters of 4096 bytes: most guests write at least that much, so the first write to a cluster
    /// copies nothing.
    pub fn new(backing_id: BackingId) -> Self {
        Self {
            backing_id,
            cluster_size_bytes: 4096,
        }
    }

    /// The size of the store for an overlay over `backing_size_bytes`; a sparse file takes less space.
    pub fn store_size_bytes(&self, backing_size_bytes: u64) -> Result<u64> {
        Ok(Geometry::new(backing_size_bytes, self.cluster_size_bytes)?.store_size_bytes())
    }
}

/// Whether a commit is in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlayState {
    /// The backing is unchanged since the overlay was created or last committed.
    InUse,
    /// A commit was started: the backing may contain a part of it.
    Committing,
}

/// The header of an overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverlayInfo {
    /// Size of the overlay and of its backing.
    pub size_bytes: u64,
    /// Size of one cluster.
    pub cluster_size_bytes: u32,
    /// Identity of the backing.
    pub backing_id: BackingId,
    /// Whether a commit is in progress.
    pub state: OverlayState,
}

/// The layout of the store, computed from the sizes of device and clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) size_bytes: u64,
    pub(super) cluster_size_bytes: u32,
}

impl Geometry {
    pub(super) fn new(size_bytes: u64, cluster_size_bytes: u32) -> Result<Self> {
        let refuse = |detail| {
            Err(Error::Unsupported {
                what: "overlay cluster size",
                detail,
            })
        };
        if !cluster_size_bytes.is_power_of_two()
            || !(CLUSTER_SIZE_BYTES_MIN..=CLUSTER_SIZE_BYTES_MAX).contains(&cluster_size_bytes)
        {
            return refuse(format!(
                "{cluster_size_bytes} bytes is not a power of two from {CLUSTER_SIZE_BYTES_MIN} to {CLUSTER_SIZE_BYTES_MAX}"
            ));
        }
        if size_bytes.div_ceil(cluster_size_bytes.into()) > CLUSTER_COUNT_MAX {
            return refuse(format!(
                "{cluster_size_bytes} bytes is too small for a device of {size_bytes} bytes, choose at least {}",
                size_bytes.div_ceil(CLUSTER_COUNT_MAX).next_power_of_two()
            ));
        }
        Ok(Self {
            size_bytes,
            cluster_size_bytes,
        })
    }

    fn cluster_bytes(&self) -> u64 {
        self.cluster_size_bytes.into()
    }

    pub(super) fn cluster_count(&self) -> u64 {
        self.size_bytes.div_ceil(self.cluster_bytes())
    }

    /// The map, in whole sectors.
    pub(super) fn map_range(&self) -> Range<u64> {
        let sector_count = self.cluster_count().div_ceil(CLUSTERS_PER_SECTOR);
        ALIGNMENT_BYTES..ALIGNMENT_BYTES + sector_count * SECTOR_BYTES
    }

    pub(super) fn map_sector_offset(&self, sector: u64) -> u64 {
        self.map_range().start + sector * SECTOR_BYTES
    }

    pub(super) fn data_offset(&self) -> u64 {
        self.map_range()
            .end
            .next_multiple_of(self.cluster_bytes().max(ALIGNMENT_BYTES))
    }

    pub(super) fn store_size_bytes(&self) -> u64 {
        self.data_offset() + self.size_bytes
    }

    /// The position of the byte at `offset` in the store.
    pub(super) fn place(&self, offset: u64) -> u64 {
        self.data_offset() + offset
    }

    pub(super) fn place_range(&self, range: &Range<u64>) -> Range<u64> {
        self.place(range.start)..self.place(range.end)
    }

    pub(super) fn cluster_start(&self, cluster: u64) -> u64 {
        (cluster * self.cluster_bytes()).min(self.size_bytes)
    }

    /// The bytes of `clusters`, up to the end of the device.
    pub(super) fn bytes(&self, clusters: &Range<u64>) -> Range<u64> {
        self.cluster_start(clusters.start)..self.cluster_start(clusters.end)
    }

    /// The clusters that `range` touches.
    pub(super) fn clusters(&self, range: &Range<u64>) -> Range<u64> {
        range.start / self.cluster_bytes()..range.end.div_ceil(self.cluster_bytes())
    }

    /// The clusters that lie entirely in `range`. The last cluster of the device may be shorter, and ends with the
    /// device.
    pub(super) fn whole_clusters(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start.div_ceil(self.cluster_bytes());
        let end = if range.end == self.size_bytes {
            self.cluster_count()
        } else {
            range.end / self.cluster_bytes()
        };
        start..end.max(start)
    }

    pub(super) fn check_store(&self, store: &dyn BlockDevice) -> Result<()> {
        let (actual, expected) = (store.size_bytes(), self.store_size_bytes());
        if actual < expected {
            return Err(corrupt(
                "overlay",
                actual,
                format!("the store has {actual} bytes, at least {expected} are needed"),
            ));
        }
        Ok(())
    }
}

/// The validated header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) geometry: Geometry,
    pub(super) backing_id: BackingId,
    pub(super) state: OverlayState,
}

impl Header {
    fn encode(&self) -> [u8; SECTOR_LENGTH] {
        let mut bytes = [0; SECTOR_LENGTH];
        let state: u32 = match self.state {
            OverlayState::InUse => 1,
            OverlayState::Committing => 2,
        };
        bytes[..VERSION_AT].copy_from_slice(&MAGIC);
        bytes[VERSION_AT..STATE_AT].copy_from_slice(&OVERLAY_VERSION.to_le_bytes());
        bytes[STATE_AT..SIZE_AT].copy_from_slice(&state.to_le_bytes());
        bytes[SIZE_AT..CLUSTER_SIZE_AT].copy_from_slice(&self.geometry.size_bytes.to_le_bytes());
        bytes[CLUSTER_SIZE_AT..RESERVED_AT].copy_from_slice(&self.geometry.cluster_size_bytes.to_le_bytes());
        bytes[BACKING_ID_AT..MAP_OFFSET_AT].copy_from_slice(&self.backing_id.0);
        bytes[MAP_OFFSET_AT..DATA_OFFSET_AT].copy_from_slice(&self.geometry.map_range().start.to_le_bytes());
        bytes[DATA_OFFSET_AT..CRC_AT].copy_from_slice(&self.geometry.data_offset().to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Writes the header: one sector, which is written atomically.
    pub(super) fn write(&self, store: &dyn BlockDeviceMut) -> Result<()> {
        store.write_at(&self.encode(), 0)
    }

    pub(super) fn read(store: &dyn BlockDevice) -> Result<Self> {
        if store.size_bytes() < SECTOR_BYTES {
            return Err(corrupt("overlay header", 0, "the store is smaller than a header"));
        }
        let mut bytes = [0; SECTOR_LENGTH];
        store.read_at(&mut bytes, 0)?;
        Self::decode(&bytes)
    }

    fn decode(bytes: &[u8; SECTOR_LENGTH]) -> Result<Self> {
        let fields = Record::new(bytes);
        let wrong = |at: usize, detail: &str| corrupt("overlay header", at as u64, detail);
        if bytes[..VERSION_AT] != MAGIC {
            return Err(wrong(0, "it does not begin with HFOVERLY"));
        }
        if fields.le_u32::<VERSION_AT>() != OVERLAY_VERSION {
            return Err(Error::Unsupported {
                what: "overlay",
                detail: format!(
                    "it has version {}, this program reads version {OVERLAY_VERSION}",
                    fields.le_u32::<VERSION_AT>()
                ),
            });
        }
        if crc32c::crc32c(&bytes[..CRC_AT]) != fields.le_u32::<CRC_AT>() {
            return Err(wrong(CRC_AT, "its checksum is wrong"));
        }
        let state = match fields.le_u32::<STATE_AT>() {
            1 => OverlayState::InUse,
            2 => OverlayState::Committing,
            _ => return Err(wrong(STATE_AT, "there is no such state")),
        };
        let geometry = Geometry::new(fields.le_u64::<SIZE_AT>(), fields.le_u32::<CLUSTER_SIZE_AT>())?;
        if geometry.data_offset().checked_add(geometry.size_bytes).is_none() {
            return Err(wrong(SIZE_AT, "no store can be that large"));
        }
        if fields.le_u64::<MAP_OFFSET_AT>() != geometry.map_range().start
            || fields.le_u64::<DATA_OFFSET_AT>() != geometry.data_offset()
        {
            return Err(wrong(MAP_OFFSET_AT, "map and data are not where they should be"));
        }
        Ok(Self {
            geometry,
            backing_id: BackingId(*fields.field::<BACKING_ID_AT, 16>()),
            state,
        })
    }

    pub(super) fn check_backing(&self, size_bytes: u64, backing_id: BackingId) -> Result<()> {
        if size_bytes == self.geometry.size_bytes && backing_id == self.backing_id {
            return Ok(());
        }
        let describe = |id: BackingId, size: u64| format!("{id} ({size} bytes)");
        Err(Error::WrongBacking {
            expected: describe(self.backing_id, self.geometry.size_bytes),
            actual: describe(backing_id, size_bytes),
        })
    }
}

/// Refuses a store whose first sector is not zero.
pub(super) fn check_blank(store: &dyn BlockDevice) -> Result<()> {
    let mut bytes = [0; SECTOR_LENGTH];
    store.read_at(&mut bytes, 0)?;
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    let content = if bytes[..VERSION_AT] == MAGIC {
        "an overlay"
    } else {
        "something"
    };
    Err(Error::Unsupported {
        what: "making an overlay here",
        detail: format!("the store already holds {content}"),
    })
}
