//! A disk padded to whole sectors, for archives that count in sectors.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentKind, ExtentList, Result, to_usize};

const SECTOR_BYTES: u64 = 512;

/// A disk, padded with zeroes to the end of its last sector.
pub(crate) struct WholeSectors<'d>(pub(crate) Arc<dyn BlockDevice + 'd>);

impl BlockDevice for WholeSectors<'_> {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes().next_multiple_of(SECTOR_BYTES)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let there = self.0.size_bytes().saturating_sub(offset).min(buffer.len() as u64);
        let (there, behind) = buffer.split_at_mut(to_usize(there));
        behind.fill(0);
        if there.is_empty() {
            Ok(())
        } else {
            self.0.read_at(there, offset)
        }
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let end = range.end.min(self.0.size_bytes());
        if range.start < end {
            return self.0.extents(range.start..end, extent_count_max);
        }
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end.saturating_sub(range.start), ExtentKind::Zero);
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, MemoryDevice};

    use super::WholeSectors;

    #[test]
    fn what_fills_the_last_sector_is_zero() {
        let disk = MemoryDevice::new(700);
        disk.write_at(&[7; 700], 0).unwrap();
        let disk = WholeSectors(Arc::new(disk));
        let mut bytes = [9; 1024];
        disk.read_at(&mut bytes, 0).unwrap();
        assert!(bytes[..700] == [7; 700] && bytes[700..] == [0; 324]);
        assert_eq!(disk.extents(0..1024, 4).unwrap().end(), 700);
        assert_eq!(disk.extents(700..1024, 4).unwrap().end(), 1024);
        disk.read_at(&mut bytes[..10], 1014).unwrap();
        disk.read_at(&mut bytes, 1).unwrap_err();
    }
}
