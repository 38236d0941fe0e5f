//! The memory of a guest, which its front end shares with the server.
//!
//! Ranges of it come from the guest, so every access checks them. The guest may change the memory at any time: what is
//! checked is copied first.

use std::fs::File;
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::SealFlags;
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::chain::{Segment, part};

/// The maximum number of regions: QEMU has one per bank of memory, and one per hot-plugged module.
pub(super) const REGION_COUNT_MAX: usize = 256;

/// Memory outside the regions was accessed, or cannot be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoMemory(pub(super) &'static str);

/// The addresses of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RegionPlace {
    pub(super) guest_address: u64,
    pub(super) size_bytes: u64,
    /// The address in the process of the front end: it uses such addresses for rings.
    pub(super) user_address: u64,
    /// Where the region begins in its file.
    pub(super) file_offset: u64,
}

#[derive(Clone)]
struct Region {
    place: RegionPlace,
    mapping: Arc<GuestRegionMmap>,
}

/// The mapped memory of a guest.
#[derive(Clone, Default)]
pub(super) struct GuestMap {
    regions: Vec<Region>,
    memory: GuestMemoryMmap,
}

/// The memory of a guest, which can be replaced while requests use the old one.
#[derive(Default)]
pub(super) struct SharedMemory(RwLock<Arc<GuestMap>>);

impl SharedMemory {
    pub(super) fn get(&self) -> Arc<GuestMap> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set(&self, map: GuestMap) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(map);
    }
}

/// Whether a file can get shorter while it is mapped. Then an access ends the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MemorySeal {
    Sealed,
    Unsealed,
}

/// Whether a front end has sealed its file of memory against truncation, as QEMU does by default.
pub(super) fn seal_of(file: &File) -> MemorySeal {
    match rustix::fs::fcntl_get_seals(file) {
        Ok(seals) if seals.contains(SealFlags::SHRINK) => MemorySeal::Sealed,
        _ => MemorySeal::Unsealed,
    }
}

/// Maps a part of a file, which must exist: an access past the end of a file ends the process.
pub(super) fn map_file(file: File, offset: u64, size_bytes: u64) -> Result<MmapRegion, NoMemory> {
    let end = offset
        .checked_add(size_bytes)
        .ok_or(NoMemory("a region is too large"))?;
    let metadata = file.metadata().map_err(|_| NoMemory("a file of memory has no size"))?;
    if !metadata.is_file() || metadata.len() < end || size_bytes == 0 {
        return Err(NoMemory("a region is outside its file"));
    }
    let size = holdfast_block::to_usize(size_bytes);
    MmapRegion::from_file(FileOffset::new(file, offset), size).map_err(|_| NoMemory("a region cannot be mapped"))
}

impl GuestMap {
    /// Adds a region.
    pub(super) fn with(&self, place: RegionPlace, file: File) -> Result<Self, NoMemory> {
        if self.regions.len() >= REGION_COUNT_MAX {
            return Err(NoMemory("too many regions"));
        }
        let is_addressable = place.guest_address.checked_add(place.size_bytes).is_some()
            && place.user_address.checked_add(place.size_bytes).is_some();
        if !is_addressable {
            return Err(NoMemory("a region is too large"));
        }
        let mapped = map_file(file, place.file_offset, place.size_bytes)?;
        let mapping = GuestRegionMmap::new(mapped, GuestAddress(place.guest_address));
        let mapping = mapping.ok_or(NoMemory("a region is too large"))?;
        let mut regions = self.regions.clone();
        regions.push(Region {
            place,
            mapping: Arc::new(mapping),
        });
        Self::of(regions)
    }

    /// Removes the region at these addresses.
    pub(super) fn without(&self, place: RegionPlace) -> Result<Self, NoMemory> {
        let is_it = |region: &Region| {
            region.place.guest_address == place.guest_address
                && region.place.user_address == place.user_address
                && region.place.size_bytes == place.size_bytes
        };
        let mut regions = self.regions.clone();
        let index = regions.iter().position(is_it).ok_or(NoMemory("no such region"))?;
        regions.remove(index);
        Self::of(regions)
    }

    fn of(mut regions: Vec<Region>) -> Result<Self, NoMemory> {
        if regions.is_empty() {
            return Ok(Self::default());
        }
        regions.sort_by_key(|region| region.place.guest_address);
        let mappings = regions.iter().map(|region| Arc::clone(&region.mapping)).collect();
        let memory = GuestMemoryMmap::from_arc_regions(mappings).map_err(|_| NoMemory("regions overlap"))?;
        Ok(Self { regions, memory })
    }

    pub(super) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// The guest's address of an address of the front end.
    pub(super) fn guest_address(&self, user_address: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let place = region.place;
            let offset = user_address.checked_sub(place.user_address)?;
            (offset < place.size_bytes).then(|| place.guest_address.checked_add(offset))?
        })
    }

    /// Copies the bytes of `segments` from `start` on.
    pub(super) fn gather(&self, segments: &[Segment], start: u64, bytes: &mut [u8]) -> Result<(), NoMemory> {
        let mut rest = bytes;
        for segment in part(segments, start, rest.len() as u64) {
            let (piece, after) = rest
                .split_at_mut_checked(segment.length as usize)
                .ok_or(NoMemory("segments are too long"))?;
            self.memory
                .read_slice(piece, GuestAddress(segment.address))
                .map_err(|_| NoMemory("a segment is outside the memory of the guest"))?;
            rest = after;
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(NoMemory("segments are too short"))
        }
    }

    /// Copies `bytes` into `segments` from `start` on.
    pub(super) fn scatter(&self, segments: &[Segment], start: u64, bytes: &[u8]) -> Result<(), NoMemory> {
        let mut rest = bytes;
        for segment in part(segments, start, rest.len() as u64) {
            let (piece, after) = rest
                .split_at_checked(segment.length as usize)
                .ok_or(NoMemory("segments are too long"))?;
            self.memory
                .write_slice(piece, GuestAddress(segment.address))
                .map_err(|_| NoMemory("a segment is outside the memory of the guest"))?;
            rest = after;
        }
        if rest.is_empty() {
            Ok(())
        } else {
            Err(NoMemory("segments are too short"))
        }
    }
}
