//! Parsers of option values that several verbs use.

use std::num::NonZeroU64;

use holdfast_image::Format;

use crate::units;

/// The image format with this name.
///
/// # Errors
/// No format has this name; the message lists the known formats.
pub fn parse_format(text: &str) -> Result<Format, String> {
    let format = Format::from_name(text).filter(|format| Format::SUPPORTED.contains(format));
    let names = || Format::SUPPORTED.map(Format::name).join(", ");
    format.ok_or_else(|| format!("the formats are {}", names()))
}

/// A rate in bytes per second, greater than 0.
///
/// # Errors
/// The text is not a number of bytes, or it is 0.
pub fn parse_rate(text: &str) -> Result<NonZeroU64, String> {
    let rate = units::parse_bytes(text).map_err(|error| error.to_string())?;
    NonZeroU64::new(rate).ok_or_else(|| "nothing would ever be read".to_owned())
}
