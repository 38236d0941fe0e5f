//! Writes the seeds of the fuzz targets, as today's writers write them: `cargo run --example write_seeds -- fuzz/seeds`.

#![allow(
    clippy::unwrap_used,
    reason = "a tool for those who work on the project, not for users"
)]

#[path = "../../repo/tests/common/mod.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use common::specimen::Specimen;

/// Seeds of a parser that a repository has many of, and the longest.
const SEED_COUNT_MAX: usize = 6;

fn main() {
    let folder = PathBuf::from(std::env::args_os().nth(1).expect("the folder to write to"));
    let mut seeds: Vec<(&str, String, Vec<u8>)> = Vec::new();
    let named = holdfast_block::hostile::seeds()
        .into_iter()
        .chain(holdfast_image::hostile::seeds())
        .chain(holdfast_serve::hostile::seeds())
        .chain(holdfast_archive::hostile::seeds())
        .chain(holdfast_hardware::hostile::seeds())
        .chain(holdfast_host::hostile::seeds())
        .chain(holdfast_engine::hostile::seeds())
        .chain(holdfast_replicate::hostile::seeds());
    seeds.extend(named.map(|(parser, name, bytes)| (parser, name.to_owned(), bytes)));
    let mut by_parser: BTreeMap<&str, BTreeSet<(usize, Vec<u8>)>> = BTreeMap::new();
    for plaintext in Specimen::new().plaintexts() {
        let found = by_parser.entry(plaintext.parser).or_default();
        found.insert((plaintext.bytes.len(), plaintext.bytes));
    }
    for (parser, found) in by_parser {
        // The shortest: what a fuzzer makes of them is short too.
        for (number, (_, bytes)) in found.into_iter().take(SEED_COUNT_MAX).enumerate() {
            seeds.push((parser, format!("{number}"), bytes));
        }
    }
    for (parser, name, bytes) in seeds {
        std::fs::create_dir_all(folder.join(parser)).unwrap();
        #[expect(clippy::disallowed_methods, reason = "what a crash loses is written again")]
        std::fs::write(folder.join(parser).join(name), bytes).unwrap();
    }
}
