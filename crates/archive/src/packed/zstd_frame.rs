//! Fields of zstd frames, read without unpacking.
//!
//! Source: RFC 8878, section 3.1.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

pub(super) const MAGIC: u32 = 0xfd2f_b528;
/// The magic number of skippable frames; the last four bits vary.
pub(crate) const SKIPPABLE: u32 = 0x184d_2a50;
/// The magic number of seek tables.
pub(crate) const SEEK_TABLE: u32 = SKIPPABLE | 0xe;
/// Offset of the frame header descriptor: after the magic number.
pub(super) const DESCRIPTOR_AT: usize = 4;
pub(super) const HAS_CHECKSUM: u8 = 4;

/// The checksum at the end of a frame, if it has one.
pub(crate) fn checksum_of(frame: &[u8]) -> Option<u32> {
    let has_one = frame.get(DESCRIPTOR_AT)? & HAS_CHECKSUM != 0;
    frame
        .last_chunk()
        .filter(|_| has_one)
        .map(|bytes| u32::from_le_bytes(*bytes))
}

/// Little-endian, of at most four bytes.
pub(super) fn number(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| (number << 8) | u32::from(*byte))
}
