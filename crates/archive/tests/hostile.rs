//! Feeds hostile archives to the parsers, without a fuzzer.

use holdfast_archive::hostile::{PARSERS, seeds};
use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Records are kept as text and as values; a packed block may claim to unpack to 64 MiB.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 1000,
    constant_bytes: 200 << 20,
};

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
    let seeds = seeds().into_iter().map(|(parser, _, bytes)| (parser, bytes)).collect();
    ParserTrial {
        parsers: PARSERS,
        seeds,
        expanding: Vec::new(),
        bound: |_| BOUND,
        case_count: 4_000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}
