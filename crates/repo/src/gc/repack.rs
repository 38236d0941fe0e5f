//! Moves live data out of packs that are mostly dead.
//!
//! The live ranges of a pack are decoded, verified, and stored again in new packs; a relocation for each old pack
//! records their new location. Chunks that are entirely alive keep their identity; the rest of others becomes new
//! chunks.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::chunker::CHUNK_BYTES_MAX;
use crate::format::fingerprint::{BLOCK_LENGTH, FingerprintKeys, PRINT_LENGTH};
use crate::format::pack::{ChunkEntry, Directory, FrameContent, FrameEntry, PackReader};
use crate::format::relocation::{Move, RelocationTable};
use crate::gc::mark::LiveRange;
use crate::id::{PackId, WriterId};
use crate::packing::{FrameStream, PackOutput};
use crate::progress::stage::NoStageTimer;
use crate::read::frame_check::{Depth, check_frame};
use crate::repository::Repository;
use crate::repository::packs::FrameBuffers;

/// The result of repacking.
pub(crate) struct Repacked {
    /// The new locations of the bytes of each old pack.
    pub(crate) tables: BTreeMap<PackId, RelocationTable>,
    /// The new packs, durable.
    pub(crate) packs: Vec<(PackId, Directory)>,
    pub(crate) stored_bytes: u64,
    /// Unreadable old packs and the reasons; they are kept.
    pub(crate) failed: Vec<(PackId, Error)>,
}

/// Readers of packs by pack.
pub(crate) type KnownReaders = HashMap<PackId, Arc<PackReader>>;

/// Stores the live ranges of `old` packs in new packs; `readers` are for packs whose directory must not be
/// read.
pub(crate) fn repack(
    repository: &Repository,
    writer: WriterId,
    old: &HashMap<PackId, Vec<LiveRange>>,
    readers: &KnownReaders,
    sealer_count: usize,
) -> Result<Repacked> {
    let draw = || {
        PackId::from_bytes(
            repository
                .vault
                .environment
                .draw()
                .expect("randomness worked when gc started"),
        )
    };
    std::thread::scope(|scope| {
        let frames = |content| FrameStream::new(Arc::clone(&repository.packs), &draw, content);
        let mut repacker = Repacker {
            repository,
            readers,
            keys: repository.vault.fingerprint_keys(),
            output: PackOutput::new(
                scope,
                Arc::clone(&repository.vault.store),
                &NoStageTimer,
                writer,
                sealer_count,
            ),
            data: frames(FrameContent::Blocks),
            stream: frames(FrameContent::Stream),
            tree: frames(FrameContent::Tree),
            buffers: FrameBuffers::new(),
            raw: Vec::new(),
        };
        let mut repacked = Repacked {
            tables: BTreeMap::new(),
            packs: Vec::new(),
            stored_bytes: 0,
            failed: Vec::new(),
        };
        let mut sorted: Vec<_> = old.iter().collect();
        sorted.sort_unstable_by_key(|(pack, _)| **pack);
        for (pack, ranges) in sorted {
            match repacker.pack(*pack, ranges) {
                Ok(table) => {
                    repacked.tables.insert(*pack, table);
                }
                Err(error) if error.is_damage() => repacked.failed.push((*pack, error)),
                Err(error) => return Err(error),
            }
        }
        for stream in [&mut repacker.data, &mut repacker.stream, &mut repacker.tree] {
            stream.finish(&mut repacker.output, Vec::new())?;
        }
        for pack in repacker.output.wait_for_ended()? {
            repacked.stored_bytes += pack.stored_bytes;
            repacked.packs.push((pack.pack, pack.directory));
        }
        Ok(repacked)
    })
}

struct Repacker<'a> {
    repository: &'a Repository,
    readers: &'a KnownReaders,
    keys: FingerprintKeys,
    output: PackOutput<'a>,
    data: FrameStream<'a>,
    stream: FrameStream<'a>,
    tree: FrameStream<'a>,
    buffers: FrameBuffers,
    raw: Vec<u8>,
}

impl Repacker<'_> {
    fn pack(&mut self, pack: PackId, ranges: &[LiveRange]) -> Result<RelocationTable> {
        let reader = match self.readers.get(&pack) {
            Some(reader) => Arc::clone(reader),
            None => self.repository.packs.reader(pack)?,
        };
        // The whole pack is checked before any part of it is copied: a damaged pack stays as it is.
        for group in ranges.chunk_by(|a, b| a.frame == b.frame) {
            self.decode(&reader, group[0].frame)?;
        }
        let mut table = RelocationTable::default();
        for group in ranges.chunk_by(|a, b| a.frame == b.frame) {
            let prints = self.decode(&reader, group[0].frame)?;
            let frame = reader.frame(group[0].frame)?;
            match frame.content {
                FrameContent::Tree => self.pages(&reader, group, &mut table)?,
                FrameContent::Blocks => self.chunks(&reader, frame, group, &prints, &mut table)?,
                FrameContent::Stream => self.chunks(&reader, frame, group, &[], &mut table)?,
            }
        }
        Ok(table)
    }

    fn decode(&mut self, reader: &PackReader, frame: u32) -> Result<Arc<Vec<u8>>> {
        let packs = &self.repository.packs;
        packs.frame(reader.pack, frame, &mut self.buffers, &mut self.raw)?;
        let prints = packs.prints(reader.pack, frame)?;
        check_frame(&self.keys, reader, frame, &self.raw, &prints, Depth::Prints)?;
        Ok(prints)
    }

    fn pages(&mut self, reader: &PackReader, group: &[LiveRange], table: &mut RelocationTable) -> Result<()> {
        for range in group {
            let page = self.bytes(reader, *range)?.to_vec();
            let to = self.tree.push_page(&page, &mut self.output)?;
            table.add(Move {
                frame: range.frame,
                offset: range.offset,
                length: range.length,
                to,
            });
        }
        Ok(())
    }

    fn bytes(&self, reader: &PackReader, range: LiveRange) -> Result<&[u8]> {
        let start = range.offset as usize;
        self.raw.get(start..start + range.length as usize).ok_or_else(|| {
            let detail = format!("bytes at {start} of frame {} are behind its end", range.frame);
            Error::damaged(&reader.name, range.offset.into(), detail)
        })
    }

    /// Copies the live parts of each chunk of a frame.
    fn chunks(
        &mut self,
        reader: &PackReader,
        frame: &FrameEntry,
        group: &[LiveRange],
        prints: &[u8],
        table: &mut RelocationTable,
    ) -> Result<()> {
        let live = joined(group);
        let mut start = 0;
        for chunk in reader.directory.chunks(frame) {
            let end = start + chunk.length;
            let parts: Vec<_> = live
                .iter()
                .map(|(from, to)| ((*from).max(start), (*to).min(end)))
                .filter(|(from, to)| from < to)
                .collect();
            let whole = frame.content == FrameContent::Stream && !parts.is_empty() || parts[..] == [(start, end)];
            if whole {
                self.store(group[0].frame, start, prints, *chunk, table)?;
            } else {
                for (from, to) in parts {
                    let id = self.keys.chunk_of_blocks(&self.hashes(from, to));
                    let entry = ChunkEntry { id, length: to - from };
                    self.store(group[0].frame, from, prints, entry, table)?;
                }
            }
            start = end;
        }
        Ok(())
    }

    fn hashes(&self, from: u32, to: u32) -> Vec<[u8; 32]> {
        let mut hashes = Vec::new();
        self.keys
            .hash_blocks(&self.raw[from as usize..to as usize], &mut hashes);
        hashes
    }

    /// Stores the chunk `entry`, whose bytes begin at `from` of `frame`.
    fn store(
        &mut self,
        frame: u32,
        from: u32,
        prints: &[u8],
        entry: ChunkEntry,
        table: &mut RelocationTable,
    ) -> Result<()> {
        debug_assert!(u64::from(entry.length) <= CHUNK_BYTES_MAX);
        let to = from + entry.length;
        let bytes = &self.raw[from as usize..to as usize];
        let stream = if prints.is_empty() {
            &mut self.stream
        } else {
            &mut self.data
        };
        let first_print = from as usize / BLOCK_LENGTH * PRINT_LENGTH;
        let last_print = to as usize / BLOCK_LENGTH * PRINT_LENGTH;
        let prints = if prints.is_empty() {
            prints
        } else {
            &prints[first_print..last_print]
        };
        stream.push(bytes, prints, &mut self.output)?;
        let to = stream.keep_pending(entry);
        table.add(Move {
            frame,
            offset: from,
            length: entry.length,
            to,
        });
        Ok(())
    }
}

/// The ranges of one frame without overlaps, as start and end.
fn joined(group: &[LiveRange]) -> Vec<(u32, u32)> {
    let mut joined: Vec<(u32, u32)> = Vec::new();
    for range in group {
        let end = range.offset + range.length;
        match joined.last_mut() {
            Some((_, last)) if *last >= range.offset => *last = end.max(*last),
            _ => joined.push((range.offset, end)),
        }
    }
    joined
}
