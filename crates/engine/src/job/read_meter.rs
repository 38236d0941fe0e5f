//! Measures how a job reads: how many bytes, and whether the source shrinks meanwhile.

use std::io::Read;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_block::{BlockDevice, Error as DeviceError, ExtentKind, ExtentList, to_usize};

use super::bottleneck::Stages;
use super::interrupt::{Interrupt, Interrupted};
use crate::Progress;

/// Measurements of the reads of one disk.
#[derive(Debug)]
pub(crate) struct Meter {
    bytes: AtomicU64,
    /// Smallest size seen if the source became smaller; otherwise `u64::MAX`.
    end: AtomicU64,
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self {
            bytes: AtomicU64::new(0),
            end: AtomicU64::new(u64::MAX),
        }
    }

    /// Remaining bytes of the source, if it has shrunk.
    pub(crate) fn shrunk_to(&self) -> Option<u64> {
        Some(self.end.load(Ordering::Relaxed)).filter(|end| *end != u64::MAX)
    }

    fn count(&self, bytes: u64, progress: &dyn Progress) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        progress.advance(bytes);
    }
}

/// A disk whose reads are measured.
///
/// If the disk shrinks while it is read, the missing part reads as zero: the rest is saved, and the copy is marked.
pub(crate) struct MeteredDevice<'a> {
    pub(crate) inner: &'a dyn BlockDevice,
    pub(crate) meter: &'a Meter,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) stages: &'a Stages<'a>,
}

impl BlockDevice for MeteredDevice<'_> {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        let mut end = None;
        let mut result = self.stages.read(|| self.inner.read_at(buffer, offset));
        // The disk may shrink again while the rest is read.
        while let Err(DeviceError::Shrunk { actual_size_bytes, .. }) = result {
            let left = to_usize(actual_size_bytes.saturating_sub(offset).min(buffer.len() as u64));
            if end.is_some_and(|end| actual_size_bytes >= end) {
                return result;
            }
            end = Some(actual_size_bytes);
            buffer[left..].fill(0);
            result = match left {
                0 => Ok(()),
                _ => self.inner.read_at(&mut buffer[..left], offset),
            };
        }
        if let Some(end) = end {
            self.meter.end.fetch_min(end, Ordering::Relaxed);
        }
        self.meter.count(buffer.len() as u64, self.progress);
        result
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        let mut end = range.end;
        loop {
            match self.inner.extents(range.start..end, extent_count_max) {
                Err(DeviceError::Shrunk { actual_size_bytes, .. }) if actual_size_bytes < end => {
                    self.meter.end.fetch_min(actual_size_bytes, Ordering::Relaxed);
                    if actual_size_bytes <= range.start {
                        let mut list = ExtentList::new(range.start, extent_count_max);
                        list.push(range.end - range.start, ExtentKind::Zero);
                        return Ok(list);
                    }
                    end = actual_size_bytes;
                }
                other => return other,
            }
        }
    }

    fn block_size_bytes(&self) -> u32 {
        self.inner.block_size_bytes()
    }
}

/// A stream whose reads are measured.
pub(crate) struct MeteredStream<'a> {
    pub(crate) inner: &'a mut dyn Read,
    pub(crate) meter: &'a Meter,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) stages: &'a Stages<'a>,
    pub(crate) interrupt: &'a Interrupt,
}

impl Read for MeteredStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let inner = &mut self.inner;
        let count = self.stages.read_stream(|| inner.read(buffer))?;
        // Ctrl-C also stops the writer of a pipe: this end of the stream is not the end of the data to back up.
        if count == 0 && self.interrupt.is_requested() {
            return Err(std::io::Error::other(Interrupted));
        }
        self.meter.count(count as u64, self.progress);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicU64, Ordering};

    use holdfast_block::{BlockDevice, Error, ExtentKind, ExtentList, ManualClock, MemoryDevice};

    use super::{Meter, MeteredDevice};
    use crate::NoProgress;
    use crate::job::bottleneck::Stages;

    /// A disk that loses 1000 bytes at its end with each failed read.
    struct Shrinking {
        inner: MemoryDevice,
        size_bytes: AtomicU64,
        smallest: u64,
    }

    impl BlockDevice for Shrinking {
        fn size_bytes(&self) -> u64 {
            self.inner.size_bytes()
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
            let actual_size_bytes = self.size_bytes.load(Ordering::Relaxed);
            if offset + buffer.len() as u64 > actual_size_bytes {
                let next = (actual_size_bytes - 1000).max(self.smallest);
                self.size_bytes.store(next, Ordering::Relaxed);
                return Err(Error::Shrunk {
                    offset,
                    size_bytes: self.size_bytes(),
                    actual_size_bytes,
                });
            }
            self.inner.read_at(buffer, offset)
        }
        fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
            let actual_size_bytes = self.size_bytes.load(Ordering::Relaxed);
            if range.end > actual_size_bytes {
                return Err(Error::Shrunk {
                    offset: actual_size_bytes,
                    size_bytes: self.size_bytes(),
                    actual_size_bytes,
                });
            }
            self.inner.extents(range, extent_count_max)
        }
    }

    #[test]
    fn what_is_left_of_a_disk_that_shrinks_is_read_and_the_rest_is_zero() {
        let bytes = vec![7; 10_000];
        let disk = Shrinking {
            inner: MemoryDevice::from_bytes(&bytes),
            size_bytes: AtomicU64::new(9000),
            smallest: 6000,
        };
        let meter = Meter::new();
        let clock = ManualClock::new();
        let stages = Stages::new(&clock, &NoProgress);
        let metered = MeteredDevice {
            inner: &disk,
            meter: &meter,
            progress: &NoProgress,
            stages: &stages,
        };
        let mut first = vec![1; 5000];
        metered.read_at(&mut first, 0).unwrap();
        assert_eq!((first, meter.shrunk_to()), (vec![7; 5000], None));
        let mut second = vec![1; 5000];
        metered.read_at(&mut second, 5000).unwrap();
        assert_eq!(meter.shrunk_to(), Some(6000));
        assert_eq!(second[..1000], [7; 1000]);
        assert!(second[1000..].iter().all(|byte| *byte == 0));
        let mut gone = vec![1; 100];
        metered.read_at(&mut gone, 8000).unwrap();
        assert_eq!(gone, vec![0; 100]);
        assert_eq!(metered.extents(1000..10_000, 9).unwrap().end(), 6000);
        let rest = metered.extents(6000..10_000, 9).unwrap();
        assert_eq!((rest.end(), rest.as_slice()[0].kind), (10_000, ExtentKind::Zero));
    }
}
