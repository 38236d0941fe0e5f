//! Predicts where holes are, so that reads avoid useless queries for extents.
//!
//! A query for extents may cost nothing (a map in memory) or much more than the read: tmpfs scans every page of a file
//! for the next hole. A query therefore covers more than the read, its data extents are remembered, and after a slow
//! query there are no queries for a while. This is correct even if other clients write at the same time: reporting data
//! is always correct.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::{BlockDevice, Clock, ExtentKind};

use crate::server::export_device::Absent;

/// Length of a query beyond the start of a read.
const WINDOW_BYTES: u64 = 1 << 30;
/// Shorter holes are sent as data: a chunk takes more bytes than their zeroes.
const HOLE_BYTES_MIN: u64 = 4096;
/// Limit of extents of one query; the rest counts as data.
const EXTENT_COUNT_MAX: usize = 64;
/// A query that takes longer costs more time than it may save.
const WORTHWHILE: Duration = Duration::from_micros(100);
/// Number of reads without a query after a slow query; doubled after each further slow query.
const SILENT_READS: u32 = 16;
const SILENT_READS_MAX: u32 = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Data,
    Hole,
}

/// Knowledge of one connection about its export.
#[derive(Debug, Default)]
pub(crate) struct HoleTracker {
    state: Mutex<KnownData>,
}

#[derive(Debug, Default)]
struct KnownData {
    /// The data extent that was found last.
    data: Range<u64>,
    /// Number of remaining reads without a query.
    silent: u32,
    /// The last initial value of `silent`; 0 after a quick query.
    penalty: u32,
}

impl HoleTracker {
    /// The contents of `range`, which is not empty, in order. If the device cannot report extents, the contents are
    /// data.
    pub(super) fn contents(
        &self,
        device: &dyn BlockDevice,
        absent: Absent,
        range: Range<u64>,
        clock: &dyn Clock,
    ) -> Vec<(Content, Range<u64>)> {
        if !self.may_have_holes(&range) {
            return vec![(Content::Data, range)];
        }
        let begun = clock.now();
        let window_end = device.size_bytes().min(range.start.saturating_add(WINDOW_BYTES));
        let answer = device.extents(range.start..window_end.max(range.end), EXTENT_COUNT_MAX);
        self.record_query_time(clock.now().saturating_sub(begun));
        let mut pieces: Vec<(Content, Range<u64>)> = Vec::new();
        let mut push = |content, range: Range<u64>| match pieces.last_mut() {
            Some((last, before)) if *last == content => before.end = range.end,
            _ if range.is_empty() => {}
            _ => pieces.push((content, range)),
        };
        let mut end = range.start;
        for extent in answer.iter().flatten() {
            if end >= range.end {
                break;
            }
            let reads_as_zero = match extent.kind {
                ExtentKind::Data => false,
                ExtentKind::Zero => true,
                ExtentKind::Absent => absent == Absent::ReadsAsZero,
            };
            let inside = extent.offset..extent.end().min(range.end);
            end = inside.end;
            if reads_as_zero && inside.end - inside.start >= HOLE_BYTES_MIN {
                push(Content::Hole, inside);
            } else {
                push(Content::Data, inside);
            }
            if !reads_as_zero {
                self.lock().data = extent.offset..extent.end();
            }
        }
        push(Content::Data, end..range.end);
        pieces
    }

    fn lock(&self) -> MutexGuard<'_, KnownData> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn may_have_holes(&self, range: &Range<u64>) -> bool {
        let mut state = self.lock();
        if state.data.start <= range.start && range.end <= state.data.end {
            return false;
        }
        let is_silent = state.silent > 0;
        state.silent = state.silent.saturating_sub(1);
        !is_silent
    }

    fn record_query_time(&self, took: Duration) {
        let mut state = self.lock();
        state.penalty = if took > WORTHWHILE {
            (2 * state.penalty).clamp(SILENT_READS, SILENT_READS_MAX)
        } else {
            0
        };
        state.silent = state.penalty;
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use holdfast_block::{BlockDevice, BlockDeviceMut as _, Clock, ExtentList, ManualClock, MemoryDevice, Result};

    use super::{Content, HoleTracker};
    use crate::server::export_device::Absent;

    /// Counts queries. Each query takes some time.
    struct CountingDevice<'a> {
        device: MemoryDevice,
        questions: AtomicU32,
        clock: &'a ManualClock,
        takes: Duration,
    }

    impl BlockDevice for CountingDevice<'_> {
        fn size_bytes(&self) -> u64 {
            self.device.size_bytes()
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
            self.device.read_at(buffer, offset)
        }
        fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
            self.questions.fetch_add(1, Ordering::Relaxed);
            self.clock.sleep(self.takes);
            self.device.extents(range, extent_count_max)
        }
    }

    fn counting_device(clock: &ManualClock, takes: Duration) -> CountingDevice<'_> {
        let device = MemoryDevice::new(1 << 30);
        device.write_at(&vec![7; 4 << 20], 1 << 20).unwrap();
        CountingDevice {
            device,
            questions: AtomicU32::new(0),
            clock,
            takes,
        }
    }

    #[test]
    fn holes_are_found_and_data_is_asked_for_once() {
        let clock = ManualClock::new();
        let device = counting_device(&clock, Duration::ZERO);
        let tracker = HoleTracker::default();
        let contents = |range| tracker.contents(&device, Absent::MayHoldData, range, &clock);
        let edge = 1 << 20;
        assert_eq!(
            contents(edge - 65536..edge + 65536),
            [(Content::Hole, edge - 65536..edge), (Content::Data, edge..edge + 65536)]
        );
        for number in 0..20 {
            let range = edge + number * 4096..edge + number * 4096 + 131_072;
            assert_eq!(contents(range.clone()), [(Content::Data, range)]);
        }
        assert_eq!(device.questions.load(Ordering::Relaxed), 1);
        let hole = 500 << 20..501 << 20;
        assert_eq!(contents(hole.clone()), [(Content::Hole, hole)]);
        let sliver = 500 << 20..(500 << 20) + 100;
        assert_eq!(contents(sliver.clone()), [(Content::Data, sliver)]);
    }

    #[test]
    fn a_question_that_takes_long_is_not_repeated_for_a_while() {
        let clock = ManualClock::new();
        let device = counting_device(&clock, Duration::from_millis(14));
        let tracker = HoleTracker::default();
        let hole = 500 << 20..501 << 20;
        let found: Vec<_> = (0..1000)
            .map(|_| tracker.contents(&device, Absent::MayHoldData, hole.clone(), &clock))
            .collect();
        assert_eq!(found[0], [(Content::Hole, hole.clone())]);
        assert_eq!(found[1], [(Content::Data, hole)], "true as well, and quicker");
        assert_eq!(device.questions.load(Ordering::Relaxed), 6, "after 16, 32, 64... reads");
    }
}
