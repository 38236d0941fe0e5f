//! Frames: what surrounds each message.

#![deny(clippy::indexing_slicing)]

use holdfast_block::{Record, to_usize};

use super::message::{DATA_FIELD_BYTES, Message, ZERO_FIELD_BYTES};
use super::range::{CompressedRange, RangeContent, RangeFrame};
use crate::{Error, Result};

/// Bytes of a frame before its payload.
const HEADER_BYTES: usize = 16;
/// Bytes of the checksum after the payload.
const CHECKSUM_BYTES: usize = 4;
/// Bytes of a frame apart from its payload.
pub const FRAME_OVERHEAD_BYTES: u64 = (HEADER_BYTES + CHECKSUM_BYTES) as u64;
/// Limit of the payload of a frame, in bytes: 4 MiB of data, and the fields before them.
pub const PAYLOAD_BYTES_MAX: u64 = (4 << 20) + 64;
/// Flag of a message that a side may skip if it does not know it.
const OPTIONAL: u8 = 1 << 0;

/// A message, its stream, and its number in the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The stream. Messages other than data are sent on stream 0.
    pub stream: u16,
    /// The number of the frame among those of its sender in its stream, from 0.
    pub sequence: u64,
    /// The message.
    pub message: Message,
}

impl Frame {
    /// Appends the bytes of the frame to `output`.
    pub fn encode(&self, output: &mut Vec<u8>) {
        let start = output.len();
        let flags = if self.message.is_optional() { OPTIONAL } else { 0 };
        output.extend_from_slice(&[0; 4]);
        output.extend_from_slice(&[self.message.kind(), flags]);
        output.extend_from_slice(&self.stream.to_le_bytes());
        output.extend_from_slice(&self.sequence.to_le_bytes());
        self.message.encode(output);
        let payload_bytes = (output.len() - start - HEADER_BYTES) as u64;
        assert!(
            payload_bytes <= PAYLOAD_BYTES_MAX,
            "the sides only build messages that fit"
        );
        let length = u32::try_from(payload_bytes).expect("it was checked");
        let (_, frame) = output.split_at_mut(start);
        if let Some(place) = frame.first_chunk_mut() {
            *place = length.to_le_bytes();
        }
        let checksum = crc32c::crc32c(frame);
        output.extend_from_slice(&checksum.to_le_bytes());
    }

    /// The size of the encoded frame if its data were not compressed, in bytes.
    pub fn plain_bytes(&self) -> u64 {
        match &self.message {
            Message::Compressed(frame) => frame.window_bytes(),
            _ => self.encoded_bytes(),
        }
    }

    /// The size of the encoded frame, in bytes.
    pub fn encoded_bytes(&self) -> u64 {
        FRAME_OVERHEAD_BYTES + self.message.payload_bytes()
    }
}

impl RangeFrame {
    /// The bytes that the frame takes of the window.
    pub(crate) fn window_bytes(&self) -> u64 {
        match &self.content {
            RangeContent::Data(bytes) => window_bytes_of(bytes.len() as u64),
            RangeContent::Zero | RangeContent::Hole => window_bytes_of(0),
        }
    }
}

impl CompressedRange {
    /// As many as without compression, since the receiver decompresses it.
    pub(crate) fn window_bytes(&self) -> u64 {
        window_bytes_of(self.length())
    }
}

/// The bytes that a frame with `data_bytes` of data takes of the window; 0 for ranges without data.
pub(crate) fn window_bytes_of(data_bytes: u64) -> u64 {
    FRAME_OVERHEAD_BYTES + (DATA_FIELD_BYTES + data_bytes).max(ZERO_FIELD_BYTES)
}

/// Decodes the frames of one byte stream, whose bytes arrive in pieces of any size.
///
/// After an error the stream is useless: the caller closes it.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    /// Bytes at the start of `buffer` that are already decoded.
    used: usize,
}

impl FrameDecoder {
    /// A decoder at the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that have arrived. The caller takes all frames before it adds more.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.used);
        self.used = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame; `None` until more bytes arrive.
    pub fn next_frame(&mut self) -> Result<Option<Frame>> {
        let (_, rest) = self.buffer.split_at(self.used);
        let Some(frame_bytes) = frame_bytes(rest)? else {
            return Ok(None);
        };
        let Some((whole, _)) = rest.split_at_checked(frame_bytes) else {
            return Ok(None);
        };
        self.used += frame_bytes;
        decode(whole).map(Some)
    }
}

/// The length of the frame at the start of `bytes`; `None` if its header is not complete.
fn frame_bytes(bytes: &[u8]) -> Result<Option<usize>> {
    let Some(header) = Record::<HEADER_BYTES>::first_of(bytes) else {
        return Ok(None);
    };
    let length = u64::from(header.le_u32::<0>());
    if length > PAYLOAD_BYTES_MAX {
        let limit = PAYLOAD_BYTES_MAX;
        return Err(Error::FrameTooLong { length, limit });
    }
    Ok(Some(to_usize(length + FRAME_OVERHEAD_BYTES)))
}

/// Decodes one frame that fills `bytes`.
fn decode(bytes: &[u8]) -> Result<Frame> {
    let short = Error::Malformed {
        message: "frame",
        detail: "it is too short",
    };
    let (covered, checksum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(short.clone())?;
    let (header, payload) = covered.split_first_chunk::<HEADER_BYTES>().ok_or(short)?;
    let header = Record::new(header);
    let (stream, sequence) = (header.le_u16::<6>(), header.le_u64::<8>());
    if crc32c::crc32c(covered) != u32::from_le_bytes(*checksum) {
        return Err(Error::FrameDamaged { stream, sequence });
    }
    let message = match Message::decode(header.byte::<4>(), payload) {
        Err(Error::UnknownMessage { kind }) if header.byte::<5>() & OPTIONAL != 0 => Message::Skipped {
            kind,
            payload: payload.to_vec(),
        },
        decoded => decoded?,
    };
    Ok(Frame {
        stream,
        sequence,
        message,
    })
}
