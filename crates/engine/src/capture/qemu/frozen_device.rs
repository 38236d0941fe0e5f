//! Reading a frozen disk.

use std::ops::Range;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, DirtyBitmap, ExtentList};
use holdfast_serve::nbd::client::{NbdDevice, NbdDeviceMut, NbdStopper};

use super::copied_disk::CopiedDisk;

/// The unit in which QEMU's filter copies: smaller pieces cannot be discarded after reading.
const CLUSTER_BYTES: u64 = 64 << 10;

/// A frozen disk.
pub(super) enum FrozenDevice<'a> {
    /// Served by QEMU's NBD server. Ranges are discarded after reading, so that the filter no longer copies them before
    /// they are overwritten.
    Served(Box<NbdDeviceMut>),
    /// Copied by QEMU, part by part.
    Copied(Box<CopiedDisk<'a>>),
}

impl FrozenDevice<'_> {
    pub(super) fn stopper(&self) -> NbdStopper {
        match self {
            Self::Served(device) => device.as_read().stopper(),
            Self::Copied(disk) => disk.stopper(),
        }
    }

    /// The connection on which QEMU serves the changes.
    pub(super) fn bitmaps(&self) -> &NbdDevice {
        match self {
            Self::Served(device) => device.as_read(),
            Self::Copied(disk) => disk.marks.as_read(),
        }
    }

    /// Reads without discarding the range.
    pub(super) fn look_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        match self {
            Self::Served(device) => device.read_at(buffer, offset),
            Self::Copied(disk) => disk.read_at(buffer, offset),
        }
    }

    /// Marks a range in a bitmap of the node that serves the disk. The range must not be read after this.
    pub(super) fn touch(&self, range: Range<u64>) -> holdfast_block::Result<()> {
        match self {
            Self::Served(device) => device.trim(range),
            Self::Copied(disk) => disk.marks.write_zeroes(range),
        }
    }

    /// Prepares for reading in order: the whole disk, or only what may have changed.
    pub(super) fn read_in_order(&mut self, changed: Option<&DirtyBitmap>) {
        match self {
            Self::Served(_) => {}
            Self::Copied(disk) => disk.read_in_order(changed),
        }
    }
}

impl BlockDevice for FrozenDevice<'_> {
    fn size_bytes(&self) -> u64 {
        match self {
            Self::Served(device) => device.size_bytes(),
            Self::Copied(disk) => disk.size_bytes(),
        }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        let device = match self {
            Self::Served(device) => device,
            Self::Copied(disk) => return disk.read_at(buffer, offset),
        };
        device.read_at(buffer, offset)?;
        let start = offset.next_multiple_of(CLUSTER_BYTES);
        let end = (offset + buffer.len() as u64) / CLUSTER_BYTES * CLUSTER_BYTES;
        if start < end {
            device.trim(start..end)?;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        match self {
            Self::Served(device) => device.extents(range, extent_count_max),
            Self::Copied(disk) => disk.extents(range, extent_count_max),
        }
    }
}
