//! The file that an image is stored in. It can grow.
//!
//! A [`BlockDevice`](holdfast_block::BlockDevice) has a fixed size, an image file does not. [`ImageFile`] separates
//! the formats from the operating system: one implementation uses host files, one keeps everything in memory and
//! records every write for the crash tests.

#[cfg(test)]
pub(crate) mod flush_tests;
mod host;
#[cfg(any(test, feature = "hostile"))]
pub(crate) mod memory;
mod staged;
mod unwritten;

use std::ops::Range;

use holdfast_block::{ExtentList, Result};

pub(crate) use host::{Access, HostFile, directory_of};
pub(crate) use staged::Staged;
pub(crate) use unwritten::UnwrittenFile;

/// A file that stores an image.
///
/// Implementations must
/// - return zeroes for bytes past the end of the file, never a short read;
/// - grow the file on a write past its end, with zeroes in the gap;
/// - make everything written before a [`sync`](Self::sync) began durable before it returns.
pub(crate) trait ImageFile: Send + Sync {
    fn length_bytes(&self) -> Result<u64>;

    /// Fills `buffer` with the bytes at `offset`; zero past the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()>;

    /// Writes all of `data` at `offset`.
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()>;

    /// Makes the file exactly `length_bytes` long; new bytes are zero.
    fn set_length(&self, length_bytes: u64) -> Result<()>;

    /// Makes `range` read as zero and frees its space if the file system supports that; never changes the
    /// length.
    fn punch(&self, range: Range<u64>) -> Result<()>;

    /// Makes all completed writes durable.
    fn sync(&self) -> Result<()>;

    /// Data and zero ranges of `range`, which must lie inside the file.
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList>;

    /// Bytes allocated on the medium, if known.
    fn allocated_bytes(&self) -> Result<Option<u64>>;
}
