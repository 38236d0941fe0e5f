//! Converts one disk into a map: zero, unchanged, already stored, or new.

use std::ops::Range;

use holdfast_block::{BlockDevice, DirtyBitmap};

use super::Session;
use super::parent::{ParentCursor, ParentExtent, ParentMap};
use super::windows::{SourceItem, SourceReader, WINDOW_BYTES, Window};
use crate::error::{Error, Result};
use crate::format::chunker::Chunker;
use crate::format::fingerprint::{BLOCK_BYTES, BLOCK_LENGTH, BlockHash, print_of};
use crate::format::manifest::DiskStatistics;
use crate::format::map::{MapReader, MapWriter, PageRef, Piece, PieceContent, Unit};
use crate::format::pack::{ChunkEntry, Location};

/// The result of backing up a disk.
pub(crate) struct DiskResult {
    pub(crate) root: Option<PageRef>,
    pub(crate) statistics: DiskStatistics,
    /// Parts of the parent that could not be read.
    pub(crate) unreadable_count: u64,
}

/// Backs up `device`, compared with the disk in `parent`; ranges that are clean in `changed` are not read.
pub(crate) fn back_up_disk(
    session: &mut Session<'_>,
    name: &str,
    device: &dyn BlockDevice,
    changed: Option<&DirtyBitmap>,
    parent: Option<ParentMap>,
) -> Result<DiskResult> {
    let packs = std::sync::Arc::clone(&session.packs);
    let keys = session.keys.clone();
    let open_parent = || parent.map(|parent| parent.reader(&packs, Unit::Block));
    let (reader_count, timer) = (session.thread_count, session.progress.timer());
    std::thread::scope(|scope| {
        let mut source = SourceReader::new(scope, device, changed, &keys, timer, reader_count);
        let mut disk = DiskBackup {
            session,
            cursor: open_parent().map(|map| ParentCursor::new(map, &packs)),
            shared_pages: open_parent(),
            map: MapWriter::new(Unit::Block),
            cutter: Chunker::default(),
            statistics: DiskStatistics::default(),
            last: BlockClass::Zero,
        };
        let failed = |source| Error::Device {
            role: "source",
            name: name.to_owned(),
            source,
        };
        while let Some(item) = source.next().map_err(failed)? {
            disk.session.check_cancelled()?;
            match item {
                SourceItem::Zero(length) => {
                    disk.zero(length)?;
                    disk.session.advance(length);
                }
                SourceItem::Window(window) => {
                    disk.window(&window)?;
                    disk.session.advance(window.data.len() as u64);
                    source.recycle(window);
                }
                SourceItem::Unchanged(range) => {
                    let mut offset = range.start;
                    while offset < range.end {
                        disk.session.check_cancelled()?;
                        let left = match disk.carry_over(offset..range.end)? {
                            CarriedOver::Until(end) => end..end,
                            CarriedOver::ToRead(range) => range,
                        };
                        disk.session.advance(left.start - offset);
                        offset = left.end;
                        if !left.is_empty() {
                            let window = source.read(left).map_err(failed)?;
                            disk.window(&window)?;
                            disk.session.advance(window.data.len() as u64);
                            source.recycle(window);
                        }
                    }
                }
            }
        }
        disk.finish(device.size_bytes())
    })
}

struct DiskBackup<'a, 'session, 'packs> {
    session: &'a mut Session<'session>,
    cursor: Option<ParentCursor<'packs>>,
    shared_pages: Option<MapReader<'packs>>,
    map: MapWriter,
    cutter: Chunker,
    statistics: DiskStatistics,
    last: BlockClass,
}

/// How far a range of the parent was reused.
enum CarriedOver {
    /// Up to this offset.
    Until(u64),
    /// Up to the start of this range, at most a window, whose parent data is unusable.
    ToRead(Range<u64>),
}

/// The category that the last block of a disk was counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockClass {
    Zero,
    Unchanged,
    Known,
    New,
}

impl DiskBackup<'_, '_, '_> {
    fn window(&mut self, window: &Window) -> Result<()> {
        self.statistics.read_bytes += window.read_bytes;
        let mut offset = window.offset;
        for (block, hash) in window.data.chunks_exact(BLOCK_LENGTH).zip(&window.hashes) {
            match hash {
                None => self.zero(BLOCK_BYTES)?,
                Some(hash) => match self.unchanged(offset, hash) {
                    Some(location) => {
                        self.statistics.unchanged_bytes += BLOCK_BYTES;
                        self.place(BLOCK_BYTES, PieceContent::Data(location))?;
                        self.last = BlockClass::Unchanged;
                    }
                    None => self.changed(block, hash)?,
                },
            }
            offset += BLOCK_BYTES;
        }
        Ok(())
    }

    /// Reuses data of the parent, from `range.start` on.
    fn carry_over(&mut self, range: Range<u64>) -> Result<CarriedOver> {
        let index = &self.session.index;
        let cursor = self.cursor.as_mut().expect("only with a parent is anything unchanged");
        match cursor.carried(range.clone(), |pack| index.is_usable(pack)) {
            ParentExtent::Zero(length) => {
                self.zero(length)?;
                Ok(CarriedOver::Until(range.start + length))
            }
            ParentExtent::Data(location, length) => {
                self.statistics.unchanged_bytes += length;
                self.place(length, PieceContent::Data(location))?;
                self.last = BlockClass::Unchanged;
                Ok(CarriedOver::Until(range.start + length))
            }
            ParentExtent::Unknown(length) => {
                let length = length.min(WINDOW_BYTES - range.start % WINDOW_BYTES);
                Ok(CarriedOver::ToRead(range.start..range.start + length))
            }
        }
    }

    fn unchanged(&mut self, offset: u64, hash: &BlockHash) -> Option<Location> {
        let index = &self.session.index;
        self.cursor
            .as_mut()?
            .unchanged(offset, hash, |pack| index.is_usable(pack))
    }

    fn zero(&mut self, length: u64) -> Result<()> {
        self.statistics.zero_bytes += length;
        self.place(length, PieceContent::Zero)?;
        self.last = BlockClass::Zero;
        Ok(())
    }

    /// Adds a changed block to the current chunk.
    fn changed(&mut self, block: &[u8], hash: &BlockHash) -> Result<()> {
        self.session
            .data
            .push(block, print_of(hash), &mut self.session.output)?;
        if self.cutter.push(hash) {
            self.finish_chunk()
        } else {
            Ok(())
        }
    }

    /// Ends the run of changed blocks and appends a piece to the map.
    fn place(&mut self, length: u64, content: PieceContent) -> Result<()> {
        self.finish_chunk()?;
        self.put(Piece { length, content })
    }

    fn put(&mut self, piece: Piece) -> Result<()> {
        self.map
            .push(piece, &mut self.shared_pages, &mut self.session.page_sink())
    }

    /// Stores the current chunk, or drops it if the repository has it already.
    fn finish_chunk(&mut self) -> Result<()> {
        if self.cutter.hashes().is_empty() {
            return Ok(());
        }
        let length = self.session.data.pending().len();
        let entry = ChunkEntry {
            id: self.cutter.chunk_id(&self.session.keys),
            length: u32::try_from(length).expect("a chunk is at most half a mebibyte"),
        };
        self.cutter.clear();
        let known_before = self.statistics.known_bytes;
        let location = self.session.store_chunk(entry, &mut self.statistics)?;
        self.last = if self.statistics.known_bytes > known_before {
            BlockClass::Known
        } else {
            BlockClass::New
        };
        self.put(Piece {
            length: length as u64,
            content: PieceContent::Data(location),
        })
    }

    /// Corrects the statistics: the last block may extend past the end of the disk, and only bytes of the
    /// disk count.
    fn count_bytes_of_disk_only(&mut self, size_bytes: u64) {
        let behind = self.map.position() - size_bytes;
        let statistics = &mut self.statistics;
        match self.last {
            BlockClass::Zero => statistics.zero_bytes -= behind,
            BlockClass::Unchanged => statistics.unchanged_bytes -= behind,
            BlockClass::Known => statistics.known_bytes -= behind,
            BlockClass::New => statistics.new_bytes -= behind,
        }
    }

    fn finish(mut self, size_bytes: u64) -> Result<DiskResult> {
        self.finish_chunk()?;
        assert_eq!(
            self.map.position(),
            size_bytes.next_multiple_of(BLOCK_BYTES),
            "the map covers the disk"
        );
        self.count_bytes_of_disk_only(size_bytes);
        let root = self.map.finish(&mut self.shared_pages, &mut self.session.page_sink())?;
        let unreadable_count = self.cursor.map_or(0, |cursor| cursor.unreadable_count);
        Ok(DiskResult {
            root,
            statistics: self.statistics,
            unreadable_count,
        })
    }
}
