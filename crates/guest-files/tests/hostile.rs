//! Feeds hostile bytes to every parser of this crate, without a fuzzer.

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_guest_files::hostile::{PARSERS, seeds};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The device is a copy of the bytes. A directory of FAT and a bitmap of NTFS are read at once; all other structures
/// have at most a few MiB, whatever their headers say.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 60,
    constant_bytes: 48 << 20,
};

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
    ParserTrial {
        parsers: PARSERS,
        seeds: seeds(),
        expanding: Vec::new(),
        bound: |_| BOUND,
        case_count: 5000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}
