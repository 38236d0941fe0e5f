//! Files and block devices as devices.
//!
//! A [`FileDevice`] can only be read, a [`FileDeviceMut`] can also be written. Both accept regular files and block
//! devices and nothing else. The size is that at the time of opening. If the file is truncated later, reads fail with
//! [`Error::Shrunk`]; [`FileDevice::changed_since_open`] detects other changes during reading.

mod direct;
mod extents;
mod io;
mod lease;
mod lock;
mod open;
mod replace;
mod space;
mod stamp;

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::Advice;

use crate::device::range_length;
use crate::{BlockDevice, BlockDeviceMut, Error, ExtentList, Result};

pub use direct::{Access, DirectPath};
pub use lease::open_past_leases;
pub use lock::{FileLock, LockOutcome, is_locked, is_open_for_writing, lock_file, lock_file_at_rest, lock_file_shared};
use open::OpenFile;
pub use replace::{rename_durably, replace_file, sync_folder_of, write_new_file};
pub use stamp::FileChange;

/// Whether I/O uses the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoMode {
    /// Uses the page cache: fast if bytes are read again soon.
    #[default]
    Buffered,
    /// Bypasses the page cache (`O_DIRECT`), so that a large copy does not evict other data from memory.
    ///
    /// If the file system refuses direct I/O, the device uses the page cache, and [`FileDevice::direct_io_refusal`]
    /// returns the reason.
    Direct,
    /// Bypasses the page cache for requests of at least 512 KiB; shorter requests use the page cache. For writing a
    /// whole disk in pieces of any length with a flush at the end.
    LargeDirect,
}

/// The expected access pattern, for the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadHint {
    /// The range will be read in order: read ahead further.
    Sequential,
    /// The range will be read soon: start reading now.
    WillNeed,
    /// The range is no longer needed: free the memory.
    DontNeed,
}

/// A file or block device that can only be read.
#[derive(Debug)]
pub struct FileDevice {
    open: OpenFile,
}

/// A file or block device that can be read and written.
#[derive(Debug)]
pub struct FileDeviceMut {
    open: OpenFile,
    flush_failed: AtomicBool,
}

impl FileDevice {
    /// Opens `path` for reading.
    pub fn open(path: &Path, mode: IoMode) -> Result<Self> {
        Ok(Self {
            open: OpenFile::open(path, Access::Read, mode)?,
        })
    }

    /// The effective mode: `Buffered` if direct I/O was requested and refused.
    pub fn io_mode(&self) -> IoMode {
        self.open.io_mode()
    }

    /// Why the file system refused direct I/O, if it was requested and refused.
    pub fn direct_io_refusal(&self) -> Option<&str> {
        self.open.direct_io_refusal()
    }

    /// Passes a hint about `range` to the page cache. Errors can be ignored.
    pub fn advise(&self, range: Range<u64>, hint: ReadHint) -> Result<()> {
        self.open.advise(&range, hint)
    }

    /// Detects changes of the file since it was opened; empty if there are none.
    ///
    /// Compares size, modification time and status change time. For a block device, which has no such times, the list
    /// is always empty. A change within one tick of the file system's clock (some milliseconds) after opening may not
    /// be detected.
    pub fn changed_since_open(&self) -> Result<Vec<FileChange>> {
        self.open.changed_since_open()
    }
}

impl FileDeviceMut {
    /// Opens an existing `path` for reading and writing.
    ///
    /// A block device that the system uses (a mounted file system, a member of an array) is refused.
    pub fn open(path: &Path, mode: IoMode) -> Result<Self> {
        OpenFile::open(path, Access::ReadWrite, mode).map(Self::new)
    }

    /// Creates a sparse file of `size_bytes`, which must not exist. Only its owner can read it.
    pub fn create_new(path: &Path, size_bytes: u64, mode: IoMode) -> Result<Self> {
        OpenFile::create_new(path, size_bytes, mode).map(Self::new)
    }

    /// Uses an open file, which may have no name; `path` is for error messages.
    pub fn of_file(file: File, path: &Path, mode: IoMode) -> Result<Self> {
        OpenFile::from_file(file, path, Access::ReadWrite, mode).map(Self::new)
    }

    fn new(open: OpenFile) -> Self {
        Self {
            open,
            flush_failed: AtomicBool::new(false),
        }
    }

    /// See [`FileDevice::io_mode`].
    pub fn io_mode(&self) -> IoMode {
        self.open.io_mode()
    }

    /// See [`FileDevice::direct_io_refusal`].
    pub fn direct_io_refusal(&self) -> Option<&str> {
        self.open.direct_io_refusal()
    }

    /// See [`FileDevice::advise`].
    pub fn advise(&self, range: Range<u64>, hint: ReadHint) -> Result<()> {
        self.open.advise(&range, hint)
    }
}

impl OpenFile {
    fn advise(&self, range: &Range<u64>, hint: ReadHint) -> Result<()> {
        self.check_range(range)?;
        let Some(length) = NonZeroU64::new(range_length(range)) else {
            return Ok(());
        };
        let advice = match hint {
            ReadHint::Sequential => Advice::Sequential,
            ReadHint::WillNeed => Advice::WillNeed,
            ReadHint::DontNeed => Advice::DontNeed,
        };
        rustix::fs::fadvise(&self.file, range.start, Some(length), advice)
            .map_err(|errno| Error::io("advise", range.start, errno))
    }
}

macro_rules! file_block_device {
    ($($device:ty),*) => {$(
        impl BlockDevice for $device {
            fn size_bytes(&self) -> u64 {
                self.open.size_bytes
            }
            fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
                self.check_bounds(offset, buffer.len() as u64)?;
                self.open.read(buffer, offset)
            }
            fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
                self.check_bounds(range.start, range_length(&range))?;
                self.open.extents(&range, extent_count_max)
            }
            fn block_size_bytes(&self) -> u32 {
                self.open.block_size_bytes
            }
        }
    )*};
}

file_block_device!(FileDevice, FileDeviceMut);

impl BlockDeviceMut for FileDeviceMut {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        self.open.write(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        self.open.write_zeroes(&range)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        self.open.trim(&range)
    }

    /// After a failed flush all later ones fail too: the kernel drops the pages that it could not write, and the next
    /// flush would succeed although the bytes are lost.
    fn flush(&self) -> Result<()> {
        if self.flush_failed.load(Ordering::Acquire) {
            let reason =
                std::io::Error::other("an earlier flush failed, so written bytes may be lost; open the file again");
            return Err(Error::io("flush", 0, reason));
        }
        rustix::fs::fdatasync(&self.open.file).map_err(|errno| {
            self.flush_failed.store(true, Ordering::Release);
            Error::io("flush", 0, errno)
        })
    }
}
