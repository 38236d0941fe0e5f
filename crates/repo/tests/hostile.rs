//! Hostile bytes for every parser of the repository, and damaged objects for all its operations, without a fuzzer.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]

mod common;

use std::sync::{Mutex, PoisonError};

use common::ruin::Victim;
use common::specimen::Specimen;
use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_repo::hostile::PARSERS;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Memory is counted for the whole process: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Limits of memory for parsers: for the bytes, their parsed form, and both once more for encoding and decoding again.
///
/// - A piece of a map is 1 byte in a page and 40 in memory; nothing else grows as much.
/// - A frame, a page and a manifest have limits of a few MiB of their own; an inner page always has 1024 children.
/// - Compressors have tables of 4 MiB and windows of a frame, which has 4 MiB, and is in memory once compressed and up
///   to twice decompressed.
fn bound(parser: &str) -> MemoryBound {
    let per_byte = match parser {
        "map" | "map_leaf" => 120,
        _ => 40,
    };
    let constant_bytes = match parser {
        "frame" | "pack" => 24 << 20,
        _ => 2 << 20,
    };
    MemoryBound {
        per_byte,
        constant_bytes,
    }
}

/// Inputs of some hundred KiB, filled with as many elements of minimal size as the format allows.
fn expanding() -> Vec<(&'static str, Vec<u8>)> {
    const COUNT: u32 = 40_000;
    let varint = |mut value: u32| {
        let mut bytes = Vec::new();
        while value >= 0x80 {
            bytes.push(value.to_le_bytes()[0] | 0x80);
            value >>= 7;
        }
        bytes.push(value.to_le_bytes()[0]);
        bytes
    };
    let id = |number: u32| [number.to_le_bytes(); 4].concat();
    let each = |item: &dyn Fn(u32) -> Vec<u8>| (0..COUNT).flat_map(item).collect::<Vec<u8>>();
    let count = varint(COUNT);
    let entry = |number: u32| [id(number), 0u32.to_le_bytes().to_vec(), vec![0; 8]].concat();
    let segment = [
        u64::from(COUNT).to_le_bytes().to_vec(),
        1u32.to_le_bytes().to_vec(),
        COUNT.div_ceil(128).to_le_bytes().to_vec(),
        each(&entry),
        [id(1), vec![0; 4]].concat(),
        vec![0; 8 * COUNT.div_ceil(128) as usize],
    ];
    let names = each(&|number| format!("\"{number:04x}\",").into_bytes());
    let manifest = [
        br#"{"format":1,"id":"01010101010101010101010101010101","machine":"m","time_ms":0,"disks":[],"#.to_vec(),
        br#""copy":"02020202020202020202020202020202","tags":["#.to_vec(),
        names,
        br#"""]}"#.to_vec(),
    ];
    let moved = |number: u32| [varint(number), vec![0, 1, 0, 0, 0]].concat();
    let chunk = |number: u32| [varint(number), vec![0, 1, 16], id(number)].concat();
    let read = |number: u32| [id(number), vec![1]].concat();
    let tiny_frame = |_| vec![16, 0, 0, 2, 0];
    let one_byte_piece = |_| vec![2];
    vec![
        ("condemned", [vec![1], each(&id)].concat()),
        ("damage_record", [vec![1, 0, 0], count.clone(), each(&chunk)].concat()),
        ("index_segment", segment.concat()),
        ("manifest", manifest.concat()),
        (
            "map_leaf",
            [
                vec![1],
                COUNT.to_le_bytes().to_vec(),
                vec![1, 0, 0],
                count.clone(),
                each(&one_byte_piece),
            ]
            .concat(),
        ),
        (
            "pack_directory",
            [vec![1], id(1), count.clone(), each(&tiny_frame), vec![0]].concat(),
        ),
        ("relocation", [vec![1, 1], id(1), count.clone(), each(&moved)].concat()),
        ("scrub_record", [vec![1], count, each(&read)].concat()),
    ]
}

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let seeds = Specimen::new()
        .plaintexts()
        .into_iter()
        .map(|plaintext| (plaintext.parser, plaintext.bytes))
        .collect();
    ParserTrial {
        parsers: PARSERS,
        seeds,
        expanding: expanding(),
        bound,
        case_count: 40_000,
        seed: test_seed(),
        allocator: &ALLOCATOR,
    }
    .run();
}

/// Edits at random places of random objects; a fuzzer does the same for longer.
#[test]
fn a_damaged_object_gives_no_wrong_byte_and_loses_no_other_data() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let victim = Victim::new();
    let mut random = SeededRandom::new(test_seed());
    for _ in 0..30 {
        let mut input = vec![0; 6 + 4 * usize::try_from(random.below(3)).unwrap()];
        random.fill(&mut input);
        println!("{input:?}");
        victim.ruin(&input);
    }
}
