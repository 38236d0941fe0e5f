//! Requests to a pool are repeated while that may help.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::Clock;

use super::{XapiError, XapiResult};

/// The pauses between attempts.
const PAUSES: [Duration; 5] = [
    Duration::from_millis(250),
    Duration::from_secs(1),
    Duration::from_secs(3),
    Duration::from_secs(6),
    Duration::from_secs(10),
];
/// How often a requested stop is checked for.
pub(super) const TICK: Duration = Duration::from_millis(250);

/// What a connection needs beside an address.
#[derive(Clone)]
pub(super) struct RetryContext {
    pub(super) clock: Arc<dyn Clock>,
    /// Whether a stop was requested.
    pub(super) is_stopped: Arc<dyn Fn() -> bool + Send + Sync>,
    /// How long a host may say, or take, nothing.
    pub(super) patience: Duration,
    /// Whether the pool has let us in before: if it refuses a connection then, its toolstack is restarting.
    pub(super) is_known: Arc<AtomicBool>,
}

impl RetryContext {
    /// Repeats a request until it succeeds, or has failed for the last time: a busy host, or a restarting toolstack, may come back.
    pub(super) fn retry<T>(&self, attempt: impl FnMut() -> XapiResult<T>) -> XapiResult<T> {
        self.again_where(XapiError::is_transient, attempt)
    }

    /// Does what can be done once only: again only if the request was not sent.
    pub(super) fn retry_if_not_sent<T>(&self, attempt: impl FnMut() -> XapiResult<T>) -> XapiResult<T> {
        self.again_where(|_| false, attempt)
    }

    fn again_where<T>(
        &self,
        is_transient: impl Fn(&XapiError) -> bool,
        mut attempt: impl FnMut() -> XapiResult<T>,
    ) -> XapiResult<T> {
        for pause in PAUSES {
            match attempt() {
                Err(error) if is_transient(&error) || self.is_away(&error) => self.pause(pause)?,
                other => return other,
            }
        }
        attempt()
    }

    /// Whether an error may be over in a moment.
    pub(super) fn may_pass(&self, error: &XapiError) -> bool {
        error.is_transient() || self.is_away(error)
    }

    /// Whether a pool that has let us in before refuses connections at this moment.
    fn is_away(&self, error: &XapiError) -> bool {
        error.is_connection_refused() && self.is_known.load(Ordering::Relaxed)
    }

    /// Waits before an attempt, by how many there were.
    pub(super) fn pause_after(&self, count: u32) -> XapiResult<()> {
        let place = usize::try_from(count).unwrap_or(usize::MAX);
        self.pause(PAUSES[place.min(PAUSES.len() - 1)])
    }

    fn pause(&self, duration: Duration) -> XapiResult<()> {
        let start = self.clock.now();
        while self.clock.now().saturating_sub(start) < duration {
            if (self.is_stopped)() {
                return Err(XapiError::Interrupted);
            }
            self.clock.sleep(TICK.min(duration));
        }
        Ok(())
    }
}
