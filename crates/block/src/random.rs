//! Seeded random numbers.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;

/// A deterministic stream of random numbers (SplitMix64): for tests, sampling and jitter, never for keys.
///
/// Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014.
#[derive(Debug, Clone)]
pub struct SeededRandom {
    state: u64,
}

impl SeededRandom {
    /// A stream that is determined by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A new seed. A test prints its seed so that the run can be replayed.
    pub fn fresh_seed() -> u64 {
        RandomState::new().build_hasher().finish()
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which must not be 0.
    ///
    /// The bias towards smaller numbers is at most `bound` in 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "there is no number below 0");
        let product = u128::from(self.next_u64()) * u128::from(bound);
        u64::try_from(product >> 64).expect("the upper half has 64 bits")
    }

    /// True with a probability of 1 in `count`.
    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// A range within `0..size_bytes` of at most `length_max` bytes; it may be empty.
    pub fn range_within(&mut self, size_bytes: u64, length_max: u64) -> Range<u64> {
        let start = self.below(size_bytes + 1);
        let length = self.below((size_bytes - start).min(length_max) + 1);
        start..start + length
    }

    /// Fills `buffer` with random bytes.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for piece in buffer.chunks_mut(8) {
            piece.copy_from_slice(&self.next_u64().to_le_bytes()[..piece.len()]);
        }
    }

    /// `length` random bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.fill(&mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::SeededRandom;

    #[test]
    fn the_stream_is_the_published_one() {
        let mut random = SeededRandom::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn ranges_stay_inside_and_reach_both_ends() {
        let mut random = SeededRandom::new(1);
        let (mut seen_start, mut seen_end) = (false, false);
        for _ in 0..1000 {
            let range = random.range_within(3, 2);
            assert!(range.start <= range.end && range.end <= 3 && range.end - range.start <= 2);
            seen_start |= range.start == 0;
            seen_end |= range.end == 3;
        }
        assert!(seen_start && seen_end);
    }
}
