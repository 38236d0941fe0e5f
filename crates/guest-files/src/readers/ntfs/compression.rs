//! LZNT1, the compression of NTFS.
//!
//! A compressed unit is a sequence of chunks. A chunk begins with a header of two bytes: the length of the rest minus 1
//! (12 bits), the signature 3 (3 bits), and whether it is compressed (1 bit); a header of zero ends the unit. Each
//! chunk holds at most 4096 bytes. A compressed chunk is a sequence of a byte of flags and eight elements: a byte, or a
//! distance and a length in 16 bits. The farther the chunk is, the more bits the distance has.

use crate::{Error, Result};

const CHUNK_BYTES: usize = 4096;
const LENGTH_MIN: usize = 3;

/// Decompresses a unit; the result has `unit_bytes` bytes, of which the last are zero if the chunks are shorter.
pub(super) fn decompress(stored: &[u8], unit_bytes: usize) -> Result<Vec<u8>> {
    let damaged = |detail: &str| Error::damaged("NTFS compression", detail);
    let mut unit = Vec::with_capacity(unit_bytes);
    let mut rest = stored;
    while let [low, high, chunk_and_rest @ ..] = rest
        && unit.len() < unit_bytes
    {
        let header = u16::from_le_bytes([*low, *high]);
        if header == 0 {
            break;
        }
        let length = usize::from(header & 0xfff) + 1;
        if header >> 12 & 7 != 3 || length > chunk_and_rest.len() {
            return Err(damaged("the header of a chunk is invalid"));
        }
        let (chunk, after) = chunk_and_rest.split_at(length);
        let start = unit.len();
        if header & 0x8000 == 0 {
            unit.extend_from_slice(chunk);
        } else {
            decompress_chunk(chunk, &mut unit)?;
        }
        if unit.len() - start > CHUNK_BYTES {
            return Err(damaged("a chunk is too long"));
        }
        // Chunks begin at multiples of 4096: a short one is followed by zeroes.
        unit.resize(start + CHUNK_BYTES, 0);
        rest = after;
    }
    unit.resize(unit_bytes, 0);
    Ok(unit)
}

fn decompress_chunk(chunk: &[u8], unit: &mut Vec<u8>) -> Result<()> {
    let damaged = |detail: &str| Error::damaged("NTFS compression", detail);
    let start = unit.len();
    let mut rest = chunk;
    while let [flags, elements @ ..] = rest {
        rest = elements;
        for bit in 0..8 {
            if unit.len() - start >= CHUNK_BYTES && !rest.is_empty() {
                return Err(damaged("a chunk is too long"));
            }
            if flags >> bit & 1 == 0 {
                let [byte, after @ ..] = rest else { return Ok(()) };
                unit.push(*byte);
                rest = after;
                continue;
            }
            let [low, high, after @ ..] = rest else {
                return if rest.is_empty() {
                    Ok(())
                } else {
                    Err(damaged("a chunk ends in an element"))
                };
            };
            rest = after;
            let element = u16::from_le_bytes([*low, *high]);
            let written = unit.len() - start;
            let length_bits = length_bits(written);
            let distance = usize::from(element >> length_bits) + 1;
            let length = usize::from(element & ((1 << length_bits) - 1)) + LENGTH_MIN;
            if distance > written || written + length > CHUNK_BYTES {
                return Err(damaged("an element points outside its chunk"));
            }
            for _ in 0..length {
                let byte = unit.get(unit.len() - distance).copied().unwrap_or_default();
                unit.push(byte);
            }
        }
    }
    Ok(())
}

/// Bits of the length in an element after `written` bytes of its chunk.
fn length_bits(written: usize) -> u32 {
    let mut bits = 12;
    let mut left = written.saturating_sub(1);
    while left >= 16 {
        bits -= 1;
        left >>= 1;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::decompress;

    #[test]
    fn literals_and_repetitions_are_expanded() {
        // "aaaa": a literal, and distance 1, length 3.
        let stored = [0x03, 0xb0, 0b10, b'a', 0x00, 0x00];
        let unit = decompress(&stored, 8192).unwrap();
        assert_eq!(&unit[..6], b"aaaa\0\0");
        assert_eq!(unit.len(), 8192);
    }

    #[test]
    fn a_stored_chunk_is_copied_and_the_next_begins_at_4096() {
        let mut stored = vec![0x02, 0x30];
        stored.extend_from_slice(b"abc");
        stored.extend_from_slice(&[0x00, 0x30, b'x', 0, 0]);
        let unit = decompress(&stored, 8192).unwrap();
        assert_eq!((&unit[..4], unit[4096]), (&b"abc\0"[..], b'x'));
    }

    #[test]
    fn elements_that_point_outside_are_refused() {
        let before_the_start = [0x03, 0xb0, 0b10, b'a', 0x00, 0x10];
        assert!(decompress(&before_the_start, 4096).is_err());
        assert!(decompress(&[0x10, 0xb0, 0], 4096).is_err());
        assert!(decompress(&[0x00, 0x80, 0], 4096).is_err());
    }
}
