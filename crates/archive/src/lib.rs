//! Machine archives as streams: one file or pipe with a machine's configuration and all of its disks.
//!
//! An archive is read once, from start to end, and may come from a pipe, compressed or not. A reader first lists the documents and disks, then
//! returns the data of the disks piece by piece. Archives are written the same way, from devices. `holdfast-hardware` translates the
//! configuration; this crate reads only its list of disks.
//!
//! Trees of files (root folders of containers, layers of their images) are in tar archives of another form: [`TreeTarReader`],
//! [`TreeTarWriter`].
//!
//! Archives are untrusted: every name, number and size in them is checked before anything is allocated.

mod checksum;
mod error;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod open;
mod ova;
mod packed;
mod reader;
mod sparse;
mod spool;
mod tar;
mod tree;
mod vma;
mod xva;

pub use error::{Error, Result};
pub use open::{ArchiveKind, Counter, OpenArchive, OpenOptions, open};
pub use ova::disk::StreamImages;
pub use ova::{OvaDisk, OvaOutput, OvaReader, OvaWriteOptions, OvaWritten, write_ova};
pub use packed::frame::Packing;
pub use packed::unpack::Unpacked;
pub use packed::{IndexEntry, PackOptions, Packed, PackedFile, PackedIndex, PackedReport, Packer, pack};
pub use reader::{ArchiveDisk, ArchiveReader, DiskContent, Document, DocumentKind, Piece};
pub use spool::Ordered;
pub use tree::{
    DeviceNumber, EndMarker, ExtendedAttribute, TreeEntry, TreeEntryKind, TreeTarReader, TreeTarWriter, TreeTime,
};
pub use vma::{VmaDisk, VmaReader, VmaWriteOptions, VmaWritten, write_vma};
pub use xva::{XvaDisk, XvaReader, XvaWriteOptions, XvaWritten, write_xva};
