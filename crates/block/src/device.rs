//! The traits of block devices.

use std::ops::Range;

use crate::{Error, Extent, ExtentList, Result};

/// A run of bytes of fixed size that can be read from any offset, by any number of threads at once.
///
/// Implementers must
/// - answer every read inside the device in full, or with an error: there are no short reads;
/// - refuse a request that reaches past the end with [`Error::OutOfBounds`] ([`check_bounds`](Self::check_bounds) does);
/// - never change size;
/// - answer [`extents`](Self::extents) truthfully: a range reported [`Zero`](crate::ExtentKind::Zero) reads as zero, and one
///   reported [`Absent`](crate::ExtentKind::Absent) reads as the layer below it does, or as zero where there is none.
///   `Data` is always a permitted answer.
///
/// A request of no bytes (or a range whose end lies before its start) that begins inside the device or at its end
/// succeeds and does nothing. The module [`conformance`](crate::testing::conformance) tests all this on any device.
///
/// Callers may assume nothing about alignment: every offset and length is legal; aligned and large requests are faster.
pub trait BlockDevice: Send + Sync {
    /// Size in bytes; any number is legal, also one that is no multiple of anything.
    fn size_bytes(&self) -> u64;

    /// Fills `buffer` with the bytes at `offset`.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()>;

    /// Describes the bytes of `range`, beginning at `range.start`, in at most `extent_count_max` (at least 1) extents.
    ///
    /// The answer covers at least one byte of a range that is not empty; it may end before the range does (ask again from
    /// [`ExtentList::end`]) and never ends after it.
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList>;

    /// Smallest unit, in bytes, that the device reads or writes efficiently (512, 4096, a cluster): a power of two.
    ///
    /// A hint for speed, never a condition.
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

/// A device that can change.
///
/// Writes take `&self`: a device keeps its own locks, so that many threads can write to different places. Two writes to
/// overlapping ranges at once may land in either order, or mixed. What was written is durable after the next
/// [`flush`](Self::flush) that started after the write returned; a crash before that may keep any part of it.
pub trait BlockDeviceMut: BlockDevice {
    /// Writes all of `data` at `offset`.
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()>;

    /// Makes `range` read as zero, giving back its space where the device can.
    fn write_zeroes(&self, range: Range<u64>) -> Result<()>;

    /// Declares that the contents of `range` are no longer needed: afterwards it reads as zero or as before.
    ///
    /// A device that cannot release space does nothing.
    fn trim(&self, range: Range<u64>) -> Result<()>;

    /// Makes all completed writes durable.
    fn flush(&self) -> Result<()>;
}

/// Bytes of `range`; one whose end lies before its start is empty.
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
/// Neighbours of one kind may be split at a step.
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
