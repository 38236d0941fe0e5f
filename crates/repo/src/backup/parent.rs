//! Telling what did not change: the prints of the parent's blocks, position by position.

use std::sync::Arc;

use crate::error::Result;
use crate::fingerprint::{BLOCK_BYTES, BlockHash, PRINT_LENGTH, print_of};
use crate::id::PackId;
use crate::map::{LEAF_BYTES, MapReader, Piece, PieceContent};
use crate::pack::Location;
use crate::packs::Packs;

/// Walks the parent's map beside the disk that is backed up.
pub(crate) struct ParentCursor<'a> {
    map: MapReader<'a>,
    packs: &'a Packs,
    leaf: Option<u64>,
    /// The leaf's pieces and where each begins on the disk.
    pieces: Vec<(u64, Piece)>,
    next_piece: usize,
    run: Option<Run>,
    /// Parts of the parent that could not be read, and were treated as changed.
    pub(crate) unreadable_count: u64,
}

/// Blocks of the parent that lie together in one frame.
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

    /// Where the block at `offset` is stored already, if the parent has the same block there in a usable pack.
    ///
    /// Offsets must not go backwards.
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

    fn find_run(&mut self, offset: u64, is_usable: impl Fn(PackId) -> bool) -> Result<Option<Run>> {
        if offset >= self.map.size_bytes() {
            return Ok(None);
        }
        let leaf = offset / LEAF_BYTES;
        if self.leaf != Some(leaf) {
            self.leaf = Some(leaf);
            self.next_piece = 0;
            self.pieces.clear();
            let mut start = leaf * LEAF_BYTES;
            for piece in self.map.leaf(leaf)?.unwrap_or_default() {
                self.pieces.push((start, piece));
                start += piece.length;
            }
        }
        while let Some((start, piece)) = self.pieces.get(self.next_piece)
            && start + piece.length <= offset
        {
            self.next_piece += 1;
        }
        let Some((
            start,
            Piece {
                length,
                content: PieceContent::Data(first),
            },
        )) = self
            .pieces
            .get(self.next_piece)
            .copied()
            .filter(|(start, _)| *start <= offset)
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
        Ok(Some(Run {
            start: offset,
            end: offset + together,
            location,
            prints,
        }))
    }
}
