//! An image file in memory, for tests.

use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use holdfast_block::{ExtentKind, ExtentList, Result, to_usize};

use super::ImageFile;

/// A growing file in memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryFile {
    bytes: RwLock<Vec<u8>>,
}

impl MemoryFile {
    /// A file that holds `bytes`.
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes: RwLock::new(bytes),
        }
    }
}

impl ImageFile for MemoryFile {
    fn length_bytes(&self) -> Result<u64> {
        Ok(self.bytes.read().unwrap_or_else(PoisonError::into_inner).len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let bytes = self.bytes.read().unwrap_or_else(PoisonError::into_inner);
        let start = to_usize(offset.min(bytes.len() as u64));
        let length = buffer.len().min(bytes.len() - start);
        buffer[..length].copy_from_slice(&bytes[start..start + length]);
        buffer[length..].fill(0);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        let start = to_usize(offset);
        if bytes.len() < start + data.len() {
            bytes.resize(start + data.len(), 0);
        }
        bytes[start..start + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn set_length(&self, length_bytes: u64) -> Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        bytes.resize(to_usize(length_bytes), 0);
        Ok(())
    }

    fn punch(&self, range: Range<u64>) -> Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        let length = bytes.len() as u64;
        bytes[to_usize(range.start.min(length))..to_usize(range.end.min(length))].fill(0);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end - range.start, ExtentKind::Data);
        Ok(list)
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}
