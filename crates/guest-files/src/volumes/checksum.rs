//! CRC-32 with the polynomial of Ethernet, as GPT and LVM use it.

/// Continues the checksum `crc` over `bytes`, without inverting it before or after.
pub(super) fn crc32(crc: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(crc, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

/// The usual CRC-32.
pub(super) fn ieee(bytes: &[u8]) -> u32 {
    !crc32(u32::MAX, bytes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_check_value_is_that_of_the_standard() {
        assert_eq!(super::ieee(b"123456789"), 0xcbf4_3926);
    }
}
