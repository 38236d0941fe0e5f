//! Hostile input for every image parser, without a fuzzer.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_image::hostile::{PARSERS, seeds};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Memory in proportion to the file: its tables once as stored and once as numbers, in each of the layers that are
/// open at a time. Constant memory: a cluster of at most 2 MiB for each table, because the file may end within it, and
/// the caches for tables (8 MiB) and decompressed clusters (4 MiB) of a layer.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 40,
    constant_bytes: 24 << 20,
};

/// An image of an empty disk with thousands of snapshots, each with the shortest possible row.
fn expanding() -> Vec<(&'static str, Vec<u8>)> {
    const COUNT: u32 = 8000;
    let header: [&[u8]; 11] = [
        b"QFI\xfb",
        &2u32.to_be_bytes(),
        &[0; 8 + 4],
        &9u32.to_be_bytes(),
        &[0; 8 + 4 + 4 + 8],
        &512u64.to_be_bytes(),
        &1u32.to_be_bytes(),
        &COUNT.to_be_bytes(),
        &1024u64.to_be_bytes(),
        &[0; 512 - 72],
        &[0; 512],
    ];
    let mut bytes = header.concat();
    bytes.resize(1024 + 40 * COUNT as usize, 0);
    // The refcount block follows the snapshots.
    let block = bytes.len().next_multiple_of(512);
    bytes.resize(block + 512, 0);
    bytes[512..520].copy_from_slice(&(block as u64).to_be_bytes());
    let mut all = vec![("qcow2", bytes.clone()), ("image_format", bytes)];
    all.extend(expanding_descriptors().map(|text| ("disk_descriptor", text)));
    all
}

/// Descriptors with the maximum number of elements, and with the maximum nesting.
fn expanding_descriptors() -> impl Iterator<Item = Vec<u8>> {
    let all = seeds();
    let (_, _, sound) = all.iter().find(|(parser, ..)| *parser == "disk_descriptor").unwrap();
    let sound = String::from_utf8(sound.clone()).unwrap();
    let elements = "<a/>".repeat(65_000);
    let spaces: Vec<_> = (0..1000)
        .map(|number| format!("<a xmlns:b{number}='c{number}'>"))
        .collect();
    let nested = spaces.concat() + &"</a>".repeat(spaces.len());
    let with_content = move |inside: String| sound.replace("<Padding>", &(inside + "<Padding>")).into_bytes();
    [elements, nested].into_iter().map(with_content)
}

#[test]
fn hostile_images_fail_with_bounded_memory() {
    let seeds = seeds().into_iter().map(|(parser, _, bytes)| (parser, bytes)).collect();
    ParserTrial {
        parsers: PARSERS,
        seeds,
        expanding: expanding(),
        bound: |_| BOUND,
        case_count: 10_000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}
