//! Hostile bytes, and the parsers to test with them: for fuzzers, and for tests without a fuzzer.
//!
//! Every crate with parsers has a table of [`Parser`]s like [`PARSERS`]. Each entry is a function that must handle any
//! bytes: without panic, endless loop or more memory than the bytes justify. If the bytes were decoded, encoding and
//! decoding again must give the same value. If the parser first checks a checksum, the function corrects the checksum,
//! as an attacker would. `fuzz/` has one target for each entry; [`damage`] creates hostile bytes from valid ones
//! without a fuzzer.
//!
//! The module exists only with the feature `hostile`, and is not part of the public API.

mod trial;

use std::ops::Range;

use crate::{BackingId, BlockDevice, BlockDeviceMut, DirtyBitmap, MemoryDevice, OverlayDevice, OverlayInfo};
use crate::{OverlayOptions, SeededRandom, to_usize};

pub use trial::{MemoryBound, ParserTrial};

/// The result of parsing hostile bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The bytes were accepted.
    Decoded,
    /// The bytes were refused.
    Refused,
}

/// A parser for fuzzing.
#[derive(Debug, Clone, Copy)]
pub struct Parser {
    /// The name of the fuzz target and of its folder of seeds.
    pub name: &'static str,
    /// Parses the bytes; panics if the parser violates its contract.
    pub feed: fn(&[u8]) -> Outcome,
}

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "dirty_bitmap",
        feed: dirty_bitmap,
    },
    Parser {
        name: "overlay",
        feed: overlay,
    },
];

/// Valid bytes for every parser of this crate: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let mut bitmap = DirtyBitmap::new(10 << 20, 4096).expect("a bitmap of 2560 bits");
    let empty = bitmap.encode();
    (0..40).for_each(|number| bitmap.set(number * 65_536..number * 65_536 + 9000));
    let runs = bitmap.encode();
    (0..2560)
        .step_by(2)
        .for_each(|number| bitmap.set(number * 4096..number * 4096 + 1));
    vec![
        ("dirty_bitmap", "empty", empty),
        ("dirty_bitmap", "runs", runs),
        ("dirty_bitmap", "words", bitmap.encode()),
        ("overlay", "new", overlay_seed(&[])),
        ("overlay", "written", overlay_seed(&[0..700, 3000..5000, 8000..8001])),
    ]
}

const BACKING_ID: BackingId = BackingId([7; 16]);
const CLUSTER_SIZE_BYTES: u32 = 512;
const OVERLAY_BYTES: u64 = 9000;

fn overlay_seed(written: &[Range<u64>]) -> Vec<u8> {
    let options = OverlayOptions {
        backing_id: BACKING_ID,
        cluster_size_bytes: CLUSTER_SIZE_BYTES,
    };
    let length = options.store_size_bytes(OVERLAY_BYTES).expect("a small device");
    let store = MemoryDevice::new(length);
    let backing = MemoryDevice::new(OVERLAY_BYTES);
    let overlay = OverlayDevice::create(backing, &store, options).expect("the store is blank");
    for range in written {
        let data = vec![0xa5; to_usize(range.end - range.start)];
        overlay.write_at(&data, range.start).expect("memory can be written");
    }
    overlay.write_zeroes(5000..7000).expect("memory can be written");
    overlay.flush().expect("memory is never full");
    store.to_bytes()
}

/// The stored form of a dirty bitmap, with corrected checksums.
pub fn dirty_bitmap(bytes: &[u8]) -> Outcome {
    const LENGTH_AT: usize = 32;
    const HEADER_LENGTH: usize = 48;
    const DEVICE_BYTES_MAX: u64 = 16 << 30;
    let mut bytes = bytes.to_vec();
    let Some((header, bits)) = bytes.split_first_chunk_mut::<HEADER_LENGTH>() else {
        return refused(DirtyBitmap::decode(&bytes, 0).is_err());
    };
    let size_bytes = u64::from_le_bytes(header[16..24].try_into().expect("eight bytes"));
    // The caller chooses the size, not the input: larger sizes take time and find nothing more.
    if size_bytes > DEVICE_BYTES_MAX {
        return Outcome::Refused;
    }
    header[LENGTH_AT..40].copy_from_slice(&(bits.len() as u64).to_le_bytes());
    header[40..44].copy_from_slice(&crc32c::crc32c(bits).to_le_bytes());
    let crc = crc32c::crc32c(&header[..44]);
    header[44..].copy_from_slice(&crc.to_le_bytes());
    let Ok(bitmap) = DirtyBitmap::decode(&bytes, size_bytes) else {
        return Outcome::Refused;
    };
    let again = DirtyBitmap::decode(&bitmap.encode(), size_bytes);
    assert_eq!(again.ok().as_ref(), Some(&bitmap), "it reads as something else");
    let dirty: u64 = bitmap.iter().take(1000).map(|range| range.end - range.start).sum();
    assert!(dirty <= size_bytes, "more is dirty than there is");
    Outcome::Decoded
}

/// The store of an overlay, with corrected checksums of its header and its map.
pub fn overlay(bytes: &[u8]) -> Outcome {
    const HEADER_CRC_AT: usize = 64;
    const SECTOR_CRC_AT: usize = 508;
    const MAP_AT: usize = 4096;
    let mut bytes = bytes.to_vec();
    if let Some(header) = bytes.get_mut(..HEADER_CRC_AT + 4) {
        let crc = crc32c::crc32c(&header[..HEADER_CRC_AT]);
        header[HEADER_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }
    let store = MemoryDevice::from_bytes(&bytes);
    let Ok(info) = OverlayInfo::read(&store) else {
        return Outcome::Refused;
    };
    let map_bytes = bytes.get_mut(MAP_AT..).unwrap_or_default();
    for (number, sector) in (0u64..).zip(map_bytes.chunks_exact_mut(512)) {
        if sector.iter().any(|byte| *byte != 0) {
            let crc = crc32c::crc32c(&info.backing_id.0);
            let crc = crc32c::crc32c_append(crc, &number.to_le_bytes());
            let crc = crc32c::crc32c_append(crc, &sector[..SECTOR_CRC_AT]);
            sector[SECTOR_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        }
    }
    // A corrected sector may be data, which begins where the map ends: the bytes are hostile in either case.
    let store = MemoryDevice::from_bytes(&bytes);
    let backing = MemoryDevice::new(info.size_bytes);
    match OverlayDevice::open(backing, store, info.backing_id) {
        Ok(overlay) => use_overlay(&overlay),
        Err(_) => Outcome::Refused,
    }
}

/// Reads the whole overlay, writes to it, and reads the written bytes.
fn use_overlay<S: BlockDeviceMut>(overlay: &OverlayDevice<MemoryDevice, S>) -> Outcome {
    const READ_BYTES_MAX: u64 = 1 << 20;
    let size_bytes = overlay.size_bytes();
    let end = size_bytes.min(READ_BYTES_MAX);
    let mut buffer = vec![0; to_usize(end)];
    let list = overlay.extents(0..size_bytes, 1000).expect("the range is inside");
    assert!(size_bytes == 0 || list.end() > 0, "the extents make no progress");
    overlay
        .read_at(&mut buffer, 0)
        .expect("the store is as long as it has to be");
    overlay
        .read_at(&mut buffer, size_bytes - end)
        .expect("the store is as long as it has to be");
    let written = [0x5a; 700];
    if end >= 1000 {
        overlay.write_at(&written, 300).expect("memory can be written");
        let mut back = [0; 700];
        overlay.read_at(&mut back, 300).expect("memory can be read");
        assert_eq!(back, written, "what was written is read");
        overlay.trim(0..end).expect("memory can be trimmed");
    }
    overlay.flush().expect("memory is never full");
    Outcome::Decoded
}

fn refused(is_refused: bool) -> Outcome {
    assert!(is_refused, "nothing can be decoded from so little");
    Outcome::Refused
}

/// Damages `bytes` one to a few times: bits, extreme numbers of every width and order, ranges that are removed,
/// duplicated or exchanged.
pub fn damage(bytes: &mut Vec<u8>, random: &mut SeededRandom) {
    for _ in 0..=random.below(4) {
        damage_once(bytes, random);
    }
}

fn damage_once(bytes: &mut Vec<u8>, random: &mut SeededRandom) {
    const EXTREME: [u64; 12] = [
        0,
        1,
        0x7f,
        0x80,
        0xffff,
        0x7fff_ffff,
        0xffff_ffff,
        1 << 32,
        1 << 40,
        i64::MAX.cast_unsigned(),
        u64::MAX - 1,
        u64::MAX,
    ];
    if bytes.is_empty() {
        bytes.push(random.below(256).to_le_bytes()[0]);
        return;
    }
    let length = bytes.len() as u64;
    // Most important fields are at the start and at the end.
    let window = 1 + random.below(3) * 64;
    let at = match random.below(4) {
        0 => random.below(length.min(window)),
        1 => length - 1 - random.below(length.min(window)),
        _ => random.below(length),
    };
    let at = to_usize(at);
    let run = to_usize(1 + random.below(40)).min(bytes.len() - at);
    match random.below(7) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.below(256).to_le_bytes()[0],
        2 => {
            let number = EXTREME[to_usize(random.below(EXTREME.len() as u64))];
            let width = 1 << random.below(4);
            let (little, big) = (number.to_le_bytes(), number.to_be_bytes());
            let chosen = if random.below(2) == 0 {
                &little[..width]
            } else {
                &big[8 - width..]
            };
            bytes
                .iter_mut()
                .skip(at)
                .zip(chosen)
                .for_each(|(byte, new)| *byte = *new);
        }
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(at..at + run)),
        5 => {
            let copy = bytes[at..at + run].to_vec();
            let to = to_usize(random.below(bytes.len() as u64 + 1));
            bytes.splice(to..to, copy);
        }
        _ => {
            let other = to_usize(random.below(length));
            bytes.swap(at, other);
        }
    }
}
