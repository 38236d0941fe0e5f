//! Tests parsers without a fuzzer: with valid bytes, and with the same bytes damaged thousands of times. Counts all
//! memory.

use std::collections::BTreeMap;

use peak_alloc::PeakAlloc;

use super::{Outcome, Parser, damage};
use crate::{SeededRandom, to_usize};

/// Limit of the memory that a parser may allocate for hostile bytes, including the bytes themselves.
#[derive(Debug, Clone, Copy)]
pub struct MemoryBound {
    /// Bytes of memory per byte of input.
    pub per_byte: usize,
    /// Additional bytes of memory.
    pub constant_bytes: usize,
}

/// Parsers, their inputs, and their memory limits.
#[derive(Debug)]
pub struct ParserTrial {
    /// The parsers; each of them needs a seed.
    pub parsers: &'static [Parser],
    /// Valid bytes, with the name of their parser.
    pub seeds: Vec<(&'static str, Vec<u8>)>,
    /// Valid bytes that expand in memory as much as the format allows, with the name of their parser.
    pub expanding: Vec<(&'static str, Vec<u8>)>,
    /// The memory limit of a parser, by its name.
    pub bound: fn(&str) -> MemoryBound,
    /// Number of damaged inputs for all parsers together.
    pub case_count: u64,
    /// The seed, which replays a failure.
    pub seed: u64,
    /// The program's global allocator.
    pub allocator: &'static PeakAlloc,
}

impl ParserTrial {
    /// Tests all inputs. No other thread may allocate memory at the same time: it would be counted.
    pub fn run(&self) {
        let mut random = SeededRandom::new(self.seed);
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
            for (_, bytes) in self.expanding.iter().filter(|(name, _)| *name == parser.name) {
                assert_eq!(
                    self.feed(parser, bytes),
                    Outcome::Decoded,
                    "{}: expanding bytes",
                    parser.name
                );
            }
            let mut refused = 0;
            self.feed(parser, &[]);
            for _ in 0..each {
                let mut bytes = seeds[to_usize(random.below(seeds.len() as u64))].to_vec();
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
        let MemoryBound {
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
