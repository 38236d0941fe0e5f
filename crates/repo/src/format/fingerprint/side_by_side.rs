//! The keyed BLAKE3 hashes of many blocks at once.
//!
//! BLAKE3 is fast when it hashes many of its 1 KiB chunks in parallel, one in each lane of a vector register. A block
//! of 4 KiB has four chunks, so hashing single blocks leaves three quarters of an AVX-512 register unused, and half of
//! an AVX2 register. Here the chunks with the same number of up to sixteen blocks share a register, then the inner
//! nodes of the blocks' trees, then their roots. The hashes equal those of `blake3::keyed_hash`; a test compares them
//! on every kind of vector unit.
//!
//! Source of the tree: BLAKE3, one function, fast everywhere (2021), sections 2.1 and 2.4. The crate does not guarantee
//! the stability of its vector code, so its version is pinned in the workspace.

use blake3::IncrementCounter;
use blake3::platform::{Platform, words_from_le_bytes_32};
use zeroize::Zeroizing;

use super::{BLOCK_LENGTH, BlockHash};

/// Number of blocks that are hashed together: the lanes of the widest vector unit.
pub(crate) const BATCH_BLOCK_COUNT: usize = 16;

const CHUNK_LENGTH: usize = blake3::CHUNK_LEN;
const CHUNK_COUNT: usize = BLOCK_LENGTH / CHUNK_LENGTH;
const HASH_LENGTH: usize = blake3::OUT_LEN;
/// An inner node hashes the values of its two children.
const NODE_LENGTH: usize = 2 * HASH_LENGTH;

// Table 3 of the paper.
const CHUNK_START: u8 = 1 << 0;
const CHUNK_END: u8 = 1 << 1;
const PARENT: u8 = 1 << 2;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

/// Hashes blocks with one key.
#[derive(Clone)]
pub(super) struct BlockHasher {
    platform: Platform,
    key: Zeroizing<[u32; 8]>,
}

impl BlockHasher {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Self {
            platform: Platform::detect(),
            key: Zeroizing::new(words_from_le_bytes_32(key)),
        }
    }

    /// Hashes at most [`BATCH_BLOCK_COUNT`] blocks into as many `hashes`.
    pub(super) fn hash(&self, blocks: &[&[u8; BLOCK_LENGTH]], hashes: &mut [BlockHash]) {
        let count = blocks.len();
        assert!(count <= BATCH_BLOCK_COUNT && count == hashes.len());
        // The values of the first chunks of all blocks, then of all second chunks, and so on.
        let mut chunks = [[0; HASH_LENGTH]; CHUNK_COUNT * BATCH_BLOCK_COUNT];
        for (number, values) in chunks.chunks_exact_mut(count.max(1)).take(CHUNK_COUNT).enumerate() {
            let mut inputs = [&[0; CHUNK_LENGTH]; BATCH_BLOCK_COUNT];
            for (input, block) in inputs.iter_mut().zip(blocks) {
                *input = &block.as_chunks().0[number];
            }
            self.platform.hash_many(
                &inputs[..count],
                &self.key,
                number as u64,
                IncrementCounter::No,
                KEYED_HASH,
                CHUNK_START,
                CHUNK_END,
                values.as_flattened_mut(),
            );
        }
        let mut halves = [[0; HASH_LENGTH]; 2 * BATCH_BLOCK_COUNT];
        let (left, right) = halves.split_at_mut(count);
        self.parents(&chunks[..count], &chunks[count..2 * count], 0, left);
        self.parents(
            &chunks[2 * count..3 * count],
            &chunks[3 * count..4 * count],
            0,
            &mut right[..count],
        );
        self.parents(left, &right[..count], ROOT, hashes);
    }

    /// The values of the parent nodes of these left and right children.
    fn parents(&self, left: &[BlockHash], right: &[BlockHash], flags: u8, values: &mut [BlockHash]) {
        let mut nodes = [[0; NODE_LENGTH]; BATCH_BLOCK_COUNT];
        for (node, (left, right)) in nodes.iter_mut().zip(left.iter().zip(right)) {
            node[..HASH_LENGTH].copy_from_slice(left);
            node[HASH_LENGTH..].copy_from_slice(right);
        }
        let inputs = nodes.each_ref();
        self.platform.hash_many(
            &inputs[..values.len()],
            &self.key,
            0,
            IncrementCounter::No,
            KEYED_HASH | PARENT | flags,
            0,
            0,
            values.as_flattened_mut(),
        );
    }
}

#[cfg(test)]
mod tests {
    use blake3::platform::Platform;
    use holdfast_block::SeededRandom;

    use super::{BATCH_BLOCK_COUNT, BLOCK_LENGTH, BlockHasher};

    /// Every vector unit of this machine, and the portable code.
    fn platforms() -> Vec<Platform> {
        let mut platforms = vec![Platform::portable(), Platform::detect()];
        #[cfg(target_arch = "x86_64")]
        platforms.extend(
            [Platform::sse2(), Platform::sse41(), Platform::avx2()]
                .into_iter()
                .flatten(),
        );
        platforms
    }

    #[test]
    fn side_by_side_hashes_are_those_of_blake3() {
        let mut random = SeededRandom::new(1);
        let mut key = [0; 32];
        random.fill(&mut key);
        let bytes = random.bytes(BATCH_BLOCK_COUNT * BLOCK_LENGTH);
        let blocks: Vec<&[u8; BLOCK_LENGTH]> = bytes.as_chunks().0.iter().collect();
        let expected: Vec<[u8; 32]> = blocks
            .iter()
            .map(|block| *blake3::keyed_hash(&key, *block).as_bytes())
            .collect();
        for platform in platforms() {
            let hasher = BlockHasher {
                platform,
                ..BlockHasher::new(&key)
            };
            for count in 0..=BATCH_BLOCK_COUNT {
                for first in 0..=BATCH_BLOCK_COUNT - count {
                    let mut hashes = vec![[0; 32]; count];
                    hasher.hash(&blocks[first..first + count], &mut hashes);
                    assert_eq!(hashes, expected[first..first + count], "{platform:?}");
                }
            }
        }
    }
}
