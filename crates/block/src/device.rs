//! The traits of block devices.

use std::ops::Range;

use crate::{Error, Extent, ExtentList, Result};

/// A byte array of fixed size. Any number of threads can read it at any offset at the same time.
///
/// Implementers must
/// - answer every read inside the device completely, or with an error: there are no short reads;
/// - refuse a request that reaches past the end with [`Error::OutOfBounds`] ([`check_bounds`](Self::check_bounds)
///   does);
/// - never change the size;
/// - answer [`extents`](Self::extents) truthfully: a range reported as [`Zero`](crate::ExtentKind::Zero) reads as zero,
///   and one reported as [`Absent`](crate::ExtentKind::Absent) reads as the layer below it, or as zero if there is no
///   such layer. `Data` is always a permitted answer.
///
/// An empty request (also a range whose end is before its start) that begins inside the device or at its end succeeds
/// and does nothing. The module [`conformance`](crate::testing::conformance) tests all of this on any device.
///
/// Every offset and length is valid; callers need not align them. Aligned and large requests are faster.
pub trait BlockDevice: Send + Sync {
    /// Size in bytes. Any size is valid; it need not be a multiple of a sector.
    fn size_bytes(&self) -> u64;

    /// Fills `buffer` with the bytes at `offset`.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()>;

    /// Describes the bytes of `range`, beginning at `range.start`, in at most `extent_count_max` (at least 1) extents.
    ///
    /// The answer covers at least one byte of a range that is not empty. It may end before the end of the range, and
    /// never ends after it; the caller continues at [`ExtentList::end`].
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList>;

    /// Smallest unit, in bytes, that the device reads or writes efficiently (512, 4096, a cluster): a power of two.
    ///
    /// Only a hint for better performance.
    fn block_size_bytes(&self) -> u32 {
        512
    }

    /// Refuses a request that reaches past the end of the device.
    fn check_bounds(&self, offset: u64, length: u64) -> Result<()> {
        let size_bytes = self.size_bytes();
        match offset.checked_add(length) {
            Some(end) if end <= size_bytes => Ok(()),
            _ => Err(Error::OutOfBounds {
                offset,
                length,
                size_bytes,
            }),
        }
    }
}

/// A device that can be written.
///
/// Writes take `&self`: a device has its own locks, so that many threads can write to different ranges. The result of
/// two simultaneous writes to overlapping ranges is either write or a mixture. A write is durable after the next
/// [`flush`](Self::flush) that started after the write returned; a crash before that may leave any part of it.
pub trait BlockDeviceMut: BlockDevice {
    /// Writes all of `data` at `offset`.
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()>;

    /// Makes `range` read as zero, and releases its space if possible.
    fn write_zeroes(&self, range: Range<u64>) -> Result<()>;

    /// Declares that the contents of `range` are no longer needed: afterwards every byte is zero or unchanged.
    ///
    /// A device that cannot release space does nothing.
    fn trim(&self, range: Range<u64>) -> Result<()>;

    /// Makes all completed writes durable.
    fn flush(&self) -> Result<()>;
}

/// Number of bytes of `range`; 0 if its end is before its start.
pub(crate) fn range_length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

macro_rules! forward_block_device {
    ($($pointer:ty),*) => {$(
        impl<T: BlockDevice + ?Sized> BlockDevice for $pointer {
            fn size_bytes(&self) -> u64 {
                (**self).size_bytes()
            }
            fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
                (**self).read_at(buffer, offset)
            }
            fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
                (**self).extents(range, extent_count_max)
            }
            fn block_size_bytes(&self) -> u32 {
                (**self).block_size_bytes()
            }
        }
        impl<T: BlockDeviceMut + ?Sized> BlockDeviceMut for $pointer {
            fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
                (**self).write_at(data, offset)
            }
            fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
                (**self).write_zeroes(range)
            }
            fn trim(&self, range: Range<u64>) -> Result<()> {
                (**self).trim(range)
            }
            fn flush(&self) -> Result<()> {
                (**self).flush()
            }
        }
    )*};
}

forward_block_device!(&T, Box<T>, std::sync::Arc<T>);

/// Visits all extents of `range` of `device`, in bounded steps.
///
/// Adjacent extents may have the same kind.
pub fn for_each_extent(
    device: &dyn BlockDevice,
    range: Range<u64>,
    mut visit: impl FnMut(Extent) -> Result<()>,
) -> Result<()> {
    const EXTENT_COUNT_MAX: usize = 1024;
    let mut offset = range.start;
    while offset < range.end {
        let list = device.extents(offset..range.end, EXTENT_COUNT_MAX)?;
        assert!(
            list.start() == offset && list.end() > offset && list.end() <= range.end,
            "extents do not cover the query"
        );
        offset = list.end();
        for extent in list {
            visit(extent)?;
        }
    }
    Ok(())
}
