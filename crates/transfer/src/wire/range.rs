//! Ranges of the disk in frames: as they are, and compressed.

#![deny(clippy::indexing_slicing)]

use std::ops::Range;

use super::field::{FieldReader, FieldWriter};
use crate::Result;
use crate::digest::FrameContent;

/// Limit of the data of a frame before compression, in bytes.
const DATA_BYTES_MAX: u64 = 4 << 20;
/// Bytes before the compressed data.
const COMPRESSED_FIELD_BYTES: u64 = 4 + 8 + 4;

/// A range of the disk and its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeFrame {
    /// Number of barriers that were sent before the frame. The receiver applies the frame between these barriers,
    /// whenever it arrives.
    pub pass: u32,
    /// The range; never empty.
    pub range: Range<u64>,
    /// Its content.
    pub content: RangeContent,
}

/// The content of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RangeContent {
    /// Bytes, as many as the range has.
    Data(Vec<u8>),
    /// Reads as zero.
    Zero,
    /// Reads as zero, and may have no space allocated.
    Hole,
}

impl RangeFrame {
    pub(crate) fn content(&self) -> FrameContent<'_> {
        match &self.content {
            RangeContent::Data(bytes) => FrameContent::Data(bytes),
            RangeContent::Zero | RangeContent::Hole => FrameContent::Zero,
        }
    }
}

/// A range of the disk with compressed data. Its fields are not checked against the data until
/// [`decompress`](super::RangeDecompressor::decompress).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompressedRange {
    /// As in [`RangeFrame`].
    pub pass: u32,
    /// The range: from 1 byte to 4 MiB.
    pub range: Range<u64>,
    /// One zstd frame, which is shorter than the range.
    pub bytes: Vec<u8>,
}

impl CompressedRange {
    pub(super) fn length(&self) -> u64 {
        self.range.end - self.range.start
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        COMPRESSED_FIELD_BYTES + self.bytes.len() as u64
    }

    pub(crate) fn encode(&self, to: &mut FieldWriter<'_>) {
        to.u32(self.pass);
        to.u64(self.range.start);
        to.u32(u32::try_from(self.length()).expect("a frame has at most 4 MiB of data"));
        to.bytes(&self.bytes);
    }

    pub(crate) fn decode(from: &mut FieldReader<'_>) -> Result<Self> {
        let (pass, start, length) = (from.u32()?, from.u64()?, u64::from(from.u32()?));
        let bytes = from.rest();
        if length > DATA_BYTES_MAX {
            return Err(from.malformed("the range is longer than 4 MiB"));
        }
        if bytes.len() as u64 >= length {
            return Err(from.malformed("the compressed data is not shorter than the range"));
        }
        let end = start.checked_add(length);
        Ok(Self {
            pass,
            range: start..end.ok_or(from.malformed("the range is too long"))?,
            bytes: bytes.to_vec(),
        })
    }
}
