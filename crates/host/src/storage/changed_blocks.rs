//! Which bytes of a file changed between two host snapshots, told by the file system itself: nothing of the file is read.
//!
//! A file system that never overwrites what a host snapshot holds knows what two of them share. There are three ways to ask it:
//!
//! - [`by_extents`]: where the same file lies in both (XFS and btrfs);
//! - [`by_send_stream`]: what a stream of differences holds (ZFS);
//! - [`by_thin_delta`]: which blocks of a pool two volumes have in common (LVM).
//!
//! All answer with [`ChangedRanges`]. What is outside of them is the same in both states; what is inside *may* differ. Whatever is
//! not known for certain is inside, so an error here costs a read, never a lost change. What cannot be known at all is an
//! error, and the caller reads everything.
//!
//! Terms: *before* and *after* are the two states, the older one first. Sizes and offsets are bytes of the file, which is the disk
//! itself when the image is raw; other formats need `holdfast_image::changed_on_disk` in between.

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
