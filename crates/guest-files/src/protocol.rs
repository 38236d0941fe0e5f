//! A file system that is read by another process.
//!
//! The child has the reader, and the parent has the device: [`serve`] runs in the child, and [`RemoteFileSystem`] is the
//! file system as the parent sees it. The child can do nothing but ask for bytes of the volume and answer. The parent
//! believes none of the answers: it checks their lengths and all names.
//!
//! A message is its length (4 bytes, little-endian), its kind (1 byte) and its content. The parent sends one request;
//! the child answers with any number of reads, each of which the parent answers, and parts of a directory, and then
//! with one result.

#![deny(clippy::indexing_slicing, reason = "the other process reads what a guest wrote")]

mod appliance;
mod child;
mod message;
mod parent;

pub use appliance::{Appliance, ApplianceVolume, ApplianceVolumes, ScanReport, ScanRequest, serve_appliance};
pub use child::serve;
pub use parent::{ReaderProcess, RemoteFileSystem};
