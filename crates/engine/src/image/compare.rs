//! Compares two disks, and reports the differences.
//!
//! Ranges without data on both disks are not read. Workers compare windows; after each batch the results are merged in
//! order, so that memory does not grow with the size of the disks.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::{BlockDevice, EitherData, ExtentKind, to_usize};

use crate::job::{Job, Result, Unit};

/// Bytes that a worker compares in one step.
pub(crate) const WINDOW_BYTES: u64 = 1 << 20;
/// Windows between two checks for an interruption.
pub(crate) const WINDOWS_PER_BATCH: usize = 64;
/// Differences are reported in blocks of this size.
pub(crate) const BLOCK_BYTES: u64 = 4096;
const EXTENT_COUNT_MAX: usize = 256;
/// Most ranges that are reported; further ranges are only counted.
pub const DIFFERENT_RANGE_COUNT_MAX: usize = 1000;

/// Differences between two disks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CompareReport {
    /// Sizes of both disks; the missing part of the shorter one counts as zero.
    pub size_bytes: [u64; 2],
    /// Offset of the first byte that differs.
    pub first_difference: Option<u64>,
    /// Bytes that differ.
    pub different_bytes: u64,
    /// Number of ranges of whole blocks with differences.
    pub different_range_count: u64,
    /// The first of them, at most [`DIFFERENT_RANGE_COUNT_MAX`].
    pub different_ranges: Vec<Range<u64>>,
    /// Bytes read from each disk; the rest is known to be zero in both.
    pub compared_bytes: u64,
    /// How long it took.
    pub duration: Duration,
}

impl CompareReport {
    /// Whether both disks hold the same bytes; additional bytes of the larger disk must be zero.
    pub fn is_equal(&self) -> bool {
        self.first_difference.is_none()
    }

    fn add(&mut self, window: &Window) {
        self.compared_bytes += window.range.end - window.range.start;
        self.different_bytes += window.different_bytes;
        self.first_difference = self.first_difference.or(window.first_difference);
        for range in &window.blocks {
            if self.different_ranges.last().is_some_and(|last| last.end == range.start)
                && self.different_range_count == self.different_ranges.len() as u64
            {
                self.different_ranges.last_mut().expect("just looked at").end = range.end;
                continue;
            }
            self.different_range_count += 1;
            if self.different_ranges.len() < DIFFERENT_RANGE_COUNT_MAX {
                self.different_ranges.push(range.clone());
            }
        }
    }
}

/// Compares two disks byte by byte.
pub fn compare(first: &dyn BlockDevice, second: &dyn BlockDevice, job: Job<'_>) -> Result<CompareReport> {
    let start = job.clock.now();
    let size_bytes = [first.size_bytes(), second.size_bytes()];
    let (long, short) = if size_bytes[0] >= size_bytes[1] {
        (first, second)
    } else {
        (second, first)
    };
    job.progress.phase("comparing", Unit::Bytes);
    job.progress.total(long.size_bytes());
    let mut report = CompareReport {
        size_bytes,
        ..CompareReport::default()
    };
    let mut windows = Windows::new(EitherData::new(long, short));
    loop {
        job.interrupt.check()?;
        let before = windows.at;
        let batch = windows.next_batch()?;
        if batch.is_empty() {
            job.progress.advance(windows.at - before);
            break;
        }
        for window in compare_batch(long, short, &batch, job)? {
            report.add(&window);
        }
        job.progress.advance(windows.at - before);
    }
    report.duration = job.clock.now().saturating_sub(start);
    Ok(report)
}

/// Iterates over the windows in which one of the disks has data.
pub(crate) struct Windows<'a> {
    either: EitherData<'a>,
    at: u64,
    data_end: u64,
}

impl<'a> Windows<'a> {
    pub(crate) fn new(either: EitherData<'a>) -> Self {
        Self {
            either,
            at: 0,
            data_end: 0,
        }
    }

    pub(crate) fn next_batch(&mut self) -> Result<Vec<Range<u64>>> {
        let size_bytes = self.either.size_bytes();
        let mut batch = Vec::new();
        while batch.len() < WINDOWS_PER_BATCH && self.at < size_bytes {
            if self.at < self.data_end {
                let border = (self.at / WINDOW_BYTES + 1) * WINDOW_BYTES;
                let window = self.at..border.min(self.data_end);
                self.at = window.end;
                batch.push(window);
                continue;
            }
            let list = self.either.extents(self.at..size_bytes, EXTENT_COUNT_MAX)?;
            match list.iter().find(|extent| extent.kind == ExtentKind::Data) {
                // Whole blocks are reported, so whole blocks are compared.
                Some(data) => {
                    self.at = self.at.max(data.offset / BLOCK_BYTES * BLOCK_BYTES);
                    self.data_end = data.end().next_multiple_of(BLOCK_BYTES).min(size_bytes);
                }
                None => self.at = list.end(),
            }
        }
        Ok(batch)
    }
}

/// Differences in one window.
struct Window {
    range: Range<u64>,
    first_difference: Option<u64>,
    different_bytes: u64,
    blocks: Vec<Range<u64>>,
}

fn compare_batch(
    long: &dyn BlockDevice,
    short: &dyn BlockDevice,
    batch: &[Range<u64>],
    job: Job<'_>,
) -> Result<Vec<Window>> {
    let done = Mutex::new(Vec::with_capacity(batch.len()));
    job.share(batch, |next| {
        let (mut one, mut two) = (Vec::new(), Vec::new());
        while let Some(range) = next()? {
            read_padded(long, range, &mut one)?;
            read_padded(short, range, &mut two)?;
            let window = compare_window(range, &one, &two);
            done.lock().unwrap_or_else(PoisonError::into_inner).push(window);
        }
        Ok(())
    })?;
    let mut windows = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    windows.sort_unstable_by_key(|window| window.range.start);
    Ok(windows)
}

/// The bytes of `range`; zero behind the end of the device.
fn read_padded(device: &dyn BlockDevice, range: &Range<u64>, buffer: &mut Vec<u8>) -> Result<()> {
    buffer.resize(to_usize(range.end - range.start), 0);
    let held = to_usize(device.size_bytes().clamp(range.start, range.end) - range.start);
    buffer[held..].fill(0);
    if held > 0 {
        device.read_at(&mut buffer[..held], range.start)?;
    }
    Ok(())
}

fn compare_window(range: &Range<u64>, one: &[u8], two: &[u8]) -> Window {
    let mut window = Window {
        range: range.clone(),
        first_difference: None,
        different_bytes: 0,
        blocks: Vec::new(),
    };
    if one == two {
        return window;
    }
    let block = to_usize(BLOCK_BYTES);
    let mut at = range.start;
    for (one, two) in one.chunks(block).zip(two.chunks(block)) {
        let end = at + one.len() as u64;
        if one != two {
            let differs = |pair: &(usize, (&u8, &u8))| pair.1.0 != pair.1.1;
            let mut different = one.iter().zip(two).enumerate().filter(differs);
            let first = different.next().map(|(index, _)| at + index as u64);
            window.first_difference = window.first_difference.or(first);
            window.different_bytes += 1 + different.count() as u64;
            match window.blocks.last_mut() {
                Some(last) if last.end == at => last.end = end,
                _ => window.blocks.push(at..end),
            }
        }
        at = end;
    }
    window
}

#[cfg(test)]
mod tests {
    use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, MemoryDevice, SystemClock};

    use super::{BLOCK_BYTES, CompareReport, DIFFERENT_RANGE_COUNT_MAX, WINDOW_BYTES, compare};
    use crate::job::{Error, Interrupt, Job, NoProgress};

    fn compared(one: &MemoryDevice, two: &MemoryDevice, interrupt: &Interrupt) -> crate::Result<CompareReport> {
        let job = Job {
            progress: &NoProgress,
            interrupt,
            clock: &SystemClock::new(),
            thread_count: 3,
        };
        compare(one, two, job)
    }

    fn report(one: &MemoryDevice, two: &MemoryDevice) -> CompareReport {
        compared(one, two, &Interrupt::new()).unwrap()
    }

    #[test]
    fn every_difference_is_counted_wherever_it_is() {
        let size = 200 * WINDOW_BYTES + 777;
        let (one, two) = (MemoryDevice::new(size), MemoryDevice::new(size));
        for disk in [&one, &two] {
            disk.write_at(b"equal", 5 * WINDOW_BYTES).unwrap();
        }
        assert!(report(&one, &two).is_equal());
        // Both sides of a border between windows, and the last byte.
        one.write_at(&[7; 2], 100 * WINDOW_BYTES - 1).unwrap();
        two.write_at(&[9], size - 1).unwrap();
        let found = report(&one, &two);
        assert_eq!(found.first_difference, Some(100 * WINDOW_BYTES - 1));
        assert_eq!(found.different_bytes, 3);
        assert_eq!(
            found.different_ranges,
            [
                100 * WINDOW_BYTES - BLOCK_BYTES..100 * WINDOW_BYTES + BLOCK_BYTES,
                200 * WINDOW_BYTES..size
            ]
        );
        assert_eq!(found.different_range_count, 2);
        assert!(found.compared_bytes < 8 * WINDOW_BYTES, "common zeroes are not read");
    }

    #[test]
    fn a_longer_disk_is_equal_if_the_rest_is_zero() {
        let (long, short) = (MemoryDevice::new(3 * WINDOW_BYTES), MemoryDevice::new(WINDOW_BYTES + 5));
        assert!(report(&long, &short).is_equal());
        assert!(report(&short, &long).is_equal());
        long.write_at(&[1], 2 * WINDOW_BYTES).unwrap();
        for found in [report(&long, &short), report(&short, &long)] {
            assert_eq!(found.first_difference, Some(2 * WINDOW_BYTES));
        }
    }

    #[test]
    fn ranges_are_counted_beyond_those_that_are_kept() {
        let count = 2 * DIFFERENT_RANGE_COUNT_MAX as u64;
        let size = 2 * BLOCK_BYTES * count;
        let (one, two) = (MemoryDevice::new(size), MemoryDevice::new(size));
        for number in 0..count {
            one.write_at(&[1], 2 * BLOCK_BYTES * number).unwrap();
        }
        let found = report(&one, &two);
        assert_eq!(found.different_range_count, count);
        assert_eq!(found.different_ranges.len(), DIFFERENT_RANGE_COUNT_MAX);
        assert_eq!(found.different_bytes, count);
    }

    #[test]
    fn an_interrupt_stops_it() {
        let disk = MemoryDevice::new(WINDOW_BYTES);
        disk.write_at(&[1], 0).unwrap();
        let interrupt = Interrupt::new();
        interrupt.request();
        let stopped = compared(&disk, &disk, &interrupt);
        assert!(matches!(stopped, Err(Error::Interrupted(_))));
        assert_eq!(disk.size_bytes(), WINDOW_BYTES);
    }
}
