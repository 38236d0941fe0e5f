//! Writing a map from front to back, sharing every page that the parent has already.

use super::page::{encode_inner, encode_leaf};
use super::{FANOUT, LEAF_BYTES, MapReader, PageRef, Piece, PieceContent, Unit};
use crate::error::Result;
use crate::id::PackId;

/// Where a map puts its pages.
pub(crate) trait PageSink {
    /// Stores a page.
    fn put_page(&mut self, bytes: &[u8]) -> Result<PageRef>;

    /// Whether pages of `pack` may be referred to by a new snapshot.
    fn is_usable(&self, pack: PackId) -> bool;
}

/// A map that is written.
pub(crate) struct MapWriter {
    unit: Unit,
    /// Bytes described so far.
    position: u64,
    /// The pieces of the leaf that is being gathered, and how many bytes they are.
    pieces: Vec<Piece>,
    leaf_bytes: u64,
    /// Children of the inner page that is being gathered on each level, from the lowest up.
    levels: Vec<Level>,
}

#[derive(Default)]
struct Level {
    children: Vec<Option<PageRef>>,
    /// Inner pages of this level that are complete.
    complete: u64,
}

impl MapWriter {
    pub(crate) fn new(unit: Unit) -> Self {
        Self {
            unit,
            position: 0,
            pieces: Vec::new(),
            leaf_bytes: 0,
            levels: Vec::new(),
        }
    }

    /// Bytes described so far.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Appends a piece, which may reach over any number of leaves.
    pub(crate) fn push(
        &mut self,
        mut piece: Piece,
        parent: &mut Option<MapReader<'_>>,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        while piece.length > 0 {
            let part = piece.part(0, LEAF_BYTES - self.leaf_bytes);
            match self.pieces.last_mut().and_then(|last| Some((last.join(part)?, last))) {
                Some((joined, last)) => *last = joined,
                None => self.pieces.push(part),
            }
            self.leaf_bytes += part.length;
            self.position += part.length;
            if self.leaf_bytes == LEAF_BYTES {
                self.finish_leaf(parent, sink)?;
            }
            if part.length == piece.length {
                break;
            }
            piece = piece.part(part.length, u64::MAX);
        }
        Ok(())
    }

    /// Completes the map; none when all of it is zero.
    pub(crate) fn finish(
        mut self,
        parent: &mut Option<MapReader<'_>>,
        sink: &mut dyn PageSink,
    ) -> Result<Option<PageRef>> {
        if self.leaf_bytes > 0 {
            self.finish_leaf(parent, sink)?;
        }
        let mut level = 0;
        loop {
            match self.levels.get(level) {
                None => return Ok(None),
                Some(top) if level + 1 == self.levels.len() && top.complete == 0 => {
                    return self.finish_inner(level, parent, sink);
                }
                Some(_) => {
                    let page = self.finish_inner(level, parent, sink)?;
                    self.push_child(level + 1, page, parent, sink)?;
                    level += 1;
                }
            }
        }
    }

    fn finish_leaf(&mut self, parent: &mut Option<MapReader<'_>>, sink: &mut dyn PageSink) -> Result<()> {
        let number = (self.position - self.leaf_bytes) / LEAF_BYTES;
        let is_zero = self.pieces.iter().all(|piece| piece.content == PieceContent::Zero);
        let page = if is_zero {
            None
        } else {
            match self.same_leaf(number, parent, sink) {
                Some(page) => Some(page),
                None => Some(sink.put_page(&encode_leaf(self.unit, &self.pieces))?),
            }
        };
        self.pieces.clear();
        self.leaf_bytes = 0;
        self.push_child(0, page, parent, sink)
    }

    /// The parent's leaf, if it says the same. A parent that cannot be read shares nothing.
    fn same_leaf(&self, number: u64, parent: &mut Option<MapReader<'_>>, sink: &dyn PageSink) -> Option<PageRef> {
        let parent = parent.as_mut()?;
        if parent.unit() != self.unit || number >= parent.leaf_count() {
            return None;
        }
        let page = parent.leaf_ref(number).ok()??;
        let usable = sink.is_usable(page.location.pack);
        (usable && parent.decode_leaf(page, number).ok()? == self.pieces).then_some(page)
    }

    /// Hands a page to the level above it. A full page is stored when the next child comes, so a level always has a child.
    fn push_child(
        &mut self,
        level: usize,
        page: Option<PageRef>,
        parent: &mut Option<MapReader<'_>>,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        if self.levels.len() == level {
            self.levels.push(Level::default());
        }
        if self.levels[level].children.len() as u64 == FANOUT {
            let full = self.finish_inner(level, parent, sink)?;
            self.push_child(level + 1, full, parent, sink)?;
        }
        self.levels[level].children.push(page);
        Ok(())
    }

    /// Stores the inner page that is gathered on `level`.
    fn finish_inner(
        &mut self,
        level: usize,
        parent: &mut Option<MapReader<'_>>,
        sink: &mut dyn PageSink,
    ) -> Result<Option<PageRef>> {
        let children = std::mem::take(&mut self.levels[level].children);
        let number = self.levels[level].complete;
        self.levels[level].complete += 1;
        if children.iter().all(Option::is_none) {
            return Ok(None);
        }
        match same_inner(level, number, &children, parent, sink) {
            Some(page) => Ok(Some(page)),
            None => sink.put_page(&encode_inner(&children)).map(Some),
        }
    }
}

/// The parent's inner page at this place, if it has the same children.
fn same_inner(
    level: usize,
    number: u64,
    children: &[Option<PageRef>],
    parent: &mut Option<MapReader<'_>>,
    sink: &dyn PageSink,
) -> Option<PageRef> {
    let parent = parent.as_mut()?;
    let page_level = u32::try_from(level).ok()? + 1;
    let top = super::height(parent.size_bytes());
    let pages_of_level = parent.leaf_count().div_ceil(FANOUT.pow(page_level));
    if page_level > top || number >= pages_of_level {
        return None;
    }
    let page = parent.page_ref(page_level, number).ok()??;
    let depth = (top - page_level) as usize;
    let usable = sink.is_usable(page.location.pack);
    (usable && *parent.children(page, page_level, number, depth).ok()? == *children).then_some(page)
}
