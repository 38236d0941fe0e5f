//! Block devices, and how they stack.
//!
//! Everything with bytes is a [`BlockDevice`]: a byte array of fixed size that can be read at any offset and reports
//! which of its ranges hold data ([`Extent`]). A device that can be written is also a [`BlockDeviceMut`]. Read-only is
//! a type, not a flag: a function that takes `&dyn BlockDevice` cannot write.
//!
//! Layers (one file each) are devices on top of other devices; backends are devices in memory, files and block devices.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("offsets are u64 and buffers are indexed by usize: Holdfast needs a 64-bit target");

mod aligned;
mod bitmap;
mod clock;
mod device;
mod either;
mod error;
mod error_text;
mod extent;
mod file;
mod flush_rounds;
#[cfg(feature = "hostile")]
#[doc(hidden)]
pub mod hostile;
mod logged;
mod lru;
mod memory;
mod ordered_pool;
mod overlay;
mod random;
mod record;
mod request;
mod slice;
#[cfg(any(test, feature = "testing"))]
mod testing;
mod throttle;
mod track;
mod zero;

pub use aligned::AlignedBuffer;
pub use bitmap::{BITMAP_VERSION, DirtyBitmap, DirtyRanges};
pub use clock::{Clock, ManualClock, SystemClock};
pub use device::{BlockDevice, BlockDeviceMut, for_each_extent};
pub use either::EitherData;
pub use error::{Error, Result};
pub use error_text::{error_messages, error_text};
pub use extent::{Extent, ExtentKind, ExtentList};
pub use file::{
    Access, DirectPath, FileChange, FileDevice, FileDeviceMut, FileLock, IoMode, LockOutcome, ReadHint, is_locked,
    is_open_for_writing, lock_file, lock_file_at_rest, lock_file_shared, open_past_leases, rename_durably,
    replace_file, sync_folder_of, write_new_file,
};
pub use flush_rounds::{FlushRounds, FlushTicket};
pub use logged::{LoggedDevice, ReplayReport, WriteLog};
pub use lru::LruCache;
pub use memory::MemoryDevice;
pub use ordered_pool::{OrderedResults, Threads};
pub use overlay::{BackingId, CommitReport, OVERLAY_VERSION, OverlayDevice, OverlayInfo, OverlayOptions, OverlayState};
pub use random::SeededRandom;
pub use record::Record;
pub use request::{Request, RequestKind};
pub use slice::SliceDevice;
#[cfg(any(test, feature = "testing"))]
pub use testing::{
    conformance,
    crash::{CrashLog, CrashLogDevice},
    fault::{Fault, FaultRule, FaultyDevice},
    trace::{TraceRing, TraceSink, TracedDevice},
};
pub use throttle::{Throttle, ThrottleLimits, ThrottledDevice};
pub use track::{CleanEpoch, TrackedDevice};
pub use zero::is_zero;

/// Converts a byte count to an index; lossless, because only 64-bit targets are supported.
#[expect(
    clippy::cast_possible_truncation,
    reason = "usize is 64 bits wide on every target that compiles"
)]
pub const fn to_usize(bytes: u64) -> usize {
    bytes as usize
}
