//! Rebuilds the directory of a damaged pack from its frames.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::chunker::CHUNK_BYTES_MAX;
use crate::format::fingerprint::FingerprintKeys;
use crate::format::pack::{ChunkEntry, Directory, FrameContent, FrameEntry, PackReader};
use crate::id::ChunkId;
use crate::read::frame_check::{Depth, check_frame};
use crate::repository::damage_records::{DamageExtent, DamageRecord, KnownIdentity};
use crate::repository::packs::{FrameBuffers, Packs};

/// A pack after all of its frames were tried.
pub(super) struct Rebuilt {
    pub(super) reader: Arc<PackReader>,
    /// The exact damage: the frames that are unreadable.
    pub(super) record: DamageRecord,
}

/// Reads every frame of a pack, and builds a directory with the chunks of the intact ones.
///
/// The chunk boundaries are taken from the damage record, which has them from the index. If they do not match the
/// bytes, the frame is divided anew, like data that gc has moved.
pub(super) fn rebuild(
    packs: &Packs,
    keys: &FingerprintKeys,
    reader: &PackReader,
    record: &DamageRecord,
) -> Result<Rebuilt> {
    let mut directory = Directory::new(reader.directory.kind, reader.directory.writer);
    let mut damaged = BTreeSet::new();
    let (mut buffers, mut raw) = (FrameBuffers::new(), Vec::new());
    for (number, frame) in (0u32..).zip(reader.directory.frames()) {
        let read = packs.prints(reader.pack, number).and_then(|prints| {
            packs.frame(reader.pack, number, &mut buffers, &mut raw)?;
            check_frame(keys, reader, number, &raw, &prints, Depth::Identities)
        });
        let chunks = match read {
            Ok(()) if reader.has_chunks() => reader.directory.chunks(frame).to_vec(),
            Ok(()) => chunks_of(keys, number, frame, &raw, record),
            Err(error @ Error::MissingPack { .. }) => return Err(error),
            Err(error) if error.is_about_one_object() || error.is_unreadable() => {
                damaged.insert(number);
                Vec::new()
            }
            Err(error) => return Err(error),
        };
        directory.push(
            frame.stored_length,
            frame.raw_length,
            frame.codec,
            frame.content,
            &chunks,
        );
    }
    directory.finish();
    let record = DamageRecord {
        extent: DamageExtent::Frames(damaged),
        chunks: record.chunks.clone(),
    };
    let reader = Arc::new(reader.with_directory(directory, packs.key(reader.pack)));
    Ok(Rebuilt { reader, record })
}

/// The chunks of a frame with these bytes.
fn chunks_of(
    keys: &FingerprintKeys,
    number: u32,
    frame: &FrameEntry,
    raw: &[u8],
    record: &DamageRecord,
) -> Vec<ChunkEntry> {
    if frame.content == FrameContent::Tree {
        return Vec::new();
    }
    let entry = |from: usize, to: usize| ChunkEntry {
        id: identity(keys, frame.content, &raw[from..to]),
        length: u32::try_from(to - from).expect("a frame is far smaller than 4 GiB"),
    };
    known_chunks(number, raw.len(), record, entry).unwrap_or_else(|| {
        let step = holdfast_block::to_usize(CHUNK_BYTES_MAX);
        let starts = (0..raw.len()).step_by(step);
        starts.map(|from| entry(from, raw.len().min(from + step))).collect()
    })
}

/// The recorded chunks of the frame; `None` unless they cover it completely and have the recorded ids.
fn known_chunks(
    number: u32,
    length: usize,
    record: &DamageRecord,
    entry: impl Fn(usize, usize) -> ChunkEntry,
) -> Option<Vec<ChunkEntry>> {
    let mut chunks = Vec::new();
    let mut end = 0usize;
    for ((_, offset), (chunk_length, identity)) in record.chunks.range((number, 0)..=(number, u32::MAX)) {
        let start = end;
        end = start.checked_add(*chunk_length as usize)?;
        if *offset as usize != start || end > length || *chunk_length == 0 {
            return None;
        }
        let chunk = entry(start, end);
        if !KnownIdentity::is(identity, &chunk.id) {
            return None;
        }
        chunks.push(chunk);
    }
    (end == length).then_some(chunks)
}

fn identity(keys: &FingerprintKeys, content: FrameContent, bytes: &[u8]) -> ChunkId {
    if content == FrameContent::Stream {
        return keys.chunk_of_stream(bytes);
    }
    let mut hashes = Vec::new();
    keys.hash_blocks(bytes, &mut hashes);
    keys.chunk_of_blocks(&hashes)
}
