//! The disk of a container with counters of its requests.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, Result};
use holdfast_image::LiveChain;

use super::control::ControlResult;

/// A [`LiveChain`] that counts its requests.
pub(super) struct CountedDisk {
    chain: LiveChain,
    reads: Counter,
    writes: Counter,
    flush_count: AtomicU64,
}

#[derive(Default)]
struct Counter {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    fn add(&self, bytes: usize) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl CountedDisk {
    pub(super) fn new(chain: LiveChain) -> Self {
        Self {
            chain,
            reads: Counter::default(),
            writes: Counter::default(),
            flush_count: AtomicU64::new(0),
        }
    }

    pub(super) fn chain(&self) -> &LiveChain {
        &self.chain
    }

    pub(super) fn status(&self) -> ControlResult {
        let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ControlResult::Status {
            read_count: number(&self.reads.count),
            read_bytes: number(&self.reads.bytes),
            write_count: number(&self.writes.count),
            write_bytes: number(&self.writes.bytes),
            flush_count: number(&self.flush_count),
        }
    }
}

impl BlockDevice for CountedDisk {
    fn size_bytes(&self) -> u64 {
        self.chain.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.reads.add(buffer.len());
        self.chain.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.chain.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.chain.block_size_bytes()
    }
}

impl BlockDeviceMut for CountedDisk {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.writes.add(data.len());
        self.chain.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.writes.add(0);
        self.chain.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.chain.trim(range)
    }

    fn flush(&self) -> Result<()> {
        self.flush_count.fetch_add(1, Ordering::Relaxed);
        self.chain.flush()
    }
}
