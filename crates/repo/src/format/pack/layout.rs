//! The fixed parts of a pack: header and trailer.
//!
//! Header, 64 bytes:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | magic `HFPACK\r\n` |
//! | 8 | 2 | format version: 2; 1 with frames of at most 2 MiB that are raw or zstd |
//! | 10 | 1 | kind: 1 data, 2 tree |
//! | 11 | 5 | zero |
//! | 16 | 16 | identity of the pack |
//! | 32 | 16 | identity of the writer |
//! | 48 | 12 | zero |
//! | 60 | 4 | CRC-32C of bytes 0 to 59 |
//!
//! Trailer, the last 80 bytes:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | magic `HFPKEND\n` |
//! | 8 | 16 | identity of the pack |
//! | 24 | 8 | offset of the sealed directory |
//! | 32 | 8 | length of the sealed directory |
//! | 40 | 32 | BLAKE3 (no key) of everything before the trailer |
//! | 72 | 4 | zero |
//! | 76 | 4 | CRC-32C of bytes 0 to 75 |
//!
//! The hash proves that the pack is intact, without any key.

use crate::error::{Error, Result};
use crate::id::{PackId, WriterId};
use crate::store::{ObjectKind, ObjectName};

pub(crate) const HEADER_LENGTH: usize = 64;
pub(crate) const TRAILER_LENGTH: usize = 80;
const FORMAT_VERSION: u16 = 2;
/// The version with shorter frames and fewer codecs. It is read like the present one, but not written.
const FORMAT_VERSION_1: u16 = 1;
const HEADER_MAGIC: &[u8; 8] = b"HFPACK\r\n";
const TRAILER_MAGIC: &[u8; 8] = b"HFPKEND\n";

const HEADER_VERSION_AT: usize = HEADER_MAGIC.len();
const HEADER_KIND_AT: usize = HEADER_VERSION_AT + 2;
const HEADER_PACK_AT: usize = 16;
const HEADER_WRITER_AT: usize = HEADER_PACK_AT + PackId::LENGTH;
const HEADER_CRC_AT: usize = HEADER_LENGTH - 4;
const _: () = assert!(HEADER_WRITER_AT + WriterId::LENGTH <= HEADER_CRC_AT);

const TRAILER_PACK_AT: usize = TRAILER_MAGIC.len();
const TRAILER_OFFSET_AT: usize = TRAILER_PACK_AT + PackId::LENGTH;
const TRAILER_DIRECTORY_LENGTH_AT: usize = TRAILER_OFFSET_AT + 8;
const TRAILER_HASH_AT: usize = TRAILER_DIRECTORY_LENGTH_AT + 8;
const TRAILER_CRC_AT: usize = TRAILER_LENGTH - 4;
const _: () = assert!(TRAILER_HASH_AT + 32 <= TRAILER_CRC_AT);

/// The content of a pack's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PackKind {
    /// Chunks.
    Data,
    /// Pages of disk maps.
    Tree,
}

/// The name of a pack in the store.
pub(crate) fn pack_name(pack: PackId) -> ObjectName {
    ObjectName::new(ObjectKind::Pack, &pack.to_string()).expect("hex digits are a name")
}

pub(crate) fn encode_header(pack: PackId, kind: PackKind, writer: WriterId) -> [u8; HEADER_LENGTH] {
    let mut header = [0; HEADER_LENGTH];
    header[..HEADER_VERSION_AT].copy_from_slice(HEADER_MAGIC);
    header[HEADER_VERSION_AT..HEADER_KIND_AT].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    header[HEADER_KIND_AT] = match kind {
        PackKind::Data => 1,
        PackKind::Tree => 2,
    };
    header[HEADER_PACK_AT..HEADER_WRITER_AT].copy_from_slice(pack.as_bytes());
    header[HEADER_WRITER_AT..HEADER_WRITER_AT + WriterId::LENGTH].copy_from_slice(writer.as_bytes());
    let crc = crc32c::crc32c(&header[..HEADER_CRC_AT]);
    header[HEADER_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    header
}

/// The fields of a validated header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackHeader {
    pub(crate) kind: PackKind,
    pub(crate) writer: WriterId,
}

/// The pack id in a header, which may differ from that in the object's name; `None` if it is not a header.
pub(crate) fn header_pack(header: &[u8; HEADER_LENGTH]) -> Option<PackId> {
    let identity = header[HEADER_PACK_AT..HEADER_WRITER_AT].try_into();
    let pack = PackId::from_bytes(identity.expect("an identity has its length"));
    decode_header(header, pack).ok().map(|_| pack)
}

/// Checks the header of the pack named `pack`.
pub(crate) fn decode_header(header: &[u8; HEADER_LENGTH], pack: PackId) -> Result<PackHeader> {
    let object = pack_name(pack);
    let wrong = |at: usize, detail: &str| Err(Error::damaged(&object, at as u64, detail));
    if &header[..HEADER_VERSION_AT] != HEADER_MAGIC {
        return wrong(0, "it does not begin as a pack does");
    }
    if crc32c::crc32c(&header[..HEADER_CRC_AT]).to_le_bytes() != header[HEADER_CRC_AT..] {
        return wrong(HEADER_CRC_AT, "the checksum of its header does not match");
    }
    let version = u16::from_le_bytes([header[HEADER_VERSION_AT], header[HEADER_VERSION_AT + 1]]);
    if !(FORMAT_VERSION_1..=FORMAT_VERSION).contains(&version) {
        return Err(Error::FutureVersion {
            object,
            found: version.into(),
            supported: FORMAT_VERSION.into(),
        });
    }
    if header[HEADER_PACK_AT..HEADER_WRITER_AT] != *pack.as_bytes() {
        return wrong(HEADER_PACK_AT, "it is another pack under this name");
    }
    let kind = match header[HEADER_KIND_AT] {
        1 => PackKind::Data,
        2 => PackKind::Tree,
        _ => return wrong(HEADER_KIND_AT, "unknown kind of pack"),
    };
    let mut writer = [0; WriterId::LENGTH];
    writer.copy_from_slice(&header[HEADER_WRITER_AT..HEADER_WRITER_AT + WriterId::LENGTH]);
    Ok(PackHeader {
        kind,
        writer: WriterId::from_bytes(writer),
    })
}

pub(crate) fn encode_trailer(
    pack: PackId,
    directory_offset: u64,
    directory_length: u64,
    hash: &[u8; 32],
) -> [u8; TRAILER_LENGTH] {
    let mut trailer = [0; TRAILER_LENGTH];
    trailer[..TRAILER_PACK_AT].copy_from_slice(TRAILER_MAGIC);
    trailer[TRAILER_PACK_AT..TRAILER_OFFSET_AT].copy_from_slice(pack.as_bytes());
    trailer[TRAILER_OFFSET_AT..TRAILER_DIRECTORY_LENGTH_AT].copy_from_slice(&directory_offset.to_le_bytes());
    trailer[TRAILER_DIRECTORY_LENGTH_AT..TRAILER_HASH_AT].copy_from_slice(&directory_length.to_le_bytes());
    trailer[TRAILER_HASH_AT..TRAILER_HASH_AT + 32].copy_from_slice(hash);
    let crc = crc32c::crc32c(&trailer[..TRAILER_CRC_AT]);
    trailer[TRAILER_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    trailer
}

/// The fields of a validated trailer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackTrailer {
    pub(crate) directory_offset: u64,
    pub(crate) directory_length: u64,
    pub(crate) hash: [u8; 32],
}

/// Corrects a trailer with a single flipped bit; `None` if it is damaged further.
///
/// The checksum identifies the bit: no two trailers that differ in two bits have the same checksum, and the pack id
/// and the offset of the directory must match as well.
pub(crate) fn correct_trailer(trailer: &[u8; TRAILER_LENGTH], pack: PackId, pack_length: u64) -> Option<PackTrailer> {
    (0..TRAILER_LENGTH * 8).find_map(|bit| {
        let mut trial = *trailer;
        trial[bit / 8] ^= 1 << (bit % 8);
        decode_trailer(&trial, pack, pack_length).ok()
    })
}

/// Checks the trailer of the pack named `pack`, which is `pack_length` bytes long.
pub(crate) fn decode_trailer(trailer: &[u8; TRAILER_LENGTH], pack: PackId, pack_length: u64) -> Result<PackTrailer> {
    let object = pack_name(pack);
    let start = pack_length - TRAILER_LENGTH as u64;
    let wrong = |at: usize, detail: &str| Err(Error::damaged(&object, start + at as u64, detail));
    if &trailer[..TRAILER_PACK_AT] != TRAILER_MAGIC {
        return wrong(0, "it does not end as a pack does: cut short, or overwritten");
    }
    if crc32c::crc32c(&trailer[..TRAILER_CRC_AT]).to_le_bytes() != trailer[TRAILER_CRC_AT..] {
        return wrong(TRAILER_CRC_AT, "the checksum of its trailer does not match");
    }
    if trailer[TRAILER_PACK_AT..TRAILER_OFFSET_AT] != *pack.as_bytes() {
        return wrong(TRAILER_PACK_AT, "it is another pack under this name");
    }
    let number = |at: usize| u64::from_le_bytes(trailer[at..at + 8].try_into().expect("eight bytes"));
    let mut hash = [0; 32];
    hash.copy_from_slice(&trailer[TRAILER_HASH_AT..TRAILER_HASH_AT + 32]);
    let trailer = PackTrailer {
        directory_offset: number(TRAILER_OFFSET_AT),
        directory_length: number(TRAILER_DIRECTORY_LENGTH_AT),
        hash,
    };
    if trailer.directory_offset.checked_add(trailer.directory_length) != Some(start)
        || trailer.directory_offset < HEADER_LENGTH as u64
    {
        return wrong(TRAILER_OFFSET_AT, "its directory does not end where the trailer begins");
    }
    Ok(trailer)
}

#[cfg(test)]
mod tests {
    use super::{TRAILER_LENGTH, correct_trailer, decode_trailer, encode_trailer};
    use crate::id::PackId;

    #[test]
    fn every_flipped_bit_of_a_trailer_is_corrected_and_two_are_not() {
        let pack = PackId::from_bytes([7; 16]);
        let (offset, length) = (70_000, 1234);
        let trailer = encode_trailer(pack, offset, length, &[9; 32]);
        let pack_length = offset + length + TRAILER_LENGTH as u64;
        for bit in 0..TRAILER_LENGTH * 8 {
            let mut flipped = trailer;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(decode_trailer(&flipped, pack, pack_length).is_err(), "bit {bit}");
            let corrected = correct_trailer(&flipped, pack, pack_length).unwrap();
            assert_eq!(
                (corrected.directory_offset, corrected.directory_length, corrected.hash),
                (offset, length, [9; 32]),
                "bit {bit}"
            );
            let other = (bit * 7 + 13) % (TRAILER_LENGTH * 8);
            flipped[other / 8] ^= 1 << (other % 8);
            assert!(
                other == bit || correct_trailer(&flipped, pack, pack_length).is_none(),
                "{bit}, {other}"
            );
        }
    }
}
