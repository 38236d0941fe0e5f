//! Requests to devices, as values.

use std::ops::Range;

use crate::device::range_length;

/// The operations of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RequestKind {
    /// [`read_at`](crate::BlockDevice::read_at).
    Read,
    /// [`extents`](crate::BlockDevice::extents).
    Extents,
    /// [`write_at`](crate::BlockDeviceMut::write_at).
    Write,
    /// [`write_zeroes`](crate::BlockDeviceMut::write_zeroes).
    WriteZeroes,
    /// [`trim`](crate::BlockDeviceMut::trim).
    Trim,
    /// [`flush`](crate::BlockDeviceMut::flush).
    Flush,
}

/// One request to a device; a flush has no offset and no length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    /// The operation.
    pub kind: RequestKind,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

impl Request {
    /// A request for `length` bytes at `offset`.
    pub fn new(kind: RequestKind, offset: u64, length: u64) -> Self {
        Self { kind, offset, length }
    }

    /// A request for `range`.
    pub fn of_range(kind: RequestKind, range: &Range<u64>) -> Self {
        Self::new(kind, range.start, range_length(range))
    }

    /// A request to make earlier writes durable.
    pub fn flush() -> Self {
        Self::new(RequestKind::Flush, 0, 0)
    }
}
