//! Walks a whole map, skipping unreadable parts.

use std::ops::Range;

use crate::check::finding::DamagedPart;
use crate::error::{Error, Result};
use crate::format::manifest::DiskRecord;
use crate::format::map::{FANOUT, LEAF_BYTES, MapReader, PageRef, PieceContent, height};
use crate::format::pack::Location;
use crate::read::frame_set::{PageKey, PageSet};
use crate::repository::packs::Packs;

/// An item of a walk, in the order of the disk.
pub(crate) enum MapItem {
    /// Bytes of the disk that are zero.
    Zero(Range<u64>),
    /// A page of the map, which is read next; its present location.
    Page { place: Location },
    /// Contiguous bytes of the disk in a frame; relocations are resolved.
    Piece {
        disk_offset: u64,
        place: Location,
        length: u64,
    },
    /// Bytes of the disk that the unreadable part of the map describes.
    Unreadable {
        range: Range<u64>,
        place: DamagedPart,
        error: Error,
    },
    /// Bytes of the disk whose page was walked earlier.
    Known(Range<u64>),
}

/// Whether everything in a walk was intact; only then its pages are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Clean,
    Touched,
}

/// Receives the items of a walk.
pub(crate) trait Visitor {
    /// The next item; [`Verdict::Touched`] prevents the pages above it from being skipped later.
    fn visit(&mut self, visit: MapItem) -> Result<Verdict>;
}

/// Walks the map of a disk.
///
/// With `known`, subtrees that were walked earlier, in this map or another, and were clean are skipped.
pub(crate) fn walk_disk(
    packs: &Packs,
    disk: &DiskRecord,
    known: Option<&mut PageSet>,
    visitor: &mut dyn Visitor,
) -> Result<()> {
    let unit = disk.content.unit();
    let mut walk = Walk {
        packs,
        map: MapReader::new(packs, disk.root, disk.size_bytes, unit),
        size_bytes: disk.size_bytes,
        known,
        visitor,
    };
    let level = height(disk.size_bytes);
    walk.page(disk.root, level, 0).map(|_| ())
}

struct Walk<'a> {
    packs: &'a Packs,
    map: MapReader<'a>,
    size_bytes: u64,
    known: Option<&'a mut PageSet>,
    visitor: &'a mut dyn Visitor,
}

impl Walk<'_> {
    /// Bytes of the disk below page `number` of `level`.
    fn span(&self, level: u32, number: u64) -> Range<u64> {
        let bytes = LEAF_BYTES.saturating_mul(FANOUT.saturating_pow(level));
        let start = number.saturating_mul(bytes).min(self.size_bytes);
        start..start.saturating_add(bytes).min(self.size_bytes)
    }

    fn page(&mut self, page: Option<PageRef>, level: u32, number: u64) -> Result<Verdict> {
        let span = self.span(level, number);
        if span.is_empty() {
            return Ok(Verdict::Clean);
        }
        let Some(page) = page else {
            return self.visitor.visit(MapItem::Zero(span));
        };
        let key = PageKey::new(page, level, span.end - span.start, self.map.unit());
        if self.known.as_ref().is_some_and(|known| known.contains(&key)) {
            return self.visitor.visit(MapItem::Known(span));
        }
        let seen = match self.packs.resolve(page.location, page.length.into()) {
            Ok((place, _)) => self.visitor.visit(MapItem::Page { place })?,
            // It is unreadable as well, which is reported below.
            Err(_) => Verdict::Touched,
        };
        let below = if level == 0 {
            self.leaf(page, number, span)?
        } else {
            self.inner(page, level, number, span)?
        };
        let verdict = if seen == Verdict::Clean { below } else { seen };
        if verdict == Verdict::Clean
            && let Some(known) = &mut self.known
        {
            known.insert(key);
        }
        Ok(verdict)
    }

    fn inner(&mut self, page: PageRef, level: u32, number: u64, span: Range<u64>) -> Result<Verdict> {
        let depth = (height(self.size_bytes) - level) as usize;
        let children = match self.map.children(page, level, number, depth) {
            Ok(children) => children,
            Err(error) => return self.unreadable(page, span, error),
        };
        let mut verdict = Verdict::Clean;
        for (child, page) in (number * FANOUT..).zip(children.iter()) {
            if self.page(*page, level - 1, child)? == Verdict::Touched {
                verdict = Verdict::Touched;
            }
        }
        Ok(verdict)
    }

    fn leaf(&mut self, page: PageRef, number: u64, span: Range<u64>) -> Result<Verdict> {
        let pieces = match self.map.decode_leaf(page, number) {
            Ok(pieces) => pieces,
            Err(error) => return self.unreadable(page, span, error),
        };
        let mut verdict = Verdict::Clean;
        let mut position = span.start;
        for piece in pieces {
            // The last block may extend past the end of the disk.
            let end = (position + piece.length).min(self.size_bytes);
            let seen = match piece.content {
                PieceContent::Zero => self.visitor.visit(MapItem::Zero(position..end))?,
                PieceContent::Data(location) => self.data(location, position..end)?,
            };
            if seen == Verdict::Touched {
                verdict = Verdict::Touched;
            }
            position = end;
        }
        Ok(verdict)
    }

    fn data(&mut self, location: Location, range: Range<u64>) -> Result<Verdict> {
        let mut verdict = Verdict::Clean;
        let mut done = 0;
        let length = range.end - range.start;
        while done < length {
            let seen = match self.packs.resolve(location.advance(done), length - done) {
                Ok((place, together)) => {
                    let disk_offset = range.start + done;
                    done += together;
                    self.visitor.visit(MapItem::Piece {
                        disk_offset,
                        place,
                        length: together,
                    })?
                }
                Err(error) => {
                    let place = DamagedPart::Frame(location.pack, location.frame);
                    let range = range.start + done..range.end;
                    done = length;
                    self.visitor.visit(MapItem::Unreadable { range, place, error })?
                }
            };
            if seen == Verdict::Touched {
                verdict = Verdict::Touched;
            }
        }
        Ok(verdict)
    }

    fn unreadable(&mut self, page: PageRef, range: Range<u64>, error: Error) -> Result<Verdict> {
        // The pack in the page's reference and the pack that holds the bytes now may differ: damage is
        // reported for the latter.
        let now = self.packs.resolve(page.location, page.length.into());
        let location = now.map_or(page.location, |(place, _)| place);
        let place = match &error {
            Error::MissingPack { pack } => DamagedPart::Pack(*pack),
            _ if self.packs.frame_reader(location.pack).is_err() => DamagedPart::Pack(location.pack),
            _ => DamagedPart::Frame(location.pack, location.frame),
        };
        self.visitor.visit(MapItem::Unreadable { range, place, error })
    }
}
