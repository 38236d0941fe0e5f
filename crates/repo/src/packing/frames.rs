//! Fills frames, and packs with frames.

use std::sync::Arc;

use super::output::{FrameJob, OpenPack, PackOutput};
use crate::error::Result;
use crate::format::codec::WRITTEN_FRAME_BYTES_MAX;
use crate::format::pack::{ChunkEntry, FRAME_COUNT_MAX, FrameContent, Location, PackKind, UnsealedFrame};
use crate::id::PackId;
use crate::repository::packs::Packs;

/// Stored bytes at which a pack is full; frames that are still being sealed make it slightly larger.
const PACK_STORED_BYTES: u64 = 48 << 20;
/// Uncompressed bytes at which a pack is full: limits its directory and prints if data compresses extremely well.
const PACK_RAW_BYTES: u64 = 256 << 20;
/// Bytes of a tree frame, which is small because pages are usually read individually.
const TREE_FRAME_BYTES: usize = 128 << 10;

/// Draws the id of a new pack.
pub(crate) type DrawPackId<'a> = &'a dyn Fn() -> PackId;

/// Collects chunks or pages of one kind into frames and packs.
pub(crate) struct FrameStream<'a> {
    packs: Arc<Packs>,
    draw: DrawPackId<'a>,
    content: FrameContent,
    pack: Option<CurrentPack>,
    raw: Vec<u8>,
    prints: Vec<u8>,
    chunks: Vec<ChunkEntry>,
    /// The current chunk, while it is moved to the next frame.
    carried: Vec<u8>,
    /// The start of the current chunk in `raw` and in `prints`.
    chunk_start: usize,
    prints_start: usize,
}

struct CurrentPack {
    pack: Arc<OpenPack>,
    frame_count: u32,
    raw_bytes: u64,
}

impl<'a> FrameStream<'a> {
    pub(crate) fn new(packs: Arc<Packs>, draw: DrawPackId<'a>, content: FrameContent) -> Self {
        Self {
            packs,
            draw,
            content,
            pack: None,
            raw: Vec::new(),
            prints: Vec::new(),
            chunks: Vec::new(),
            carried: Vec::new(),
            chunk_start: 0,
            prints_start: 0,
        }
    }

    /// The pack of the current frame; begun if there is none.
    pub(crate) fn pack(&mut self) -> PackId {
        self.current().pack.id
    }

    fn current(&mut self) -> &mut CurrentPack {
        let (packs, draw) = (&self.packs, self.draw);
        let kind = match self.content {
            FrameContent::Blocks | FrameContent::Stream => PackKind::Data,
            FrameContent::Tree => PackKind::Tree,
        };
        self.pack.get_or_insert_with(|| {
            let id = draw();
            CurrentPack {
                pack: Arc::new(OpenPack::new(id, kind, packs.key(id))),
                frame_count: 0,
                raw_bytes: 0,
            }
        })
    }

    /// Adds bytes to the current chunk, with the prints of their blocks.
    pub(crate) fn push(&mut self, bytes: &[u8], prints: &[u8], output: &mut PackOutput<'_>) -> Result<()> {
        if self.raw.len() + bytes.len() > WRITTEN_FRAME_BYTES_MAX {
            self.carry_over(output)?;
        }
        self.take_memory(output);
        self.raw.extend_from_slice(bytes);
        self.prints.extend_from_slice(prints);
        Ok(())
    }

    /// Seals the frame without the current chunk, which begins the next one.
    fn carry_over(&mut self, output: &mut PackOutput<'_>) -> Result<()> {
        self.carried.clear();
        self.carried.extend_from_slice(&self.raw[self.chunk_start..]);
        let next_prints = self.prints.split_off(self.prints_start);
        self.raw.truncate(self.chunk_start);
        self.seal_frame(output)?;
        self.roll_over(output)?;
        // The frame was submitted before memory for the next one is taken: then a buffer has become free.
        self.take_memory(output);
        self.raw.extend_from_slice(&self.carried);
        self.prints = next_prints;
        (self.chunk_start, self.prints_start) = (0, 0);
        Ok(())
    }

    /// Ensures that there is memory for a frame. Frames of pages are small and do not use the pool.
    fn take_memory(&mut self, output: &PackOutput<'_>) {
        if self.raw.capacity() == 0 && self.content != FrameContent::Tree {
            self.raw = output.raw_buffers().take();
        }
    }

    /// Bytes of the current chunk.
    pub(crate) fn pending(&self) -> &[u8] {
        &self.raw[self.chunk_start..]
    }

    /// Drops the current chunk, because the repository has it.
    pub(crate) fn drop_pending(&mut self) {
        self.raw.truncate(self.chunk_start);
        self.prints.truncate(self.prints_start);
    }

    /// Keeps the current chunk, and returns its future location.
    pub(crate) fn keep_pending(&mut self, entry: ChunkEntry) -> Location {
        debug_assert_eq!(entry.length as usize, self.pending().len());
        let location = self.here();
        self.chunks.push(entry);
        self.start_next();
        location
    }

    /// Stores a page.
    pub(crate) fn push_page(&mut self, page: &[u8], output: &mut PackOutput<'_>) -> Result<Location> {
        if self.raw.len() + page.len() > TREE_FRAME_BYTES.max(page.len()) {
            self.carry_over(output)?;
        }
        self.push(page, &[], output)?;
        let location = self.here();
        self.start_next();
        Ok(location)
    }

    fn here(&mut self) -> Location {
        let offset = u32::try_from(self.chunk_start).expect("a frame is far smaller than 4 GiB");
        let current = self.current();
        Location {
            pack: current.pack.id,
            frame: current.frame_count,
            offset,
        }
    }

    fn start_next(&mut self) {
        self.chunk_start = self.raw.len();
        self.prints_start = self.prints.len();
    }

    /// Submits the frame.
    fn seal_frame(&mut self, output: &mut PackOutput<'_>) -> Result<()> {
        if self.raw.is_empty() {
            return Ok(());
        }
        let raw_bytes = self.raw.len() as u64;
        let current = self.current();
        let number = current.frame_count;
        current.frame_count += 1;
        current.raw_bytes += raw_bytes;
        let pack = Arc::clone(&current.pack);
        let frame = UnsealedFrame {
            number,
            raw: std::mem::take(&mut self.raw),
            content: self.content,
            prints: std::mem::take(&mut self.prints),
            chunks: std::mem::take(&mut self.chunks),
        };
        output.frame(FrameJob { pack, frame })
    }

    /// Ends the pack if it is full.
    fn roll_over(&mut self, output: &mut PackOutput<'_>) -> Result<()> {
        let full = self.pack.as_ref().is_some_and(|current| {
            current.pack.stored_bytes() >= PACK_STORED_BYTES
                || current.raw_bytes >= PACK_RAW_BYTES
                || current.frame_count as usize >= FRAME_COUNT_MAX
        });
        if full {
            self.end_pack(output, Vec::new())
        } else {
            Ok(())
        }
    }

    fn end_pack(&mut self, output: &mut PackOutput<'_>, attachment: Vec<u8>) -> Result<()> {
        match self.pack.take() {
            Some(current) => output.end(current.pack, current.frame_count as usize, attachment),
            None => Ok(()),
        }
    }

    /// Seals the rest and ends the last pack, with an attachment.
    ///
    /// The current chunk must have been kept or dropped.
    pub(crate) fn finish(&mut self, output: &mut PackOutput<'_>, attachment: Vec<u8>) -> Result<()> {
        assert!(self.pending().is_empty(), "a chunk was neither kept nor dropped");
        self.seal_frame(output)?;
        (self.chunk_start, self.prints_start) = (0, 0);
        self.end_pack(output, attachment)
    }
}
