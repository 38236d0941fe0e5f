//! Data that is compressed on its way: the message, and both directions of the compression.
//!
//! The state machines do not compress: it takes milliseconds, in which they would answer nothing. The caller compresses
//! frames after the sender has returned them, and decompresses what the receiver asks for.

#![deny(clippy::indexing_slicing)]

use std::ops::Range;

use zstd::zstd_safe::{DCtx, find_frame_compressed_size};

use super::field::{FieldReader, FieldWriter};
use super::frame::window_bytes_of;
use super::message::{RangeContent, RangeFrame};
use crate::{Error, Result};

/// Limit of the data of a frame before compression, in bytes.
const DATA_BYTES_MAX: u64 = 4 << 20;
/// Shorter data is not compressed: the fields and the checksum of its frame would outweigh the gain.
const DATA_BYTES_MIN: usize = 1 << 10;
/// The fastest level of zstd that still searches: a faster one gains little, a slower one is slower than many links.
const LEVEL: i32 = 1;
/// Compression must save one part of so many: less is not worth the time of the receiver.
const SAVED_PART: usize = 8;
/// Bytes before the compressed data.
const FIELD_BYTES: u64 = 4 + 8 + 4;
/// The name of the message, for errors.
const NAME: &str = "COMPRESSED";

/// A range of the disk with compressed data. Its fields are not checked against the data until
/// [`decompress`](RangeDecompressor::decompress).
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
    fn length(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// The bytes that the frame takes of the window: as many as without compression, since the receiver decompresses it.
    pub(crate) fn window_bytes(&self) -> u64 {
        window_bytes_of(self.length())
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        FIELD_BYTES + self.bytes.len() as u64
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

/// Compresses frames. Keeps its tables between them.
pub struct RangeCompressor {
    context: zstd::bulk::Compressor<'static>,
    output: Vec<u8>,
}

impl Default for RangeCompressor {
    fn default() -> Self {
        Self {
            context: zstd::bulk::Compressor::new(LEVEL).expect("a fixed level is a legal level"),
            output: Vec::new(),
        }
    }
}

impl RangeCompressor {
    /// Compresses the data of a frame; `None` if it has none, or if that saves less than an eighth.
    pub fn compress(&mut self, frame: &RangeFrame) -> Option<CompressedRange> {
        let RangeContent::Data(data) = &frame.content else {
            return None;
        };
        if data.len() < DATA_BYTES_MIN {
            return None;
        }
        // zstd stops as soon as the output does not fit.
        let length_max = data.len() - data.len() / SAVED_PART;
        self.output.clear();
        self.output.reserve_exact(length_max);
        self.context.compress_to_buffer(data, &mut self.output).ok()?;
        (self.output.len() <= length_max).then(|| CompressedRange {
            pass: frame.pass,
            range: frame.range.clone(),
            bytes: self.output.clone(),
        })
    }
}

/// Decompresses frames. Keeps its tables between them.
pub struct RangeDecompressor(DCtx<'static>);

impl Default for RangeDecompressor {
    fn default() -> Self {
        Self(DCtx::create())
    }
}

impl RangeDecompressor {
    /// Returns the data of a frame, which is as long as its range. The receiver has checked that the range lies on the
    /// disk and within the window, so this memory was agreed.
    ///
    /// # Errors
    /// The data is not exactly one zstd frame, or that has another length.
    pub fn decompress(&mut self, frame: &CompressedRange) -> Result<Vec<u8>> {
        let malformed = |detail| Error::Malformed { message: NAME, detail };
        if find_frame_compressed_size(&frame.bytes) != Ok(frame.bytes.len()) {
            return Err(malformed("the data is not one zstd frame"));
        }
        let mut data = vec![0; holdfast_block::to_usize(frame.length())];
        // It writes into the memory that it is given, and never asks for more.
        match self.0.decompress(&mut data[..], &frame.bytes) {
            Ok(length) if length == data.len() => Ok(data),
            Ok(_) => Err(malformed("the data is shorter than its range")),
            Err(_) => Err(malformed("the data does not decompress to the length of its range")),
        }
    }
}
