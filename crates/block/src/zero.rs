//! Detects zero bytes.

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    const LANE: usize = 256;
    let mut lanes = bytes.chunks_exact(LANE);
    // Whole lanes are OR-ed without a branch, so that the compiler generates vector instructions.
    lanes.all(|lane| lane.iter().fold(0, |all, byte| all | byte) == 0)
        && bytes[bytes.len() - bytes.len() % LANE..].iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::is_zero;

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
}
