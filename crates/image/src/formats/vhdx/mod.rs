//! VHDX, the format of Hyper-V, version 1.
//!
//! Specification: Microsoft, MS-VHDX ("Virtual Hard Disk v2 (VHDX) File Format"). All numbers are little-endian, GUIDs have their first
//! three fields so, checksums are CRC-32C. Second source: QEMU's `block/vhdx.c`.
//!
//! ```text
//! offset   bytes
//! 0        64 KiB   "vhdxfile", and the program that created it
//! 64 KiB   64 KiB   the first header
//! 128 KiB  64 KiB   the second one: the valid one with the larger number counts
//! 192 KiB  64 KiB   region table
//! 256 KiB  64 KiB   its copy
//! 1 MiB    ...      the log, and the regions: table of blocks (BAT), metadata; blocks, all at multiples of 1 MiB
//! ```
//!
//! Other programs change the table and the metadata through the log, and a program that opens an image with a log that
//! is not empty must replay it first. Holdfast writes without the log: a block's data is durable before its entry of
//! eight bytes is written in place.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

pub(crate) mod check;
pub(crate) mod create;
pub(crate) mod header;
pub(crate) mod identity;
pub(crate) mod log;
pub(crate) mod metadata;
pub(crate) mod repair;
pub(crate) mod resize;
pub(crate) mod tables;

pub(crate) mod opened;
#[cfg(test)]
mod tests;

use holdfast_block::Record;

use crate::model::bytes::put;
use crate::model::identity::ImageId;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Sectors that one sector bitmap block covers: it has 1 MiB of bits.
const CHUNK_SECTORS: u64 = 1 << 23;

/// The checksum of `bytes`, in which its own field is at offset 4.
fn checksum(bytes: &[u8]) -> u32 {
    let [before, after] = [bytes.get(..4), bytes.get(8..)].map(Option::unwrap_or_default);
    let start = crc32c::crc32c(before);
    let start = crc32c::crc32c_append(start, &[0; 4]);
    crc32c::crc32c_append(start, after)
}

/// Whether `bytes` begin with `signature` and have a valid checksum.
fn is_sealed(bytes: &[u8], signature: [u8; 4]) -> bool {
    Record::<8>::first_of(bytes)
        .is_some_and(|start| *start.field::<0, 4>() == signature && start.le_u32::<4>() == checksum(bytes))
}

/// Sets the checksum of `bytes`, at offset 4.
fn seal(bytes: &mut [u8]) {
    let sum = checksum(bytes);
    put(bytes, 4, &sum.to_le_bytes());
}

/// Sets the checksums of both headers and both region tables.
#[cfg(any(test, feature = "hostile"))]
pub(crate) fn seal_all(bytes: &mut [u8]) {
    let kib = 1 << 10;
    for (start, length) in [(64, 4), (128, 4), (192, 64), (256, 64)] {
        if let Some(part) = bytes.get_mut(start * kib..(start + length) * kib) {
            seal(part);
        }
    }
}

/// A GUID from its text as one number.
const fn guid(text: u128) -> ImageId {
    ImageId(text.to_be_bytes())
}
