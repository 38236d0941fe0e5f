//! A raw image: the bytes of the disk, with holes where the file system has them.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, Result};

use crate::file::ImageFile;

/// A file or block device, with the size that it had when it was opened.
pub(crate) struct RawImage {
    file: Arc<dyn ImageFile>,
    size_bytes: u64,
}

impl RawImage {
    pub(crate) fn new(file: Arc<dyn ImageFile>) -> Result<Self> {
        let size_bytes = file.length_bytes()?;
        Ok(Self { file, size_bytes })
    }
}

impl BlockDevice for RawImage {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.file.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        self.file.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}

pub(crate) struct RawImageMut(pub(crate) RawImage);

impl BlockDevice for RawImageMut {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.0.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.0.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.0.block_size_bytes()
    }
}

impl BlockDeviceMut for RawImageMut {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        self.0.file.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        self.0.file.punch(range)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.write_zeroes(range)
    }

    fn flush(&self) -> Result<()> {
        self.0.file.sync()
    }
}
