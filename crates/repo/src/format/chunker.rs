//! Chunk boundaries of disks.
//!
//! Chunks are whole blocks with content-defined boundaries: a block whose hash meets a condition ends its chunk. The
//! same file at another position of another disk is cut at the same blocks if it is aligned to blocks, as files of file
//! systems are. Only runs of new blocks (not zero, not unchanged) are cut, and the end of a run ends its chunk. The
//! boundaries depend only on the blocks of the run: not on threads, and not on how the disk was read.

use crate::format::fingerprint::{BLOCK_BYTES, BlockHash, FingerprintKeys};
use crate::id::ChunkId;

/// A chunk ends after a block whose hash has this many low zero bits: on average after 16 blocks, 64 KiB.
const CUT_BITS: u32 = 4;

/// Maximum number of blocks in a chunk: 512 KiB.
pub(crate) const CHUNK_BLOCK_COUNT_MAX: usize = 128;

/// Maximum bytes of a chunk of any kind.
pub(crate) const CHUNK_BYTES_MAX: u64 = CHUNK_BLOCK_COUNT_MAX as u64 * BLOCK_BYTES;

/// The blocks of the current chunk.
#[derive(Debug, Default)]
pub(crate) struct Chunker {
    hashes: Vec<BlockHash>,
}

impl Chunker {
    /// Adds the next block of the run; returns true if the chunk ends with it.
    #[must_use]
    pub(crate) fn push(&mut self, hash: &BlockHash) -> bool {
        self.hashes.push(*hash);
        // The print uses the first bytes and the cut the last, so that neither reveals the other.
        let low = u32::from_le_bytes([hash[28], hash[29], hash[30], hash[31]]);
        low.trailing_zeros() >= CUT_BITS || self.hashes.len() == CHUNK_BLOCK_COUNT_MAX
    }

    /// The hashes of the chunk so far.
    pub(crate) fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// The identity of the chunk so far.
    pub(crate) fn chunk_id(&self, keys: &FingerprintKeys) -> ChunkId {
        keys.chunk_of_blocks(&self.hashes)
    }

    /// Begins the next chunk.
    pub(crate) fn clear(&mut self) {
        self.hashes.clear();
    }
}
