//! Hostile bytes for every parser of the repository, and hostile objects for all that reads them, without a fuzzer.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]

mod common;
#[path = "../../block/tests/hostile/ordeal.rs"]
mod ordeal;

use std::sync::{Mutex, PoisonError};

use common::ruin::Victim;
use common::specimen::Specimen;
use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_repo::hostile::PARSERS;
use ordeal::{Bound, Ordeal};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Memory is counted for the whole program: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

/// What parsers may take, for the bytes, what they become, and both once more for encoding and decoding them again.
///
/// - A piece of a map is 1 byte in a page and 40 in memory; nothing else grows as much.
/// - A frame, a page and a manifest have limits of a few MiB of their own; an inner page always has 1024 children.
/// - Compressors and ciphers have tables of a few hundred KiB.
fn bound(parser: &str) -> Bound {
    let per_byte = match parser {
        "map" | "map_leaf" => 120,
        _ => 40,
    };
    let constant_bytes = match parser {
        "frame" | "pack" => 10 << 20,
        _ => 2 << 20,
    };
    Bound {
        per_byte,
        constant_bytes,
    }
}

#[test]
fn hostile_bytes_are_an_error_and_take_no_more_memory_than_they_justify() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let seeds = Specimen::new()
        .plaintexts()
        .into_iter()
        .map(|plaintext| (plaintext.parser, plaintext.bytes))
        .collect();
    Ordeal {
        parsers: PARSERS,
        seeds,
        bound,
        case_count: 40_000,
        allocator: &ALLOCATOR,
    }
    .run();
}

/// Edits at random places of random objects; a fuzzer does the same for longer.
#[test]
fn a_ruined_object_costs_no_wrong_byte_and_nothing_that_could_be_restored() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let victim = Victim::new();
    let mut random = SeededRandom::new(test_seed());
    for _ in 0..60 {
        let mut input = vec![0; 6 + 4 * usize::try_from(random.below(3)).unwrap()];
        random.fill(&mut input);
        println!("{input:?}");
        victim.ruin(&input);
    }
}
