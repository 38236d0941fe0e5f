//! Streamed extents (streamOptimized): compressed grains that can be written and read sequentially.
//!
//! ```text
//! header      its directory is "at the end", and its overhead says where the grains begin
//! descriptor
//! grains      each a marker, a stream of zlib, and zeroes up to the end of the sector
//! table       after the grains in it: a marker, one sector, and the table
//! ...
//! directory   a marker, and the directory
//! footer      a marker, and a header that says where the directory is
//! end         a sector of zeroes
//! ```
//!
//! The marker of a grain has its first sector on the disk (8 bytes) and the length of the zlib stream that follows
//! (4). If that is 0, it marks another structure and takes a sector: number of sectors that follow (8), 0 (4), type
//! (4).
//!
//! QEMU and open-vmdk write a variant: directory and tables are before the first grain, as in other sparse extents,
//! and the stream ends with the grains; QEMU writes no end-of-stream marker.

mod grains;
mod preamble;
mod reader;
#[cfg(any(test, feature = "hostile"))]
pub(crate) mod specimen;
#[cfg(test)]
mod tests;
mod writer;

pub use reader::{StreamGrain, StreamReader};
pub use writer::{StreamOptions, StreamReport, write_stream_optimized};

use holdfast_block::to_usize;
use libdeflater::Decompressor;

use super::SECTOR_BYTES;
use crate::model::bytes::put;

pub(super) const GRAIN_MARKER_BYTES: usize = 12;

const END_OF_STREAM: u32 = 0;
const TABLE: u32 = 1;
const DIRECTORY: u32 = 2;
const FOOTER: u32 = 3;

type Sector = [u8; to_usize(SECTOR_BYTES)];

/// The first sector and the stored length, which is 0 if it does not mark a grain.
pub(super) fn grain_marker(bytes: &[u8; GRAIN_MARKER_BYTES]) -> (u64, u64) {
    let [sector @ .., a, b, c, d] = *bytes;
    (u64::from_le_bytes(sector), u64::from(u32::from_le_bytes([a, b, c, d])))
}

/// Maximum length of a compressed grain.
pub(super) fn stored_bytes_max(grain_bytes: u64) -> u64 {
    2 * grain_bytes
}

/// Fails if a compressed grain cannot have that length. Incompressible data becomes slightly longer.
pub(super) fn check_stored(stored: u64, grain_bytes: u64) -> Result<(), String> {
    if stored == 0 || stored > stored_bytes_max(grain_bytes) {
        return Err(format!("it has {stored} bytes"));
    }
    Ok(())
}

/// Decompresses into `grain`; the stream must have at least `least` bytes of it, or all: the last grain of a disk may
/// be shorter. The rest is zero.
pub(super) fn inflate(
    decompressor: &mut Decompressor,
    input: &[u8],
    grain: &mut [u8],
    least: u64,
) -> Result<(), String> {
    let count = decompressor
        .zlib_decompress(input, grain)
        .map_err(|error| error.to_string())?;
    let expected = least.min(grain.len() as u64);
    if (count as u64) < expected {
        return Err(format!("it decompresses to {count} bytes, not {expected}"));
    }
    grain.get_mut(count..).unwrap_or_default().fill(0);
    Ok(())
}

/// A marker of a structure other than a grain.
fn marker(kind: u32, sectors: u64) -> Sector {
    let mut bytes = [0; to_usize(SECTOR_BYTES)];
    put(&mut bytes, 0, &sectors.to_le_bytes());
    put(&mut bytes, 12, &kind.to_le_bytes());
    bytes
}
