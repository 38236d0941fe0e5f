//! A dirty bitmap: which parts of a device may have changed since a point in time.
//!
//! One bit stands for *granularity* bytes. Clear means unchanged; set means *maybe* changed. Setting therefore rounds
//! outwards and clearing rounds inwards: rounding can only cause unnecessary reads, never a lost change.
//!
//! [`encode`](DirtyBitmap::encode) writes the layout that `bitmap/encoding.rs` documents.

mod encoding;
mod pages;
mod shared_marks;

use std::ops::Range;

use crate::device::range_length;
use crate::{Error, Result};

pub use encoding::BITMAP_VERSION;
use pages::BitPages;
pub(crate) use shared_marks::SharedMarks;

/// Finest granularity: a sector.
const GRANULARITY_BYTES_MIN: u64 = 512;
/// Limit of bits of one bitmap: 256 TiB at 64 KiB. Bounds a bitmap's memory to 512 MiB, or 16 MiB while the bitmap is
/// empty.
const BIT_COUNT_MAX: u64 = 1 << 32;

/// A set of ranges of a device that may have changed, to the granularity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirtyBitmap {
    size_bytes: u64,
    granularity_bytes: u64,
    pages: BitPages,
}

impl DirtyBitmap {
    /// A bitmap without marked ranges for a device of `size_bytes`.
    ///
    /// `granularity_bytes` is a power of two, at least 512, and large enough that 2^32 bits cover the device.
    pub fn new(size_bytes: u64, granularity_bytes: u64) -> Result<Self> {
        Ok(Self {
            size_bytes,
            granularity_bytes,
            pages: BitPages::new(bit_count(size_bytes, granularity_bytes)?),
        })
    }

    /// Size of the device, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Number of bytes per bit.
    pub fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    /// Marks `range`, rounded outwards; the part after the end of the device is ignored.
    pub fn set(&mut self, range: Range<u64>) {
        if range_length(&range) > 0 && range.start < self.size_bytes {
            self.pages
                .set(outer_bits(&range, self.size_bytes, self.granularity_bytes));
        }
    }

    /// Marks the whole device.
    pub fn set_all(&mut self) {
        self.set(0..self.size_bytes);
    }

    /// Clears the marks of all bits that lie entirely in `range`. If `range` reaches the end of the device, the last
    /// bit counts as entirely inside.
    pub fn clear(&mut self, range: Range<u64>) {
        let end = if range.end >= self.size_bytes {
            self.size_bytes.div_ceil(self.granularity_bytes)
        } else {
            range.end / self.granularity_bytes
        };
        let start = range.start.div_ceil(self.granularity_bytes);
        if start < end {
            self.pages.clear(start..end);
        }
    }

    /// Clears all marks.
    pub fn clear_all(&mut self) {
        self.clear(0..self.size_bytes);
    }

    /// Whether any byte of `range` is marked.
    pub fn is_dirty(&self, range: Range<u64>) -> bool {
        range_length(&range) > 0
            && self
                .next_dirty(range.start)
                .is_some_and(|dirty| dirty.start < range.end)
    }

    /// Whether no range is marked.
    pub fn is_clean(&self) -> bool {
        self.next_dirty(0).is_none()
    }

    /// The first marked range at or after `offset`. If the range begins before `offset`, only its part from `offset` on
    /// is returned.
    pub fn next_dirty(&self, offset: u64) -> Option<Range<u64>> {
        if offset >= self.size_bytes {
            return None;
        }
        let first = self.pages.next_set(offset / self.granularity_bytes)?;
        let end = self.pages.next_clear(first);
        Some((first * self.granularity_bytes).max(offset)..self.byte_at(end))
    }

    /// The marked ranges, in order; adjacent ranges are merged.
    pub fn iter(&self) -> DirtyRanges<'_> {
        DirtyRanges {
            bitmap: self,
            offset: 0,
        }
    }

    /// Number of marked bytes.
    pub fn dirty_bytes(&self) -> u64 {
        let count = self.pages.count();
        match self.pages.bit_count().checked_sub(1) {
            // The last bit may stand for fewer bytes than the others.
            Some(last) if self.pages.is_set(last) => {
                (count - 1) * self.granularity_bytes + (self.size_bytes - self.byte_at(last))
            }
            _ => count * self.granularity_bytes,
        }
    }

    /// Also marks all ranges that `other` marks, which must be for a device of the same size. If the granularity of
    /// `self` is coarser, ranges are rounded outwards.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        if other.size_bytes != self.size_bytes {
            return Err(Error::Unsupported {
                what: "merge of bitmaps",
                detail: format!(
                    "they are of devices of {} and {} bytes",
                    self.size_bytes, other.size_bytes
                ),
            });
        }
        for range in other {
            self.set(range);
        }
        Ok(())
    }

    /// Clears and returns the first marked range at or after `offset`, at most `length_max` bytes of it.
    ///
    /// The length is rounded down to the granularity, but is at least one bit. The returned range is exactly the
    /// cleared one. A live copy takes, reads and sends a range; a write in between marks the range again.
    pub fn take_next(&mut self, offset: u64, length_max: u64) -> Option<Range<u64>> {
        if offset >= self.size_bytes {
            return None;
        }
        let first = self.pages.next_set(offset / self.granularity_bytes)?;
        let bit_count_max = (length_max / self.granularity_bytes).max(1);
        let end = self.pages.next_clear_within(first..first.saturating_add(bit_count_max));
        self.pages.clear(first..end);
        Some(first * self.granularity_bytes..self.byte_at(end))
    }

    /// The offset at which bit `bit` begins, or the end of the device.
    fn byte_at(&self, bit: u64) -> u64 {
        bit.saturating_mul(self.granularity_bytes).min(self.size_bytes)
    }
}

/// The number of bits for a device; fails if the granularity is invalid or too fine.
fn bit_count(size_bytes: u64, granularity_bytes: u64) -> Result<u64> {
    if !granularity_bytes.is_power_of_two() || granularity_bytes < GRANULARITY_BYTES_MIN {
        return Err(Error::Unsupported {
            what: "bitmap granularity",
            detail: format!("{granularity_bytes} bytes is not a power of two of at least {GRANULARITY_BYTES_MIN}"),
        });
    }
    let bit_count = size_bytes.div_ceil(granularity_bytes);
    if bit_count > BIT_COUNT_MAX {
        return Err(Error::Unsupported {
            what: "bitmap granularity",
            detail: format!(
                "{granularity_bytes} bytes is too fine for a device of {size_bytes} bytes, choose at least {}",
                size_bytes.div_ceil(BIT_COUNT_MAX).next_power_of_two()
            ),
        });
    }
    Ok(bit_count)
}

/// The bits of `range`, rounded outwards, up to the end of the device.
fn outer_bits(range: &Range<u64>, size_bytes: u64, granularity_bytes: u64) -> Range<u64> {
    range.start / granularity_bytes..range.end.min(size_bytes).div_ceil(granularity_bytes)
}

/// The marked ranges of a [`DirtyBitmap`], in bytes.
#[derive(Debug, Clone)]
pub struct DirtyRanges<'a> {
    bitmap: &'a DirtyBitmap,
    offset: u64,
}

impl Iterator for DirtyRanges<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let range = self.bitmap.next_dirty(self.offset)?;
        self.offset = range.end;
        Some(range)
    }
}

impl<'a> IntoIterator for &'a DirtyBitmap {
    type Item = Range<u64>;
    type IntoIter = DirtyRanges<'a>;

    fn into_iter(self) -> DirtyRanges<'a> {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::DirtyBitmap;
    use crate::testing::conformance::test_seed;
    use crate::{Error, SeededRandom, to_usize};

    fn ranges(bitmap: &DirtyBitmap) -> Vec<Range<u64>> {
        bitmap.iter().collect()
    }

    #[test]
    fn setting_rounds_outwards_and_clearing_inwards() {
        let mut bitmap = DirtyBitmap::new(10_000, 1024).unwrap();
        bitmap.set(1000..1025);
        assert_eq!(ranges(&bitmap), [Range { start: 0, end: 2048 }]);
        bitmap.clear(1..2048);
        assert_eq!(ranges(&bitmap), [Range { start: 0, end: 1024 }]);
        bitmap.set(9_999..u64::MAX);
        assert_eq!(ranges(&bitmap), [0..1024, 9216..10_000]);
        assert_eq!(bitmap.dirty_bytes(), 1024 + 784);
        assert!(bitmap.is_dirty(1000..9000) && !bitmap.is_dirty(1024..9216) && !bitmap.is_dirty(5..5));
        bitmap.clear(9216..9999);
        assert!(bitmap.is_dirty(9999..10_000));
        bitmap.clear(9216..10_000);
        bitmap.clear(0..1024);
        assert!(bitmap.is_clean());
    }

    #[test]
    fn awkward_granularities_are_refused_with_advice() {
        for granularity in [0, 1, 256, 513, 1000] {
            assert!(matches!(
                DirtyBitmap::new(1, granularity),
                Err(Error::Unsupported { .. })
            ));
        }
        let error = DirtyBitmap::new(1 << 50, 512).unwrap_err();
        assert!(error.to_string().contains("262144"), "{error}");
        DirtyBitmap::new(1 << 50, 262_144).unwrap();
    }

    #[test]
    fn the_end_of_the_number_range_is_no_trap() {
        let mut bitmap = DirtyBitmap::new(u64::MAX, 1 << 40).unwrap();
        bitmap.set(u64::MAX - 1..u64::MAX);
        assert_eq!(bitmap.next_dirty(0).unwrap().end, u64::MAX);
        bitmap.set_all();
        assert_eq!(bitmap.dirty_bytes(), u64::MAX);
        assert_eq!(bitmap.take_next(u64::MAX - 1, u64::MAX).unwrap().end, u64::MAX);
        assert!(DirtyBitmap::new(0, 512).unwrap().is_clean());
    }

    /// Compares random operations with a vector of one bool per bit.
    #[test]
    fn behaves_like_a_vector_of_bools() {
        let mut random = SeededRandom::new(test_seed());
        for size in [1, 511, 512, 70_000, 5_000_001, 20_000_000] {
            let mut bitmap = DirtyBitmap::new(size, 512).unwrap();
            let mut model = vec![false; to_usize(size.div_ceil(512))];
            for _ in 0..200 {
                let range = random.range_within(size, size);
                let length = if random.one_in(2) { 3000 } else { size };
                let range = range.start..range.end.min(range.start + length);
                let outer = to_usize(range.start / 512)..to_usize(range.end.div_ceil(512));
                if random.one_in(2) {
                    bitmap.set(range.clone());
                    if !range.is_empty() {
                        model[outer].fill(true);
                    }
                } else {
                    bitmap.clear(range.clone());
                    let end = if range.end == size {
                        outer.end
                    } else {
                        to_usize(range.end / 512)
                    };
                    let start = to_usize(range.start.div_ceil(512));
                    if start < end {
                        model[start..end].fill(false);
                    }
                }
                compare(&bitmap, &model);
            }
            let copy = DirtyBitmap::decode(&bitmap.encode(), size).unwrap();
            assert_eq!(copy, bitmap);
            take_everything(bitmap, &mut random);
        }
    }

    fn compare(bitmap: &DirtyBitmap, model: &[bool]) {
        let mut seen = vec![false; model.len()];
        let (mut end_before, mut bytes) = (None, 0);
        for range in bitmap {
            assert!(
                end_before.is_none_or(|end| end < range.start),
                "ranges touch or go back"
            );
            end_before = Some(range.end);
            bytes += range.end - range.start;
            seen[to_usize(range.start / 512)..to_usize(range.end.div_ceil(512))].fill(true);
        }
        assert_eq!(seen, model);
        assert_eq!(bitmap.dirty_bytes(), bytes);
    }

    fn take_everything(mut bitmap: DirtyBitmap, random: &mut SeededRandom) {
        let expected = bitmap.dirty_bytes();
        let mut taken = 0;
        while let Some(range) = bitmap.take_next(0, random.below(100_000)) {
            assert!(!bitmap.is_dirty(range.clone()));
            taken += range.end - range.start;
        }
        assert_eq!(taken, expected);
        assert!(bitmap.is_clean());
    }

    #[test]
    fn merging_a_coarser_one_over_reports_and_never_under_reports() {
        let mut fine = DirtyBitmap::new(100_000, 512).unwrap();
        let mut coarse = DirtyBitmap::new(100_000, 65_536).unwrap();
        fine.set(512..513);
        coarse.set(99_999..100_000);
        let mut merged = fine.clone();
        merged.merge(&coarse).unwrap();
        assert_eq!(ranges(&merged), [512..1024, 65_536..100_000]);
        coarse.merge(&fine).unwrap();
        assert_eq!(coarse.dirty_bytes(), 100_000);
        assert!(fine.merge(&DirtyBitmap::new(99_999, 512).unwrap()).is_err());
    }
}
