//! A frozen disk at QEMU's server.

use std::ops::Range;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, ExtentList};
use holdfast_serve::nbd::client::{NbdDeviceMut, NbdStopper};

/// What QEMU's filter copies at once: a smaller piece that was read cannot be given back.
const CLUSTER_BYTES: u64 = 64 << 10;

/// A frozen disk at QEMU's server. What was read is given back, so that nobody saves it any more before it is overwritten.
pub(super) struct FrozenDevice {
    pub(super) inner: NbdDeviceMut,
}

impl FrozenDevice {
    pub(super) fn stopper(&self) -> NbdStopper {
        self.inner.as_read().stopper()
    }
}

impl BlockDevice for FrozenDevice {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.inner.read_at(buffer, offset)?;
        let start = offset.next_multiple_of(CLUSTER_BYTES);
        let end = (offset + buffer.len() as u64) / CLUSTER_BYTES * CLUSTER_BYTES;
        if start < end {
            self.inner.trim(start..end)?;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        self.inner.extents(range, extent_count_max)
    }
}
