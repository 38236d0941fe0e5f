//! Compresses and decompresses the data of frames.
//!
//! The state machines do not compress: it takes milliseconds, in which they would answer nothing. The caller compresses
//! frames after the sender has returned them, and decompresses what the receiver asks for.

#![deny(clippy::indexing_slicing)]

use zstd::zstd_safe::{DCtx, find_frame_compressed_size};

use super::range::{CompressedRange, RangeContent, RangeFrame};
use crate::{Error, Result};

/// Shorter data is not compressed: the fields and the checksum of its frame would outweigh the gain.
const DATA_BYTES_MIN: usize = 1 << 10;
/// The fastest level of zstd that still searches: a faster one gains little, a slower one is slower than many links.
const LEVEL: i32 = 1;
/// Compression must save one part of so many: less is not worth the time of the receiver.
const SAVED_PART: usize = 8;
/// The name of the message, for errors.
const NAME: &str = "COMPRESSED";

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
