//! A new file that stores only its length and drops its content.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_block::{ExtentKind, ExtentList, Result};

use super::ImageFile;

/// Reads as zero, whatever was written.
#[derive(Debug, Default)]
pub(crate) struct UnwrittenFile {
    length_bytes: AtomicU64,
}

impl ImageFile for UnwrittenFile {
    fn length_bytes(&self) -> Result<u64> {
        Ok(self.length_bytes.load(Ordering::Relaxed))
    }

    fn read_at(&self, buffer: &mut [u8], _offset: u64) -> Result<()> {
        buffer.fill(0);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let end = offset.saturating_add(data.len() as u64);
        self.length_bytes.fetch_max(end, Ordering::Relaxed);
        Ok(())
    }

    fn set_length(&self, length_bytes: u64) -> Result<()> {
        self.length_bytes.store(length_bytes, Ordering::Relaxed);
        Ok(())
    }

    fn punch(&self, _range: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end.saturating_sub(range.start), ExtentKind::Zero);
        Ok(list)
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}
