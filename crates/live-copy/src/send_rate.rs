//! A limit on what the streams of a job send together. It does not apply while what is copied is frozen: the guest waits.

use std::num::NonZeroU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::{Clock, Throttle, ThrottleLimits};

/// Unused time that may be used later, in milliseconds.
const BURST_MS: u32 = 50;
/// Interval of asking whether a wait is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes that are sent at once under a limit.
const PIECE_BYTES: usize = 16 << 10;

/// The rate at which streams may send, together.
pub struct SendRate {
    clock: Arc<dyn Clock>,
    /// None without a limit.
    throttle: Option<Throttle>,
    /// Number of reasons not to apply the limit now.
    lift_count: Mutex<u64>,
    is_lifted: Condvar,
}

impl SendRate {
    /// At most this many bytes per second; without a limit if that is none.
    pub fn at_most(bytes_per_s: Option<NonZeroU64>, clock: Arc<dyn Clock>) -> Self {
        let throttle = bytes_per_s.map(|_| {
            let throttle = Throttle::default();
            let limits = ThrottleLimits {
                bytes_per_second: bytes_per_s,
                operations_per_second: None,
                burst_ms: BURST_MS,
            };
            throttle.set_limits(limits, clock.now());
            throttle
        });
        Self {
            clock,
            throttle,
            lift_count: Mutex::default(),
            is_lifted: Condvar::new(),
        }
    }

    /// Without a limit.
    pub fn unlimited(clock: Arc<dyn Clock>) -> Self {
        Self::at_most(None, clock)
    }

    /// How many of these bytes are sent at once, at most.
    pub fn piece_bytes(&self, bytes: usize) -> usize {
        match &self.throttle {
            Some(_) => PIECE_BYTES,
            None => bytes.max(1),
        }
    }

    /// Waits until this many more bytes may be sent, the limit is lifted, or `is_over` returns true.
    pub fn pass(&self, bytes: usize, is_over: &dyn Fn() -> bool) {
        let Some(throttle) = &self.throttle else { return };
        let mut lift_count = self.lift_count();
        if *lift_count > 0 {
            return;
        }
        let now = self.clock.now();
        let until = now + throttle.reserve(bytes as u64, now);
        while *lift_count == 0 && !is_over() {
            let left = until.saturating_sub(self.clock.now());
            if left.is_zero() {
                return;
            }
            let waited = self.is_lifted.wait_timeout(lift_count, left.min(LOOK_INTERVAL));
            lift_count = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lifts the limit until the result is dropped.
    pub fn lift(&self) -> LiftedRate<'_> {
        *self.lift_count() += 1;
        self.is_lifted.notify_all();
        LiftedRate(self)
    }

    fn lift_count(&self) -> MutexGuard<'_, u64> {
        self.lift_count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reason not to apply a limit.
#[must_use]
pub struct LiftedRate<'a>(&'a SendRate);

impl Drop for LiftedRate<'_> {
    fn drop(&mut self) {
        *self.0.lift_count() -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::{Clock as _, SystemClock};

    use super::SendRate;

    fn rate(bytes_per_s: u64) -> SendRate {
        SendRate::at_most(NonZeroU64::new(bytes_per_s), Arc::new(SystemClock::new()))
    }

    #[test]
    fn streams_share_the_limit() {
        let (rate, clock) = (rate(1_000_000), SystemClock::new());
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..10).for_each(|_| rate.pass(20_000, &|| false)));
            }
        });
        // The last one waits for the others, less the burst.
        assert!(clock.now() >= Duration::from_millis(320), "{:?}", clock.now());
    }

    #[test]
    fn a_wait_ends_when_the_limit_is_lifted_and_when_it_is_over() {
        let rate = rate(1);
        rate.pass(1 << 40, &|| false);
        rate.pass(1, &|| true);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| rate.pass(1, &|| false));
            let lifted = rate.lift();
            waits.join().unwrap();
            rate.pass(1, &|| false);
            drop(lifted);
        });
        assert_eq!(*rate.lift_count(), 0);
        assert_eq!(rate.piece_bytes(1 << 20), 16 << 10);
        let unlimited = SendRate::unlimited(Arc::new(SystemClock::new()));
        unlimited.pass(1 << 60, &|| false);
        assert_eq!(unlimited.piece_bytes(1 << 20), 1 << 20);
    }
}
