//! XVA: a machine as a stream, as written and read by xapi.
//!
//! Source: `ocaml/xapi/stream_vdi.ml`, `export.ml`, `import.ml` and `importexport.ml`. A tar archive with `ova.xml`,
//! followed by each disk in blocks of 1 MiB: members `Ref:N/00000000` and so on, each followed by its checksum. Block
//! numbers also count blocks that are left out. An empty block keeps the connection open and contains no data.

mod checksum;
pub(crate) mod disks;
pub(crate) mod ova;
pub(crate) mod tar;

/// Bytes of a block.
pub(crate) const BLOCK_BYTES: u64 = 1 << 20;
