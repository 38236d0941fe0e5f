//! Walks a stored disk leaf by leaf, and compares it with its base.

use crate::backup::request::StoredDisk;
use crate::error::Result;
use crate::format::manifest::DiskRecord;
use crate::format::map::{LEAF_BYTES, MapReader, Piece, PieceContent};
use crate::format::pack::Location;
use crate::repository::packs::Packs;

/// A range of a stored disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredExtent {
    /// Bytes, a multiple of the map's unit.
    pub(crate) length: u64,
    pub(crate) content: StoredExtentContent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredExtentContent {
    Zero,
    /// The base has the same location at this offset; a location in the source.
    Same(Location),
    /// Data of the source, at the location in the map: not resolved yet.
    Data(Location),
}

/// Walks the maps of a disk and of its base together.
pub(crate) struct StoredWalk<'a> {
    map: MapReader<'a>,
    base: Option<MapReader<'a>>,
    next_leaf: u64,
}

impl<'a> StoredWalk<'a> {
    pub(crate) fn new(stored: &StoredDisk<'a>) -> Self {
        let packs: &'a Packs = &stored.repository.packs;
        let disk = stored.disk;
        let open = |disk: &DiskRecord| MapReader::new(packs, disk.root, disk.size_bytes, disk.content.unit());
        let base = stored.base.filter(|base| base.content == disk.content);
        Self {
            map: open(disk),
            base: base.map(open),
            next_leaf: 0,
        }
    }

    /// The extents of the next leaf, together with all leaves of zeroes before it; `None` at the end of the
    /// disk.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<StoredExtent>>> {
        let number = self.next_leaf;
        if number >= self.map.leaf_count() {
            return Ok(None);
        }
        let leaf = self.map.next_leaf(number)?.unwrap_or(self.map.leaf_count());
        if leaf > number {
            self.next_leaf = leaf;
            return Ok(Some(vec![StoredExtent {
                length: self.bytes_between(number, leaf),
                content: StoredExtentContent::Zero,
            }]));
        }
        self.next_leaf = number + 1;
        self.leaf(number).map(Some)
    }

    /// Bytes of whole units from leaf `number` to leaf `end`.
    fn bytes_between(&self, number: u64, end: u64) -> u64 {
        let size = self.map.size_bytes().next_multiple_of(self.map.unit().bytes());
        end.saturating_mul(LEAF_BYTES).min(size) - number * LEAF_BYTES
    }

    fn leaf(&mut self, number: u64) -> Result<Vec<StoredExtent>> {
        let ours = self.map.leaf(number)?.unwrap_or_default();
        let Some(base) = self.base.as_mut().filter(|base| number < base.leaf_count()) else {
            return Ok(ours.into_iter().map(|piece| extent(piece, false)).collect());
        };
        // A base that cannot be read shares nothing.
        let theirs = base.leaf(number).unwrap_or_default().unwrap_or_default();
        let mut theirs = theirs.into_iter();
        let mut other = theirs.next();
        let mut extents = Vec::new();
        for mut piece in ours {
            while piece.length > 0 {
                let (length, is_same) = match other {
                    None => (piece.length, false),
                    Some(other) => (piece.length.min(other.length), piece.content == other.content),
                };
                extents.push(extent(piece.part(0, length), is_same));
                other = match other {
                    Some(other) if other.length > length => Some(other.part(length, u64::MAX)),
                    _ => theirs.next(),
                };
                if piece.length == length {
                    break;
                }
                piece = piece.part(length, u64::MAX);
            }
        }
        Ok(extents)
    }
}

fn extent(piece: Piece, is_same: bool) -> StoredExtent {
    let content = match piece.content {
        PieceContent::Zero => StoredExtentContent::Zero,
        PieceContent::Data(location) if is_same => StoredExtentContent::Same(location),
        PieceContent::Data(location) => StoredExtentContent::Data(location),
    };
    StoredExtent {
        length: piece.length,
        content,
    }
}
