//! The map of a disk: which bytes of which frames it consists of.
//!
//! A map is a tree of pages with fixed spans. A leaf describes [`LEAF_BYTES`] of the disk as pieces; an inner page
//! points to [`FANOUT`] children. Because spans are fixed, a page is found by position alone, and a page equal to that
//! of the previous snapshot at the same position *is* that page: an unchanged region costs nothing on a disk of any
//! size. A region of zeroes has no page.

mod page;
mod reader;
mod writer;

pub(crate) use page::{PAGE_BYTES_MAX, Piece, PieceContent, Unit};
#[cfg(feature = "hostile")]
pub(crate) use page::{decode_inner, decode_leaf, encode_inner, encode_leaf};
pub(crate) use reader::{MapReader, PageCache};
pub(crate) use writer::{MapWriter, PageSink};

use crate::format::pack::Location;

/// Bytes of a disk that a leaf describes: 64 MiB.
pub(crate) const LEAF_BYTES: u64 = 64 << 20;

/// Children of an inner page.
pub(crate) const FANOUT: u64 = 1024;

/// The location of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(from = "PageRefText", into = "PageRefText")]
pub(crate) struct PageRef {
    pub(crate) location: Location,
    pub(crate) length: u32,
}

/// The JSON form of a page reference.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct PageRefText {
    pack: crate::id::PackId,
    frame: u32,
    offset: u32,
    length: u32,
}

impl From<PageRefText> for PageRef {
    fn from(text: PageRefText) -> Self {
        let location = Location {
            pack: text.pack,
            frame: text.frame,
            offset: text.offset,
        };
        Self {
            location,
            length: text.length,
        }
    }
}

impl From<PageRef> for PageRefText {
    fn from(page: PageRef) -> Self {
        let Location { pack, frame, offset } = page.location;
        Self {
            pack,
            frame,
            offset,
            length: page.length,
        }
    }
}

/// Leaves of a map of `size_bytes`.
pub(crate) fn leaf_count(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(LEAF_BYTES)
}

/// Levels of inner pages above the leaves of a map of `size_bytes`: at least 1.
pub(crate) fn height(size_bytes: u64) -> u32 {
    let mut pages = leaf_count(size_bytes).div_ceil(FANOUT);
    let mut height = 1;
    while pages > 1 {
        pages = pages.div_ceil(FANOUT);
        height += 1;
    }
    height
}

#[cfg(test)]
mod tests {
    use super::{LEAF_BYTES, height};

    #[test]
    fn a_tree_is_as_high_as_its_size_asks() {
        for (size, expected) in [
            (0, 1),
            (1, 1),
            (LEAF_BYTES * 1024, 1),
            (LEAF_BYTES * 1024 + 1, 2),
            (16 << 40, 2),
            (LEAF_BYTES << 20, 2),
            ((LEAF_BYTES << 20) + 1, 3),
            (u64::MAX, 4),
        ] {
            assert_eq!(height(size), expected, "{size}");
        }
    }
}
