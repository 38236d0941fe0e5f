//! Packs: header and trailer, directory, a frame, and whole packs with forged sections.

use holdfast_block::hostile::Outcome;

use super::keyring;
use crate::error::Result;
use crate::format::codec::{Codec, Compressor, Decompressor, FRAME_BYTES_MAX, StoredFrame};
use crate::format::fingerprint::FingerprintKeys;
use crate::format::machine_code::{filter, unfilter};
use crate::format::pack::{
    Directory, FrameContent, HEADER_LENGTH, PackKey, PackSection, TRAILER_LENGTH, decode_header, decode_trailer,
    encode_header, encode_trailer, pack_name, read_directory,
};
use crate::id::PackId;
use crate::key::{Cipher, Purpose, TAG_LENGTH};
use crate::read::frame_check::{Depth, check_frame};
use crate::store::{MemoryStore, ObjectName, Store};

/// Header and trailer of a pack, with corrected checksums: u64 length of the pack, 64 bytes, 80 bytes.
pub fn pack_ends(bytes: &[u8]) -> Outcome {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Outcome::Refused;
    };
    let (Some(header), Some(trailer)) = (rest.first_chunk(), rest.get(HEADER_LENGTH..)) else {
        return Outcome::Refused;
    };
    let Some(trailer) = trailer.first_chunk() else {
        return Outcome::Refused;
    };
    let (mut header, mut trailer): ([u8; HEADER_LENGTH], [u8; TRAILER_LENGTH]) = (*header, *trailer);
    correct_checksum(&mut header);
    correct_checksum(&mut trailer);
    let pack_id = |at: usize, bytes: &[u8]| PackId::from_bytes(bytes[at..at + 16].try_into().expect("16 bytes"));
    let pack = pack_id(16, &header);
    let mut outcome = Outcome::Refused;
    if let Ok(found) = decode_header(&header, pack) {
        let again = decode_header(&encode_header(pack, found.kind, found.writer), pack).expect("just encoded");
        assert!(
            again.kind == found.kind && again.writer == found.writer,
            "it reads as something else"
        );
        outcome = Outcome::Decoded;
    }
    // The reader of a trailer has checked that the pack is long enough for header and trailer.
    let length = u64::from_le_bytes(*length).max((HEADER_LENGTH + TRAILER_LENGTH) as u64);
    let pack = pack_id(8, &trailer);
    if let Ok(found) = decode_trailer(&trailer, pack, length) {
        assert!(
            found.directory_offset + found.directory_length < length,
            "the directory is inside"
        );
        let again = encode_trailer(pack, found.directory_offset, found.directory_length, &found.hash);
        assert_eq!(again[..72], trailer[..72], "it reads as something else");
        outcome = Outcome::Decoded;
    }
    outcome
}

/// Puts the CRC-32C of all bytes before it into the last four.
fn correct_checksum(bytes: &mut [u8]) {
    if let Some((body, crc)) = bytes.split_last_chunk_mut::<4>() {
        *crc = crc32c::crc32c(body).to_le_bytes();
    }
}

/// The plaintext of a pack's directory.
pub fn pack_directory(bytes: &[u8]) -> Outcome {
    let Ok(mut directory) = Directory::decode_unplaced(bytes) else {
        return Outcome::Refused;
    };
    let offset = directory.finish();
    let encoded = directory.encode();
    let again = Directory::decode(&encoded, offset);
    assert_eq!(again.as_ref(), Ok(&directory), "it reads as something else");
    assert!(
        Directory::decode(&encoded, offset + 1).is_err(),
        "its place is not checked"
    );
    let mut end = HEADER_LENGTH as u64;
    for frame in directory.frames() {
        assert_eq!(frame.offset, end, "frames follow one another");
        end += u64::from(frame.stored_length);
        assert!(frame.raw_length as usize <= FRAME_BYTES_MAX, "a frame over its limit");
        let chunks = directory.chunks(frame).iter().map(|chunk| u64::from(chunk.length));
        assert!(
            chunks.sum::<u64>() <= u64::from(frame.raw_length),
            "chunks outside of their frame"
        );
    }
    Outcome::Decoded
}

/// A frame: u8 codec, u32 bytes before compression, its stored bytes.
pub fn frame(bytes: &[u8]) -> Outcome {
    let Some((&[codec, l0, l1, l2, l3], stored)) = bytes.split_first_chunk() else {
        return Outcome::Refused;
    };
    let Some(codec) = Codec::from_wire(codec) else {
        return Outcome::Refused;
    };
    let raw_length = u32::from_le_bytes([l0, l1, l2, l3]) as usize % (FRAME_BYTES_MAX + 1);
    let object = ObjectName::config();
    let frame = |codec, bytes| StoredFrame {
        codec,
        bytes,
        object: &object,
        offset: 0,
    };
    let mut raw = vec![0; raw_length];
    let mut decompressor = Decompressor::new();
    // Decoding in steps may miss truncation or damage after the wanted part, but never before it.
    let mut start = Vec::new();
    let started = decompressor.decompress_start(&frame(codec, stored), raw_length, raw_length / 2, &mut start);
    if decompressor.decompress(&frame(codec, stored), &mut raw).is_err() {
        return Outcome::Refused;
    }
    started.expect("the start of what decompresses does so, too");
    assert!(
        start.len() >= raw_length / 2 && start == raw[..start.len()],
        "the start is another"
    );
    let mut packed = Vec::new();
    let mut back = start;
    back.clone_from(&raw);
    filter(&mut back);
    unfilter(&mut back);
    assert!(back == raw, "the filter for machine code is not exact");
    let codec = Compressor::new().compress(&mut back, &mut packed);
    if codec == Codec::Raw {
        assert!(back == raw, "a frame that does not compress was changed");
        packed.extend_from_slice(&raw);
    }
    back.fill(0);
    decompressor
        .decompress(&frame(codec, &packed), &mut back)
        .expect("what was compressed decompresses");
    assert!(back == raw, "it reads as something else");
    Outcome::Decoded
}

const PACK: PackId = PackId::from_bytes([5; 16]);

fn key() -> PackKey {
    PackKey::new(Cipher::Aes256Gcm, keyring().key(Purpose::PackSealing), PACK)
}

/// A whole pack, every section sealed: u32 length of the directory, the directory, the frames' stored bytes and then the
/// prints, as long as the directory says.
pub fn pack(bytes: &[u8]) -> Outcome {
    let Some(object) = forge(&key(), PACK, bytes) else {
        return Outcome::Refused;
    };
    let store = MemoryStore::new();
    store.put(&pack_name(PACK), &object).expect("memory is never full");
    let Ok(reader) = read_directory(&store, PACK, key()) else {
        return Outcome::Refused;
    };
    let keys = FingerprintKeys::new(&keyring());
    let (mut sealed, mut raw) = (Vec::new(), Vec::new());
    let mut decompressor = Decompressor::new();
    let mut outcome = Outcome::Decoded;
    for number in 0..u32::try_from(reader.directory.frames().len()).expect("at most 2^16 frames") {
        let read = reader
            .fetch(&store, number, &mut sealed)
            .and_then(|()| reader.unseal(number, &mut sealed, &mut decompressor, &mut raw))
            .and_then(|()| reader.prints(&store, number))
            .and_then(|prints| check_frame(&keys, &reader, number, &raw, &prints, Depth::Identities));
        if read.is_err() {
            outcome = Outcome::Refused;
        }
    }
    outcome
}

/// Seals the given plaintexts; `None` if the directory is invalid, which [`pack_directory`] covers.
pub(super) fn forge(key: &PackKey, pack: PackId, bytes: &[u8]) -> Option<Vec<u8>> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (plaintext, mut rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    let mut directory = Directory::decode_unplaced(plaintext).ok()?;
    let offset = directory.finish();
    let mut object = encode_header(pack, directory.kind, directory.writer).to_vec();
    let mut append = |section: PackSection, length: usize| -> Option<()> {
        let (taken, left) = rest.split_at_checked(length.checked_sub(TAG_LENGTH)?)?;
        rest = left;
        let mut sealed = taken.to_vec();
        key.seal(section, &mut sealed);
        object.extend_from_slice(&sealed);
        Some(())
    };
    for (number, frame) in (0..).zip(directory.frames()) {
        append(PackSection::Frame(number), frame.stored_length as usize)?;
    }
    for (number, frame) in (0..).zip(directory.frames()) {
        if frame.content == FrameContent::Blocks {
            append(PackSection::Prints(number), frame.prints_length())?;
        }
    }
    let mut sealed = plaintext.to_vec();
    key.seal(PackSection::Directory, &mut sealed);
    object.extend_from_slice(&sealed);
    let hash = blake3::hash(&object);
    object.extend_from_slice(&encode_trailer(pack, offset, sealed.len() as u64, hash.as_bytes()));
    Some(object)
}

/// The plaintext of a pack of a store, in the form of [`pack()`]'s input.
pub(super) fn plaintext(store: &dyn Store, pack: PackId, key: impl Fn() -> PackKey) -> Result<Vec<u8>> {
    let reader = read_directory(store, pack, key())?;
    let key = key();
    let encoded = reader.directory.encode();
    let length = u32::try_from(encoded.len()).expect("a directory is at most 32 MiB");
    let mut bytes = [&length.to_le_bytes(), &encoded[..]].concat();
    let mut sealed = Vec::new();
    let numbers = 0..u32::try_from(reader.directory.frames().len()).expect("at most 2^16 frames");
    for number in numbers.clone() {
        reader.fetch(store, number, &mut sealed)?;
        assert!(key.open(PackSection::Frame(number), &mut sealed), "the pack is whole");
        bytes.extend_from_slice(&sealed);
    }
    for number in numbers {
        bytes.extend_from_slice(&reader.prints(store, number)?);
    }
    Ok(bytes)
}

/// Inputs of the parsers of a pack's parts, from a pack of a store: name of the parser, bytes.
pub(super) fn parts(
    store: &dyn Store,
    pack: PackId,
    key: impl Fn() -> PackKey,
) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let whole = plaintext(store, pack, &key)?;
    let object = store.get(&pack_name(pack), u64::MAX)?;
    let length = (object.len() as u64).to_le_bytes();
    let ends = [
        &length,
        &object[..HEADER_LENGTH],
        &object[object.len() - TRAILER_LENGTH..],
    ];
    let reader = read_directory(store, pack, key())?;
    let mut parts = vec![
        ("pack_ends", ends.concat()),
        ("pack_directory", reader.directory.encode()),
    ];
    let mut at = 4 + reader.directory.encode().len();
    for frame in reader.directory.frames() {
        let end = at + frame.stored_length as usize - TAG_LENGTH;
        let head = [&[frame.codec.to_wire()], &frame.raw_length.to_le_bytes()[..]].concat();
        parts.push(("frame", [&head, &whole[at..end]].concat()));
        at = end;
    }
    parts.push(("pack", whole));
    Ok(parts)
}
