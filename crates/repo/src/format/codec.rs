//! Frames: the unit of compression and sealing.
//!
//! New chunks are collected in disk order until a frame is full and then compressed together, so that small chunks
//! compress as well as large ones. A frame is at most [`FRAME_BYTES_MAX`] before compression, which is the cost of a
//! cold read anywhere in it.

use holdfast_block::AlignedBuffer;
use zstd::zstd_safe::{CParameter, DCtx, InBuffer, OutBuffer, ResetDirective};

use crate::error::{Error, Result};
use crate::format::machine_code::{LOOK_AHEAD_LENGTH, filter, is_machine_code, unfilter};
use crate::store::ObjectName;

/// Maximum bytes of a frame before compression, for reading: 4 MiB.
pub(crate) const FRAME_BYTES_MAX: usize = 4 << 20;

/// Maximum bytes of a frame before compression, for writing, limited by the memory of a job
/// (`docs/design/0001-repository.md`).
pub(crate) const WRITTEN_FRAME_BYTES_MAX: usize = 3 << 20;

/// zstd level of data, with a window of a whole frame and larger tables than the level's defaults: the best ratio per
/// second on disks (`docs/design/0001-repository.md`).
const LEVEL: i32 = 3;
const WINDOW_LOG: u32 = FRAME_BYTES_MAX.ilog2();
const HASH_LOG: u32 = 19;
const CHAIN_LOG: u32 = 17;

/// Minimum length of frames that are probed before they are compressed.
const PROBE_FRAME_BYTES_MIN: usize = 256 << 10;
const PROBE_COUNT: usize = 8;
const PROBE_BYTES: usize = 4096;

/// The encoding of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    /// Uncompressed, since the data does not compress.
    Raw,
    /// One zstd frame.
    Zstd,
    /// One zstd frame of data in which relative addresses of machine code were replaced by absolute ones.
    ZstdMachineCode,
}

impl Codec {
    pub(crate) fn to_wire(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Zstd => 1,
            Self::ZstdMachineCode => 2,
        }
    }

    pub(crate) fn from_wire(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Raw),
            1 => Some(Self::Zstd),
            2 => Some(Self::ZstdMachineCode),
            _ => None,
        }
    }
}

/// Compresses frames; keeps its tables between frames.
pub(crate) struct Compressor {
    data: zstd::bulk::Compressor<'static>,
    probe: zstd::bulk::Compressor<'static>,
    scratch: Vec<u8>,
}

impl Compressor {
    pub(crate) fn new() -> Self {
        let compressor = |level| zstd::bulk::Compressor::new(level).expect("a fixed level is a legal level");
        let mut data = compressor(LEVEL);
        for parameter in [
            CParameter::WindowLog(WINDOW_LOG),
            CParameter::HashLog(HASH_LOG),
            CParameter::ChainLog(CHAIN_LOG),
        ] {
            data.set_parameter(parameter)
                .expect("the sizes of the window and the tables are legal");
        }
        Self {
            data,
            probe: compressor(1),
            scratch: vec![0; PROBE_BYTES * 2],
        }
    }

    /// Compresses `raw` into `stored` (cleared first) if that saves at least 1/64; otherwise the frame is stored as it
    /// is, and `stored` stays empty. After a compression the content of `raw` is undefined.
    pub(crate) fn compress(&mut self, raw: &mut [u8], stored: &mut Vec<u8>) -> Codec {
        stored.clear();
        if !self.is_worth_it(raw) {
            return Codec::Raw;
        }
        let is_code = is_machine_code(raw);
        if is_code {
            filter(raw);
        }
        stored.reserve(zstd::zstd_safe::compress_bound(raw.len()) + crate::key::TAG_LENGTH);
        self.data
            .compress_to_buffer(raw, stored)
            .expect("the buffer has room for the worst case");
        let is_smaller = stored.len() + raw.len() / 64 < raw.len();
        match (is_smaller, is_code) {
            (true, false) => return Codec::Zstd,
            (true, true) => return Codec::ZstdMachineCode,
            (false, true) => unfilter(raw),
            (false, false) => {}
        }
        stored.clear();
        Codec::Raw
    }

    /// Whether any of a few samples of a large frame compresses by 1/32; archives and videos do not.
    fn is_worth_it(&mut self, raw: &[u8]) -> bool {
        if raw.len() < PROBE_FRAME_BYTES_MIN {
            return true;
        }
        let stride = (raw.len() - PROBE_BYTES) / (PROBE_COUNT - 1);
        (0..PROBE_COUNT).any(|number| {
            let sample = &raw[number * stride..][..PROBE_BYTES];
            let length = self.probe.compress_to_buffer(sample, &mut self.scratch[..]);
            length.is_ok_and(|length| length < PROBE_BYTES - PROBE_BYTES / 32)
        })
    }
}

/// Stored bytes that are decoded per step if only the start of a frame is needed.
const START_STEP_LENGTH: usize = 32 << 10;

/// The stored bytes of a frame, after decryption.
pub(crate) struct StoredFrame<'a> {
    pub(crate) codec: Codec,
    pub(crate) bytes: &'a [u8],
    /// The pack and the offset in it, for errors.
    pub(crate) object: &'a ObjectName,
    pub(crate) offset: u64,
}

impl StoredFrame<'_> {
    fn damaged(&self, detail: String) -> Error {
        Error::damaged(self.object, self.offset, detail)
    }

    fn not_decompressed(&self, code: usize) -> Error {
        let why = zstd::zstd_safe::get_error_name(code);
        self.damaged(format!("frame does not decompress: {why}"))
    }
}

/// Decompresses stored frames.
pub(crate) struct Decompressor(DCtx<'static>);

impl Decompressor {
    pub(crate) fn new() -> Self {
        Self(DCtx::create())
    }

    /// Fills `raw` from a stored frame.
    pub(crate) fn decompress(&mut self, frame: &StoredFrame<'_>, raw: &mut [u8]) -> Result<()> {
        let length = match frame.codec {
            Codec::Raw => {
                if frame.bytes.len() == raw.len() {
                    raw.copy_from_slice(frame.bytes);
                }
                frame.bytes.len()
            }
            Codec::Zstd | Codec::ZstdMachineCode => {
                let done = self.0.decompress(raw, frame.bytes);
                done.map_err(|code| frame.not_decompressed(code))?
            }
        };
        if length != raw.len() {
            let detail = format!("frame has {length} bytes, its directory has {}", raw.len());
            return Err(frame.damaged(detail));
        }
        if frame.codec == Codec::ZstdMachineCode {
            unfilter(raw);
        }
        Ok(())
    }

    /// Like [`decompress`](Self::decompress), but decodes at least the first `wanted` of `raw_length` bytes; `raw`
    /// becomes as long as the decoded part. Its capacity always fits the whole frame, so that the memory can be reused
    /// for any other.
    ///
    /// The integrity of the rest of the frame is covered by the frame's seal only.
    pub(crate) fn decompress_start(
        &mut self,
        frame: &StoredFrame<'_>,
        raw_length: usize,
        wanted: usize,
        raw: &mut Vec<u8>,
    ) -> Result<()> {
        let stored = frame.bytes;
        let look_ahead = if frame.codec == Codec::ZstdMachineCode {
            LOOK_AHEAD_LENGTH
        } else {
            0
        };
        let wanted = wanted + look_ahead;
        if raw.capacity() < raw_length {
            *raw = Vec::with_capacity(raw_length);
        }
        // Near the end it is cheaper to decode everything than to decode in steps.
        if wanted >= raw_length / 8 * 7 {
            raw.resize(raw_length, 0);
            return self.decompress(frame, raw);
        }
        raw.resize(wanted, 0);
        if frame.codec == Codec::Raw {
            let stored = stored.get(..raw_length).filter(|start| start.len() == stored.len());
            let Some(stored) = stored else {
                let detail = format!("frame does not have the {raw_length} bytes of its directory entry");
                return Err(frame.damaged(detail));
            };
            raw.copy_from_slice(&stored[..wanted]);
            return Ok(());
        }
        let mut output = OutBuffer::around(&mut raw[..]);
        let mut input = InBuffer::around(&[]);
        let mut given = 0;
        while output.pos() < wanted {
            if input.pos() == given {
                if given == stored.len() {
                    let detail = format!("frame has {} bytes, {wanted} of it are referred to", output.pos());
                    return Err(frame.damaged(detail));
                }
                let used = given;
                given = stored.len().min(given + START_STEP_LENGTH);
                input = InBuffer::around(&stored[..given]);
                input.set_pos(used);
            }
            self.0
                .decompress_stream(&mut output, &mut input)
                .map_err(|code| frame.not_decompressed(code))?;
        }
        self.0
            .reset(ResetDirective::SessionOnly)
            .map_err(|code| frame.not_decompressed(code))?;
        if frame.codec == Codec::ZstdMachineCode {
            unfilter(raw);
            raw.truncate(wanted - look_ahead);
        }
        Ok(())
    }
}

/// Reusable memory for decoded frames.
pub(crate) trait FrameMemory {
    /// Returns `length` bytes with undefined content.
    fn of_length(&mut self, length: usize) -> &mut [u8];
}

impl FrameMemory for Vec<u8> {
    fn of_length(&mut self, length: usize) -> &mut [u8] {
        if self.capacity() < length {
            *self = vec![0; length];
        } else {
            self.resize(length, 0);
        }
        self
    }
}

impl FrameMemory for AlignedBuffer {
    fn of_length(&mut self, length: usize) -> &mut [u8] {
        self.set_length(length);
        self
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::AlignedBuffer;

    use super::{Codec, Compressor, Decompressor, FRAME_BYTES_MAX, FrameMemory, StoredFrame};
    use crate::error::Result;
    use crate::store::ObjectName;

    fn noise(length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        bytes
    }

    fn decompress(decompressor: &mut Decompressor, codec: Codec, bytes: &[u8], raw: &mut [u8]) -> Result<()> {
        decompressor.decompress(&stored_frame(codec, bytes, &ObjectName::config()), raw)
    }

    fn stored_frame<'a>(codec: Codec, bytes: &'a [u8], object: &'a ObjectName) -> StoredFrame<'a> {
        StoredFrame {
            codec,
            bytes,
            object,
            offset: 0,
        }
    }

    #[test]
    fn compressible_data_is_compressed_and_other_data_is_stored_raw() {
        let text = b"point in time ".repeat(40_000);
        let mut half = noise(300_000);
        half.extend_from_slice(&text);
        for (raw, expected) in [
            (noise(FRAME_BYTES_MAX), Codec::Raw),
            (text, Codec::Zstd),
            (half, Codec::Zstd),
            (noise(4096), Codec::Raw),
            (Vec::new(), Codec::Raw),
        ] {
            let mut stored = Vec::new();
            let codec = Compressor::new().compress(&mut raw.clone(), &mut stored);
            assert_eq!(codec, expected);
            if codec == Codec::Raw {
                assert!(stored.is_empty());
                stored.extend_from_slice(&raw);
            }
            assert!(stored.len() <= raw.len());
            let back = |stored: &[u8], length| {
                let mut back = vec![1; length];
                let done = decompress(&mut Decompressor::new(), codec, stored, &mut back);
                done.map(|()| back)
            };
            assert_eq!(back(&stored, raw.len()).unwrap(), raw);
            assert!(back(&stored, raw.len() + 1).is_err());
            if let Some((_, shorter)) = stored.split_last() {
                assert!(back(&stored, raw.len() - 1).is_err());
                assert!(back(shorter, raw.len()).is_err());
            }
        }
    }

    /// Calls with distances that occur only once, at a fixed spacing.
    fn code(length: usize, spacing: usize) -> Vec<u8> {
        let mut bytes = noise(length);
        for (number, at) in (0..length - 5).step_by(spacing).enumerate() {
            let distance = i32::try_from(number % 97 * 4096).unwrap() - i32::try_from(at).unwrap();
            bytes[at] = 0xE8;
            bytes[at + 1..at + 5].copy_from_slice(&distance.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn machine_code_is_filtered_and_comes_back() {
        let raw = code(FRAME_BYTES_MAX, 10);
        let mut stored = Vec::new();
        let mut compressor = Compressor::new();
        assert_eq!(
            compressor.compress(&mut raw.clone(), &mut stored),
            Codec::ZstdMachineCode
        );
        let mut back = vec![1; raw.len()];
        let mut decompressor = Decompressor::new();
        decompress(&mut decompressor, Codec::ZstdMachineCode, &stored, &mut back).unwrap();
        assert!(back == raw);
        decompress(&mut decompressor, Codec::Zstd, &stored, &mut back).unwrap();
        assert!(back != raw, "it was filtered");
        // Data that looks like code but does not compress is stored unchanged.
        let mut raw = noise(200_000);
        for call in raw.chunks_exact_mut(150) {
            (call[0], call[4]) = (0xE8, 0);
        }
        assert!(crate::format::machine_code::is_machine_code(&raw));
        let mut kept = raw.clone();
        assert_eq!(compressor.compress(&mut kept, &mut stored), Codec::Raw);
        assert!(stored.is_empty() && kept == raw);
    }

    #[test]
    fn the_start_of_a_frame_unpacks_to_the_start_of_the_data() {
        let mut text = b"point in time ".repeat(100_000);
        text.extend(noise(600_000));
        for (raw, expected) in [(text, Codec::Zstd), (code(2_000_000, 10), Codec::ZstdMachineCode)] {
            start_is_that_of_the_whole(&raw, expected);
        }
    }

    #[test]
    fn the_start_of_a_frame_that_is_stored_as_it_is_is_copied() {
        let object = ObjectName::config();
        let raw = noise(100_000);
        let mut start = Vec::new();
        let mut decode = |length, wanted| {
            let frame = stored_frame(Codec::Raw, &raw, &object);
            let done = Decompressor::new().decompress_start(&frame, length, wanted, &mut start);
            done.map(|()| start.clone())
        };
        assert!(decode(raw.len(), 5000).unwrap() == raw[..5000]);
        assert!(decode(raw.len(), 99_000).unwrap() == raw);
        for length in [raw.len() - 1, raw.len() + 1] {
            assert!(decode(length, 5000).is_err());
        }
    }

    fn start_is_that_of_the_whole(raw: &[u8], expected: Codec) {
        let object = ObjectName::config();
        let mut stored = Vec::new();
        let codec = Compressor::new().compress(&mut raw.to_vec(), &mut stored);
        assert_eq!(codec, expected);
        let frame = stored_frame(codec, &stored, &object);
        // Several frames with the same decompressor, which must discard its unfinished state.
        let (mut decompressor, mut start) = (Decompressor::new(), vec![1; 10]);
        for wanted in [0, 1, 4096, 1_400_000, 1_500_000, raw.len() - 1, raw.len(), 5] {
            decompressor
                .decompress_start(&frame, raw.len(), wanted, &mut start)
                .unwrap();
            assert!((wanted..=raw.len()).contains(&start.len()));
            assert!(start == raw[..start.len()]);
            assert_eq!(start.len() == raw.len(), wanted > raw.len() / 8 * 7);
            assert!(start.capacity() >= raw.len());
        }
        let cut_off = stored_frame(codec, &stored[..stored.len() / 4], &object);
        let wanted = raw.len() / 8 * 7 - 1000;
        assert!(
            decompressor
                .decompress_start(&cut_off, raw.len(), wanted, &mut start)
                .is_err()
        );
        start.resize(raw.len(), 0);
        assert!(decompressor.decompress(&frame, &mut start).is_ok());
        assert!(start == raw);
    }

    #[test]
    fn memory_is_as_long_as_was_asked() {
        let memories: [&mut dyn FrameMemory; 2] = [&mut Vec::new(), &mut AlignedBuffer::default()];
        for memory in memories {
            for length in [3, 5000, 0, 4096] {
                assert_eq!(memory.of_length(length).len(), length);
            }
        }
    }
}
