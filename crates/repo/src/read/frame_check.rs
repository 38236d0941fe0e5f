//! Verifies that a decoded frame matches its pack's directory.
//!
//! The seal proves that a frame is what was sealed. The prints and chunk ids prove that it is what was read from the
//! disk: they were computed before the bytes were compressed and sealed, so that they detect memory errors in
//! between.

use crate::error::{Error, Result};
use crate::format::fingerprint::{BLOCK_LENGTH, BlockHash, FingerprintKeys, PRINT_LENGTH, print_of};
use crate::format::pack::{FrameContent, PackReader};

/// Which checks are made on a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// The print of every block.
    Prints,
    /// The identity of every chunk as well.
    Identities,
}

/// Checks the decoded bytes of frame `number` against its prints and the identities of its chunks.
///
/// Chunks of a stream have no prints: their identities are always checked.
pub(crate) fn check_frame(
    keys: &FingerprintKeys,
    reader: &PackReader,
    number: u32,
    raw: &[u8],
    prints: &[u8],
    depth: Depth,
) -> Result<()> {
    let frame = reader.frame(number)?;
    let differs = |what: &str, at: usize| {
        let detail = format!("frame {number} opens, but {what} at byte {at} of it is not what was backed up");
        Err(Error::damaged(&reader.name, frame.offset, detail))
    };
    match frame.content {
        FrameContent::Tree => Ok(()),
        FrameContent::Stream => {
            let mut at = 0;
            for chunk in reader.directory.chunks(frame) {
                let end = at + chunk.length as usize;
                if keys.chunk_of_stream(&raw[at..end]) != chunk.id {
                    return differs("the chunk", at);
                }
                at = end;
            }
            Ok(())
        }
        FrameContent::Blocks => {
            let mut hashes: Vec<BlockHash> = Vec::new();
            keys.hash_blocks(raw, &mut hashes);
            let stored = prints.chunks_exact(PRINT_LENGTH);
            if let Some(number) = hashes
                .iter()
                .zip(stored)
                .position(|(hash, print)| print_of(hash) != print)
            {
                return differs("the block", number * BLOCK_LENGTH);
            }
            if depth == Depth::Prints {
                return Ok(());
            }
            let mut at = 0;
            for chunk in reader.directory.chunks(frame) {
                let end = at + chunk.length as usize;
                if keys.chunk_of_blocks(&hashes[at / BLOCK_LENGTH..end / BLOCK_LENGTH]) != chunk.id {
                    return differs("the chunk", at);
                }
                at = end;
            }
            Ok(())
        }
    }
}
