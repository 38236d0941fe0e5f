//! Makes a disk equal to another one by writing only the differences.
//!
//! Ranges without data on both disks are not read, nor are ranges that a bitmap reports as equal.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_block::{BlockDevice, BlockDeviceMut, DirtyBitmap, EitherData, to_usize};
use holdfast_repo::TargetState;

use super::compare::{BLOCK_BYTES, WINDOW_BYTES, WINDOWS_PER_BATCH, Windows};
use crate::job::{Job, Result};

/// A disk that is made equal to another one.
pub(crate) struct Differences<'a> {
    /// The wanted content.
    pub(crate) from: &'a dyn BlockDevice,
    /// The disk to change; at least as large.
    pub(crate) onto: &'a dyn BlockDeviceMut,
    /// Its content before.
    pub(crate) state: TargetState,
    /// Ranges in which the two may differ, if known.
    pub(crate) places: Option<&'a DirtyBitmap>,
}

/// Result, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) written_bytes: u64,
    /// Zero bytes among the written ones.
    pub(crate) zero_bytes: u64,
}

#[derive(Default)]
struct Counters {
    written: AtomicU64,
    zero: AtomicU64,
}

impl Differences<'_> {
    /// Writes the differences; everything is durable when this returns.
    pub(crate) fn write(&self, job: Job<'_>) -> Result<Written> {
        let size_bytes = self.from.size_bytes();
        let counters = Counters::default();
        let mut windows = Windows::new(EitherData::new(self.from, self.onto as &dyn BlockDevice));
        let mut at = 0;
        loop {
            job.interrupt.check()?;
            let batch = match self.places {
                Some(places) => marked(places, at, size_bytes),
                None => windows.next_batch()?,
            };
            let Some(last) = batch.last() else { break };
            self.write_batch(&batch, &counters, job)?;
            job.progress.advance(last.end - at);
            at = last.end;
        }
        job.progress.advance(size_bytes - at);
        self.onto.flush()?;
        Ok(Written {
            written_bytes: counters.written.into_inner(),
            zero_bytes: counters.zero.into_inner(),
        })
    }

    fn write_batch(&self, batch: &[Range<u64>], counters: &Counters, job: Job<'_>) -> Result<()> {
        job.share(batch, |next| {
            let (mut wanted, mut present) = (Vec::new(), Vec::new());
            while let Some(range) = next()? {
                let length = to_usize(range.end - range.start);
                wanted.resize(length, 0);
                present.resize(length, 0);
                self.from.read_at(&mut wanted, range.start)?;
                if self.state == TargetState::Zeroed {
                    present.fill(0);
                } else {
                    self.onto.read_at(&mut present, range.start)?;
                }
                self.write_window(range.start, &wanted, &present, counters)?;
            }
            Ok(())
        })
    }

    /// Writes runs of blocks that differ, zero blocks separately from others.
    fn write_window(&self, start: u64, wanted: &[u8], present: &[u8], counters: &Counters) -> Result<()> {
        let block = to_usize(BLOCK_BYTES);
        let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
        let mut at = 0;
        for (wanted, present) in wanted.chunks(block).zip(present.chunks(block)) {
            let end = at + wanted.len();
            if wanted != present {
                let is_zero = wanted.iter().all(|byte| *byte == 0);
                match runs.last_mut() {
                    Some((run, zero)) if run.end == at && *zero == is_zero => run.end = end,
                    _ => runs.push((at..end, is_zero)),
                }
            }
            at = end;
        }
        for (run, is_zero) in runs {
            let (from, length) = (start + run.start as u64, run.len() as u64);
            if is_zero {
                self.onto.write_zeroes(from..from + length)?;
                counters.zero.fetch_add(length, Ordering::Relaxed);
            } else {
                self.onto.write_at(&wanted[run], from)?;
            }
            counters.written.fetch_add(length, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The next marked windows, from offset `at` on.
fn marked(places: &DirtyBitmap, mut at: u64, size_bytes: u64) -> Vec<Range<u64>> {
    let mut batch = Vec::new();
    while batch.len() < WINDOWS_PER_BATCH {
        let Some(range) = places.next_dirty(at).filter(|range| range.start < size_bytes) else {
            break;
        };
        let border = (range.start / WINDOW_BYTES + 1) * WINDOW_BYTES;
        at = range.end.min(border).min(size_bytes);
        batch.push(range.start..at);
    }
    batch
}

#[cfg(test)]
mod tests {
    use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, DirtyBitmap, MemoryDevice, SystemClock};
    use holdfast_repo::TargetState;

    use super::{Differences, Written};
    use crate::job::{Interrupt, Job, NoProgress};

    const SIZE: usize = (3 << 20) + 512;

    fn become_like(wanted: &[u8], present: &[u8], places: Option<&DirtyBitmap>) -> (Vec<u8>, Written) {
        let device = |bytes: &[u8]| {
            let device = MemoryDevice::new(bytes.len() as u64);
            device.write_at(bytes, 0).unwrap();
            device
        };
        let (from, onto) = (device(wanted), device(present));
        let differences = Differences {
            from: &from,
            onto: &onto,
            state: TargetState::Similar,
            places,
        };
        let job = Job {
            progress: &NoProgress,
            interrupt: &Interrupt::new(),
            clock: &SystemClock::new(),
            thread_count: 3,
        };
        let written = differences.write(job).unwrap();
        let mut bytes = vec![0; present.len()];
        onto.read_at(&mut bytes, 0).unwrap();
        (bytes, written)
    }

    #[test]
    fn only_blocks_that_differ_are_written() {
        let mut wanted = vec![0; SIZE];
        wanted[0..4096].fill(1);
        wanted[1_000_000..1_100_000].fill(2);
        wanted[SIZE - 1] = 3;
        let mut present = wanted.clone();
        assert_eq!(become_like(&wanted, &present, None).1, Written::default());
        present[4096] = 9;
        present[1_050_000] = 9;
        present[SIZE - 1] = 9;
        let (bytes, written) = become_like(&wanted, &present, None);
        assert!(bytes == wanted);
        assert_eq!((written.written_bytes, written.zero_bytes), (4096 + 4096 + 512, 4096));
        // The part behind the end of the wanted content is not changed.
        present.resize(SIZE + 4096, 7);
        let (bytes, _) = become_like(&wanted, &present, None);
        assert!(bytes[..SIZE] == wanted[..] && bytes[SIZE..].iter().all(|byte| *byte == 7));
    }

    #[test]
    fn where_a_bitmap_says_that_nothing_differs_nothing_is_read() {
        let wanted = vec![1; SIZE];
        let present = vec![2; SIZE];
        let mut places = DirtyBitmap::new(SIZE as u64, 4096).unwrap();
        places.set(8192..12_288);
        places.set(2 << 20..SIZE as u64);
        let (bytes, written) = become_like(&wanted, &present, Some(&places));
        let marked = 4096 + (SIZE as u64 - (2 << 20));
        assert_eq!(written.written_bytes, marked);
        let mut expected = present;
        expected[8192..12_288].fill(1);
        expected[2 << 20..].fill(1);
        assert!(bytes == expected);
    }
}
