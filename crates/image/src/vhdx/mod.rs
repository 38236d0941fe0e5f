//! VHDX, the format of Hyper-V, version 1.
//!
//! Specification: Microsoft, MS-VHDX ("Virtual Hard Disk v2 (VHDX) File Format"). All numbers are little-endian, GUIDs have their first
//! three fields so, checksums are CRC-32C. Second source: QEMU's `block/vhdx.c`.
//!
//! ```text
//! offset   bytes
//! 0        64 KiB   "vhdxfile", and who made it
//! 64 KiB   64 KiB   the first header
//! 128 KiB  64 KiB   the second one: the valid one with the larger number counts
//! 192 KiB  64 KiB   where the regions are
//! 256 KiB  64 KiB   the same
//! 1 MiB    ...      the log, and the regions: table of blocks (BAT), metadata; blocks, all at multiples of 1 MiB
//! ```
//!
//! What a program changes in the table or the metadata goes through the log, and whoever opens an image with a log that is not empty
//! replays it first. We write without it: a block's data is durable before its entry of eight bytes is written, in place.

pub(crate) mod check;
pub(crate) mod create;
pub(crate) mod header;
pub(crate) mod identity;
pub(crate) mod log;
pub(crate) mod metadata;
pub(crate) mod repair;
pub(crate) mod resize;
pub(crate) mod tables;

#[cfg(test)]
mod tests;

use crate::identity::ImageId;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Sectors that one block of bits tells of: 1 MiB of bits.
const CHUNK_SECTORS: u64 = 1 << 23;

fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(bytes[offset..offset + 2].try_into().expect("two bytes"))
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
}

fn guid_at(bytes: &[u8], offset: usize) -> ImageId {
    ImageId::from_guid(bytes[offset..offset + 16].try_into().expect("sixteen bytes"))
}

/// The checksum of `bytes`, whose own stands at offset 4.
fn checksum(bytes: &[u8]) -> u32 {
    let start = crc32c::crc32c(&bytes[..4]);
    let start = crc32c::crc32c_append(start, &[0; 4]);
    crc32c::crc32c_append(start, &bytes[8..])
}

/// Puts the checksum of `bytes` at offset 4.
fn seal(bytes: &mut [u8]) {
    let sum = checksum(bytes);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
}

/// Makes the checksums of both headers and both tables of regions right.
#[cfg(any(test, feature = "hostile"))]
pub(crate) fn seal_all(bytes: &mut [u8]) {
    let kib = 1 << 10;
    for (start, length) in [(64, 4), (128, 4), (192, 64), (256, 64)] {
        if let Some(part) = bytes.get_mut(start * kib..(start + length) * kib) {
            seal(part);
        }
    }
}

/// A number that a GUID is written as.
const fn guid(text: u128) -> ImageId {
    ImageId(text.to_be_bytes())
}
