//! Members of gzip that record their length.
//!
//! Source: RFC 1952, section 2.3.1.1: subfields of the extra field. Holdfast's subfield is `HF`: the packed and the
//! unpacked length of the member.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::io;

use holdfast_block::Record;

use crate::packed::frame::{FRAME_BYTES_MAX, Frame, Input};

/// Magic, method, flags, time, level and system.
const HEAD_BYTES: usize = 10;
const FLAG_EXTRA: u8 = 4;
/// The extra field: its length, and one subfield with a head of four bytes.
const SIZE_FIELD_BYTES: usize = 2 + 4 + 8;
/// Head and size field of a member that this program packed.
pub(crate) const MEMBER_HEAD_BYTES: usize = HEAD_BYTES + SIZE_FIELD_BYTES;
/// CRC-32 and length.
const TAIL_BYTES: usize = 8;
/// An empty deflate stream.
const NOTHING: [u8; 2] = [3, 0];
pub(crate) const SIZES: [u8; 2] = *b"HF";
pub(crate) const INDEX: [u8; 2] = *b"HX";
/// Limit of a subfield of an index member: the length of the extra field has 16 bits.
pub(crate) const INDEX_BYTES_MAX: usize = 0xffff - 4 - 12;

/// Head of a member, up to its extra field.
fn head(extra_bytes: usize) -> io::Result<Vec<u8>> {
    let extra = u16::try_from(extra_bytes).map_err(io::Error::other)?;
    let mut head = vec![0x1f, 0x8b, 8, FLAG_EXTRA, 0, 0, 0, 0, 0, 255];
    head.extend(extra.to_le_bytes());
    Ok(head)
}

/// Packs `bytes` as a member.
pub(crate) fn pack(compressor: &mut libdeflater::Compressor, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let bound = compressor.deflate_compress_bound(bytes.len());
    let mut member = head(4 + 8)?;
    member.extend(SIZES);
    member.extend(8_u16.to_le_bytes());
    member.resize(MEMBER_HEAD_BYTES + bound, 0);
    let (_, room) = member.split_at_mut(MEMBER_HEAD_BYTES);
    let packed = compressor.deflate_compress(bytes, room).map_err(io::Error::other)?;
    member.truncate(MEMBER_HEAD_BYTES + packed);
    member.extend(libdeflater::crc32(bytes).to_le_bytes());
    let unpacked = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    member.extend(unpacked.to_le_bytes());
    let whole = u32::try_from(member.len()).map_err(io::Error::other)?;
    let sizes = whole.to_le_bytes().into_iter().chain(unpacked.to_le_bytes());
    let places = member.iter_mut().skip(MEMBER_HEAD_BYTES - 8);
    places.zip(sizes).for_each(|(place, byte)| *place = byte);
    Ok(member)
}

/// A member without content whose extra field has the subfields `HF` and `HX`, the latter with `bytes`.
pub(crate) fn index_member(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut member = head(12 + 4 + bytes.len())?;
    member.extend(SIZES);
    member.extend(8_u16.to_le_bytes());
    let whole = MEMBER_HEAD_BYTES + 4 + bytes.len() + NOTHING.len() + TAIL_BYTES;
    member.extend(u32::try_from(whole).map_err(io::Error::other)?.to_le_bytes());
    member.extend([0; 4]);
    member.extend(INDEX);
    member.extend(u16::try_from(bytes.len()).map_err(io::Error::other)?.to_le_bytes());
    member.extend(bytes);
    member.extend(NOTHING);
    member.extend([0; TAIL_BYTES]);
    Ok(member)
}

/// The content of an index member, if `member` is one.
pub(crate) fn index_of(member: &[u8]) -> Option<&[u8]> {
    let head = Record::<4>::first_of(member.get(MEMBER_HEAD_BYTES..)?)?;
    let length = usize::from(head.le_u16::<2>());
    let is_one = sizes(member).is_some() && *head.field::<0, 2>() == INDEX;
    member
        .get(MEMBER_HEAD_BYTES + 4..MEMBER_HEAD_BYTES + 4 + length)
        .filter(|_| is_one)
}

/// Checks that an index member unpacks to nothing in other programs.
///
/// # Errors
/// A description of the problem.
pub(crate) fn check_index(member: &[u8]) -> Result<(), &'static str> {
    let again = index_of(member).map(index_member);
    match again {
        Some(Ok(again)) if again == member => Ok(()),
        _ => Err("one of its members is malformed"),
    }
}

/// The CRC-32 with which a member ends.
pub(crate) fn checksum_of(member: &[u8]) -> Option<u32> {
    let tail = member.last_chunk::<TAIL_BYTES>()?;
    Some(Record::new(tail).le_u32::<0>())
}

/// Packed and unpacked length of a member, if it records them.
pub(crate) fn sizes(head: &[u8]) -> Option<(usize, usize)> {
    let head = Record::<MEMBER_HEAD_BYTES>::first_of(head)?;
    let has_sizes = *head.field::<0, 4>() == [0x1f, 0x8b, 8, FLAG_EXTRA]
        && head.le_u16::<HEAD_BYTES>() >= 12
        && *head.field::<{ HEAD_BYTES + 2 }, 2>() == SIZES
        && *head.field::<{ HEAD_BYTES + 4 }, 2>() == [8, 0];
    let number = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
    let (length, unpacked) = (
        head.le_u32::<{ HEAD_BYTES + 6 }>(),
        head.le_u32::<{ HEAD_BYTES + 10 }>(),
    );
    has_sizes.then(|| (number(length), number(unpacked)))
}

/// Reads the next member.
pub(crate) fn read_member(input: &mut Input) -> io::Result<Frame> {
    use io::Read as _;
    let mut bytes = Vec::new();
    input.by_ref().take(MEMBER_HEAD_BYTES as u64).read_to_end(&mut bytes)?;
    if bytes.is_empty() {
        return Ok(Frame::End);
    }
    // Tapes and block-wise writers pad with zeroes; gzip ignores them.
    if bytes.iter().all(|byte| *byte == 0) && is_rest_zero(input)? {
        return Ok(Frame::End);
    }
    match sizes(&bytes) {
        Some((length, unpacked_bytes))
            if (MEMBER_HEAD_BYTES + TAIL_BYTES..=FRAME_BYTES_MAX).contains(&length)
                && unpacked_bytes <= FRAME_BYTES_MAX =>
        {
            input.append(&mut bytes, length - MEMBER_HEAD_BYTES)?;
            Ok(Frame::Whole { bytes, unpacked_bytes })
        }
        _ => Ok(Frame::Long { start: bytes }),
    }
}

/// Whether the rest of the input is zero; reads it to the end.
fn is_rest_zero(input: &mut Input) -> io::Result<bool> {
    use io::Read as _;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = input.read(&mut buffer)?;
        if count == 0 {
            return Ok(true);
        }
        if buffer.iter().take(count).any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
}

/// Unpacks a member whose recorded unpacked length is `unpacked_bytes`.
pub(crate) fn unpack(
    decompressor: &mut libdeflater::Decompressor,
    member: &[u8],
    unpacked_bytes: usize,
) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; unpacked_bytes];
    let damaged = |detail: String| io::Error::new(io::ErrorKind::InvalidData, detail);
    let count = decompressor
        .gzip_decompress(member, &mut bytes)
        .map_err(|error| damaged(format!("a gzip member is damaged: {error}")))?;
    if count != unpacked_bytes {
        return Err(damaged(format!(
            "a gzip member holds {count} bytes, and says {unpacked_bytes}"
        )));
    }
    Ok(bytes)
}
