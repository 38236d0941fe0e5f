//! VHD as a stream, as xapi's `vhd-tool` writes and reads it.
//!
//! Source: the VHD specification of Microsoft (2006), and `ocaml/libs/vhd/vhd_format/f.ml` for what the stream consists of:
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
//! Blocks are whole: those of a differencing disk are filled up from the chain, and their bitmaps are full.

mod layout;
mod reader;
mod writer;

pub(crate) use reader::read;
pub(crate) use writer::{Parent, write};

/// Bytes of a sector.
const SECTOR_BYTES: u64 = 512;
/// Bytes of a block.
const BLOCK_BYTES: u64 = 2 << 20;
/// An entry of the table for a block that is not there.
const UNUSED: u32 = u32::MAX;
