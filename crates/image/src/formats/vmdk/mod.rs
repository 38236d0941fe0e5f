//! VMDK, the format of VMware.
//!
//! Specification: VMware, "Virtual Disk Format 5.0"; second source: QEMU's `block/vmdk.c`. A text lists the extents of
//! the disk ([`descriptor`]); it is a separate file, or embedded in the first extent. An extent is flat, zero, or
//! sparse ([`extent`]): a sparse extent has a header, and a directory of grain tables. All numbers are little-endian,
//! and offsets count sectors of 512 bytes.

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
