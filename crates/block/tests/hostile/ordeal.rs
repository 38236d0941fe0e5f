//! What parsers are put through where there is no fuzzer: valid bytes, then the same damaged thousands of times, with all memory
//! counted. The tests of other crates take this file in as well.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::BTreeMap;

use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_block::hostile::{Outcome, Parser, damage};
use peak_alloc::PeakAlloc;

/// The most memory that a parser may take for hostile bytes, their own included: a multiple of their number, and a constant.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    pub(crate) per_byte: usize,
    pub(crate) constant_bytes: usize,
}

/// Parsers, what they are fed, and what they must not exceed.
pub(crate) struct Ordeal {
    pub(crate) parsers: &'static [Parser],
    /// Valid bytes by the name of their parser; every parser has some.
    pub(crate) seeds: Vec<(&'static str, Vec<u8>)>,
    /// Long bytes that are small in the file and large in memory, as far as the format goes: every one of them is decoded.
    pub(crate) swollen: Vec<(&'static str, Vec<u8>)>,
    /// By the name of the parser.
    pub(crate) bound: fn(&str) -> Bound,
    /// Damaged inputs for all parsers together.
    pub(crate) case_count: u64,
    pub(crate) allocator: &'static PeakAlloc,
}

impl Ordeal {
    /// Feeds everything. Nothing else may run in the program meanwhile: its memory would be counted.
    pub(crate) fn run(&self) {
        let mut random = SeededRandom::new(test_seed());
        let mut by_parser: BTreeMap<&str, Vec<&[u8]>> = BTreeMap::new();
        for (name, bytes) in &self.seeds {
            assert!(
                self.parsers.iter().any(|parser| parser.name == *name),
                "no parser {name}"
            );
            by_parser.entry(name).or_default().push(bytes);
        }
        let each = self.case_count / self.parsers.len() as u64;
        for parser in self.parsers {
            let seeds = by_parser.get(parser.name).unwrap_or_else(|| {
                unreachable!("{} has no valid bytes to begin with", parser.name);
            });
            for (number, bytes) in seeds.iter().enumerate() {
                let outcome = self.feed(parser, bytes);
                assert_eq!(outcome, Outcome::Decoded, "{}: valid bytes {number}", parser.name);
            }
            for (_, bytes) in self.swollen.iter().filter(|(name, _)| *name == parser.name) {
                assert_eq!(
                    self.feed(parser, bytes),
                    Outcome::Decoded,
                    "{}: swollen bytes",
                    parser.name
                );
            }
            let mut refused = 0;
            self.feed(parser, &[]);
            for _ in 0..each {
                let mut bytes = seeds[usize::try_from(random.below(seeds.len() as u64)).unwrap()].to_vec();
                damage(&mut bytes, &mut random);
                refused += u64::from(self.feed(parser, &bytes) == Outcome::Refused);
            }
            assert!(refused > 0, "{} takes everything: is it checked at all?", parser.name);
        }
    }

    fn feed(&self, parser: &Parser, bytes: &[u8]) -> Outcome {
        self.allocator.reset_peak_usage();
        let before = self.allocator.current_usage();
        let outcome = (parser.feed)(bytes);
        let taken = self.allocator.peak_usage().saturating_sub(before);
        let Bound {
            per_byte,
            constant_bytes,
        } = (self.bound)(parser.name);
        let most = bytes.len() * per_byte + constant_bytes;
        assert!(
            taken <= most,
            "{} took {taken} bytes of memory for {} hostile bytes, more than {most}",
            parser.name,
            bytes.len()
        );
        outcome
    }
}
