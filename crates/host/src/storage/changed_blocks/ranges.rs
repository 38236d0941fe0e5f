//! A set of ranges of bounded size: if there are too many, neighbours are merged.

use std::ops::Range;

use holdfast_block::DirtyBitmap;

/// Limit on the number of ranges, which use 4 MiB. More ranges are merged across the gaps between them, which costs
/// unnecessary reads.
const RANGE_COUNT_MAX: usize = 1 << 18;
/// The first size of gaps that are merged if there are too many ranges: a block.
const GAP_BYTES_INITIAL: u64 = 4096;

/// The ranges of a file that may have changed; the rest did not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedRanges {
    size_bytes: u64,
    ranges: Vec<Range<u64>>,
}

impl ChangedRanges {
    /// Size of the newer file in bytes. All ranges are within it.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The ranges, in order; not empty, and not adjacent.
    pub fn as_slice(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// Total bytes of the ranges.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// The ranges as a bitmap, rounded outwards.
    pub fn to_bitmap(&self, granularity_bytes: u64) -> holdfast_block::Result<DirtyBitmap> {
        let mut bitmap = DirtyBitmap::new(self.size_bytes, granularity_bytes)?;
        for range in &self.ranges {
            bitmap.set(range.clone());
        }
        Ok(bitmap)
    }
}

/// Collects ranges in any order.
pub(super) struct Collector {
    size_bytes: u64,
    ranges: Vec<Range<u64>>,
    /// Ranges with a gap up to this size are merged.
    gap_bytes: u64,
    range_count_max: usize,
}

impl Collector {
    /// A collector for a file with `size_bytes` in its newer state.
    pub(super) fn new(size_bytes: u64) -> Self {
        Self::with_count_max(size_bytes, RANGE_COUNT_MAX)
    }

    fn with_count_max(size_bytes: u64, range_count_max: usize) -> Self {
        Self {
            size_bytes,
            ranges: Vec::new(),
            gap_bytes: 0,
            range_count_max,
        }
    }

    /// Adds `range`; the part after the end of the file is ignored.
    pub(super) fn add(&mut self, range: Range<u64>) {
        let range = range.start..range.end.min(self.size_bytes);
        if range.start >= range.end {
            return;
        }
        match self.ranges.last_mut() {
            Some(last) if last.start <= range.start && range.start <= last.end.saturating_add(self.gap_bytes) => {
                last.end = last.end.max(range.end);
            }
            _ => self.ranges.push(range),
        }
        if self.ranges.len() >= self.range_count_max {
            self.join();
            // Half of the capacity is freed, so that not each of the next ranges causes a sort.
            while self.ranges.len() > self.range_count_max / 2 {
                self.gap_bytes = (self.gap_bytes.saturating_mul(2)).max(GAP_BYTES_INITIAL);
                self.join();
            }
        }
    }

    pub(super) fn add_all(&mut self) {
        self.add(0..self.size_bytes);
    }

    pub(super) fn finish(mut self) -> ChangedRanges {
        self.join();
        ChangedRanges {
            size_bytes: self.size_bytes,
            ranges: self.ranges,
        }
    }

    /// Sorts the ranges, and merges adjacent ones.
    fn join(&mut self) {
        let gap_bytes = self.gap_bytes;
        self.ranges.sort_unstable_by_key(|range| range.start);
        self.ranges.dedup_by(|next, kept| {
            let touches = next.start <= kept.end.saturating_add(gap_bytes);
            if touches {
                kept.end = kept.end.max(next.end);
            }
            touches
        });
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::SeededRandom;
    use holdfast_block::conformance::test_seed;

    use super::Collector;

    #[test]
    fn ranges_are_sorted_merged_and_clipped() {
        let mut collector = Collector::new(100);
        for range in [90..200, 10..20, 15..17, 20..30, 5..6, 100..101, 40..40] {
            collector.add(range);
        }
        let ranges = collector.finish();
        assert_eq!(ranges.as_slice(), [5..6, 10..30, 90..100]);
        assert_eq!((ranges.bytes(), ranges.size_bytes()), (31, 100));
        let bitmap = ranges.to_bitmap(512).unwrap();
        assert_eq!(bitmap.dirty_bytes(), 100);
    }

    /// Many small ranges, in any order, are merged to few: no range is lost, and the limit is kept.
    #[test]
    fn too_many_ranges_are_merged() {
        let mut random = SeededRandom::new(test_seed());
        for _ in 0..50 {
            let size = 1 << 30;
            let mut collector = Collector::with_count_max(size, 32);
            let mut added = Vec::new();
            for _ in 0..random.below(500) {
                let start = random.below(size);
                let range = start..start + random.below(10_000);
                collector.add(range.clone());
                assert!(collector.ranges.len() < 32);
                added.push(range);
            }
            let ranges = collector.finish();
            for pair in ranges.as_slice().windows(2) {
                assert!(pair[0].end < pair[1].start);
            }
            for range in added {
                let end = range.end.min(size);
                let holds = |kept: &std::ops::Range<u64>| kept.start <= range.start && end <= kept.end;
                assert!(
                    range.is_empty() || ranges.as_slice().iter().any(holds),
                    "{range:?} is lost"
                );
            }
        }
    }
}
