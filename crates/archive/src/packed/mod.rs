//! Streams that are compressed on all cores and allow random access.
//!
//! The output is a valid gzip file (RFC 1952) or zstd file (RFC 8878) of many members or frames, one for each block of the stream, followed by an
//! index that other programs ignore: see `docs/format/packed-streams.md`.

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
