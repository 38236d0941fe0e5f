//! XVA: a machine as a stream, as xapi writes and reads it.
//!
//! Source: `ocaml/xapi/stream_vdi.ml`, `export.ml`, `import.ml` and `importexport.ml`. A tar with `ova.xml`, then each disk in
//! blocks of 1 MiB, members `Ref:N/00000000` and so on, each followed by its checksum. Numbers count blocks, those that were left
//! out included; an empty block keeps the connection open and has no bytes of the disk.

mod checksum;
pub(crate) mod disks;
pub(crate) mod ova;
pub(crate) mod tar;

/// Bytes of a block.
pub(crate) const BLOCK_BYTES: u64 = 1 << 20;
