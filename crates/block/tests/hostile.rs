//! Feeds hostile bytes to every parser of this crate, without a fuzzer.

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_block::hostile::{PARSERS, seeds};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// A bitmap takes 16 bytes for every 4096 bits. The expected device size is at most 16 GiB here, so this is 128 KiB,
/// and the same again for the second decoding. An overlay is copied a few times, read into a buffer of 1 MiB and
/// written to.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 40,
    constant_bytes: 4 << 20,
};

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
    let seeds = seeds().into_iter().map(|(parser, _, bytes)| (parser, bytes)).collect();
    ParserTrial {
        parsers: PARSERS,
        seeds,
        expanding: Vec::new(),
        bound: |_| BOUND,
        case_count: 6000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}
