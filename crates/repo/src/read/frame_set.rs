//! An exact set of frames and pages, in bounded memory.

use std::collections::{HashMap, HashSet};

use crate::format::map::{PageRef, Unit};
use crate::id::PackId;

/// Frames by pack, one bit each. When the limit is reached, it accepts no further packs, and the caller repeats work
/// on them.
#[derive(Debug)]
pub(crate) struct FrameSet {
    packs: HashMap<PackId, Vec<u64>>,
    bytes: usize,
    bytes_max: usize,
}

/// Memory of a pack besides its bits.
const PACK_BYTES: usize = 2 * size_of::<(PackId, Vec<u64>)>();

impl FrameSet {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            packs: HashMap::new(),
            bytes: 0,
            bytes_max,
        }
    }

    /// Adds a frame; returns false if it was in the set already.
    pub(crate) fn insert(&mut self, pack: PackId, frame: u32) -> bool {
        let (word, bit) = (frame as usize / 64, 1u64 << (frame % 64));
        let known = self.packs.get(&pack).map(Vec::len);
        let growth = match known {
            None => PACK_BYTES + (word + 1) * 8,
            Some(length) => (word + 1).saturating_sub(length) * 8,
        };
        if self.bytes + growth > self.bytes_max {
            return true;
        }
        self.bytes += growth;
        let words = self.packs.entry(pack).or_default();
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        let new = words[word] & bit == 0;
        words[word] |= bit;
        new
    }
}

/// A page and its span: at the end of a disk of another size, the same page describes other data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PageKey {
    pack: PackId,
    frame: u32,
    offset: u32,
    level: u32,
    span_bytes: u64,
    unit_bytes: u64,
}

impl PageKey {
    pub(crate) fn new(page: PageRef, level: u32, span_bytes: u64, unit: Unit) -> Self {
        Self {
            pack: page.location.pack,
            frame: page.location.frame,
            offset: page.location.offset,
            level,
            span_bytes,
            unit_bytes: unit.bytes(),
        }
    }
}

/// Pages whose whole subtree was visited; bounded like [`FrameSet`].
#[derive(Debug, Default)]
pub(crate) struct PageSet {
    pages: HashSet<PageKey>,
}

/// Maximum number of pages: 8 MiB; leaves of 8 TiB of disk.
const PAGE_COUNT_MAX: usize = 1 << 17;

impl PageSet {
    pub(crate) fn contains(&self, page: &PageKey) -> bool {
        self.pages.contains(page)
    }

    pub(crate) fn insert(&mut self, page: PageKey) {
        if self.pages.len() < PAGE_COUNT_MAX {
            self.pages.insert(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FrameSet, PACK_BYTES};
    use crate::id::PackId;

    #[test]
    fn frames_are_new_once_and_forgotten_over_the_bound() {
        let pack = |number: u8| PackId::from_bytes([number; 16]);
        let mut set = FrameSet::new(2 * (PACK_BYTES + 16));
        for number in 0..2 {
            for frame in [0, 63, 64, 127] {
                assert!(set.insert(pack(number), frame));
                assert!(!set.insert(pack(number), frame));
            }
        }
        // If the set is full, every page is reported as new, so nothing is skipped.
        assert!(set.insert(pack(2), 0) && set.insert(pack(2), 0));
        assert!(set.insert(pack(0), 128) && set.insert(pack(0), 128));
        assert!(set.insert(pack(0), 5) && !set.insert(pack(0), 5));
    }
}
