//! The locations of copied chunks of another repository, for repositories with different fingerprint keys.

use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::LruCache;

use crate::format::pack::Location;
use crate::id::PackId;

/// Memory limit for known locations: about 80 GiB of stored disks.
const MEMORY_BYTES: usize = 32 << 20;
/// Memory of a frame's entry besides its chunks.
const FRAME_BYTES: usize = 128;

/// Chunks of a frame of the source and their copies: offset in the frame, length, and location in the target; in
/// ascending order.
pub(crate) type ChunkPlaces = Vec<(u32, u32, Location)>;

/// Locations that copies from one repository to another found so far, within a memory limit, so that data shared by two
/// machines is read once.
///
/// It is valid for one pair of repositories in one process; an entry is used only if its pack still exists.
pub struct CopyMemory(Mutex<LruCache<(PackId, u32), Arc<ChunkPlaces>>>);

impl Default for CopyMemory {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(MEMORY_BYTES)))
    }
}

impl CopyMemory {
    /// The known chunks of a frame of the source.
    pub(crate) fn places(&self, pack: PackId, frame: u32) -> Option<Arc<ChunkPlaces>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&(pack, frame))
    }

    /// Adds locations of chunks of a frame to the known ones.
    pub(crate) fn learn(&self, pack: PackId, frame: u32, new: &ChunkPlaces) {
        let mut places = new.clone();
        if let Some(known) = self.places(pack, frame) {
            let is_new = |start: u32| new.iter().any(|(other, ..)| *other == start);
            places.extend(known.iter().filter(|(start, ..)| !is_new(*start)));
        }
        places.sort_unstable_by_key(|(start, ..)| *start);
        let bytes = places.len() * size_of::<(u32, u32, Location)>() + FRAME_BYTES;
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.insert((pack, frame), Arc::new(places), bytes);
    }
}

/// The location of the chunk that begins at `start`.
pub(crate) fn location_at(places: &ChunkPlaces, start: u32) -> Option<Location> {
    let index = places.binary_search_by_key(&start, |(start, ..)| *start).ok()?;
    Some(places[index].2)
}
