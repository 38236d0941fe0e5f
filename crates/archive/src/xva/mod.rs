//! XVA: the export format of XenServer and XCP-ng.
//!
//! Source: xen-api, `ocaml/xapi/stream_vdi.ml` and `ocaml/xapi/xva.ml`. A tape archive whose first member is `ova.xml`;
//! then the disks, one after the other in the order of their ids as text, each in members of 1 MiB, and after each
//! member one with its checksum.
//!
//! - The number in a member's name is a counter: skipped numbers are zero blocks that were left out. The first and the last block are always
//!   present.
//! - An empty member has a number but no position on the disk: it was sent to keep a connection open.
//! - All blocks of a disk are as long as its first one; the length is not assumed.
//! - Checksums are XXH64 (`.xxhash`, upper-case digits) or SHA-1 (`.checksum`).

mod read;
mod write;

pub use read::XvaReader;
pub use write::{XvaDisk, XvaWriteOptions, XvaWritten, write_xva};

#[cfg(test)]
mod tests;
