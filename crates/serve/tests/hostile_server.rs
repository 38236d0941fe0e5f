//! Feeds hostile bytes to every parser of network protocols, without a fuzzer.

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_serve::hostile::{PARSERS, seeds};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// A handshake answers an option with less than 64 KiB, and this test keeps all output twice, to compare it. Requests
/// are executed on a disk of 100 kB, and each reply is discarded before the next one.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 200,
    constant_bytes: 2 << 20,
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
