//! A stream that is packed on all cores, and can be read at any place later.
//!
//! What is written is a valid gzip file (RFC 1952) or zstd file (RFC 8878) of many members or frames, each of one block of the stream, with an
//! index behind them in the ways that these formats have for such: see `docs/format/packed-streams.md`. Whoever unpacks it otherwise does not notice.

pub(crate) mod gzip;
mod index;
mod read;
mod write;
pub(crate) mod zstd_frame;

pub use index::{IndexEntry, PackedIndex};
pub use read::{PackedFile, PackedReport};
pub(crate) use stream_validator::{GzipValidator, ZstdValidator};
pub use write::{PackOptions, Packed, Packer, pack};

pub(crate) mod frame;
mod stream_validator;
#[cfg(test)]
mod tests;
pub(crate) mod unpack;
pub(crate) mod zstd_read;
