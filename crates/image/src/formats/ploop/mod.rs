//! The expanding image of Parallels and ploop, versions 1 and 2: one delta. A [`descriptor`] lists the deltas of a
//! disk.
//!
//! Specification: QEMU's `docs/interop/parallels.rst`, and OpenVZ's `include/ploop1_image.h`. All numbers are
//! little-endian; a sector has 512 bytes.
//!
//! ```text
//! offset  bytes
//! 0       16   "WithoutFreeSpace" (version 1) or "WithouFreSpacExt" (2)
//! 16      4    2
//! 20      4    heads
//! 24      4    cylinders
//! 28      4    sectors of a cluster
//! 32      4    entries of the table
//! 36      8    sectors of the disk; in version 1 only the low half counts
//! 44      4    0x746F6E59 open, 0x312E3276 closed, 0 closed by a program without support for extensions
//! 48      4    sector where the clusters begin; in version 1 it may be 0: right after the table
//! 52      4    flags: 1 empty
//! 56      8    sector of the extension
//! 64      4    each entry of the table: 0 not stored; where the cluster is, by sectors (1) or clusters (2)
//! ```

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

pub(crate) mod check;
pub(crate) mod create;
pub(crate) mod descriptor;
pub(crate) mod header;
pub(crate) mod repair;
pub(crate) mod resize;
pub(crate) mod tables;

#[cfg(test)]
mod tests;

const SECTOR_BYTES: u64 = 512;
