//! Copies a disk of a snapshot from another repository.
//!
//! The maps of the disk and of its base, of which the parent's disk is a copy, are walked together, in batches. What
//! the two share is taken from the parent, as far as it is usable. The other chunks are looked up: if both repositories
//! have the same fingerprint keys, a chunk that is already stored here is not even read. The rest is read by frame,
//! each frame once per batch, decoded, verified against its identity in the other repository, and stored under its
//! identity here.
//!
//! Chunks are stored whole, even if a map needs only a part of one, so that they are recognized when another snapshot
//! needs the rest. Their boundaries are kept.

pub(crate) mod frames;
pub(crate) mod walk;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::Session;
use super::parent::{ParentCursor, ParentExtent, ParentMap};
use super::request::StoredDisk;
use crate::backup::copy_memory::{ChunkPlaces, CopyMemory, location_at};
use crate::backup::from_repository::frames::{FetchedFrame, FrameFetcher, FrameQueue, FrameRequest, WantedChunk};
use crate::backup::from_repository::walk::{StoredExtent, StoredExtentContent, StoredWalk};
use crate::error::{Error, Result};
use crate::format::manifest::{DiskContent, DiskStatistics};
use crate::format::map::{MapReader, MapWriter, PageRef, Piece, PieceContent};
use crate::format::pack::{FrameContent, FrameEntry, Location, PackReader};
use crate::id::{ChunkId, PackId};
use crate::repository::packs::Packs;

/// Pieces that are collected before their frames are read: about 4 MiB of memory.
const BATCH_PIECE_COUNT: usize = 1 << 16;
/// Length of pieces in frames whose chunks are unknown: about that of a chunk.
const PIECE_BYTES: u32 = 64 << 10;
/// Bytes of the disk that are collected before their chunks are looked up: about 32,000 chunks, which take 3 MiB; 40
/// MiB if each chunk is a single block.
const BATCH_BYTES: u64 = 2 << 30;

/// Copies a disk; returns the root of its map, and statistics.
pub(crate) fn copy_disk(
    session: &mut Session<'_>,
    name: &str,
    stored: StoredDisk<'_>,
    parent: Option<ParentMap>,
) -> Result<(Option<PageRef>, DiskStatistics)> {
    let packs = Arc::clone(&session.packs);
    let unit = stored.disk.content.unit();
    let open_parent = || parent.map(|parent| parent.reader(&packs, unit));
    // A parent of another size cannot be a copy of the base, even if the request names it.
    let is_same_size = stored
        .base
        .is_some_and(|base| parent.is_some_and(|parent| parent.size_bytes == base.size_bytes));
    let base = stored.base.filter(|_| is_same_size);
    let stored = StoredDisk { base, ..stored };
    let keys = stored.repository.vault.fingerprint_keys();
    let is_alike = session.draw.0.has_same_fingerprints(stored.repository);
    let fetcher = FrameFetcher {
        packs: Arc::clone(&stored.repository.packs),
        target_keys: (!is_alike).then(|| session.keys.clone()),
        keys,
        pace: stored.pace,
    };
    let thread_count = session.thread_count;
    std::thread::scope(|scope| {
        let mut copy = DiskCopy {
            cursor: base
                .and_then(|_| open_parent())
                .map(|map| ParentCursor::new(map, &packs)),
            shared_pages: open_parent(),
            map: MapWriter::new(unit),
            statistics: DiskStatistics::default(),
            frames: FrameQueue::new(scope, fetcher, thread_count),
            origin: Origin {
                packs: &stored.repository.packs,
                disk: name,
                content: stored.disk.content,
                memory: stored.memory,
            },
            is_alike,
            session,
        };
        copy.run(StoredWalk::new(&stored))?;
        let root = copy.map.finish(&mut copy.shared_pages, &mut copy.session.page_sink())?;
        Ok((root, copy.statistics))
    })
}

/// The source of the copy.
#[derive(Clone, Copy)]
struct Origin<'a> {
    packs: &'a Packs,
    disk: &'a str,
    content: DiskContent,
    memory: &'a CopyMemory,
}

impl Origin<'_> {
    fn error(&self, error: Error) -> Error {
        match error {
            Error::Cancelled => Error::Cancelled,
            other => Error::Origin {
                disk: self.disk.to_owned(),
                source: Box::new(other),
            },
        }
    }
}

struct DiskCopy<'a, 'session, 'packs> {
    session: &'a mut Session<'session>,
    /// The parent, if it is a copy of the base.
    cursor: Option<ParentCursor<'packs>>,
    shared_pages: Option<MapReader<'packs>>,
    map: MapWriter,
    statistics: DiskStatistics,
    frames: FrameQueue<'a>,
    origin: Origin<'a>,
    /// Whether both repositories compute the same chunk ids.
    is_alike: bool,
}

impl DiskCopy<'_, '_, '_> {
    fn run(&mut self, mut walk: StoredWalk<'_>) -> Result<()> {
        let mut batch = CopyBatch::default();
        let mut position = 0;
        while let Some(extents) = walk.next().map_err(|error| self.origin.error(error))? {
            self.session.check_cancelled()?;
            for extent in extents {
                self.gather(position, extent, &mut batch);
                position += extent.length;
            }
            if batch.parts.len() >= BATCH_PIECE_COUNT || batch.bytes_to_copy >= BATCH_BYTES {
                self.copy(&batch.parts)?;
                batch = CopyBatch::default();
            }
        }
        self.copy(&batch.parts)
    }

    /// Adds an extent to the batch: as pieces of this repository, or as data to copy.
    fn gather(&mut self, position: u64, extent: StoredExtent, batch: &mut CopyBatch) {
        let (length, there) = match extent.content {
            StoredExtentContent::Zero => return batch.push_present(extent.length, PieceContent::Zero),
            StoredExtentContent::Data(there) => (extent.length, there),
            StoredExtentContent::Same(there) => {
                let mut done = 0;
                while done < extent.length {
                    let range = position + done..position + extent.length;
                    let index = &self.session.index;
                    let carried = match &mut self.cursor {
                        Some(cursor) => cursor.carried(range, |pack| index.is_usable(pack)),
                        None => ParentExtent::Unknown(extent.length - done),
                    };
                    done += match carried {
                        ParentExtent::Data(here, length) => {
                            self.statistics.unchanged_bytes += length;
                            batch.push_present(length, PieceContent::Data(here));
                            length
                        }
                        // A block of zeroes has no location: where the base has one, its copy has no zeroes.
                        ParentExtent::Unknown(length) | ParentExtent::Zero(length) => {
                            batch.push_to_copy(length, there.advance(done));
                            length
                        }
                    };
                }
                return;
            }
        };
        batch.push_to_copy(length, there);
    }

    /// Copies the missing data of a batch, and writes its part of the map.
    ///
    /// Gc of the source may move data meanwhile: then the whole batch is resolved again, and data that was copied
    /// already is found here.
    fn copy(&mut self, batch: &[CopyPart]) -> Result<()> {
        let packs = self.origin.packs;
        let copied = packs.follow(|| {
            let resolved = resolve(packs, batch)?;
            let places = self.copy_chunks(&resolved)?;
            Ok((resolved, places))
        });
        // What is still missing is lost.
        let (resolved, places) = copied.map_err(|error| match error {
            Error::MissingPack { .. } => self.origin.error(error),
            other => other,
        })?;
        for part in &resolved {
            match *part {
                ResolvedPart::Present(piece) => {
                    self.put(piece)?;
                    self.session.advance(piece.length);
                }
                ResolvedPart::ToCopy { length, there } => {
                    let mut done = 0;
                    while done < length {
                        let piece = place_of(&places, there.advance(done), length - done);
                        self.put(piece)?;
                        done += piece.length;
                    }
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, piece: Piece) -> Result<()> {
        if piece.content == PieceContent::Zero {
            self.statistics.zero_bytes += piece.length;
        }
        self.map
            .push(piece, &mut self.shared_pages, &mut self.session.page_sink())
    }

    /// Ensures that all needed chunks are stored here, and returns their locations.
    fn copy_chunks(&mut self, resolved: &[ResolvedPart]) -> Result<HashMap<(PackId, u32), ChunkPlaces>> {
        let mut needed: BTreeMap<(PackId, u32), Vec<Range<u32>>> = BTreeMap::new();
        for part in resolved {
            if let ResolvedPart::ToCopy { length, there } = part {
                let length = u32::try_from(*length).expect("a piece lies in one frame");
                let ranges = needed.entry((there.pack, there.frame)).or_default();
                ranges.push(there.offset..there.offset.saturating_add(length));
            }
        }
        let mut places: HashMap<(PackId, u32), ChunkPlaces> = HashMap::new();
        let mut wishes = Vec::new();
        for ((pack, frame), ranges) in needed {
            let (known, wish) = self.locate_chunks(pack, frame, ranges)?;
            places.insert((pack, frame), known);
            wishes.extend(wish);
        }
        let Self {
            frames,
            session,
            statistics,
            origin,
            is_alike,
            ..
        } = self;
        let is_alike = *is_alike;
        let mut failed_here = None;
        let fetched = frames.fetch_all(wishes, &mut |frame| {
            let stored = store(session, statistics, frame);
            let place = places.entry((frame.wish.pack, frame.wish.frame)).or_default();
            match stored {
                Ok(mut stored) => {
                    if !is_alike {
                        origin.memory.learn(frame.wish.pack, frame.wish.frame, &stored);
                    }
                    place.append(&mut stored);
                }
                Err(error) => {
                    failed_here = Some(error);
                    return Err(Error::Cancelled);
                }
            }
            Ok(())
        });
        if let Some(error) = failed_here {
            return Err(error);
        }
        fetched.map_err(|error| with_origin(origin, error))?;
        for place in places.values_mut() {
            place.sort_unstable_by_key(|(start, ..)| *start);
        }
        Ok(places)
    }

    /// The known locations of a frame's chunks in `ranges`, without reading the frame; and the chunks that must be
    /// read.
    fn locate_chunks(
        &mut self,
        pack: PackId,
        frame: u32,
        mut ranges: Vec<Range<u32>>,
    ) -> Result<(ChunkPlaces, Option<FrameRequest>)> {
        let reader = self
            .origin
            .packs
            .frame_reader(pack)
            .map_err(|error| with_origin(&self.origin, error))?;
        let entry = reader.frame(frame).map_err(|error| self.origin.error(error))?;
        let expected = match self.origin.content {
            DiskContent::Blocks => FrameContent::Blocks,
            DiskContent::Stream => FrameContent::Stream,
        };
        let unit = self.origin.content.unit().bytes();
        let is_wrong = |range: &Range<u32>| range.end > entry.raw_length || u64::from(range.start) % unit != 0;
        if entry.content != expected || ranges.iter().any(is_wrong) {
            let detail = format!("frame {frame} is shorter than, or not of the kind that, a disk needs of it");
            return Err(self.origin.error(Error::damaged(&reader.name, entry.offset, detail)));
        }
        let disk_bytes = ranges.iter().map(|range| u64::from(range.end - range.start)).sum();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut ranges = ranges.into_iter().peekable();
        let learnt = self.origin.memory.places(pack, frame);
        let (mut places, mut chunks) = (ChunkPlaces::new(), Vec::new());
        let mut start = 0;
        for (length, id) in chunks_of(&reader, entry) {
            let end = start + length;
            while ranges.next_if(|range| range.end <= start).is_some() {}
            if ranges.peek().is_some_and(|range| range.start < end) {
                let chunk = WantedChunk { start, length, id };
                match self.find(chunk, learnt.as_deref().and_then(|places| location_at(places, start))) {
                    Some(here) => places.push((start, length, here)),
                    None => chunks.push(chunk),
                }
            }
            start = end;
        }
        if chunks.is_empty() {
            self.session.advance(disk_bytes);
        }
        let wish = (!chunks.is_empty()).then_some(FrameRequest {
            pack,
            frame,
            stored_bytes: u64::from(entry.stored_length),
            disk_bytes,
            chunks,
        });
        Ok((places, wish))
    }

    /// The location of a chunk in this repository: the `learnt` one if it is still valid, otherwise by its id if the
    /// ids are the same here.
    fn find(&mut self, chunk: WantedChunk, learnt: Option<Location>) -> Option<Location> {
        let index = &mut self.session.index;
        let here = match (learnt.filter(|here| index.is_usable(here.pack)), chunk.id) {
            (None, Some(id)) if self.is_alike => index.find(&id, chunk.length),
            (learnt, _) => learnt,
        }?;
        self.statistics.known_bytes += u64::from(chunk.length);
        Some(here)
    }
}

/// The chunks of a frame, with length and id. If the directory of the pack is lost, these are pieces of the frame with
/// the same boundaries for every disk.
pub(super) fn chunks_of<'r>(
    reader: &'r PackReader,
    frame: &'r FrameEntry,
) -> Box<dyn Iterator<Item = (u32, Option<ChunkId>)> + 'r> {
    if reader.has_chunks() {
        let chunks = reader.directory.chunks(frame).iter();
        return Box::new(chunks.map(|chunk| (chunk.length, Some(chunk.id))));
    }
    let borders = (0..frame.raw_length).step_by(PIECE_BYTES as usize);
    Box::new(borders.map(|start| (PIECE_BYTES.min(frame.raw_length - start), None)))
}

/// Marks `error` as an error of the source. A missing pack is not marked: its data may have been moved, so the caller
/// resolves it again.
fn with_origin(origin: &Origin<'_>, error: Error) -> Error {
    match error {
        Error::MissingPack { .. } => error,
        other => origin.error(other),
    }
}

/// A part of a batch.
#[derive(Debug, Clone, Copy)]
enum CopyPart {
    /// Data that this repository has already, or zeroes.
    Present(Piece),
    /// Data of the other repository, at the location in its map.
    ToCopy { length: u64, there: Location },
}

/// The same with present locations.
#[derive(Debug, Clone, Copy)]
enum ResolvedPart {
    Present(Piece),
    /// Contiguous bytes of a frame.
    ToCopy {
        length: u64,
        there: Location,
    },
}

/// Parts that are copied together.
#[derive(Default)]
struct CopyBatch {
    parts: Vec<CopyPart>,
    /// Bytes of those that must be copied.
    bytes_to_copy: u64,
}

impl CopyBatch {
    fn push_present(&mut self, length: u64, content: PieceContent) {
        let piece = Piece { length, content };
        match self.parts.last_mut() {
            Some(CopyPart::Present(last)) if let Some(joined) = last.join(piece) => *last = joined,
            _ => self.parts.push(CopyPart::Present(piece)),
        }
    }

    fn push_to_copy(&mut self, length: u64, there: Location) {
        self.bytes_to_copy += length;
        self.parts.push(CopyPart::ToCopy { length, there });
    }
}

/// Follows the relocations of the source.
fn resolve(packs: &Packs, batch: &[CopyPart]) -> Result<Vec<ResolvedPart>> {
    let mut resolved = Vec::with_capacity(batch.len());
    for part in batch {
        match *part {
            CopyPart::Present(piece) => resolved.push(ResolvedPart::Present(piece)),
            CopyPart::ToCopy { length, there } => {
                let mut done = 0;
                while done < length {
                    let (there, together) = packs.resolve(there.advance(done), length - done)?;
                    resolved.push(ResolvedPart::ToCopy {
                        length: together,
                        there,
                    });
                    done += together;
                }
            }
        }
    }
    Ok(resolved)
}

/// The piece in this repository that corresponds to `there`, at most `length` bytes, within one chunk.
fn place_of(places: &HashMap<(PackId, u32), ChunkPlaces>, there: Location, length: u64) -> Piece {
    let chunks = &places[&(there.pack, there.frame)];
    let behind = chunks.partition_point(|(start, ..)| *start <= there.offset);
    let (start, chunk_length, here) = chunks[behind - 1];
    let inside = there.offset - start;
    Piece {
        length: length.min(u64::from(chunk_length - inside)),
        content: PieceContent::Data(here.advance(inside.into())),
    }
}

/// Stores the requested chunks of a frame, unless they are stored here under their ids already; returns the location of
/// each.
fn store(session: &mut Session<'_>, statistics: &mut DiskStatistics, frame: &FetchedFrame) -> Result<ChunkPlaces> {
    session.check_cancelled()?;
    statistics.read_bytes += frame.wish.stored_bytes;
    let mut places = ChunkPlaces::new();
    for (&WantedChunk { start, length, .. }, (entry, prints)) in frame.wish.chunks.iter().zip(&frame.named) {
        let bytes = &frame.raw[start as usize..][..length as usize];
        let here = if prints.is_empty() {
            session.stream.push(bytes, prints, &mut session.output)?;
            session.store_stream_chunk(*entry, statistics)?
        } else {
            session.data.push(bytes, prints, &mut session.output)?;
            session.store_chunk(*entry, statistics)?
        };
        places.push((start, length, here));
    }
    session.advance(frame.wish.disk_bytes);
    Ok(places)
}
