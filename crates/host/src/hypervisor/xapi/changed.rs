//! Changed-block tracking: the differences between two snapshots of a disk.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use holdfast_block::DirtyBitmap;
use serde_json::json;

use super::{Pool, Reference, XapiResult};

/// Bytes per bit, as defined by the XenAPI.
const BLOCK_BYTES: u64 = 64 << 10;

impl Pool {
    /// The ranges of a disk of `size_bytes` that changed between two of its snapshots.
    pub fn changed_blocks(
        self: &Arc<Self>,
        from: &Reference,
        to: &Reference,
        size_bytes: u64,
    ) -> XapiResult<DirtyBitmap> {
        const METHOD: &str = "VDI.list_changed_blocks";
        let answer = self.call(METHOD, &[json!(from.0), json!(to.0)])?;
        let text = answer.as_str().unwrap_or_default();
        changed_blocks(text, size_bytes).map_err(|detail| self.invalid_answer(METHOD, &detail))
    }
}

/// Parses a list of changed blocks: base64 of one bit for each 64 KiB, the first in the highest bit of the first byte.
///
/// # Errors
/// The text is not base64, or its length does not fit the disk.
pub fn changed_blocks(text: &str, size_bytes: u64) -> Result<DirtyBitmap, String> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let bytes = STANDARD.decode(digits).map_err(|error| error.to_string())?;
    let block_count = size_bytes.div_ceil(BLOCK_BYTES);
    // A snapshot may have another size than the disk. The state of blocks that the list does not contain is unknown.
    if (bytes.len() as u64) != block_count.div_ceil(8) {
        return Err(format!(
            "it has {} bytes, but the disk has {block_count} blocks of 64 KiB",
            bytes.len()
        ));
    }
    let mut changed = DirtyBitmap::new(size_bytes, BLOCK_BYTES).map_err(|error| error.to_string())?;
    for (at, byte) in (0_u64..).zip(bytes) {
        for bit in (0..8).filter(|bit| byte & (0x80 >> bit) != 0) {
            let start = (at * 8 + bit) * BLOCK_BYTES;
            if start < size_bytes {
                changed.set(start..(start + BLOCK_BYTES).min(size_bytes));
            }
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::{BLOCK_BYTES, changed_blocks};

    #[test]
    fn the_highest_bit_is_the_first_block() {
        let size_bytes = 9 * BLOCK_BYTES - 512;
        let changed = changed_blocks("gYA=", size_bytes).unwrap();
        let ranges: Vec<_> = changed.iter().collect();
        assert_eq!(ranges, [0..BLOCK_BYTES, 7 * BLOCK_BYTES..size_bytes]);
        assert!(changed_blocks("AAA=\n", size_bytes).unwrap().is_clean());
        // Bits after the end of the disk are ignored.
        assert_eq!(
            changed_blocks("AP8=", size_bytes).unwrap().dirty_bytes(),
            BLOCK_BYTES - 512
        );
        for wrong in ["", "gQ==", "gYCA", "!!!!", "gYA"] {
            assert!(changed_blocks(wrong, size_bytes).is_err(), "{wrong}");
        }
    }
}
