//! A writable layer over a read-only device: written data is in a *store*, everything else comes from the *backing*.
//!
//! The store is any device (usually a sparse file) of [`OverlayOptions::store_size_bytes`]. Every cluster of the
//! overlay has a fixed position in the store, and a map contains for each cluster whether it is *absent* (read the
//! backing), *data* (read the store) or *zero*. So space is never allocated explicitly, and cannot be allocated twice;
//! a store that supports holes takes space only for written data. `docs/format/overlay.md` describes the format.
//!
//! Invariants, with the order of writes that ensures them:
//! - The stored map never marks a cluster as *data* before its bytes are durable: [`flush`](BlockDeviceMut::flush)
//!   makes the store durable, then writes the changed map sectors, and makes them durable too.
//! - Clusters are independent of each other, and so are map sectors (each has its own checksum): after a power cut, any
//!   subset of them may have been written.
//! - A cluster that the stored map marks as *data* contains only bytes that were written to it, or zeroes.
//!
//! So after a power cut all flushed data is present, and each sector of 512 bytes that was written later is old or new.

mod commit;
mod header;
mod map;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use crate::device::range_length;
use crate::{BlockDevice, BlockDeviceMut, Error, ExtentKind, ExtentList, FlushRounds, Result, to_usize};

pub use commit::CommitReport;
pub use header::{BackingId, OVERLAY_VERSION, OverlayInfo, OverlayOptions, OverlayState};
use header::{Geometry, Header};
use map::{ClusterState, Map};

/// A device that reads `backing` where nothing was written, and writes to `store`.
#[derive(Debug)]
pub struct OverlayDevice<B, S> {
    backing: B,
    store: S,
    geometry: Geometry,
    backing_id: BackingId,
    state: OverlayState,
    /// Writes of the map, one at a time, so that an older map sector never follows a newer one.
    rounds: FlushRounds,
    // Lock order: allocation, map. The lock of the map is never held during a request to a device.
    /// Held while clusters change their state, so that two writers do not fill one cluster from the backing at the same
    /// time.
    allocation: Mutex<()>,
    map: RwLock<Map>,
}

fn lock(mutex: &Mutex<()>) -> MutexGuard<'_, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: BlockDevice, S: BlockDeviceMut> OverlayDevice<B, S> {
    /// Creates an empty overlay on `store`. The first sector of `store` must be zero, so that an existing overlay is
    /// never overwritten.
    pub fn create(backing: B, store: S, options: OverlayOptions) -> Result<Self> {
        let geometry = Geometry::new(backing.size_bytes(), options.cluster_size_bytes)?;
        geometry.check_store(&store)?;
        header::check_blank(&store)?;
        // The map must be empty before the header makes it valid.
        store.write_zeroes(geometry.map_range())?;
        store.flush()?;
        let header = Header {
            geometry,
            backing_id: options.backing_id,
            state: OverlayState::InUse,
        };
        header.write(&store)?;
        store.flush()?;
        Ok(Self::assemble(backing, store, &header, Map::new(geometry)))
    }

    /// Opens the overlay on `store`, which must have been created for a backing of this size and identity.
    pub fn open(backing: B, store: S, backing_id: BackingId) -> Result<Self> {
        let header = Header::read(&store)?;
        header.geometry.check_store(&store)?;
        header.check_backing(backing.size_bytes(), backing_id)?;
        let map = Map::load(&store, header.geometry, backing_id)?;
        Ok(Self::assemble(backing, store, &header, map))
    }

    fn assemble(backing: B, store: S, header: &Header, map: Map) -> Self {
        Self {
            backing,
            store,
            geometry: header.geometry,
            backing_id: header.backing_id,
            state: header.state,
            rounds: FlushRounds::new(),
            allocation: Mutex::default(),
            map: RwLock::new(map),
        }
    }

    /// The backing device.
    pub fn backing(&self) -> &B {
        &self.backing
    }

    /// Whether a commit was started and not completed. In that case the backing may contain a part of it: commit again.
    pub fn state(&self) -> OverlayState {
        self.state
    }

    /// The state of the cluster at `offset`, and the end of the consecutive clusters in that state, at most `end`.
    fn run(&self, offset: u64, end: u64) -> (ClusterState, u64) {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let (state, cluster_end) = map.run(self.geometry.clusters(&(offset..end)));
        (state, self.geometry.cluster_start(cluster_end).min(end))
    }

    fn set_state(&self, clusters: Range<u64>, state: ClusterState) {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        map.set(clusters, state);
    }

    fn write_in_place(&self, data: &[u8], offset: u64) -> Result<()> {
        self.store.write_at(data, self.geometry.place(offset))
    }

    /// Writes to clusters without data. The rest of each cluster is copied from the backing.
    fn write_first(&self, data: &[u8], offset: u64) -> Result<()> {
        let range = offset..offset + data.len() as u64;
        let clusters = self.geometry.clusters(&range);
        let whole = self.geometry.whole_clusters(&range);
        let inner = self.geometry.bytes(&whole);
        if inner.is_empty() {
            for cluster in clusters.clone() {
                self.fill_cluster(cluster, data, offset)?;
            }
        } else {
            if range.start < inner.start {
                self.fill_cluster(clusters.start, data, offset)?;
            }
            let middle = to_usize(inner.start - offset)..to_usize(inner.end - offset);
            self.write_in_place(&data[middle], inner.start)?;
            if inner.end < range.end {
                self.fill_cluster(clusters.end - 1, data, offset)?;
            }
        }
        // Only now: a flush may write the map at any time, and the map must not refer to data that is not written yet.
        self.set_state(clusters, ClusterState::Data);
        Ok(())
    }

    /// Writes one whole cluster: its present content, overwritten by the part of `data` (at `offset`) that lies in it.
    fn fill_cluster(&self, cluster: u64, data: &[u8], offset: u64) -> Result<()> {
        let bytes = self.geometry.bytes(&(cluster..cluster + 1));
        let mut buffer = vec![0; to_usize(range_length(&bytes))];
        self.read_at(&mut buffer, bytes.start)?;
        let start = bytes.start.max(offset);
        let end = bytes.end.min(offset + data.len() as u64);
        buffer[to_usize(start - bytes.start)..to_usize(end - bytes.start)]
            .copy_from_slice(&data[to_usize(start - offset)..to_usize(end - offset)]);
        self.write_in_place(&buffer, bytes.start)
    }

    /// Zeroes whole clusters and releases their space in the store.
    fn zero_clusters(&self, clusters: Range<u64>) -> Result<()> {
        if clusters.is_empty() {
            return Ok(());
        }
        let place = self.geometry.place_range(&self.geometry.bytes(&clusters));
        self.set_state(clusters, ClusterState::Zero);
        // The stored map may still say data: the cluster then reads as the old bytes or as zero, which are both valid.
        self.store.trim(place)
    }

    /// Zeroes a part of clusters, one run of equal states at a time.
    fn zero_part(&self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let (state, end) = self.run(at, range.end);
            match state {
                ClusterState::Data => self.store.write_zeroes(self.geometry.place_range(&(at..end)))?,
                ClusterState::Zero => {}
                ClusterState::Absent => self.write_first(&vec![0; to_usize(end - at)], at)?,
            }
            at = end;
        }
        Ok(())
    }

    /// Makes the data durable, and then writes the changed map sectors that refer to it.
    fn flush_map(&self) -> Result<()> {
        let changed = {
            let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
            map.take_changed(self.backing_id)
        };
        let written = self.store.flush().and_then(|()| {
            for (sector, bytes) in &changed {
                self.store.write_at(bytes, self.geometry.map_sector_offset(*sector))?;
            }
            if changed.is_empty() { Ok(()) } else { self.store.flush() }
        });
        if written.is_err() {
            let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
            map.mark_changed(changed.into_keys());
        }
        written
    }
}

impl<B: BlockDevice, S: BlockDeviceMut> BlockDevice for OverlayDevice<B, S> {
    fn size_bytes(&self) -> u64 {
        self.geometry.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let end = offset + buffer.len() as u64;
        let mut at = offset;
        while at < end {
            let (state, run_end) = self.run(at, end);
            let piece = &mut buffer[to_usize(at - offset)..to_usize(run_end - offset)];
            match state {
                ClusterState::Absent => self.backing.read_at(piece, at)?,
                ClusterState::Data => self.store.read_at(piece, self.geometry.place(at))?,
                ClusterState::Zero => piece.fill(0),
            }
            at = run_end;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.check_bounds(range.start, range_length(&range))?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        while list.end() < range.end {
            let (state, end) = self.run(list.end(), range.end);
            let kind = match state {
                ClusterState::Absent => ExtentKind::Absent,
                ClusterState::Data => ExtentKind::Data,
                ClusterState::Zero => ExtentKind::Zero,
            };
            if !list.push(end - list.end(), kind) {
                break;
            }
        }
        Ok(list)
    }

    fn block_size_bytes(&self) -> u32 {
        self.geometry.cluster_size_bytes
    }
}

impl<B: BlockDevice, S: BlockDeviceMut> BlockDeviceMut for OverlayDevice<B, S> {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        let end = offset + data.len() as u64;
        if data.is_empty() || self.run(offset, end) == (ClusterState::Data, end) {
            return self.write_in_place(data, offset);
        }
        let _allocation = lock(&self.allocation);
        let mut at = offset;
        while at < end {
            let (state, run_end) = self.run(at, end);
            let piece = &data[to_usize(at - offset)..to_usize(run_end - offset)];
            match state {
                ClusterState::Data => self.write_in_place(piece, at)?,
                ClusterState::Absent | ClusterState::Zero => self.write_first(piece, at)?,
            }
            at = run_end;
        }
        Ok(())
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        if range.is_empty() {
            return Ok(());
        }
        let _allocation = lock(&self.allocation);
        let whole = self.geometry.whole_clusters(&range);
        let inner = self.geometry.bytes(&whole);
        if inner.is_empty() {
            return self.zero_part(range);
        }
        self.zero_part(range.start..inner.start)?;
        self.zero_clusters(whole)?;
        self.zero_part(inner.end..range.end)
    }

    /// Zeroes the whole clusters in `range`, so that the bytes of the backing do not become visible again.
    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        if range.is_empty() {
            return Ok(());
        }
        let _allocation = lock(&self.allocation);
        self.zero_clusters(self.geometry.whole_clusters(&range))
    }

    fn flush(&self) -> Result<()> {
        self.rounds.flush(|| self.flush_map())
    }
}

impl OverlayInfo {
    /// Reads the header of the overlay on `store`, without its backing.
    pub fn read(store: &dyn BlockDevice) -> Result<Self> {
        let header = Header::read(store)?;
        Ok(Self {
            size_bytes: header.geometry.size_bytes,
            cluster_size_bytes: header.geometry.cluster_size_bytes,
            backing_id: header.backing_id,
            state: header.state,
        })
    }
}

fn corrupt(what: &'static str, offset: u64, detail: impl Into<String>) -> Error {
    Error::Corrupt {
        what,
        offset,
        detail: detail.into(),
    }
}
