//! XVA: machines as XenServer and XCP-ng export them.
//!
//! Source: xen-api, `ocaml/xapi/stream_vdi.ml` and `ocaml/xapi/xva.ml`. A tape archive whose first member is `ova.xml`; then the disks, one after the
//! other in the order of their ids as text, each in members of 1 MiB, and behind each member one with its checksum.
//!
//! - The number in a member's name is a counter: blocks between two numbers are zero and were left out. The first block and the last are
//!   always there.
//! - A member without content has a number, and no place on the disk: it was sent to keep a connection open.
//! - Blocks are as long as the first of their disk, which is read, and not assumed.
//! - Checksums are XXH64 (`.xxhash`, upper-case digits) or SHA-1 (`.checksum`).

mod read;
mod write;

pub use read::XvaReader;
pub use write::{XvaDisk, XvaWriteOptions, XvaWritten, write_xva};

#[cfg(test)]
mod tests;
