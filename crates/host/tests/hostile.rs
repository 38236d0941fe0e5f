//! Hostile answers of hypervisors and machines, without a fuzzer.

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_host::hostile::{PARSERS, seeds};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// An XML node takes some hundred bytes of memory for four of input; a stream of pages is in memory twice.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 400,
    constant_bytes: 12 << 20,
};

#[test]
fn hostile_bytes_are_an_error_and_use_bounded_memory() {
    let seeds = seeds().into_iter().map(|(parser, _, bytes)| (parser, bytes)).collect();
    ParserTrial {
        parsers: PARSERS,
        seeds,
        expanding: Vec::new(),
        bound: |_| BOUND,
        case_count: 20_000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}
