//! VMDK, the format of VMware.
//!
//! Specification: VMware, "Virtual Disk Format 5.0"; second source QEMU's `block/vmdk.c`. A text says of which extents the disk is made
//! ([`descriptor`]); it is a file of its own, or in the first extent. An extent is flat, zero, or sparse ([`extent`]): then it
//! has its own header, and a directory of tables of grains. All numbers are little-endian, and count sectors of 512 bytes.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

pub(crate) mod check;
pub(crate) mod create;
pub(crate) mod descriptor;
pub(crate) mod extent;
pub(crate) mod identity;
pub(crate) mod repair;
pub(crate) mod stream;
pub(crate) mod tables;

pub(crate) mod concatenated;
pub(crate) mod disk;
mod overlap;
mod redundant_directory;
#[cfg(test)]
mod tests;

const SECTOR_BYTES: u64 = 512;
