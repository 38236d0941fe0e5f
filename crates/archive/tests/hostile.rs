//! What a hostile archive can hold, without a fuzzer.

#[path = "../../block/tests/hostile/ordeal.rs"]
mod ordeal;

use holdfast_archive::hostile::{PARSERS, seeds};
use ordeal::{Bound, Ordeal};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Records are kept as text and as values; a packed block may say that it unpacks to 64 MiB.
const BOUND: Bound = Bound {
    per_byte: 1000,
    constant_bytes: 200 << 20,
};

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
    let seeds = seeds().into_iter().map(|(parser, _, bytes)| (parser, bytes)).collect();
    Ordeal {
        parsers: PARSERS,
        seeds,
        swollen: Vec::new(),
        bound: |_| BOUND,
        case_count: 4_000,
        allocator: &ALLOCATOR,
    }
    .run();
}
