//! Hostile text for what people type; and that every parser of the project has its fuzz target, with seeds that it reads.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

use std::collections::BTreeSet;
use std::path::Path;

use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{MemoryBound, ParserTrial};
use holdfast_block::hostile::{Outcome, Parser};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// An error quotes what was typed, and a plan has a few decisions.
const BOUND: MemoryBound = MemoryBound {
    per_byte: 40,
    constant_bytes: 1 << 20,
};

/// What fuzz targets other than those of one parser are called.
const WHOLE_STORIES: [&str; 1] = ["repository"];

fn all_parsers() -> impl Iterator<Item = &'static Parser> {
    holdfast_block::hostile::PARSERS
        .iter()
        .chain(holdfast_image::hostile::PARSERS)
        .chain(holdfast_repo::hostile::PARSERS)
        .chain(holdfast_serve::hostile::PARSERS)
        .chain(holdfast_archive::hostile::PARSERS)
        .chain(holdfast_hardware::hostile::PARSERS)
        .chain(holdfast_host::hostile::PARSERS)
        .chain(holdfast_engine::hostile::PARSERS)
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect()
}

// Everything in one test: memory is counted for the whole program.
#[test]
fn hostile_text_is_an_error_and_every_parser_has_a_fuzz_target_with_seeds() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let parsers: BTreeSet<String> = all_parsers().map(|parser| parser.name.to_owned()).collect();
    let mut targets = parsers.clone();
    targets.extend(WHOLE_STORIES.map(str::to_owned));
    assert_eq!(
        names_in(&fuzz.join("fuzz_targets")),
        targets,
        "fuzz targets and parsers"
    );
    assert_eq!(names_in(&fuzz.join("seeds")), parsers, "folders of seeds and parsers");
    for parser in all_parsers() {
        for entry in std::fs::read_dir(fuzz.join("seeds").join(parser.name)).unwrap() {
            let path = entry.unwrap().path();
            let outcome = (parser.feed)(&std::fs::read(&path).unwrap());
            assert_eq!(outcome, Outcome::Decoded, "{}", path.display());
        }
    }
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
