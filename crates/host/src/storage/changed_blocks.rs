//! The ranges of a file that changed between two host snapshots, from metadata of the file system: no data of the file
//! is read.
//!
//! A copy-on-write file system knows which blocks two snapshots share. There are three ways to query it:
//!
//! - [`by_extents`]: the extents of the file in both (XFS and btrfs);
//! - [`by_send_stream`]: the records of an incremental stream (ZFS);
//! - [`by_thin_delta`]: the shared blocks of two volumes in a pool (LVM).
//!
//! All return [`ChangedRanges`]. Bytes outside of the ranges are equal in both states; bytes inside *may* differ.
//! Uncertain bytes are inside, so a mistake costs a read, never a lost change. If nothing is certain, the result is
//! an error, and the caller reads everything.
//!
//! Terms: *before* and *after* are the two states, the older one first. Sizes and offsets are bytes of the file. They
//! equal those of the disk if the image is raw; other formats also need `holdfast_image::changed_on_disk`.

mod error;
mod extents;
mod fiemap;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod ranges;
pub(crate) mod send_stream;
mod sharing;
mod thin_delta;

pub use error::{ExtentError, Result, SendStreamError};
pub use extents::{ExtentChanges, by_extents};
pub use ranges::ChangedRanges;
pub use send_stream::{SendStreamQuery, StreamChanges, StreamObject, WholeFileReason, by_send_stream, guid_of_stream};
pub use sharing::{Sharing, sharing_of};
pub use thin_delta::{ThinDeltaError, ThinDeltaQuery, by_thin_delta};
