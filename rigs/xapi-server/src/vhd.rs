//! VHD as a stream, as written and read by xapi's `vhd-tool`.
//!
//! Source: the VHD specification of Microsoft (2006), and `ocaml/libs/vhd/vhd_format/f.ml` for the structure of the
//! stream:
//!
//! ```text
//!      0  footer (copy)
//!    512  dynamic disk header
//!   1536  one empty sector, which the parent locator of a differencing disk points to
//!   2048  block allocation table, filled up to a sector
//!    ...  blocks of 2 MiB, each after a sector of bitmap
//!    ...  footer
//! ```
//!
//! Blocks are complete: blocks of a differencing disk are completed from the chain, and all bits in their bitmaps are
//! set.

mod layout;
mod reader;
mod writer;

pub(crate) use reader::read;
pub(crate) use writer::{Parent, write};

/// Bytes of a sector.
const SECTOR_BYTES: u64 = 512;
/// Bytes of a block.
const BLOCK_BYTES: u64 = 2 << 20;
/// An entry of the table for a missing block.
const UNUSED: u32 = u32::MAX;
