//! Fingerprints: keyed hashes of 4 KiB blocks, and of chunks over the hashes of their blocks.
//!
//! Every block is hashed once. The identity of a chunk is a hash of the hashes of its blocks (32 bytes for each 4 KiB,
//! which is almost free). The first 12 bytes of a block's hash, its *print*, are stored with the block: the next backup
//! compares prints position by position and needs no lookup for an unchanged block. Because positions are compared with
//! a secret key, there is no birthday bound: a changed block is taken for unchanged with probability 2^-96.

mod side_by_side;

use zeroize::Zeroizing;

use crate::id::ChunkId;
use crate::key::{Keyring, Purpose};
pub(crate) use side_by_side::BATCH_BLOCK_COUNT;
use side_by_side::BlockHasher;

/// Bytes of a block, the unit of change detection.
pub const BLOCK_BYTES: u64 = 4096;
pub(crate) const BLOCK_LENGTH: usize = holdfast_block::to_usize(BLOCK_BYTES);

/// Bytes of a print.
pub(crate) const PRINT_LENGTH: usize = 12;

/// The keyed BLAKE3 hash of a block.
pub(crate) type BlockHash = [u8; 32];

/// The secret keys for hashes of blocks, chunks and streams, derived from the master secret.
#[derive(Clone)]
pub(crate) struct FingerprintKeys {
    block: BlockHasher,
    chunk: Zeroizing<[u8; 32]>,
    stream: Zeroizing<[u8; 32]>,
    cut_seed: u64,
}

impl FingerprintKeys {
    /// The keys of `keyring`.
    ///
    /// Chunks of disks and of streams are hashed with different keys, derived from the chunk key, so that the input for
    /// a disk (hashes) can never be confused with the input for a stream (bytes).
    pub(crate) fn new(keyring: &Keyring) -> Self {
        let chunk = |what: &[u8]| Zeroizing::new(*blake3::keyed_hash(keyring.key(Purpose::ChunkId), what).as_bytes());
        let seed = keyring.key(Purpose::StreamCut);
        Self {
            block: BlockHasher::new(keyring.key(Purpose::BlockHash)),
            chunk: chunk(b"blocks"),
            stream: chunk(b"stream"),
            cut_seed: u64::from_le_bytes(seed[..8].try_into().expect("a key is longer than a seed")),
        }
    }

    /// The seed of the stream chunker.
    pub(crate) fn cut_seed(&self) -> u64 {
        self.cut_seed
    }

    /// The hashes of at most [`BATCH_BLOCK_COUNT`] blocks, in their order.
    pub(crate) fn block_hashes(&self, blocks: &[&[u8; BLOCK_LENGTH]], hashes: &mut [BlockHash]) {
        self.block.hash(blocks, hashes);
    }

    /// Appends the hashes of all blocks of `bytes`, which are whole blocks.
    pub(crate) fn hash_blocks(&self, bytes: &[u8], hashes: &mut Vec<BlockHash>) {
        let (blocks, rest) = bytes.as_chunks();
        debug_assert!(rest.is_empty(), "whole blocks are hashed");
        let known = hashes.len();
        hashes.resize(known + blocks.len(), [0; 32]);
        let batches = blocks.chunks(BATCH_BLOCK_COUNT);
        for (blocks, hashes) in batches.zip(hashes[known..].chunks_mut(BATCH_BLOCK_COUNT)) {
            let mut batch = [&blocks[0]; BATCH_BLOCK_COUNT];
            for (slot, block) in batch.iter_mut().zip(blocks) {
                *slot = block;
            }
            self.block.hash(&batch[..blocks.len()], hashes);
        }
    }

    /// The identity of a chunk of whole blocks, from their hashes.
    pub(crate) fn chunk_of_blocks(&self, hashes: &[BlockHash]) -> ChunkId {
        ChunkId(*blake3::keyed_hash(&self.chunk, hashes.as_flattened()).as_bytes())
    }

    /// The identity of a chunk of a stream, from its bytes.
    pub(crate) fn chunk_of_stream(&self, bytes: &[u8]) -> ChunkId {
        ChunkId(*blake3::keyed_hash(&self.stream, bytes).as_bytes())
    }
}

/// The print of a block.
pub(crate) fn print_of(hash: &BlockHash) -> &[u8] {
    &hash[..PRINT_LENGTH]
}

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (head, middle, tail) = split_words(bytes);
    head.iter().all(|byte| *byte == 0)
        && middle
            .as_chunks::<64>()
            .0
            .iter()
            .all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
        && tail.iter().all(|byte| *byte == 0)
}

/// Splits off the bytes outside of whole cache lines, so that the middle compiles to vector code.
fn split_words(bytes: &[u8]) -> (&[u8], &[u8], &[u8]) {
    let head = bytes.len().min(64);
    let middle = (bytes.len() - head) / 64 * 64;
    let (head, rest) = bytes.split_at(head);
    let (middle, tail) = rest.split_at(middle);
    (head, middle, tail)
}

#[cfg(test)]
mod tests {
    use super::is_zero;

    #[test]
    fn one_set_byte_anywhere_is_found() {
        for length in [0, 1, 63, 64, 65, 127, 128, 4096] {
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
