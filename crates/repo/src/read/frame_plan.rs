//! Reads a disk by frame instead of by offset.
//!
//! Restore and verify need every frame of a disk once, in any order of its bytes on the disk. The plan walks the
//! map and returns batches sorted by frame: memory is bounded, and a frame is decoded twice only if its bytes fall into
//! two batches.

use crate::error::Result;
use crate::format::map::{LEAF_BYTES, MapReader, PieceContent};
use crate::format::pack::Location;
use crate::id::PackId;
use crate::repository::packs::Packs;

/// Maximum number of pieces in a batch: 3 MiB of memory; 16 GiB of a disk that was written once, or 256 MiB of a
/// disk in single blocks.
const BATCH_PIECE_COUNT: usize = 1 << 16;

/// Contiguous bytes of a disk in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PlannedPiece {
    pub(crate) pack: PackId,
    pub(crate) frame: u32,
    pub(crate) frame_offset: u32,
    pub(crate) length: u32,
    pub(crate) disk_offset: u64,
}

/// The next part of a disk.
pub(crate) struct PlannedBatch {
    /// Sorted by pack, frame and offset in the frame.
    pub(crate) pieces: Vec<PlannedPiece>,
    /// Zero ranges of the disk: offset and length.
    pub(crate) zeroes: Vec<(u64, u64)>,
}

/// Walks a map in batches.
pub(crate) struct FramePlan<'a> {
    map: MapReader<'a>,
    packs: &'a Packs,
    next_leaf: u64,
    position: u64,
}

impl<'a> FramePlan<'a> {
    pub(crate) fn new(map: MapReader<'a>, packs: &'a Packs) -> Self {
        Self {
            map,
            packs,
            next_leaf: 0,
            position: 0,
        }
    }

    /// The next batch; `None` at the end of the disk.
    pub(crate) fn next(&mut self) -> Result<Option<PlannedBatch>> {
        let size = self.map.size_bytes();
        let mut batch = PlannedBatch {
            pieces: Vec::new(),
            zeroes: Vec::new(),
        };
        while self.position < size && batch.pieces.len() + batch.zeroes.len() < BATCH_PIECE_COUNT {
            let leaf = self.map.next_leaf(self.next_leaf)?;
            let start = leaf.map_or(size, |leaf| leaf * LEAF_BYTES);
            if start > self.position {
                batch.push_zero(self.position, start - self.position);
                self.position = start;
            }
            let Some(leaf) = leaf else { break };
            self.next_leaf = leaf + 1;
            for piece in self.map.leaf(leaf)?.unwrap_or_default() {
                // The last block may extend past the end of the disk.
                let length = piece.length.min(size - self.position);
                match piece.content {
                    PieceContent::Zero => batch.push_zero(self.position, length),
                    PieceContent::Data(location) => {
                        plan_piece(self.packs, location, length, self.position, &mut batch.pieces)?;
                    }
                }
                self.position += length;
            }
        }
        batch.pieces.sort_unstable();
        let is_empty = batch.pieces.is_empty() && batch.zeroes.is_empty();
        Ok((!is_empty).then_some(batch))
    }
}

/// Plans `length` bytes of the disk at `disk_offset`, which are at `location` according to the map.
fn plan_piece(
    packs: &Packs,
    location: Location,
    length: u64,
    disk_offset: u64,
    pieces: &mut Vec<PlannedPiece>,
) -> Result<()> {
    let mut done = 0;
    while done < length {
        let (place, together) = packs.resolve(location.advance(done), length - done)?;
        pieces.push(PlannedPiece {
            pack: place.pack,
            frame: place.frame,
            frame_offset: place.offset,
            length: u32::try_from(together).expect("a piece lies in one frame"),
            disk_offset: disk_offset + done,
        });
        done += together;
    }
    Ok(())
}

/// Plans again pieces that gc has moved meanwhile; sorted like a batch.
pub(crate) fn plan_again(map: &mut MapReader<'_>, packs: &Packs, moved: &[PlannedPiece]) -> Result<Vec<PlannedPiece>> {
    let mut pieces = Vec::new();
    for planned in moved {
        let (start, end) = (planned.disk_offset, planned.disk_offset + u64::from(planned.length));
        let leaf = start / LEAF_BYTES;
        let mut at = leaf * LEAF_BYTES;
        for piece in map.leaf(leaf)?.unwrap_or_default() {
            let (from, to) = (at.max(start), (at + piece.length).min(end));
            if let PieceContent::Data(location) = piece.content
                && from < to
            {
                plan_piece(packs, location.advance(from - at), to - from, from, &mut pieces)?;
            }
            at += piece.length;
        }
    }
    pieces.sort_unstable();
    Ok(pieces)
}

/// The same pieces at their present locations; sorted like a batch.
pub(crate) fn moved_pieces(packs: &Packs, planned: &[PlannedPiece]) -> Result<Vec<PlannedPiece>> {
    let mut pieces = Vec::new();
    for piece in planned {
        let location = Location {
            pack: piece.pack,
            frame: piece.frame,
            offset: piece.frame_offset,
        };
        plan_piece(packs, location, piece.length.into(), piece.disk_offset, &mut pieces)?;
    }
    pieces.sort_unstable();
    Ok(pieces)
}

impl PlannedBatch {
    fn push_zero(&mut self, offset: u64, length: u64) {
        match self.zeroes.last_mut() {
            Some((start, known)) if *start + *known == offset => *known += length,
            _ => self.zeroes.push((offset, length)),
        }
    }
}
