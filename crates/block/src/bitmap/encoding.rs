//! The stored form of a bitmap, version 1.
//!
//! Numbers are little-endian.
//!
//! | offset | bytes | field                                                             |
//! |-------:|------:|-------------------------------------------------------------------|
//! |      0 |     8 | magic `HFBITMAP`                                                  |
//! |      8 |     4 | version, 1                                                        |
//! |     12 |     4 | form of the bits: 1 words, 2 runs                                 |
//! |     16 |     8 | size of the device, in bytes                                      |
//! |     24 |     8 | granularity, in bytes: a power of two, at least 512               |
//! |     32 |     8 | length of the bits that follow the header, in bytes               |
//! |     40 |     4 | CRC-32C of the bits                                               |
//! |     44 |     4 | CRC-32C of bytes 0 to 43                                          |
//! |     48 |       | the bits                                                          |
//!
//! *Words*: ceil(bits / 64) numbers of 64 bits; bit `i` is bit `i % 64` of number `i / 64`; bits past the end are 0.
//!
//! *Runs*: lengths of alternating clear and set runs, in bits. The first run is clear; only its length may be 0. Each
//! length is a LEB128 number in its shortest form. A clear run at the end is omitted.
//!
//! The writer uses the shorter form, or words if both have the same length.
//!
//! The caller of the reader passes the expected size of the device. Memory is bounded by that size and by the input: 16
//! bytes for each 4096 bits, and 512 more for each group of 4096 bits with both clear and set bits.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use super::DirtyBitmap;
use crate::{Error, Record, Result, to_usize};

/// The version that [`DirtyBitmap::encode`] writes.
pub const BITMAP_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"HFBITMAP";
const FORM_WORDS: u32 = 1;
const FORM_RUNS: u32 = 2;

const VERSION_AT: usize = MAGIC.len();
const FORM_AT: usize = VERSION_AT + 4;
const SIZE_AT: usize = FORM_AT + 4;
const GRANULARITY_AT: usize = SIZE_AT + 8;
const LENGTH_AT: usize = GRANULARITY_AT + 8;
const BITS_CRC_AT: usize = LENGTH_AT + 8;
const HEADER_CRC_AT: usize = BITS_CRC_AT + 4;
const HEADER_LENGTH: usize = HEADER_CRC_AT + 4;
const _: () = assert!(HEADER_LENGTH == 48);

fn corrupt(offset: usize, detail: String) -> Error {
    Error::Corrupt {
        what: "dirty bitmap",
        offset: offset as u64,
        detail,
    }
}

type Fields<'a> = Record<'a, HEADER_LENGTH>;

fn append_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(u8::try_from(number & 0x7F).expect("seven bits") | 0x80);
        number >>= 7;
    }
    bytes.push(u8::try_from(number).expect("seven bits"));
}

/// Decodes the LEB128 number at `*at`, and advances `*at` behind it.
fn take_number(bytes: &[u8], at: &mut usize) -> Result<u64> {
    let start = *at;
    let mut number = 0u64;
    for shift in (0..63).step_by(7) {
        let byte = *bytes
            .get(*at)
            .ok_or_else(|| corrupt(HEADER_LENGTH + start, "a run is cut off".into()))?;
        *at += 1;
        number |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            if byte == 0 && shift > 0 {
                break;
            }
            return Ok(number);
        }
    }
    Err(corrupt(
        HEADER_LENGTH + start,
        "a run length is not in its shortest form".into(),
    ))
}

impl DirtyBitmap {
    /// The stored form, version [`BITMAP_VERSION`].
    pub fn encode(&self) -> Vec<u8> {
        let words_length = to_usize(self.pages.bit_count().div_ceil(64) * 8);
        let (form, bits) = match self.encode_runs(words_length) {
            Some(runs) => (FORM_RUNS, runs),
            None => (FORM_WORDS, self.encode_words()),
        };
        let mut bytes = Vec::with_capacity(HEADER_LENGTH + bits.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&BITMAP_VERSION.to_le_bytes());
        bytes.extend_from_slice(&form.to_le_bytes());
        bytes.extend_from_slice(&self.size_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.granularity_bytes.to_le_bytes());
        bytes.extend_from_slice(&(bits.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&crc32c::crc32c(&bits).to_le_bytes());
        bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
        bytes.extend_from_slice(&bits);
        bytes
    }

    /// The encoded runs; `None` if they take `length_end` bytes or more.
    fn encode_runs(&self, length_end: usize) -> Option<Vec<u8>> {
        let mut runs = Vec::new();
        let mut at = 0;
        while let Some(set) = self.pages.next_set(at) {
            append_number(&mut runs, set - at);
            at = self.pages.next_clear(set);
            append_number(&mut runs, at - set);
            if runs.len() >= length_end {
                return None;
            }
        }
        (runs.len() < length_end).then_some(runs)
    }

    fn encode_words(&self) -> Vec<u8> {
        (0..self.pages.bit_count().div_ceil(64))
            .flat_map(|index| self.pages.word(index).to_le_bytes())
            .collect()
    }

    /// Decodes a bitmap of a device of `size_bytes`.
    ///
    /// Returns [`Error::Corrupt`] if the bitmap is damaged or belongs to a device of another size, and
    /// [`Error::Unsupported`] if it has a later version. The caller then reads the whole device instead.
    pub fn decode(bytes: &[u8], size_bytes: u64) -> Result<Self> {
        let (form, granularity_bytes) = check_header(bytes, size_bytes)?;
        let bits = bytes.get(HEADER_LENGTH..).unwrap_or_default();
        let mut bitmap = Self::new(size_bytes, granularity_bytes)?;
        match form {
            FORM_WORDS => bitmap.decode_words(bits)?,
            FORM_RUNS => bitmap.decode_runs(bits)?,
            _ => return Err(corrupt(FORM_AT, format!("{form} is not a known form of the bits"))),
        }
        Ok(bitmap)
    }

    fn decode_words(&mut self, bits: &[u8]) -> Result<()> {
        let bit_count = self.pages.bit_count();
        let expected = to_usize(bit_count.div_ceil(64) * 8);
        if bits.len() != expected {
            return Err(corrupt(
                LENGTH_AT,
                format!("{} bytes of words, expected {expected}", bits.len()),
            ));
        }
        for (index, word) in (0u64..).zip(bits.as_chunks().0.iter()) {
            let mut rest = u64::from_le_bytes(*word);
            while rest != 0 {
                let start = u64::from(rest.trailing_zeros());
                let length = u64::from((rest >> start).trailing_ones());
                let first = index * 64 + start;
                if first + length > bit_count {
                    return Err(corrupt(HEADER_LENGTH, "a bit past the end of the device is set".into()));
                }
                self.pages.set(first..first + length);
                rest &= if start + length == 64 {
                    0
                } else {
                    u64::MAX << (start + length)
                };
            }
        }
        Ok(())
    }

    fn decode_runs(&mut self, bits: &[u8]) -> Result<()> {
        let bit_count = self.pages.bit_count();
        let past_end = || corrupt(HEADER_LENGTH, "runs reach past the end of the device".into());
        let (mut at, mut position) = (0u64, 0);
        while position < bits.len() {
            let first = at == 0 && position == 0;
            let clear = take_number(bits, &mut position)?;
            let set = take_number(bits, &mut position)?;
            if set == 0 || (clear == 0 && !first) {
                return Err(corrupt(HEADER_LENGTH + position, "a run is empty".into()));
            }
            let start = at.checked_add(clear).ok_or_else(past_end)?;
            let end = start.checked_add(set).ok_or_else(past_end)?;
            if end > bit_count {
                return Err(past_end());
            }
            self.pages.set(start..end);
            at = end;
        }
        Ok(())
    }
}

/// Checks the header and the checksum of the bits; returns the form of the bits and the granularity.
fn check_header(bytes: &[u8], size_bytes: u64) -> Result<(u32, u64)> {
    let Some((head, bits)) = bytes.split_first_chunk::<HEADER_LENGTH>() else {
        return Err(corrupt(0, format!("{} bytes are less than a header", bytes.len())));
    };
    let fields = Fields::new(head);
    if *fields.field::<0, 8>() != MAGIC {
        return Err(corrupt(0, "it does not begin with HFBITMAP".into()));
    }
    let version = fields.le_u32::<VERSION_AT>();
    if version != BITMAP_VERSION {
        return Err(Error::Unsupported {
            what: "dirty bitmap",
            detail: format!("it has version {version}, this program reads version {BITMAP_VERSION}"),
        });
    }
    let header_crc = crc32c::crc32c(fields.field::<0, HEADER_CRC_AT>());
    if header_crc != fields.le_u32::<HEADER_CRC_AT>() {
        return Err(corrupt(HEADER_CRC_AT, "the header's checksum is wrong".into()));
    }
    let actual_size_bytes = fields.le_u64::<SIZE_AT>();
    if actual_size_bytes != size_bytes {
        return Err(corrupt(
            SIZE_AT,
            format!("it is of a device of {actual_size_bytes} bytes, expected {size_bytes}"),
        ));
    }
    if fields.le_u64::<LENGTH_AT>() != bits.len() as u64 {
        return Err(corrupt(
            LENGTH_AT,
            format!(
                "{} bytes follow the header, expected {}",
                bits.len(),
                fields.le_u64::<LENGTH_AT>()
            ),
        ));
    }
    if crc32c::crc32c(bits) != fields.le_u32::<BITS_CRC_AT>() {
        return Err(corrupt(HEADER_LENGTH, "the checksum of the bits is wrong".into()));
    }
    Ok((fields.le_u32::<FORM_AT>(), fields.le_u64::<GRANULARITY_AT>()))
}

#[cfg(test)]
mod tests {
    use super::{
        BITS_CRC_AT, FORM_AT, FORM_RUNS, FORM_WORDS, Fields, HEADER_CRC_AT, HEADER_LENGTH, LENGTH_AT, VERSION_AT,
    };
    use crate::testing::conformance::test_seed;
    use crate::{DirtyBitmap, Error, SeededRandom, to_usize};

    /// Returns `bytes` with correct length and checksums, so that the decoder reaches the checks after them.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        let length = (bytes.len() - HEADER_LENGTH) as u64;
        bytes[LENGTH_AT..LENGTH_AT + 8].copy_from_slice(&length.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[HEADER_LENGTH..]);
        bytes[BITS_CRC_AT..BITS_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..HEADER_CRC_AT]);
        bytes[HEADER_CRC_AT..HEADER_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn sparse() -> DirtyBitmap {
        let mut bitmap = DirtyBitmap::new(1 << 30, 512).unwrap();
        bitmap.set(1 << 20..1 << 21);
        bitmap.set((1 << 30) - 1..1 << 30);
        bitmap
    }

    /// Every second bit set: the worst case for runs.
    fn striped() -> DirtyBitmap {
        let mut bitmap = DirtyBitmap::new(100 * 512 + 1, 512).unwrap();
        for bit in (0..101).step_by(2) {
            bitmap.set(bit * 512..bit * 512 + 1);
        }
        bitmap
    }

    #[test]
    fn the_shorter_form_is_taken() {
        let few = sparse().encode();
        let form = |bytes: &[u8]| Fields::first_of(bytes).unwrap().le_u32::<FORM_AT>();
        assert_eq!(form(&few), FORM_RUNS);
        assert!(few.len() < 70);
        let many = striped().encode();
        assert_eq!((form(&many), many.len()), (FORM_WORDS, HEADER_LENGTH + 16));
        for (bitmap, bytes) in [(sparse(), few), (striped(), many)] {
            assert_eq!(DirtyBitmap::decode(&bytes, bitmap.size_bytes()).unwrap(), bitmap);
        }
        let empty = DirtyBitmap::new(0, 512).unwrap();
        assert_eq!(DirtyBitmap::decode(&empty.encode(), 0).unwrap(), empty);
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        for bitmap in [sparse(), striped()] {
            let bytes = bitmap.encode();
            for at in 0..bytes.len() * 8 {
                let mut damaged = bytes.clone();
                damaged[at / 8] ^= 1 << (at % 8);
                assert!(DirtyBitmap::decode(&damaged, bitmap.size_bytes()).is_err(), "bit {at}");
            }
            for length in 0..bytes.len() {
                assert!(
                    DirtyBitmap::decode(&bytes[..length], bitmap.size_bytes()).is_err(),
                    "cut at {length}"
                );
            }
        }
    }

    #[test]
    fn a_later_version_and_another_device_are_distinguished_from_damage() {
        let mut bytes = sparse().encode();
        assert!(matches!(
            DirtyBitmap::decode(&bytes, 1 << 29),
            Err(Error::Corrupt { .. })
        ));
        bytes[VERSION_AT] = 2;
        let later = DirtyBitmap::decode(&sealed(bytes), 1 << 30);
        assert!(matches!(later, Err(Error::Unsupported { .. })));
    }

    #[test]
    fn invalid_contents_with_valid_checksums_are_refused() {
        let header = sparse().encode()[..HEADER_LENGTH].to_vec();
        let max = 1u64 << 21;
        let invalid: [&[u64]; 6] = [
            &[0],
            &[1, 0],
            &[0, 1, 0, 1],
            &[max, 1],
            &[0, max + 1],
            &[1 << 62, 1 << 62, 1 << 62, 1],
        ];
        for numbers in invalid {
            let mut bytes = header.clone();
            for number in numbers {
                super::append_number(&mut bytes, *number);
            }
            assert!(DirtyBitmap::decode(&sealed(bytes), 1 << 30).is_err(), "{numbers:?}");
        }
        for overlong in [&[0x80u8, 0x00, 0x01][..], &[0xFF; 12][..]] {
            let mut bytes = header.clone();
            bytes.extend_from_slice(overlong);
            assert!(DirtyBitmap::decode(&sealed(bytes), 1 << 30).is_err());
        }
        let mut past_end = striped().encode();
        *past_end.last_mut().unwrap() = 0x80;
        assert!(DirtyBitmap::decode(&sealed(past_end), 100 * 512 + 1).is_err());
    }

    #[test]
    fn noise_never_panics() {
        let mut random = SeededRandom::new(test_seed());
        let header = sparse().encode()[..HEADER_LENGTH].to_vec();
        for _ in 0..2000 {
            let mut bytes = header.clone();
            let length = to_usize(random.below(40));
            bytes.extend(random.bytes(length));
            if let Ok(bitmap) = DirtyBitmap::decode(&sealed(bytes), 1 << 30) {
                assert_eq!(DirtyBitmap::decode(&bitmap.encode(), 1 << 30).unwrap(), bitmap);
            }
        }
    }
}
