//! Tracks which bytes of a read have arrived.

use std::ops::Range;

/// Limit of disjoint pieces of one reply. Servers usually send in order, which needs one piece.
const PIECE_COUNT_MAX: usize = 1024;

/// A set of bytes without overlaps.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    /// In order; adjacent pieces never touch.
    pieces: Vec<Range<u64>>,
}

/// Why a range was not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CoverageError {
    /// A part of the range was added before.
    Overlap,
    /// There are too many pieces.
    Fragmented,
}

impl Coverage {
    /// Adds `range`, which is not empty.
    pub(super) fn add(&mut self, range: Range<u64>) -> Result<(), CoverageError> {
        let at = self.pieces.partition_point(|piece| piece.end < range.start);
        // The first piece that ends at or after the start of the range: it touches the range from the left, overlaps
        // it, or lies after it.
        let touches_left = self.pieces.get(at).is_some_and(|piece| piece.end == range.start);
        let behind = at + usize::from(touches_left);
        let next = self.pieces.get(behind);
        if next.is_some_and(|piece| piece.start < range.end) {
            return Err(CoverageError::Overlap);
        }
        let touches_right = next.is_some_and(|piece| piece.start == range.end);
        match (touches_left, touches_right) {
            (true, true) => {
                self.pieces[at].end = self.pieces[behind].end;
                self.pieces.remove(behind);
            }
            (true, false) => self.pieces[at].end = range.end,
            (false, true) => self.pieces[behind].start = range.start,
            (false, false) if self.pieces.len() == PIECE_COUNT_MAX => return Err(CoverageError::Fragmented),
            (false, false) => self.pieces.insert(at, range),
        }
        Ok(())
    }

    /// The number of bytes.
    pub(super) fn length(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.end - piece.start).sum()
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::SeededRandom;
    use holdfast_block::conformance::test_seed;

    use super::{Coverage, CoverageError, PIECE_COUNT_MAX};

    /// Compares random ranges with a vector of one bool per byte.
    #[test]
    fn behaves_like_a_vector_of_bools() {
        let mut random = SeededRandom::new(test_seed());
        for _ in 0..200 {
            let mut coverage = Coverage::default();
            let mut model = [false; 64];
            for _ in 0..60 {
                let range = random.range_within(64, 6);
                if range.is_empty() {
                    continue;
                }
                let part = &mut model[holdfast_block::to_usize(range.start)..holdfast_block::to_usize(range.end)];
                if part.contains(&true) {
                    assert_eq!(coverage.add(range), Err(CoverageError::Overlap));
                } else {
                    part.fill(true);
                    assert_eq!(coverage.add(range), Ok(()));
                }
                let count = model.iter().filter(|covered| **covered).count() as u64;
                assert_eq!(coverage.length(), count);
                assert!(coverage.pieces.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }
    }

    #[test]
    fn a_reply_of_crumbs_is_refused() {
        let mut coverage = Coverage::default();
        for number in 0..PIECE_COUNT_MAX as u64 {
            coverage.add(number * 2..number * 2 + 1).unwrap();
        }
        assert_eq!(coverage.add(1 << 20..1 << 21), Err(CoverageError::Fragmented));
        coverage.add(1..2).unwrap();
        coverage.add(1 << 20..1 << 21).unwrap();
    }
}
