//! The mark phase of gc, and the basis of all statistics.
//!
//! The walk visits every page that any snapshot reaches once, even if many snapshots share it, and records which blocks
//! of which packs are alive. Blocks are recorded exactly for as many packs as the memory bound allows, and by whole
//! frames for the rest, which can only make gc keep more.

use std::collections::{HashMap, HashSet};

use crate::error::Result;
use crate::format::fingerprint::BLOCK_BYTES;
use crate::format::manifest::Manifest;
use crate::format::map::{FANOUT, MapReader, PageRef, PieceContent, height};
use crate::format::pack::Location;
use crate::id::{PackId, SnapshotId};
use crate::repository::packs::Packs;

/// Memory limit of block bitmaps: about 6,000 packs, 300 GiB of repository.
const BITMAP_BYTES_MAX: usize = 24 << 20;

/// Bits per frame: a frame has at most 1024 blocks.
const FRAME_WORD_COUNT: usize = crate::format::codec::FRAME_BYTES_MAX / holdfast_block::to_usize(BLOCK_BYTES) / 64;

type FrameBits = Box<[u64; FRAME_WORD_COUNT]>;

/// The live parts of a pack.
#[derive(Debug, Default)]
pub(crate) struct LivePack {
    /// By frame: its live blocks; `None` if the memory limit was reached, then all count as live.
    frames: HashMap<u32, Option<FrameBits>>,
}

impl LivePack {
    /// Live bytes of frame `frame`, whose length is `raw_length`.
    pub(crate) fn live_bytes(&self, frame: u32, raw_length: u32) -> u64 {
        match self.frames.get(&frame) {
            None => 0,
            Some(None) => raw_length.into(),
            Some(Some(bits)) => {
                let blocks: u32 = bits.iter().map(|word| word.count_ones()).sum();
                (u64::from(blocks) * BLOCK_BYTES).min(raw_length.into())
            }
        }
    }
}

/// Everything that snapshots refer to.
#[derive(Default)]
pub(crate) struct Marks {
    live: HashMap<PackId, LivePack>,
    bitmap_bytes: usize,
    /// Packs whose relocations are still needed.
    pub(crate) relocated: HashSet<PackId>,
    /// Packs that carry the copy of a manifest.
    pub(crate) copies: HashSet<PackId>,
    walker: Walker,
    snapshots: HashSet<SnapshotId>,
}

impl Marks {
    /// Marks everything that `manifest` refers to, unless it was marked before.
    pub(crate) fn snapshot(&mut self, packs: &Packs, manifest: &Manifest) -> Result<()> {
        if !self.snapshots.insert(manifest.id) {
            return Ok(());
        }
        self.live.entry(manifest.copy).or_default();
        self.copies.insert(manifest.copy);
        let mut recorder = LiveRecorder {
            live: &mut self.live,
            bitmap_bytes: &mut self.bitmap_bytes,
        };
        let relocated = &mut self.relocated;
        self.walker.snapshot(packs, manifest, &mut |location, length| {
            for_each_place(packs, location, length, relocated, |place, together| {
                recorder.record(place, together);
            })
        })
    }

    /// Allows all snapshots to be marked again, in addition to existing marks.
    pub(crate) fn revisit_snapshots(&mut self) {
        self.snapshots.clear();
        self.walker = Walker::default();
    }

    /// Marks all live data of `pack` as relocated.
    pub(crate) fn mark_relocated(&mut self, pack: PackId) {
        self.live.remove(&pack);
        self.relocated.insert(pack);
    }

    /// Whether anything refers to `pack`.
    pub(crate) fn is_live(&self, pack: PackId) -> bool {
        self.live.contains_key(&pack)
    }

    /// All packs that anything refers to, in no order.
    pub(crate) fn live_packs(&self) -> impl Iterator<Item = PackId> + '_ {
        self.live.keys().copied()
    }

    /// The live parts of `pack`.
    pub(crate) fn pack(&self, pack: PackId) -> Option<&LivePack> {
        self.live.get(&pack)
    }
}

/// The present locations of the bytes at `location`, piece by piece.
fn for_each_place(
    packs: &Packs,
    location: Location,
    length: u64,
    relocated: &mut HashSet<PackId>,
    mut visit: impl FnMut(Location, u64),
) -> Result<()> {
    let mut done = 0;
    while done < length {
        let from = location.advance(done);
        let (place, together) = packs.resolve_noting(from, length - done, |hop| {
            relocated.insert(hop);
        })?;
        visit(place, together);
        done += together;
    }
    Ok(())
}

struct LiveRecorder<'a> {
    live: &'a mut HashMap<PackId, LivePack>,
    bitmap_bytes: &'a mut usize,
}

impl LiveRecorder<'_> {
    fn record(&mut self, place: Location, length: u64) {
        let pack = self.live.entry(place.pack).or_default();
        let bitmap_bytes = &mut *self.bitmap_bytes;
        let bits = pack.frames.entry(place.frame).or_insert_with(|| {
            let room = *bitmap_bytes < BITMAP_BYTES_MAX;
            room.then(|| {
                *bitmap_bytes += size_of::<[u64; FRAME_WORD_COUNT]>();
                Box::new([0; FRAME_WORD_COUNT])
            })
        });
        if let Some(bits) = bits {
            let first = u64::from(place.offset) / BLOCK_BYTES;
            let end = (u64::from(place.offset) + length)
                .div_ceil(BLOCK_BYTES)
                .min(FRAME_WORD_COUNT as u64 * 64);
            for block in first..end {
                bits[holdfast_block::to_usize(block / 64)] |= 1 << (block % 64);
            }
        }
    }
}

/// Visits what snapshots refer to, each page once.
#[derive(Default)]
struct Walker {
    visited: HashSet<PageRef>,
}

impl Walker {
    /// Calls `visit` with the location of every page and piece that `manifest` refers to and that was not visited
    /// before.
    fn snapshot(
        &mut self,
        packs: &Packs,
        manifest: &Manifest,
        visit: &mut dyn FnMut(Location, u64) -> Result<()>,
    ) -> Result<()> {
        for disk in &manifest.disks {
            if let Some(root) = disk.root {
                let map = MapReader::new(packs, disk.root, disk.size_bytes, disk.content.unit());
                self.map(map, root, visit)?;
            }
        }
        Ok(())
    }

    fn map(
        &mut self,
        mut map: MapReader<'_>,
        root: PageRef,
        visit: &mut dyn FnMut(Location, u64) -> Result<()>,
    ) -> Result<()> {
        let top = height(map.size_bytes());
        // Pages to visit: location, level, and number on that level. Depth first, so at most one page's children per
        // level are pending.
        let mut waiting = vec![(root, top, 0)];
        while let Some((page, level, number)) = waiting.pop() {
            if !self.visited.insert(page) {
                continue;
            }
            visit(page.location, page.length.into())?;
            if level == 0 {
                for piece in map.decode_leaf(page, number)? {
                    if let PieceContent::Data(location) = piece.content {
                        visit(location, piece.length)?;
                    }
                }
                continue;
            }
            let children = map.children(page, level, number, (top - level) as usize)?;
            for (child, child_number) in children.iter().zip(number * FANOUT..) {
                waiting.extend(child.map(|child| (child, level - 1, child_number)));
            }
        }
        Ok(())
    }
}

/// A live range of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LiveRange {
    pub(crate) frame: u32,
    pub(crate) offset: u32,
    pub(crate) length: u32,
}

/// The exact ranges of the `chosen` packs that `snapshots` refer to, sorted; pages are not joined with their
/// neighbours.
pub(crate) fn live_ranges<'a>(
    packs: &Packs,
    snapshots: impl IntoIterator<Item = &'a Manifest>,
    chosen: &HashSet<PackId>,
) -> Result<HashMap<PackId, Vec<LiveRange>>> {
    let mut ranges: HashMap<PackId, Vec<LiveRange>> = HashMap::new();
    let mut walker = Walker::default();
    let mut relocated = HashSet::new();
    for manifest in snapshots {
        walker.snapshot(packs, manifest, &mut |location, length| {
            for_each_place(packs, location, length, &mut relocated, |place, together| {
                if chosen.contains(&place.pack) {
                    let length = u32::try_from(together).expect("a piece lies in one frame");
                    let range = LiveRange {
                        frame: place.frame,
                        offset: place.offset,
                        length,
                    };
                    ranges.entry(place.pack).or_default().push(range);
                }
            })
        })?;
    }
    for ranges in ranges.values_mut() {
        ranges.sort_unstable();
        ranges.dedup();
    }
    Ok(ranges)
}
