//! Restore dry runs: read the snapshot and the target, and count what would be written.

use std::io::Write;
use std::ops::Range;
use std::path::Path;

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentKind, ExtentList, FileDevice, IoMode, Result as BlockResult};
use holdfast_image::OpenOptions;

use crate::job::Result;

/// A target that discards writes.
pub(super) struct UnwrittenTarget(Held);

/// What the target holds before the restore.
enum Held {
    /// A file that does not exist yet, of this size.
    Nothing(u64),
    /// A file or block device, opened for reading.
    Device(Box<dyn BlockDevice>),
}

impl UnwrittenTarget {
    /// A new file.
    pub(super) fn new_file(size_bytes: u64) -> Self {
        Self(Held::Nothing(size_bytes))
    }

    /// An existing raw file or block device.
    pub(super) fn raw(path: &Path) -> Result<Self> {
        let device = FileDevice::open(path, IoMode::Buffered)?;
        Ok(Self(Held::Device(Box::new(device))))
    }

    /// An existing image.
    pub(super) fn image(path: &Path, options: &OpenOptions) -> Result<Self> {
        let image = holdfast_image::open(path, options)?;
        Ok(Self(Held::Device(Box::new(image))))
    }
}

impl BlockDevice for UnwrittenTarget {
    fn size_bytes(&self) -> u64 {
        match &self.0 {
            Held::Nothing(size_bytes) => *size_bytes,
            Held::Device(device) => device.size_bytes(),
        }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        match &self.0 {
            Held::Nothing(_) => {
                self.check_bounds(offset, buffer.len() as u64)?;
                buffer.fill(0);
                Ok(())
            }
            Held::Device(device) => device.read_at(buffer, offset),
        }
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        match &self.0 {
            Held::Nothing(_) => {
                self.check_bounds(range.start, range.end - range.start)?;
                let mut list = ExtentList::new(range.start, extent_count_max);
                list.push(range.end - range.start, ExtentKind::Zero);
                Ok(list)
            }
            Held::Device(device) => device.extents(range, extent_count_max),
        }
    }

    fn block_size_bytes(&self) -> u32 {
        match &self.0 {
            Held::Nothing(_) => 512,
            Held::Device(device) => device.block_size_bytes(),
        }
    }
}

impl BlockDeviceMut for UnwrittenTarget {
    fn write_at(&self, data: &[u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, data.len() as u64)
    }

    fn write_zeroes(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_bounds(range.start, range.end - range.start)
    }

    fn trim(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_bounds(range.start, range.end - range.start)
    }

    fn flush(&self) -> BlockResult<()> {
        Ok(())
    }
}

/// A stream that drops and counts what is written to it.
#[derive(Default)]
pub(super) struct CountedBytes(pub(super) u64);

impl Write for CountedBytes {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
