//! Writes a map sequentially, sharing all pages that are equal to the parent's.

use holdfast_block::to_usize;

use super::page::{encode_inner, encode_leaf};
use super::{FANOUT, LEAF_BYTES, MapReader, PageRef, Piece, PieceContent, Unit};
use crate::error::Result;
use crate::id::PackId;

/// The destination of a map's pages.
pub(crate) trait PageSink {
    /// Stores a page.
    fn put_page(&mut self, bytes: &[u8]) -> Result<PageRef>;

    /// Whether a new snapshot may refer to pages of `pack`.
    fn is_usable(&self, pack: PackId) -> bool;
}

/// A map that is being written.
pub(crate) struct MapWriter {
    unit: Unit,
    /// Bytes described so far.
    position: u64,
    /// The pieces of the current leaf, and their total bytes.
    pieces: Vec<Piece>,
    leaf_bytes: u64,
    /// Children of the current inner page on each level, from the lowest up.
    levels: Vec<Level>,
}

#[derive(Default)]
struct Level {
    children: Vec<Option<PageRef>>,
    /// Number of completed inner pages of this level.
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

    /// Appends a piece, which may span any number of leaves.
    pub(crate) fn push(
        &mut self,
        mut piece: Piece,
        parent: &mut Option<MapReader<'_>>,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        while piece.length > 0 {
            if self.leaf_bytes == 0 && piece.content == PieceContent::Zero && piece.length >= LEAF_BYTES {
                let skipped = self.skip_zero_leaves(piece.length / LEAF_BYTES, parent, sink)?;
                if skipped == piece.length {
                    break;
                }
                piece = piece.part(skipped, u64::MAX);
                continue;
            }
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

    /// Completes the map; returns `None` if all of it is zero.
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

    /// Appends this many zero leaves, and returns their bytes.
    fn skip_zero_leaves(
        &mut self,
        leaf_count: u64,
        parent: &mut Option<MapReader<'_>>,
        sink: &mut dyn PageSink,
    ) -> Result<u64> {
        self.push_absent_children(0, leaf_count, parent, sink)?;
        let bytes = leaf_count * LEAF_BYTES;
        self.position += bytes;
        Ok(bytes)
    }

    /// Appends `count` children without a page to `level`. Subtrees without any page are counted on the level above, so that
    /// the work does not grow with the size of the disk.
    fn push_absent_children(
        &mut self,
        level: usize,
        mut count: u64,
        parent: &mut Option<MapReader<'_>>,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        while count > 0 {
            self.make_room(level, parent, sink)?;
            let gathered = self.levels[level].children.len() as u64;
            if gathered == 0 && count > FANOUT {
                // The last page stays at this level, since a level always has a child.
                let page_count = (count - 1) / FANOUT;
                self.levels[level].complete += page_count;
                self.push_absent_children(level + 1, page_count, parent, sink)?;
                count -= page_count * FANOUT;
            } else {
                let part = count.min(FANOUT - gathered);
                let children = &mut self.levels[level].children;
                children.resize(children.len() + to_usize(part), None);
                count -= part;
            }
        }
        Ok(())
    }

    /// The parent's page of the leaf, if it is equal. An unreadable parent shares nothing.
    fn same_leaf(&self, number: u64, parent: &mut Option<MapReader<'_>>, sink: &dyn PageSink) -> Option<PageRef> {
        let parent = parent.as_mut()?;
        if parent.unit() != self.unit || number >= parent.leaf_count() {
            return None;
        }
        let page = parent.leaf_ref(number).ok()??;
        let same = sink.is_usable(page.location.pack) && parent.decode_leaf(page, number).ok()? == self.pieces;
        // Reading may have revealed that the directory of its pack is damaged.
        (same && sink.is_usable(page.location.pack)).then_some(page)
    }

    /// Adds a page to the level above it. A full page is stored when the next child arrives, so a level always has a
    /// child.
    fn push_child(
        &mut self,
        level: usize,
        page: Option<PageRef>,
        parent: &mut Option<MapReader<'_>>,
        sink: &mut dyn PageSink,
    ) -> Result<()> {
        self.make_room(level, parent, sink)?;
        self.levels[level].children.push(page);
        Ok(())
    }

    /// Stores the current page of `level` if it is full.
    fn make_room(&mut self, level: usize, parent: &mut Option<MapReader<'_>>, sink: &mut dyn PageSink) -> Result<()> {
        if self.levels.len() == level {
            self.levels.push(Level::default());
        }
        if self.levels[level].children.len() as u64 == FANOUT {
            let full = self.finish_inner(level, parent, sink)?;
            self.push_child(level + 1, full, parent, sink)?;
        }
        Ok(())
    }

    /// Stores the current inner page of `level`.
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

/// The parent's inner page at this position, if it has the same children.
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
    let usable = || sink.is_usable(page.location.pack);
    let same = usable() && *parent.children(page, page_level, number, depth).ok()? == *children;
    (same && usable()).then_some(page)
}

#[cfg(test)]
mod tests {
    use super::{MapWriter, PageSink};
    use crate::error::Result;
    use crate::format::map::{FANOUT, LEAF_BYTES, PageRef, Piece, PieceContent, Unit};
    use crate::format::pack::Location;
    use crate::id::PackId;

    /// Stores pages in memory; a page's number is its location.
    #[derive(Default)]
    struct Pages(Vec<Vec<u8>>);

    impl PageSink for Pages {
        fn put_page(&mut self, bytes: &[u8]) -> Result<PageRef> {
            self.0.push(bytes.to_vec());
            Ok(PageRef {
                location: place(u32::try_from(self.0.len()).unwrap()),
                length: u32::try_from(bytes.len()).unwrap(),
            })
        }

        fn is_usable(&self, _pack: PackId) -> bool {
            true
        }
    }

    fn place(frame: u32) -> Location {
        Location {
            pack: PackId::from_bytes([7; 16]),
            frame,
            offset: 0,
        }
    }

    /// A run of leaves, each zero or with a block of data.
    struct Run {
        leaf_count: u64,
        has_data: bool,
    }

    fn push(map: &mut MapWriter, length: u64, content: PieceContent, pages: &mut Pages) {
        map.push(Piece { length, content }, &mut None, pages).unwrap();
    }

    /// Writes `runs`, with at most `zero_leaves_max` leaves of zeroes in one piece; returns the root and all
    /// pages.
    fn write(runs: &[Run], zero_leaves_max: u64) -> (Option<PageRef>, Vec<Vec<u8>>) {
        let (mut map, mut pages) = (MapWriter::new(Unit::Block), Pages::default());
        for run in runs {
            let mut left = run.leaf_count;
            while left > 0 && !run.has_data {
                let count = left.min(zero_leaves_max);
                push(&mut map, count * LEAF_BYTES, PieceContent::Zero, &mut pages);
                left -= count;
            }
            for _ in 0..left {
                push(&mut map, 4096, PieceContent::Data(place(0)), &mut pages);
                push(&mut map, LEAF_BYTES - 4096, PieceContent::Zero, &mut pages);
            }
        }
        (map.finish(&mut None, &mut pages).unwrap(), pages.0)
    }

    /// Whole subtrees of zeroes are skipped; the pages are the same as for leaf-by-leaf writing.
    #[test]
    fn zeroes_in_one_piece_make_the_same_pages_as_leaf_by_leaf() {
        let million = FANOUT * FANOUT;
        for (before, zeroes, after) in [
            (0, 1, 0),
            (1, FANOUT - 1, 1),
            (1, FANOUT, 1),
            (FANOUT, FANOUT, 1),
            (FANOUT, 2 * FANOUT + 1, 0),
            (3, million + 5, 2),
            (0, 2 * million, 1),
            (0, million - 1, 1),
            (1, million - 1, 1),
        ] {
            let runs = [(before, true), (zeroes, false), (after, true)]
                .map(|(leaf_count, has_data)| Run { leaf_count, has_data });
            assert!(
                write(&runs, u64::MAX) == write(&runs, 1),
                "{before} leaves, {zeroes} of zeroes, {after} leaves"
            );
        }
    }

    #[test]
    fn a_map_of_exbibytes_of_zeroes_takes_no_time() {
        let leaf_count = (u64::MAX / LEAF_BYTES) - 1;
        let zeroes = Run {
            leaf_count,
            has_data: false,
        };
        assert_eq!(write(&[zeroes], u64::MAX), (None, Vec::new()));
        let (root, pages) = write(
            &[(1, true), (leaf_count - 2, false), (1, true)].map(|(leaf_count, has_data)| Run { leaf_count, has_data }),
            u64::MAX,
        );
        assert!(root.is_some());
        assert_eq!(pages.len(), 2 + 2 * 4 - 1, "two leaves, and the inner pages above each");
    }
}
