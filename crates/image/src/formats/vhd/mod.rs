//! VHD, the format of Virtual PC, Hyper-V and XenServer, version 1.0.
//!
//! Specification: Microsoft, "Virtual Hard Disk Image Format Specification", October 2006. All numbers are big-endian. Second sources:
//! QEMU's `block/vpc.c`, and blktap of XenServer.
//!
//! A fixed image is the disk followed by a footer of 512 bytes. The others have a copy of the footer at their start, a
//! header, a table of four bytes for each block (the sector where it begins, or 0xFFFFFFFF), the blocks, and the
//! footer. A block is a bitmap of its sectors, highest bit first, followed by the sectors: those without a bit read
//! from the parent, or as zero.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

pub(crate) mod check;
pub(crate) mod create;
pub(crate) mod footer;
pub(crate) mod identity;
pub(crate) mod locator;
pub(crate) mod repair;
pub(crate) mod resize;
pub(crate) mod sparse;
pub(crate) mod stream;
pub(crate) mod tables;

pub(crate) mod header;
#[cfg(test)]
mod tests;

const SECTOR_BYTES: u64 = 512;
/// A block that is not stored.
const FREE: u32 = 0xffff_ffff;

/// The one's complement of the sum of all bytes except the checksum itself, which is at `at`.
fn checksum(bytes: &[u8], at: usize) -> u32 {
    let sum = |bytes: &[u8]| bytes.iter().fold(0_u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    let [before, after] = [bytes.get(..at), bytes.get(at + 4..)].map(Option::unwrap_or_default);
    !sum(before).wrapping_add(sum(after))
}

/// Corrects the checksums of everything that looks like a footer or header.
#[cfg(any(test, feature = "hostile"))]
pub(crate) fn seal_all(bytes: &mut [u8]) {
    let end = bytes.len();
    let places = [(0, 512, 64), (end.saturating_sub(512), 512, 64), (512, 1024, 36)];
    for (start, length, at) in places {
        if let Some(part) = bytes.get_mut(start..start + length) {
            let sum = checksum(part, at);
            crate::model::bytes::put(part, at, &sum.to_be_bytes());
        }
    }
}
