//! What is read of configurations, laid open: see [`holdfast_block::hostile`].

use holdfast_block::hostile::Parser;

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[];

/// Valid bytes for every parser of this crate: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    Vec::new()
}
