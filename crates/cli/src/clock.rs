//! Time, passed in: whoever measures or waits takes a [`Clock`].

use std::time::{Duration, Instant};

/// A clock that only goes forward, and can wait.
pub trait Clock: Send + Sync {
    /// Time since an arbitrary start, the same for all calls on one clock.
    fn now(&self) -> Duration;

    /// Returns when [`now`](Self::now) is at least `duration` later.
    fn sleep(&self, duration: Duration);
}

/// The machine's monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock that starts now.
    #[expect(clippy::disallowed_methods, reason = "the program's one clock starts here")]
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

    #[expect(clippy::disallowed_methods, reason = "the program's one clock waits here")]
    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}
