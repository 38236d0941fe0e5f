//! Where chunks of another repository were stored: for repositories with different fingerprint keys.

use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::LruCache;

use crate::format::pack::Location;
use crate::id::PackId;

/// Memory for what is known: about 80 GiB of stored disks.
const MEMORY_BYTES: usize = 32 << 20;
/// What a frame costs beside its chunks.
const FRAME_BYTES: usize = 128;

/// Chunks of a frame there, and where they are here: where each begins there, its length, its place; in their order.
pub(crate) type ChunkPlaces = Vec<(u32, u32, Location)>;

/// What copies from one repository to another learnt on the way, within bounds; so what two machines share is read once.
///
/// It is for one such pair, and for one process: what it says is used only if the pack that it names is still there.
pub struct CopyMemory(Mutex<LruCache<(PackId, u32), Arc<ChunkPlaces>>>);

impl Default for CopyMemory {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(MEMORY_BYTES)))
    }
}

impl CopyMemory {
    /// What is known of a frame there.
    pub(crate) fn places(&self, pack: PackId, frame: u32) -> Option<Arc<ChunkPlaces>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&(pack, frame))
    }

    /// Learns where chunks of a frame are, beside what is known of it.
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

/// The place of the chunk that begins at `start`.
pub(crate) fn location_at(places: &ChunkPlaces, start: u32) -> Option<Location> {
    let index = places.binary_search_by_key(&start, |(start, ..)| *start).ok()?;
    Some(places[index].2)
}
