//! Chooses the thread that executes a request: the receiving thread, or a worker.
//!
//! Passing a request to another thread takes longer than a read from memory. But while the receiving thread is busy,
//! its connection makes no progress. A device does not announce which read will be slow, so the time is measured:
//! requests of one class go to workers until enough of them in a row were quick; then the receiving thread executes
//! them until some are slow again. One slow read may delay its own connection; the next one does not.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The maximum time of a quick request is this, plus [`NANOSECONDS_PER_BYTE`].
const QUICK: Duration = Duration::from_micros(250);
/// Corresponds to 256 MiB/s: memory is ten times faster; slower storage justifies another thread.
const NANOSECONDS_PER_BYTE: u64 = 4;
/// A single request that exceeds the maximum by this factor is conclusive; a smaller delay may be due to load.
const CONCLUSIVE: u32 = 20;

/// If the counter is above this, requests go to workers. Each quick request subtracts 1.
const TOLERATED: u32 = 32;
const SUSPICION_PER_SLOW: u32 = 32;
const SUSPICION_MAX: u32 = 96;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dispatch {
    Inline,
    Worker,
}

/// A class of requests that take a similar time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkClass {
    Read,
    Write,
    /// Requests that must reach the storage medium.
    Durable,
    Other,
}

/// A request to be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) class: WorkClass,
    /// Bytes that the request transfers.
    pub(crate) bytes: u64,
}

/// Measurements of one connection's device, per class of requests.
#[derive(Debug)]
pub(crate) struct DispatchPolicy {
    reads: AtomicU32,
    writes: AtomicU32,
    /// Requests that must reach the storage medium.
    durable: AtomicU32,
    others: AtomicU32,
}

impl DispatchPolicy {
    pub(crate) fn new() -> Self {
        let suspicious = || AtomicU32::new(TOLERATED + SUSPICION_PER_SLOW);
        Self {
            reads: suspicious(),
            writes: suspicious(),
            durable: suspicious(),
            others: suspicious(),
        }
    }

    fn counter(&self, class: WorkClass) -> &AtomicU32 {
        match class {
            WorkClass::Read => &self.reads,
            WorkClass::Write => &self.writes,
            WorkClass::Durable => &self.durable,
            WorkClass::Other => &self.others,
        }
    }

    pub(crate) fn choose(&self, class: WorkClass) -> Dispatch {
        // Relaxed: an independent counter.
        if self.counter(class).load(Ordering::Relaxed) > TOLERATED {
            Dispatch::Worker
        } else {
            Dispatch::Inline
        }
    }

    /// Records how long a request took.
    pub(crate) fn record(&self, work: Work, took: Duration) {
        let quick = QUICK + Duration::from_nanos(work.bytes.saturating_mul(NANOSECONDS_PER_BYTE));
        let counter = self.counter(work.class);
        let before = counter.load(Ordering::Relaxed);
        let after = if took <= quick {
            before.saturating_sub(1)
        } else if took > quick * CONCLUSIVE {
            SUSPICION_MAX
        } else {
            (before + SUSPICION_PER_SLOW).min(SUSPICION_MAX)
        };
        if after != before {
            counter.store(after, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Dispatch, DispatchPolicy, Work, WorkClass};

    const READ: Work = Work {
        class: WorkClass::Read,
        bytes: 4096,
    };
    const QUICK: Duration = Duration::from_micros(20);

    #[test]
    fn quick_requests_are_carried_out_on_the_spot_after_they_proved_it() {
        let policy = DispatchPolicy::new();
        for _ in 0..32 {
            assert_eq!(policy.choose(READ.class), Dispatch::Worker);
            policy.record(READ, QUICK);
        }
        assert_eq!(policy.choose(READ.class), Dispatch::Inline);
        for other in [WorkClass::Write, WorkClass::Durable, WorkClass::Other] {
            assert_eq!(policy.choose(other), Dispatch::Worker, "{other:?} proved nothing");
        }
    }

    #[test]
    fn one_hiccup_is_tolerated_two_are_not_and_a_blatant_one_is_not() {
        let proven = || {
            let policy = DispatchPolicy::new();
            (0..64).for_each(|_| policy.record(READ, QUICK));
            policy
        };
        let policy = proven();
        policy.record(READ, Duration::from_millis(1));
        assert_eq!(policy.choose(READ.class), Dispatch::Inline);
        policy.record(READ, Duration::from_millis(1));
        assert_eq!(policy.choose(READ.class), Dispatch::Worker);
        let policy = proven();
        policy.record(READ, Duration::from_millis(10));
        assert_eq!(policy.choose(READ.class), Dispatch::Worker);
        let large = Work { bytes: 1 << 20, ..READ };
        let policy = proven();
        (0..9).for_each(|_| policy.record(large, Duration::from_millis(3)));
        assert_eq!(
            policy.choose(READ.class),
            Dispatch::Inline,
            "a large request may take longer"
        );
    }
}
