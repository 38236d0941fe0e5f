//! The sector bitmaps of blocks.

use super::pages::Pages;
use crate::Result;

/// Which bit of a byte belongs to its first sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BitOrder {
    /// The lowest bit, as in VHDX.
    LowFirst,
    /// The highest bit, as in VHD.
    HighFirst,
}

impl BitOrder {
    /// The bit of `sector` in its byte.
    pub(crate) fn bit(self, sector: u64) -> u8 {
        match self {
            Self::LowFirst => 1 << (sector % 8),
            Self::HighFirst => 0x80 >> (sector % 8),
        }
    }

    /// The bit of `sector` in the bitmap at `offset`, and the number of sectors from there on, at most `count_max`,
    /// with the same bit.
    pub(crate) fn same(self, pages: &Pages, offset: u64, sector: u64, count_max: u64) -> Result<(u64, bool)> {
        let byte = |sector: u64| -> Result<u8> { Ok(pages.array::<1>(offset + sector / 8)?[0]) };
        let mut current = byte(sector)?;
        let is_set = current & self.bit(sector) != 0;
        let same = if is_set { 0xff } else { 0 };
        let mut count = 1;
        while count < count_max {
            let at = sector + count;
            if at.is_multiple_of(8) {
                current = byte(at)?;
                if current == same && count + 8 <= count_max {
                    count += 8;
                    continue;
                }
            }
            if (current & self.bit(at) != 0) != is_set {
                break;
            }
            count += 1;
        }
        Ok((count, is_set))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::BitOrder;
    use crate::allocation_table::pages::Pages;
    use crate::file::memory::MemoryFile;

    #[test]
    fn bit_runs_end_at_a_change_or_the_limit() {
        let pages = Pages::new(Arc::new(MemoryFile::new(vec![0xff, 0xff, 0x0f, 0])), 4096);
        let same = |order: BitOrder, sector, count_max| order.same(&pages, 0, sector, count_max).unwrap();
        assert_eq!(same(BitOrder::LowFirst, 3, 100), (17, true));
        assert_eq!(same(BitOrder::LowFirst, 20, 12), (12, false));
        assert_eq!(same(BitOrder::HighFirst, 0, 100), (16, true));
        assert_eq!(same(BitOrder::HighFirst, 16, 100), (4, false));
        assert_eq!(same(BitOrder::HighFirst, 20, 2), (2, true));
        assert_eq!(same(BitOrder::HighFirst, 0, 9), (9, true));
    }
}
