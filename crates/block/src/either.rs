//! A device that reads one disk and reports the data extents of two.

use std::ops::Range;

use crate::{BlockDevice, ExtentKind, ExtentList, Result};

/// Reads one device, and reports data where that device or another one has data.
///
/// To compare two disks, or to store their difference, it is sufficient to process the data ranges of this device: both
/// disks are zero elsewhere. After the end of the other device, only the extents of the first device count.
pub struct EitherData<'a> {
    device: &'a dyn BlockDevice,
    other: &'a dyn BlockDevice,
}

impl<'a> EitherData<'a> {
    /// Reads `device`; `other` is only asked for its extents.
    pub fn new(device: &'a dyn BlockDevice, other: &'a dyn BlockDevice) -> Self {
        Self { device, other }
    }

    fn other_extents(&self, range: &Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let held = self.other.size_bytes().clamp(range.start, range.end);
        if held == range.start {
            let mut list = ExtentList::new(range.start, 1);
            list.push(range.end - range.start, ExtentKind::Zero);
            return Ok(list);
        }
        self.other.extents(range.start..held, extent_count_max)
    }
}

impl BlockDevice for EitherData<'_> {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut merged = ExtentList::new(range.start, extent_count_max);
        let first = self.device.extents(range.clone(), extent_count_max)?;
        if range.is_empty() {
            return Ok(merged);
        }
        let second = self.other_extents(&range, extent_count_max)?;
        let end = first.end().min(second.end());
        let (mut first, mut second) = (first.into_iter().peekable(), second.into_iter().peekable());
        while let (Some(one), Some(two)) = (first.peek(), second.peek()) {
            let at = merged.end();
            let next = one.end().min(two.end()).min(end);
            let is_data = one.kind == ExtentKind::Data || two.kind == ExtentKind::Data;
            let kind = if is_data { ExtentKind::Data } else { ExtentKind::Zero };
            if !merged.push(next - at, kind) {
                break;
            }
            let (first_ends, second_ends) = (one.end() == next, two.end() == next);
            if first_ends {
                first.next();
            }
            if second_ends {
                second.next();
            }
        }
        Ok(merged)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::EitherData;
    use crate::{BlockDevice as _, BlockDeviceMut as _, ExtentKind, MemoryDevice, for_each_extent};

    const BLOCK: u64 = 1 << 20;

    fn disk(blocks: u64, data: &[u64]) -> MemoryDevice {
        let disk = MemoryDevice::new(blocks * BLOCK);
        for block in data {
            disk.write_at(&[1; 512], block * BLOCK).unwrap();
        }
        disk
    }

    fn data_blocks(device: &EitherData<'_>, blocks: u64) -> Vec<u64> {
        let mut found = Vec::new();
        for_each_extent(device, 0..blocks * BLOCK, |extent| {
            if extent.kind == ExtentKind::Data {
                found.extend(extent.offset / BLOCK..extent.end().div_ceil(BLOCK));
            }
            Ok(())
        })
        .unwrap();
        found.dedup();
        found
    }

    #[test]
    fn data_is_where_either_has_it() {
        let (one, two) = (disk(8, &[0, 3]), disk(8, &[3, 6]));
        assert_eq!(data_blocks(&EitherData::new(&one, &two), 8), [0, 3, 6]);
        let mut byte = [9];
        EitherData::new(&one, &two).read_at(&mut byte, 6 * BLOCK).unwrap();
        assert_eq!(byte, [0], "only the first is read");
    }

    #[test]
    fn the_end_of_the_other_is_no_end() {
        let (long, short) = (disk(8, &[1, 7]), disk(4, &[2]));
        assert_eq!(data_blocks(&EitherData::new(&long, &short), 8), [1, 2, 7]);
        assert_eq!(data_blocks(&EitherData::new(&short, &long), 4), [1, 2]);
    }
}
