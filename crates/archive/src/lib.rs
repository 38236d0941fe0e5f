//! Machine archives as streams: one file, or one pipe, with a machine's configuration and all of its disks.
//!
//! An archive is read from its start to its end, once, and may come from a pipe: a reader says first what there is, and then
//! gives the data of the disks piece by piece. It is written the same way, from devices. What the configuration means is not
//! known here: it is text, which `holdfast-hardware` translates.
//!
//! Archives are hostile until proven otherwise: every name, number and size in them is checked before anything is allocated.

mod error;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod reader;

pub use error::{Error, Result};
pub use reader::{ArchiveDisk, ArchiveReader, Document, DocumentKind, Piece};
