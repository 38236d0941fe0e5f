//! The frame table of a pack: the part of its directory that a segment of the index stores.
//!
//! ```text
//! u8   kind of pack            16 bytes  identity of the writer
//! n    frames, each: n stored bytes, n bytes before compression, u8 codec, u8 content, as in the directory
//! ```
//!
//! It makes a pack with a damaged directory readable. Every frame is authenticated by its seal, so a wrong table
//! causes errors, but never wrong bytes.

use super::directory::Directory;
use crate::wire::{Decoder, Malformed, put_varint};

/// Maximum length of a table that is read, without its seal.
pub(crate) const FRAME_TABLE_BYTES_MAX: u32 = 1 << 20;
/// Bytes of the shortest frame of a table.
const FRAME_BYTES: usize = 4;

/// The table of the pack with this directory.
pub(crate) fn encode_frame_table(directory: &Directory) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(32 + directory.frames().len() * 10);
    directory.encode_start(&mut bytes);
    put_varint(&mut bytes, directory.frames().len() as u64);
    for frame in directory.frames() {
        frame.encode(&mut bytes);
    }
    bytes
}

/// A directory with the frames of a table, without chunks.
pub(crate) fn decode_frame_table(bytes: &[u8]) -> Result<Directory, Malformed> {
    let mut decoder = Decoder::new(bytes);
    let mut directory = Directory::decode_start(&mut decoder)?;
    let frame_count = decoder.count(FRAME_BYTES)?;
    if frame_count > super::directory::FRAME_COUNT_MAX {
        return decoder.fail("has too many frames");
    }
    for _ in 0..frame_count {
        let frame = Directory::decode_frame_start(&mut decoder)?;
        directory.push(frame.stored_length, frame.raw_length, frame.codec, frame.content, &[]);
    }
    decoder.finish()?;
    directory.finish();
    Ok(directory)
}
