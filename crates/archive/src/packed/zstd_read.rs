//! Reads whole frames of zstd whose headers record their length.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::io;

use super::zstd_frame::{DESCRIPTOR_AT, MAGIC, number};
use crate::packed::ZstdValidator;
use crate::packed::frame::{FRAME_BYTES_MAX, Frame, Input};
use crate::packed::zstd_frame::{HAS_CHECKSUM, SEEK_TABLE, SKIPPABLE};

/// Reads the next frame with data. Skips skippable frames, and checks seek tables among them with `tally`.
pub(crate) fn read_frame(input: &mut Input, tally: &mut ZstdValidator) -> io::Result<Frame> {
    use io::Read as _;
    loop {
        let mut bytes = Vec::new();
        input.by_ref().take(4).read_to_end(&mut bytes)?;
        if bytes.is_empty() {
            return Ok(Frame::End);
        }
        let Ok(magic) = <[u8; 4]>::try_from(&bytes[..]).map(u32::from_le_bytes) else {
            return Ok(Frame::Long { start: bytes });
        };
        if magic & !0xf == SKIPPABLE {
            input.append(&mut bytes, 4)?;
            let length = number(bytes.get(4..).unwrap_or_default());
            if magic == SEEK_TABLE {
                tally.skippable(input, length)?;
                continue;
            }
            let length = u64::from(length);
            let skipped = io::copy(&mut input.by_ref().take(length), &mut io::sink())?;
            if skipped < length {
                // Fails with the error of a truncated stream.
                input.append(&mut bytes, 1)?;
            }
            continue;
        }
        if magic != MAGIC {
            return Ok(Frame::Long { start: bytes });
        }
        return read_data(input, bytes);
    }
}

pub(crate) fn read_data(input: &mut Input, mut bytes: Vec<u8>) -> io::Result<Frame> {
    input.append(&mut bytes, 1)?;
    let Some(descriptor) = bytes.get(DESCRIPTOR_AT).copied() else {
        return Ok(Frame::Long { start: bytes });
    };
    let is_single = descriptor & 0x20 != 0;
    let has_checksum = descriptor & HAS_CHECKSUM != 0;
    let window_bytes = usize::from(!is_single);
    let dictionary_bytes = match descriptor & 3 {
        3 => 4,
        code => usize::from(code),
    };
    let size_bytes = match descriptor >> 6 {
        0 => usize::from(is_single),
        1 => 2,
        2 => 4,
        _ => 8,
    };
    input.append(&mut bytes, window_bytes + dictionary_bytes + size_bytes)?;
    let (_, size) = bytes.split_at(bytes.len() - size_bytes);
    let unpacked_bytes = match size.len() {
        0 => None,
        2 => Some(u64::from(number(size)) + 256),
        _ => Some(
            size.iter()
                .rev()
                .fold(0, |number, byte| (number << 8) | u64::from(*byte)),
        ),
    };
    let unpacked_bytes = unpacked_bytes.and_then(|size| usize::try_from(size).ok());
    let Some(unpacked_bytes) = unpacked_bytes.filter(|size| *size <= FRAME_BYTES_MAX) else {
        return Ok(Frame::Long { start: bytes });
    };
    loop {
        if bytes.len() > FRAME_BYTES_MAX {
            return Ok(Frame::Long { start: bytes });
        }
        input.append(&mut bytes, 3)?;
        let block = number(bytes.last_chunk::<3>().map_or(&[], |block| block));
        let length = match block >> 1 & 3 {
            // One repeated byte.
            1 => 1,
            _ => usize::try_from(block >> 3).unwrap_or(usize::MAX),
        };
        input.append(&mut bytes, length)?;
        if block & 1 == 1 {
            break;
        }
    }
    if has_checksum {
        input.append(&mut bytes, 4)?;
    }
    Ok(Frame::Whole { bytes, unpacked_bytes })
}
