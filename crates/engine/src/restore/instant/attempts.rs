//! Attempts to use the connection of QEMU to a server that was started again.
//!
//! The first request after the death of a server fails: by it QEMU notices that its server is gone. Requests fail until QEMU has
//! connected again, which it tries with pauses of up to 16 seconds (`nbd/client-connection.c`, also in QEMU 10.0). So attempts are
//! bounded by time and not by their number.

use std::time::Duration;

/// The time in which QEMU connects again, with a margin.
const RECONNECT_MAX: Duration = Duration::from_secs(60);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Attempts at one thing, with pauses that double.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Attempts {
    /// When the first attempt was made, and when the next one is due, on the job's clock.
    times: Option<(Duration, Duration)>,
    pause: Duration,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    Now,
    Later,
    Exhausted,
}

impl Attempts {
    /// Counts an attempt if one is due.
    pub(super) fn next(&mut self, now: Duration) -> Attempt {
        let first = match self.times {
            Some((_, due)) if now < due => return Attempt::Later,
            Some((first, _)) if now.saturating_sub(first) >= RECONNECT_MAX => return Attempt::Exhausted,
            Some((first, _)) => first,
            None => now,
        };
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, PAUSE_MAX);
        self.times = Some((first, now + self.pause));
        Attempt::Now
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Attempt, Attempts};

    #[test]
    fn attempts_become_rarer_and_outlast_the_pauses_of_qemu() {
        let mut attempts = Attempts::default();
        let times = (0..).map(|number| Duration::from_millis(number * 100));
        let made: Vec<_> = times
            .map(|now| (now, attempts.next(now)))
            .take_while(|(_, attempt)| *attempt != Attempt::Exhausted)
            .filter(|(_, attempt)| *attempt == Attempt::Now)
            .map(|(now, _)| now.as_millis())
            .collect();
        assert_eq!(made[..6], [0, 100, 300, 700, 1500, 3100]);
        let last = made.last().unwrap();
        assert!((55_000..=60_000).contains(last), "{made:?}");
        let longest = made.windows(2).map(|pair| pair[1] - pair[0]).max();
        assert_eq!(longest, Some(5000));
    }
}
