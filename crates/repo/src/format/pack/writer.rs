//! Writes a pack sequentially.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::directory::{ChunkEntry, Directory, FrameContent};
use super::key::{PackKey, PackSection};
use super::layout::{PackKind, encode_header, encode_trailer, pack_name};
use crate::error::{Error, Result};
use crate::format::codec::{Codec, Compressor};
use crate::id::{PackId, WriterId};
use crate::key::TAG_LENGTH;
use crate::store::{ObjectWriter, Put, Store};

/// A frame that is ready to be appended.
pub(crate) struct SealedFrame {
    pub(crate) number: u32,
    payload: Vec<u8>,
    prints: Vec<u8>,
    raw_length: u32,
    codec: Codec,
    pub(crate) content: FrameContent,
    chunks: Vec<ChunkEntry>,
}

impl SealedFrame {
    /// Bytes that the frame adds to its pack, without the directory.
    pub(crate) fn stored_bytes(&self) -> u64 {
        (self.payload.len() + self.prints.len()) as u64
    }

    /// Bytes of the frame in memory, without the tag.
    pub(crate) fn held_bytes(&self) -> usize {
        self.payload.len() - TAG_LENGTH
    }

    /// The memory of the uncompressed frame, if it was stored uncompressed.
    pub(crate) fn into_raw_buffer(self) -> Vec<u8> {
        match self.codec {
            Codec::Raw => self.payload,
            Codec::Zstd | Codec::ZstdMachineCode => Vec::new(),
        }
    }
}

/// A full frame that is not compressed and sealed yet.
pub(crate) struct UnsealedFrame {
    pub(crate) number: u32,
    pub(crate) raw: Vec<u8>,
    pub(crate) content: FrameContent,
    /// The prints of the blocks of the frame; empty if it contains no blocks.
    pub(crate) prints: Vec<u8>,
    pub(crate) chunks: Vec<ChunkEntry>,
}

impl UnsealedFrame {
    /// Compresses and seals the frame: the expensive step, which any thread can do in any order.
    ///
    /// Also returns the memory of the uncompressed frame, unless the frame does not compress and was sealed in place.
    pub(crate) fn seal(mut self, compressor: &mut Compressor, key: &PackKey) -> (SealedFrame, Vec<u8>) {
        let mut compressed = Vec::new();
        let codec = compressor.compress(&mut self.raw, &mut compressed);
        let raw_length = u32::try_from(self.raw.len()).expect("a frame is far smaller than 4 GiB");
        let (mut payload, free) = match codec {
            Codec::Raw => (self.raw, Vec::new()),
            Codec::Zstd | Codec::ZstdMachineCode => (compressed, self.raw),
        };
        key.seal(PackSection::Frame(self.number), &mut payload);
        if self.content == FrameContent::Blocks {
            key.seal(PackSection::Prints(self.number), &mut self.prints);
        }
        let frame = SealedFrame {
            number: self.number,
            payload,
            prints: self.prints,
            raw_length,
            codec,
            content: self.content,
            chunks: self.chunks,
        };
        (frame, free)
    }
}

/// A pack that is being written.
pub(crate) struct PackWriter {
    pack: PackId,
    key: Arc<PackKey>,
    object: Box<dyn ObjectWriter>,
    hasher: blake3::Hasher,
    directory: Directory,
    prints: Vec<u8>,
    /// Frames that arrived before their predecessors; a frame's number is its position.
    early: BTreeMap<u32, SealedFrame>,
}

impl PackWriter {
    pub(crate) fn create(
        store: &dyn Store,
        pack: PackId,
        kind: PackKind,
        writer: WriterId,
        key: Arc<PackKey>,
    ) -> Result<Self> {
        let mut pack_writer = Self {
            pack,
            key,
            object: store.create(&pack_name(pack))?,
            hasher: blake3::Hasher::new(),
            directory: Directory::new(kind, writer),
            prints: Vec::new(),
            early: BTreeMap::new(),
        };
        pack_writer.append(&encode_header(pack, kind, writer))?;
        Ok(pack_writer)
    }

    /// Number of appended frames.
    pub(crate) fn frame_count(&self) -> usize {
        self.directory.frames().len()
    }

    /// Appends a frame now, or after its predecessors; passes appended frames to `recycle`.
    pub(crate) fn add(&mut self, frame: SealedFrame, mut recycle: impl FnMut(SealedFrame)) -> Result<()> {
        self.early.insert(frame.number, frame);
        while let Some(frame) = self.next_in_place() {
            let stored_length = u32::try_from(frame.payload.len()).expect("a frame is far smaller than 4 GiB");
            self.append(&frame.payload)?;
            self.directory.push(
                stored_length,
                frame.raw_length,
                frame.codec,
                frame.content,
                &frame.chunks,
            );
            self.prints.extend_from_slice(&frame.prints);
            recycle(frame);
        }
        Ok(())
    }

    fn next_in_place(&mut self) -> Option<SealedFrame> {
        let number = u32::try_from(self.frame_count()).ok()?;
        self.early.remove(&number)
    }

    /// Writes the rest of the pack; it is complete and durable on return.
    pub(crate) fn finish(mut self, attachment: Vec<u8>) -> Result<(Directory, u64)> {
        assert!(self.early.is_empty(), "a frame of the pack is missing");
        let prints = std::mem::take(&mut self.prints);
        self.append(&prints)?;
        self.directory.attachment = attachment;
        let directory_offset = self.directory.finish();
        let mut directory = self.directory.encode();
        self.key.seal(PackSection::Directory, &mut directory);
        self.append(&directory)?;
        let hash = self.hasher.finalize();
        let trailer = encode_trailer(self.pack, directory_offset, directory.len() as u64, hash.as_bytes());
        self.object.append(&trailer)?;
        match self.object.commit()? {
            Put::Created => Ok((
                self.directory,
                directory_offset + (directory.len() + trailer.len()) as u64,
            )),
            Put::AlreadyExists => Err(Error::damaged(
                &pack_name(self.pack),
                0,
                "a pack of this random name exists: is the source of randomness broken?",
            )),
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        Ok(self.object.append(bytes)?)
    }
}
