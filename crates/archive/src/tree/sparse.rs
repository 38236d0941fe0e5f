//! Maps of files with holes.

use std::io::Read;
use std::ops::Range;

use holdfast_block::Record;

use super::header::{number, wrong_member};
use crate::Result;
use crate::tar::BLOCK_BYTES;

/// Limit of the ranges of one file: 16 MiB of memory.
pub(super) const EXTENT_COUNT_MAX: usize = 1 << 20;

/// The start of the old GNU format: four ranges in the header, and the real size.
pub(super) struct GnuMap {
    pub(super) numbers: Vec<u64>,
    pub(super) is_continued: bool,
    pub(super) real_size_bytes: u64,
}

/// Reads the fields of a header of type `S`.
pub(super) fn gnu_map(block: &[u8; BLOCK_BYTES]) -> Option<GnuMap> {
    let fields = Record::new(block);
    let mut numbers = Vec::new();
    push_ranges(&mut numbers, fields.field::<386, 96>())?;
    Some(GnuMap {
        numbers,
        is_continued: fields.byte::<482>() != 0,
        real_size_bytes: u64::try_from(number(fields.field::<483, 12>())?).ok()?,
    })
}

/// Reads a block that continues the map; returns whether another one follows.
pub(super) fn continue_gnu_map(numbers: &mut Vec<u64>, block: &[u8; BLOCK_BYTES]) -> Option<bool> {
    let fields = Record::new(block);
    push_ranges(numbers, fields.field::<0, 504>())?;
    Some(fields.byte::<504>() != 0)
}

/// Reads ranges of two numbers of 12 bytes, up to the first empty one.
fn push_ranges(numbers: &mut Vec<u64>, mut bytes: &[u8]) -> Option<()> {
    while let Some((range, rest)) = bytes.split_at_checked(24) {
        if range.first() == Some(&0) {
            break;
        }
        let (offset, length) = range.split_at(12);
        numbers.push(u64::try_from(number(offset)?).ok()?);
        numbers.push(u64::try_from(number(length)?).ok()?);
        bytes = rest;
    }
    Some(())
}

/// A map that precedes the data: version 1.0.
pub(super) struct MapInData {
    pub(super) numbers: Vec<u64>,
    /// Bytes of the map with its padding.
    pub(super) stored_bytes: u64,
}

/// Reads decimal numbers, one a line: their count of pairs, and then the pairs; padded to whole blocks. Returns `None` if it
/// is not such a map or is longer than `left` bytes.
pub(super) fn map_in_data(stream: &mut impl Read, left: u64) -> std::io::Result<Option<MapInData>> {
    let mut stored_bytes = 0;
    let mut numbers = Vec::new();
    let mut count = None;
    let mut value: Option<u64> = None;
    let mut block = [0; BLOCK_BYTES];
    while count.is_none_or(|count| numbers.len() < count) {
        if stored_bytes + block.len() as u64 > left {
            return Ok(None);
        }
        stream.read_exact(&mut block)?;
        stored_bytes += block.len() as u64;
        for byte in block {
            match (byte, value) {
                (b'0'..=b'9', so_far) => {
                    let next = so_far.unwrap_or(0).checked_mul(10);
                    let Some(next) = next.and_then(|next| next.checked_add(u64::from(byte - b'0'))) else {
                        return Ok(None);
                    };
                    value = Some(next);
                }
                (b'\n', Some(number)) => {
                    value = None;
                    match count {
                        None => {
                            let Ok(pairs) = usize::try_from(number) else {
                                return Ok(None);
                            };
                            if pairs > EXTENT_COUNT_MAX {
                                return Ok(None);
                            }
                            count = Some(pairs * 2);
                        }
                        Some(_) => numbers.push(number),
                    }
                }
                _ => return Ok(None),
            }
            if count.is_some_and(|count| numbers.len() >= count) {
                break;
            }
        }
    }
    Ok(Some(MapInData { numbers, stored_bytes }))
}

/// Checks a map of offsets and lengths in turn, and returns the ranges that are not empty.
pub(super) fn checked_extents(
    numbers: &[u64],
    real_size_bytes: u64,
    stored_bytes: u64,
    wrong: impl Fn(&str) -> crate::Error,
) -> Result<Vec<Range<u64>>> {
    if numbers.len() / 2 > EXTENT_COUNT_MAX {
        return Err(wrong("its map of holes has too many ranges"));
    }
    if !numbers.len().is_multiple_of(2) {
        return Err(wrong("its map of holes ends in the middle of a range"));
    }
    let mut extents: Vec<Range<u64>> = Vec::new();
    let (mut end, mut sum) = (0, 0_u64);
    for pair in numbers.chunks_exact(2) {
        let &[start, length] = pair else { continue };
        let range_end = start.checked_add(length).filter(|end| *end <= real_size_bytes);
        let Some(range_end) = range_end.filter(|_| start >= end) else {
            return Err(wrong(
                "its map of holes has ranges outside of the file, or out of order",
            ));
        };
        end = range_end;
        sum += length;
        match extents.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.end == start => last.end = range_end,
            _ => extents.push(start..range_end),
        }
    }
    if sum != stored_bytes {
        return Err(wrong("its map of holes does not match its length in the archive"));
    }
    Ok(extents)
}

/// An error about a named member, as a function of the detail.
pub(super) fn about(path: &[u8], offset: u64) -> impl Fn(&str) -> crate::Error {
    move |detail| wrong_member(path, offset, detail)
}
