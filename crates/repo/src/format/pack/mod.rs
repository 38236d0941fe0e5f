//! Packs: the stored objects that hold frames.
//!
//! A pack is written sequentially: a header, sealed frames, the sealed prints of each frame, the sealed directory, a
//! trailer. Its identity is drawn at random when it is begun, so that references to its frames can be written while it
//! is still growing. `docs/format/repository.md` has the layout byte by byte.

mod directory;
mod frame_table;
mod key;
mod layout;
mod reader;
mod writer;

pub(crate) use directory::{ChunkEntry, Directory, FRAME_COUNT_MAX, FrameContent, FrameEntry};
pub(crate) use frame_table::{FRAME_TABLE_BYTES_MAX, decode_frame_table, encode_frame_table};
pub(crate) use key::PackKey;
#[cfg(feature = "hostile")]
pub(crate) use key::PackSection;
pub(crate) use layout::{HEADER_LENGTH, PackKind, TRAILER_LENGTH, pack_name};
#[cfg(feature = "hostile")]
pub(crate) use layout::{decode_header, decode_trailer, encode_header, encode_trailer};
pub(crate) use reader::{PACK_BYTES_MIN, PackReader, read_around, read_directory, read_displaced_directory, read_kind};
pub(crate) use writer::{PackWriter, SealedFrame, UnsealedFrame};

use crate::id::PackId;

/// The location of bytes: an offset in a frame before compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Location {
    pub(crate) pack: PackId,
    pub(crate) frame: u32,
    pub(crate) offset: u32,
}

impl Location {
    /// The location `bytes` further in the same frame.
    pub(crate) fn advance(self, bytes: u64) -> Self {
        let bytes = u32::try_from(bytes).expect("a frame is far smaller than 4 GiB");
        Self {
            offset: self.offset + bytes,
            ..self
        }
    }
}
