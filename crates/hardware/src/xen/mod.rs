//! XenServer and XCP-ng: the records of a machine in the `ova.xml` of an XVA.
//!
//! Source: xen-api, the note on the format in `ocaml/xapi/xva.ml` and the data model of the XenAPI. The text is one
//! value of XML-RPC: `version`, and `objects`, each with its `class`, the `id` by which others refer to it (`Ref:7`),
//! and its record as `snapshot`.

mod read;
mod records;
mod suspended;
pub mod value;
mod write;

pub use read::{XenDisk, XenRecords, read};
pub use suspended::{SuspendedDisk, SuspendedMachine, suspended_machine};
pub use write::{XenExport, write};
pub use write_options::XenOptions;

mod raw_records;
#[cfg(test)]
mod tests;
pub(crate) mod write_options;
