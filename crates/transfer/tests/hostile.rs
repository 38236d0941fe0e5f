//! Feeds hostile frames and journals to the parsers, without a fuzzer.

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_transfer::hostile::{PARSERS, compressed_seed, seeds};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The decoder keeps the bytes that have arrived, and each frame is encoded and decoded again. A synchronization in a
/// journal keeps the digest of each unit in a map.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 16,
    constant_bytes: 1 << 20,
};

/// Compressed data may become 4 MiB, whatever its length. It is compressed and decompressed once more.
const COMPRESSED_BOUND: MemoryBound = MemoryBound {
    per_byte: 4,
    constant_bytes: 20 << 20,
};

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
    let seeds = seeds().into_iter().map(|(parser, _, bytes)| (parser, bytes)).collect();
    ParserTrial {
        parsers: PARSERS,
        seeds,
        expanding: vec![("transfer_compressed", compressed_seed(&vec![0; 4 << 20]))],
        bound: |parser| match parser {
            "transfer_compressed" => COMPRESSED_BOUND,
            _ => BOUND,
        },
        case_count: 20_000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}
