//! Hostile bytes for every parser of images, without a fuzzer.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

#[path = "../../block/tests/hostile/ordeal.rs"]
mod ordeal;

use holdfast_image::hostile::{PARSERS, seeds};
use ordeal::{Bound, Ordeal};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What the file can justify: its tables once as they are stored and once as numbers, in each of the layers that are open at a
/// time. What it cannot: a cluster of at most 2 MiB for each table that begins in it, as the file may end within one, and
/// the caches for tables (8 MiB) and decompressed clusters (4 MiB) of a layer.
const BOUND: Bound = Bound {
    per_byte: 40,
    constant_bytes: 32 << 20,
};

#[test]
fn hostile_images_are_an_error_and_take_no_more_memory_than_they_justify() {
    let seeds = seeds().into_iter().map(|(parser, _, bytes)| (parser, bytes)).collect();
    Ordeal {
        parsers: PARSERS,
        seeds,
        bound: |_| BOUND,
        case_count: 6000,
        allocator: &ALLOCATOR,
    }
    .run();
}
