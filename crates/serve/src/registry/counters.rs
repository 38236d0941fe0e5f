//! Counters of an export: requests to its device, and errors.

use std::sync::atomic::{AtomicU64, Ordering};

/// Requests to the device of an export since it was added. A rate is the difference of two samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Completed reads.
    pub read_count: u64,
    /// Bytes of these reads.
    pub read_bytes: u64,
    /// Completed writes, also of zeroes.
    pub write_count: u64,
    /// Bytes of these writes.
    pub write_bytes: u64,
    /// Completed flushes.
    pub flush_count: u64,
    /// Completed requests to discard a range.
    pub discard_count: u64,
    /// Bytes of these ranges.
    pub discard_bytes: u64,
    /// Requests that the device failed.
    pub error_count: u64,
}

/// The use of the cache of a device since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheUse {
    /// Look-ups that found their data.
    pub hit_count: u64,
    /// Look-ups that had to read and decode it.
    pub miss_count: u64,
}

/// A request to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counted {
    Read,
    Write,
    Flush,
    Discard,
    /// Of a kind that is not counted unless it fails.
    Query,
}

/// Counts completed requests of one kind.
#[derive(Debug, Default)]
struct Count {
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl Count {
    // Relaxed: independent counters; a sample may be a moment old.
    fn add(&self, bytes: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    reads: Count,
    writes: Count,
    flushes: Count,
    discards: Count,
    errors: AtomicU64,
}

impl Counters {
    pub(super) fn completed(&self, kind: Counted, bytes: u64) {
        match kind {
            Counted::Read => self.reads.add(bytes),
            Counted::Write => self.writes.add(bytes),
            Counted::Flush => self.flushes.add(bytes),
            Counted::Discard => self.discards.add(bytes),
            Counted::Query => {}
        }
    }

    pub(super) fn failed(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn sample(&self) -> Traffic {
        Traffic {
            read_count: self.reads.requests(),
            read_bytes: self.reads.bytes(),
            write_count: self.writes.requests(),
            write_bytes: self.writes.bytes(),
            flush_count: self.flushes.requests(),
            discard_count: self.discards.requests(),
            discard_bytes: self.discards.bytes(),
            error_count: self.errors.load(Ordering::Relaxed),
        }
    }
}
