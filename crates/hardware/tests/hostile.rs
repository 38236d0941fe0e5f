//! Feeds hostile configurations to the parsers without a fuzzer.

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_hardware::hostile::{PARSERS, seeds};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// An XML node of four bytes needs some hundred bytes of memory, and the written text needs as much again.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 800,
    constant_bytes: 1 << 20,
};

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
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
