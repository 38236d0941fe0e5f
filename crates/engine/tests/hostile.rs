//! Hostile text for everything that users type: names of snapshots, rules, calendars, configurations.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// An error quotes the input, and a plan has a few decisions.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 40,
    constant_bytes: 1 << 20,
};

#[test]
fn hostile_text_is_an_error_and_takes_no_more_memory_than_it_justifies() {
    let seeds = holdfast_engine::hostile::seeds()
        .into_iter()
        .map(|(parser, _, bytes)| (parser, bytes))
        .collect();
    ParserTrial {
        parsers: holdfast_engine::hostile::PARSERS,
        seeds,
        expanding: Vec::new(),
        bound: |_| BOUND,
        case_count: 8000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}
