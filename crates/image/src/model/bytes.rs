//! Conversions between byte strings and numbers, text or rows; rounding.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

/// Splits bytes into little-endian 64-bit numbers; an incomplete last one is ignored.
pub(crate) fn to_words(bytes: &[u8]) -> Vec<u64> {
    rows(bytes, 0).iter().map(|word| u64::from_be_bytes(*word)).collect()
}

/// Joins 64-bit numbers to little-endian bytes.
pub(crate) fn from_words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Rows of `N` bytes from byte `start` on; an incomplete last one is ignored.
pub(crate) fn rows<const N: usize>(bytes: &[u8], start: usize) -> &[[u8; N]] {
    bytes.get(start..).unwrap_or_default().as_chunks().0
}

/// The same, mutable.
pub(crate) fn rows_mut<const N: usize>(bytes: &mut [u8], start: usize) -> &mut [[u8; N]] {
    bytes.get_mut(start..).unwrap_or_default().as_chunks_mut().0
}

/// Text in UTF-16, little-endian, up to the first zero.
pub(crate) fn le_utf16(bytes: &[u8]) -> String {
    utf16(bytes, u16::from_le_bytes)
}

/// Text in UTF-16, big-endian, up to the first zero.
pub(crate) fn be_utf16(bytes: &[u8]) -> String {
    utf16(bytes, u16::from_be_bytes)
}

fn utf16(bytes: &[u8], number: fn([u8; 2]) -> u16) -> String {
    let units = rows(bytes, 0).iter().map(|pair| number(*pair));
    let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    String::from_utf16_lossy(&units)
}

/// Writes a field into a structure of fixed layout.
#[expect(
    clippy::indexing_slicing,
    reason = "the places are constants of the formats: no number from a file is among them"
)]
pub(crate) fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

/// Rounds `value` up to a multiple of `unit`, a power of two; down where the result would overflow.
pub(crate) fn round_up(value: u64, unit: u64) -> u64 {
    value.checked_next_multiple_of(unit).unwrap_or(!(unit - 1))
}

#[cfg(test)]
mod tests {
    use super::round_up;

    #[test]
    fn rounding_up_never_overflows() {
        assert_eq!(round_up(1, 512), 512);
        assert_eq!(round_up(u64::MAX, 512), u64::MAX - 511);
    }
}
