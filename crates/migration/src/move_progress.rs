//! The progress of a migration: first of all disks together, then of the memory.

use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_engine::{Bottleneck, Progress, Unit};

use crate::memory_convergence::MemoryStatus;

/// The progress of the copy of one disk, as a part of that of all disks. What is sent again is not counted.
pub(crate) struct DiskProgress<'a> {
    all: &'a dyn Progress,
    uncounted_bytes: AtomicU64,
}

impl<'a> DiskProgress<'a> {
    pub(crate) fn new(all: &'a dyn Progress, size_bytes: u64) -> Self {
        Self {
            all,
            uncounted_bytes: AtomicU64::new(size_bytes),
        }
    }
}

impl Progress for DiskProgress<'_> {
    fn phase(&self, _name: &str, _unit: Unit) {}
    fn total(&self, _total: u64) {}

    fn advance(&self, amount: u64) {
        let counted = |left: u64| Some(left.saturating_sub(amount));
        let update = self
            .uncounted_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted);
        let left = update.unwrap_or_default();
        self.all.advance(amount.min(left));
    }

    fn note(&self, message: &str) {
        self.all.note(message);
    }

    fn warning(&self, message: &str) {
        self.all.warning(message);
    }

    fn bottleneck(&self, bottleneck: Bottleneck) {
        self.all.bottleneck(bottleneck);
    }
}

/// The progress of the memory.
pub(crate) struct MemoryProgress {
    done_bytes: u64,
}

impl MemoryProgress {
    pub(crate) fn begin(progress: &dyn Progress) -> Self {
        progress.phase("sending the memory", Unit::Bytes);
        Self { done_bytes: 0 }
    }

    /// What the guest has written again does not take progress back.
    pub(crate) fn update(&mut self, status: &MemoryStatus, progress: &dyn Progress) {
        progress.total(status.total_bytes);
        let done = status.total_bytes.saturating_sub(status.remaining_bytes);
        progress.advance(done.saturating_sub(self.done_bytes));
        self.done_bytes = self.done_bytes.max(done);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use holdfast_engine::{Bottleneck, Progress, Unit};

    use super::DiskProgress;

    #[derive(Default)]
    struct Counted(AtomicU64);

    impl Progress for Counted {
        fn phase(&self, _name: &str, _unit: Unit) {}
        fn total(&self, _total: u64) {}
        fn advance(&self, amount: u64) {
            self.0.fetch_add(amount, Ordering::Relaxed);
        }
        fn note(&self, _message: &str) {}
        fn warning(&self, _message: &str) {}
        fn bottleneck(&self, _bottleneck: Bottleneck) {}
    }

    #[test]
    fn disks_are_counted_once() {
        let all = Counted::default();
        let disks = [DiskProgress::new(&all, 10), DiskProgress::new(&all, 20)];
        for amount in [4, 4, 4, 4] {
            disks[0].advance(amount);
        }
        disks[1].advance(5);
        assert_eq!(all.0.load(Ordering::Relaxed), 15);
    }
}
