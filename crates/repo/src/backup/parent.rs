//! Detects unchanged blocks: compares with the prints of the parent's blocks, position by position.

use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::format::fingerprint::{BLOCK_BYTES, BlockHash, PRINT_LENGTH, print_of};
use crate::format::map::{LEAF_BYTES, MapReader, PageRef, Piece, PieceContent, Unit};
use crate::format::pack::Location;
use crate::id::PackId;
use crate::repository::packs::Packs;

/// The map of the parent's disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParentMap {
    pub(crate) root: Option<PageRef>,
    pub(crate) size_bytes: u64,
}

impl ParentMap {
    pub(crate) fn reader(self, packs: &Packs, unit: Unit) -> MapReader<'_> {
        MapReader::new(packs, self.root, self.size_bytes, unit)
    }
}

/// Walks the parent's map in parallel with the disk that is backed up.
pub(crate) struct ParentCursor<'a> {
    map: MapReader<'a>,
    packs: &'a Packs,
    leaf: Option<LastLeaf>,
    /// The leaf's pieces, each with its offset on the disk.
    pieces: Vec<(u64, Piece)>,
    next_piece: usize,
    run: Option<Run>,
    /// Parts of the parent that could not be read, and were treated as changed.
    pub(crate) unreadable_count: u64,
}

/// The leaf of the map that was read last.
#[derive(Debug, Clone, Copy)]
struct LastLeaf {
    number: u64,
    /// The leaf could not be read: its content is unknown, and it is not read again.
    is_lost: bool,
}

/// The mapping of a block.
enum MappedBlock {
    /// It is in this piece, which begins at this offset.
    Piece(u64, Piece),
    /// Zeroes up to this offset.
    Zero(u64),
    /// The map is unreadable from here up to this offset.
    Lost(u64),
}

/// The content of the parent at an offset, with its length in bytes, a multiple of the block size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParentExtent {
    /// Zeroes.
    Zero(u64),
    /// Stored data, all of it in one frame.
    Data(Location, u64),
    /// No data, or no usable data.
    Unknown(u64),
}

/// Adjacent blocks of the parent in one frame.
struct Run {
    start: u64,
    end: u64,
    location: Location,
    prints: Arc<Vec<u8>>,
}

impl<'a> ParentCursor<'a> {
    pub(crate) fn new(map: MapReader<'a>, packs: &'a Packs) -> Self {
        Self {
            map,
            packs,
            leaf: None,
            pieces: Vec::new(),
            next_piece: 0,
            run: None,
            unreadable_count: 0,
        }
    }

    /// The stored location of the block at `offset`, if the parent has the same block there in a usable pack.
    ///
    /// Offsets must be ascending.
    pub(crate) fn unchanged(
        &mut self,
        offset: u64,
        hash: &BlockHash,
        is_usable: impl Fn(PackId) -> bool,
    ) -> Option<Location> {
        if self.run.as_ref().is_none_or(|run| offset >= run.end) {
            self.run = self.find_run(offset, &is_usable).unwrap_or_else(|_| {
                self.unreadable_count += 1;
                None
            });
        }
        let run = self.run.as_ref().filter(|run| run.start <= offset)?;
        let location = run.location.advance(offset - run.start);
        let block = holdfast_block::to_usize(u64::from(location.offset) / BLOCK_BYTES);
        let print = run.prints.get(block * PRINT_LENGTH..(block + 1) * PRINT_LENGTH)?;
        (print == print_of(hash)).then_some(location)
    }

    /// The longest extent of one kind that the parent has from `range.start` on, within `range`.
    ///
    /// Offsets must be ascending and multiples of the block size.
    pub(crate) fn carried(&mut self, range: Range<u64>, is_usable: impl Fn(PackId) -> bool) -> ParentExtent {
        let offset = range.start;
        // The last block is padded with zeroes, in both snapshots.
        let end = range.end.min(self.map.size_bytes().next_multiple_of(BLOCK_BYTES));
        if offset >= end {
            return ParentExtent::Unknown(range.end - offset);
        }
        let (start, piece) = match self.place_at(offset) {
            MappedBlock::Piece(start, piece) => (start, piece),
            MappedBlock::Zero(zero_end) => return ParentExtent::Zero(zero_end.min(end) - offset),
            MappedBlock::Lost(lost_end) => return ParentExtent::Unknown(lost_end.min(end) - offset),
        };
        let left = (start + piece.length).min(end) - offset;
        let PieceContent::Data(first) = piece.content else {
            return ParentExtent::Zero(left);
        };
        match self.packs.resolve(first.advance(offset - start), left) {
            Ok((location, together)) if is_usable(location.pack) => ParentExtent::Data(location, together.min(left)),
            Ok((_, together)) => ParentExtent::Unknown(together.min(left)),
            Err(_) => {
                self.unreadable_count += 1;
                ParentExtent::Unknown(left)
            }
        }
    }

    /// The mapping of the block at `offset`, which lies in the current leaf.
    fn place_at(&mut self, offset: u64) -> MappedBlock {
        let number = offset / LEAF_BYTES;
        let leaf_end = (number + 1).saturating_mul(LEAF_BYTES);
        if self.leaf.is_none_or(|leaf| leaf.number != number) {
            self.next_piece = 0;
            self.pieces.clear();
            let read = self.map.leaf(number);
            self.leaf = Some(LastLeaf {
                number,
                is_lost: read.is_err(),
            });
            if matches!(read, Ok(None)) {
                return MappedBlock::Zero(self.end_of_zeroes(number));
            }
            let mut start = number * LEAF_BYTES;
            for piece in read.ok().flatten().unwrap_or_default() {
                self.pieces.push((start, piece));
                start += piece.length;
            }
            self.unreadable_count += u64::from(self.leaf.is_some_and(|leaf| leaf.is_lost));
        }
        if self.leaf.is_some_and(|leaf| leaf.is_lost) {
            return MappedBlock::Lost(leaf_end);
        }
        while let Some((start, piece)) = self.pieces.get(self.next_piece)
            && start + piece.length <= offset
        {
            self.next_piece += 1;
        }
        match self.pieces.get(self.next_piece) {
            Some((start, piece)) => MappedBlock::Piece(*start, *piece),
            // The pieces of a leaf cover it completely; a leaf without pieces is zero.
            None => MappedBlock::Zero(leaf_end),
        }
    }

    /// The end of the run of leaves without a page that begins with leaf `number`. Subtrees without a page are skipped
    /// as a whole, so that the work does not grow with the size of the disk.
    fn end_of_zeroes(&mut self, number: u64) -> u64 {
        match self.map.next_leaf(number) {
            Ok(Some(next)) => next * LEAF_BYTES,
            Ok(None) => self.map.size_bytes().next_multiple_of(BLOCK_BYTES),
            // An unreadable page is reported when the walk reaches it.
            Err(_) => (number + 1).saturating_mul(LEAF_BYTES),
        }
    }

    fn find_run(&mut self, offset: u64, is_usable: impl Fn(PackId) -> bool) -> Result<Option<Run>> {
        if offset >= self.map.size_bytes() {
            return Ok(None);
        }
        let MappedBlock::Piece(
            start,
            Piece {
                length,
                content: PieceContent::Data(first),
            },
        ) = self.place_at(offset)
        else {
            return Ok(None);
        };
        let (location, together) = self
            .packs
            .resolve(first.advance(offset - start), start + length - offset)?;
        if !is_usable(location.pack) || u64::from(location.offset) % BLOCK_BYTES != 0 {
            return Ok(None);
        }
        let prints = self.packs.prints(location.pack, location.frame)?;
        // Reading may have revealed that the directory of the pack is damaged.
        if !is_usable(location.pack) {
            return Ok(None);
        }
        Ok(Some(Run {
            start: offset,
            end: offset + together,
            location,
            prints,
        }))
    }
}
