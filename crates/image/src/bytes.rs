//! Big-endian numbers in byte strings, and rounding.

/// The 16-bit number at `offset`, which must lie inside `bytes`.
pub(crate) fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_be_bytes(bytes[offset..offset + 2].try_into().expect("two bytes"))
}

/// The 32-bit number at `offset`, which must lie inside `bytes`.
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
}

/// The 64-bit number at `offset`, which must lie inside `bytes`.
pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_be_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
}

/// 64-bit numbers, one after another; a rest of fewer than eight bytes is left out.
pub(crate) fn to_words(bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks_exact(8)
        .map(|word| u64::from_be_bytes(word.try_into().expect("eight bytes")))
        .collect()
}

/// The bytes of 64-bit numbers, one after another.
pub(crate) fn from_words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// `value` or the next multiple of `unit`, a power of two; the largest multiple where that does not fit.
pub(crate) fn round_up(value: u64, unit: u64) -> u64 {
    value.checked_next_multiple_of(unit).unwrap_or(!(unit - 1))
}

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    const LANE: usize = 256;
    let mut lanes = bytes.chunks_exact(LANE);
    // Whole lanes are OR-ed without a branch inside, which the compiler turns into vector instructions.
    lanes.all(|lane| lane.iter().fold(0, |all, byte| all | byte) == 0)
        && bytes[bytes.len() - bytes.len() % LANE..].iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::{is_zero, round_up};

    #[test]
    fn one_byte_anywhere_is_not_zero() {
        for length in [0, 1, 255, 256, 257, 1000] {
            let mut bytes = vec![0; length];
            assert!(is_zero(&bytes));
            for at in 0..length {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "{at} of {length}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn rounding_up_never_overflows() {
        assert_eq!(round_up(1, 512), 512);
        assert_eq!(round_up(u64::MAX, 512), u64::MAX - 511);
    }
}
