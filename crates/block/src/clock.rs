//! Time as a parameter: code that measures or waits takes a [`Clock`].

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A clock that never goes back, and can wait.
pub trait Clock: Send + Sync {
    /// Time since an arbitrary start. All calls on one clock use the same start.
    fn now(&self) -> Duration;

    /// Returns when [`now`](Self::now) is at least `duration` later.
    fn sleep(&self, duration: Duration);
}

impl<T: Clock + ?Sized> Clock for std::sync::Arc<T> {
    fn now(&self) -> Duration {
        (**self).now()
    }
    fn sleep(&self, duration: Duration) {
        (**self).sleep(duration);
    }
}

/// The system's monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock that starts now.
    #[expect(clippy::disallowed_methods, reason = "the only place that reads the system's clock")]
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    #[expect(clippy::disallowed_methods, reason = "the only place that sleeps")]
    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

/// A clock for tests, which advances only by `sleep` and `advance`.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl ManualClock {
    /// A clock that shows 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Advances the clock.
    pub fn advance(&self, duration: Duration) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) += duration;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep(&self, duration: Duration) {
        self.advance(duration);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Clock, ManualClock, SystemClock};

    #[test]
    fn sleeping_takes_at_least_as_long_as_asked() {
        let wait = Duration::from_millis(2);
        for clock in [&SystemClock::new() as &dyn Clock, &ManualClock::new()] {
            let before = clock.now();
            clock.sleep(wait);
            assert!(clock.now() >= before + wait);
        }
    }
}
