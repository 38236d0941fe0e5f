//! VDI, the format of VirtualBox, version 1.1.
//!
//! There is no specification; `VDICore.h` of VirtualBox defines the fields, and QEMU's `block/vdi.c` is the second
//! source. All numbers are little-endian, also the first three fields of UUIDs.
//!
//! ```text
//! offset  bytes
//! 0       64    a text, ended by a line feed
//! 64      4     0xBEDA107F
//! 68      4     version: 0x00010001
//! 72      4     bytes of the header from here on: 400 (QEMU: 384)
//! 76      4     1 dynamic, 2 fixed, 3 undo, 4 differencing
//! 80      4     flags
//! 84      256   comment
//! 340     4     offset of the block map
//! 344     4     offset of the blocks
//! 348     16    geometry: cylinders, heads, sectors, bytes of a sector
//! 364     4     unused
//! 368     8     size of the disk
//! 376     4     bytes of a block
//! 380     4     bytes before the data of each block
//! 384     4     blocks of the disk
//! 388     4     blocks that are stored
//! 392     16    UUID of the image
//! 408     16    UUID of its last modification
//! 424     16    UUID of the parent
//! 440     16    UUID of the parent's last modification
//! 456     16    geometry for guests
//! ```
//!
//! The block map has four bytes for each block: its number among the stored blocks, 0xFFFFFFFF if it is not stored (it
//! reads from the parent, or as zero), or 0xFFFFFFFE if it is zero.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

pub(crate) mod check;
pub(crate) mod create;
pub(crate) mod header;
pub(crate) mod identity;
pub(crate) mod repair;
pub(crate) mod resize;
pub(crate) mod tables;

#[cfg(test)]
mod tests;

/// Not stored: reads from the parent, or as zero.
const FREE: u32 = 0xffff_ffff;
const ZERO: u32 = 0xffff_fffe;
