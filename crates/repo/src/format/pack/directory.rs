//! The directory of a pack: its frames and chunks.
//!
//! Encoding (integers named *n* are of variable length, see `wire`):
//!
//! ```text
//! u8   kind of pack            16 bytes  identity of the writer
//! n    frames, each:
//!        n   stored bytes, tag included        n   bytes before compression
//!        u8  codec (0 raw, 1 zstd)             u8  content (0 blocks, 1 stream, 2 tree pages)
//!        n   chunks (0 for tree pages), each:  32 bytes identity, n length in blocks or bytes
//! n    bytes of attachment, and the attachment (a tree pack carries a copy of its snapshot's manifest)
//! ```
//!
//! Offsets are not stored: frames follow one another after the header, the prints of all frames with blocks follow the
//! last frame in the same order, and the directory follows them.

use std::ops::Range;

use super::layout::{HEADER_LENGTH, PackKind};
use crate::format::chunker::CHUNK_BYTES_MAX;
use crate::format::codec::{Codec, FRAME_BYTES_MAX};
use crate::format::fingerprint::{BLOCK_BYTES, PRINT_LENGTH};
use crate::id::{ChunkId, WriterId};
use crate::key::TAG_LENGTH;
use crate::wire::{Decoder, Malformed, put_varint};

/// Maximum length of a directory that is read: far more than a pack of the largest size with the smallest
/// chunks needs.
pub(crate) const DIRECTORY_BYTES_MAX: u64 = 32 << 20;

/// Maximum number of frames in a pack.
pub(crate) const FRAME_COUNT_MAX: usize = 1 << 16;

/// The kind of content of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameContent {
    /// Chunks of whole blocks, each block with a print.
    Blocks,
    /// Chunks of a stream.
    Stream,
    /// Pages of disk maps.
    Tree,
}

/// A chunk of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkEntry {
    pub(crate) id: ChunkId,
    /// Bytes before compression.
    pub(crate) length: u32,
}

/// A frame of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FrameEntry {
    /// Offset of the sealed bytes in the pack.
    pub(crate) offset: u64,
    /// Sealed bytes, tag included.
    pub(crate) stored_length: u32,
    /// Bytes before compression.
    pub(crate) raw_length: u32,
    pub(crate) codec: Codec,
    pub(crate) content: FrameContent,
    /// Offset of the sealed prints in the pack; meaningless unless [`FrameContent::Blocks`].
    pub(crate) prints_offset: u64,
    chunks: Range<u32>,
}

/// The fields of an encoded frame before its chunks.
pub(crate) struct FrameStart {
    pub(crate) stored_length: u32,
    pub(crate) raw_length: u32,
    pub(crate) codec: Codec,
    pub(crate) content: FrameContent,
}

impl FrameContent {
    /// Its code, and the unit of chunk lengths in bytes.
    fn to_wire(self) -> (u8, u64) {
        match self {
            Self::Blocks => (0, BLOCK_BYTES),
            Self::Stream => (1, 1),
            Self::Tree => (2, 1),
        }
    }

    fn from_wire(byte: u8) -> Option<Self> {
        [Self::Blocks, Self::Stream, Self::Tree]
            .into_iter()
            .find(|content| content.to_wire().0 == byte)
    }
}

impl FrameEntry {
    /// Writes the fields before the chunks.
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        put_varint(bytes, self.stored_length.into());
        put_varint(bytes, self.raw_length.into());
        bytes.push(self.codec.to_wire());
        bytes.push(self.content.to_wire().0);
    }

    /// Sealed bytes of the frame's prints; 0 if it has none.
    pub(crate) fn prints_length(&self) -> usize {
        match self.content {
            FrameContent::Blocks => {
                (self.raw_length as usize / crate::format::fingerprint::BLOCK_LENGTH) * PRINT_LENGTH + TAG_LENGTH
            }
            FrameContent::Stream | FrameContent::Tree => 0,
        }
    }
}

/// A validated directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Directory {
    pub(crate) kind: PackKind,
    pub(crate) writer: WriterId,
    frames: Vec<FrameEntry>,
    chunks: Vec<ChunkEntry>,
    pub(crate) attachment: Vec<u8>,
}

impl Directory {
    pub(crate) fn new(kind: PackKind, writer: WriterId) -> Self {
        Self {
            kind,
            writer,
            frames: Vec::new(),
            chunks: Vec::new(),
            attachment: Vec::new(),
        }
    }

    pub(crate) fn frames(&self) -> &[FrameEntry] {
        &self.frames
    }

    pub(crate) fn frame(&self, number: u32) -> Option<&FrameEntry> {
        self.frames.get(number as usize)
    }

    /// The chunks of a frame of this directory, in order.
    pub(crate) fn chunks(&self, frame: &FrameEntry) -> &[ChunkEntry] {
        &self.chunks[frame.chunks.start as usize..frame.chunks.end as usize]
    }

    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Approximate memory of this value in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.frames.len() * size_of::<FrameEntry>()
            + self.chunks.len() * size_of::<ChunkEntry>()
            + self.attachment.len()
            + size_of::<Self>()
    }

    /// Adds the next frame after the last one.
    pub(crate) fn push(
        &mut self,
        stored_length: u32,
        raw_length: u32,
        codec: Codec,
        content: FrameContent,
        chunks: &[ChunkEntry],
    ) {
        let count = |length: usize| u32::try_from(length).expect("a pack has far fewer than 2^32 chunks");
        let first = count(self.chunks.len());
        self.chunks.extend_from_slice(chunks);
        self.frames.push(FrameEntry {
            offset: self.frames_end(),
            stored_length,
            raw_length,
            codec,
            content,
            prints_offset: 0,
            chunks: first..count(self.chunks.len()),
        });
    }

    /// The offset after the last frame.
    pub(crate) fn frames_end(&self) -> u64 {
        self.frames.last().map_or(HEADER_LENGTH as u64, |frame| {
            frame.offset + u64::from(frame.stored_length)
        })
    }

    /// Places the prints after the last frame; returns the offset of the directory.
    fn place_prints(&mut self) -> u64 {
        let mut offset = self.frames_end();
        for frame in &mut self.frames {
            frame.prints_offset = offset;
            offset += frame.prints_length() as u64;
        }
        offset
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.chunks.len() * (ChunkId::LENGTH + 2) + self.frames.len() * 12 + 64);
        self.encode_start(&mut bytes);
        put_varint(&mut bytes, self.frames.len() as u64);
        for frame in &self.frames {
            frame.encode(&mut bytes);
            let unit = frame.content.to_wire().1;
            let chunks = self.chunks(frame);
            put_varint(&mut bytes, chunks.len() as u64);
            for chunk in chunks {
                bytes.extend_from_slice(chunk.id.as_bytes());
                put_varint(&mut bytes, u64::from(chunk.length) / unit);
            }
        }
        put_varint(&mut bytes, self.attachment.len() as u64);
        bytes.extend_from_slice(&self.attachment);
        bytes
    }

    /// Writes the fields before the frames.
    pub(super) fn encode_start(&self, bytes: &mut Vec<u8>) {
        bytes.push(match self.kind {
            PackKind::Data => 1,
            PackKind::Tree => 2,
        });
        bytes.extend_from_slice(self.writer.as_bytes());
    }

    /// Decodes the fields before the frames to a directory without frames.
    pub(super) fn decode_start(decoder: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let kind = match decoder.u8()? {
            1 => PackKind::Data,
            2 => PackKind::Tree,
            _ => return decoder.fail("names an unknown kind of pack"),
        };
        Ok(Self::new(kind, WriterId::from_bytes(decoder.array()?)))
    }

    /// Decodes and validates; `directory_offset` is the directory's offset according to the trailer.
    pub(crate) fn decode(bytes: &[u8], directory_offset: u64) -> Result<Self, Malformed> {
        let mut directory = Self::decode_unplaced(bytes)?;
        if directory.place_prints() != directory_offset {
            return Decoder::new(bytes).fail("does not add up to the length of the pack");
        }
        Ok(directory)
    }

    /// Decodes a directory without its offset in the pack, and therefore without the offsets of prints.
    pub(crate) fn decode_unplaced(bytes: &[u8]) -> Result<Self, Malformed> {
        const FRAME_BYTES: usize = 5;
        let mut decoder = Decoder::new(bytes);
        let mut directory = Self::decode_start(&mut decoder)?;
        let frame_count = decoder.count(FRAME_BYTES)?;
        if frame_count > FRAME_COUNT_MAX {
            return decoder.fail("has too many frames");
        }
        directory.frames.reserve_exact(frame_count);
        for _ in 0..frame_count {
            directory.decode_frame(&mut decoder)?;
        }
        let attachment_length = decoder.count(1)?;
        directory.attachment = decoder.take(attachment_length)?.to_vec();
        decoder.finish()?;
        Ok(directory)
    }

    /// Decodes the fields before the chunks of a frame.
    pub(super) fn decode_frame_start(decoder: &mut Decoder<'_>) -> Result<FrameStart, Malformed> {
        let limit = (FRAME_BYTES_MAX + TAG_LENGTH) as u64;
        let stored_length = bounded_u32(decoder.varint_at_most(limit)?);
        let raw_length = bounded_u32(decoder.varint_at_most(FRAME_BYTES_MAX as u64)?);
        let Some(codec) = Codec::from_wire(decoder.u8()?) else {
            return decoder.fail("names an unknown codec");
        };
        let Some(content) = FrameContent::from_wire(decoder.u8()?) else {
            return decoder.fail("names an unknown content");
        };
        if (stored_length as usize) < TAG_LENGTH {
            return decoder.fail("has a frame that is too short");
        }
        Ok(FrameStart {
            stored_length,
            raw_length,
            codec,
            content,
        })
    }

    fn decode_frame(&mut self, decoder: &mut Decoder<'_>) -> Result<(), Malformed> {
        let FrameStart {
            stored_length,
            raw_length,
            codec,
            content,
        } = Self::decode_frame_start(decoder)?;
        let unit = content.to_wire().1;
        let chunk_count = decoder.count(ChunkId::LENGTH + 1)?;
        let mut chunks = Vec::with_capacity(chunk_count);
        let mut total = 0;
        for _ in 0..chunk_count {
            let id = ChunkId::from_bytes(decoder.array()?);
            let length = decoder.varint_at_most(CHUNK_BYTES_MAX / unit)? * unit;
            if length == 0 {
                return decoder.fail("has an empty chunk");
            }
            total += length;
            chunks.push(ChunkEntry {
                id,
                length: bounded_u32(length),
            });
        }
        let complete = match content {
            FrameContent::Tree => chunk_count == 0,
            FrameContent::Blocks | FrameContent::Stream => total == u64::from(raw_length),
        };
        if !complete {
            return decoder.fail("has a frame that is not the sum of its chunks");
        }
        self.push(stored_length, raw_length, codec, content, &chunks);
        Ok(())
    }

    /// Completes a directory that was built with [`push`](Self::push); returns the offset at which it must be
    /// stored.
    pub(crate) fn finish(&mut self) -> u64 {
        self.place_prints()
    }
}

/// A number that was checked against a limit of a few MiB.
fn bounded_u32(value: u64) -> u32 {
    u32::try_from(value).expect("the limit of the field is below 2^32")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::{ChunkEntry, Directory, FrameContent};
    use crate::format::codec::Codec;
    use crate::format::pack::PackKind;
    use crate::id::{ChunkId, WriterId};

    fn sample(lengths: &[u8]) -> (Directory, u64) {
        let mut directory = Directory::new(PackKind::Data, WriterId::from_bytes([7; 16]));
        for (number, blocks) in (0u8..).zip(lengths) {
            let chunks: Vec<_> = (0..*blocks % 4)
                .map(|chunk| ChunkEntry {
                    id: ChunkId::from_bytes([number ^ chunk; 32]),
                    length: 4096 * u32::from((*blocks).min(128)),
                })
                .filter(|chunk| chunk.length > 0)
                .collect();
            let raw = chunks.iter().map(|chunk| chunk.length).sum();
            directory.push(raw / 3 + 16, raw, Codec::Zstd, FrameContent::Blocks, &chunks);
        }
        directory.attachment = vec![1; lengths.len()];
        let offset = directory.finish();
        (directory, offset)
    }

    proptest! {
        #[test]
        fn directories_round_trip(lengths in proptest::collection::vec(any::<u8>(), 0..20)) {
            let (directory, offset) = sample(&lengths);
            prop_assert_eq!(Directory::decode(&directory.encode(), offset), Ok(directory.clone()));
            assert!(Directory::decode(&directory.encode(), offset + 1).is_err());
        }

        #[test]
        fn damaged_directories_never_panic(lengths in proptest::collection::vec(any::<u8>(), 0..8),
                                           flips in proptest::collection::vec(any::<(u16, u8)>(), 1..6)) {
            let (directory, offset) = sample(&lengths);
            let mut bytes = directory.encode();
            for (at, flip) in flips {
                let at = usize::from(at) % bytes.len();
                bytes[at] ^= flip;
            }
            if let Ok(decoded) = Directory::decode(&bytes, offset) {
                for frame in decoded.frames() {
                    assert!(decoded.chunks(frame).len() <= bytes.len());
                }
            }
        }
    }
}
