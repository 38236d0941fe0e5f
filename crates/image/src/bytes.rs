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

#[cfg(test)]
mod tests {
    use super::round_up;

    #[test]
    fn rounding_up_never_overflows() {
        assert_eq!(round_up(1, 512), 512);
        assert_eq!(round_up(u64::MAX, 512), u64::MAX - 511);
    }
}
