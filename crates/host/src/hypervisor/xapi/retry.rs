//! Retries of requests to a pool.

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

/// The properties of a connection besides its address.
#[derive(Clone)]
pub(super) struct RetryContext {
    pub(super) clock: Arc<dyn Clock>,
    /// Whether a stop was requested.
    pub(super) is_stopped: Arc<dyn Fn() -> bool + Send + Sync>,
    /// How long a host may make no progress, in either direction.
    pub(super) idle_timeout: Duration,
    /// Whether a login has succeeded before. If the pool then refuses a connection, its toolstack is restarting.
    pub(super) is_known: Arc<AtomicBool>,
}

impl RetryContext {
    /// Repeats a request until it succeeds or the retries are used up: a busy host or a restarting toolstack may
    /// recover.
    pub(super) fn retry<T>(&self, attempt: impl FnMut() -> XapiResult<T>) -> XapiResult<T> {
        self.retry_if(XapiError::is_transient, attempt)
    }

    /// Repeats a request that must be executed only once. It is repeated only if it was not sent.
    pub(super) fn retry_if_not_sent<T>(&self, attempt: impl FnMut() -> XapiResult<T>) -> XapiResult<T> {
        self.retry_if(|_| false, attempt)
    }

    fn retry_if<T>(
        &self,
        is_transient: impl Fn(&XapiError) -> bool,
        mut attempt: impl FnMut() -> XapiResult<T>,
    ) -> XapiResult<T> {
        for pause in PAUSES {
            match attempt() {
                Err(error) if is_transient(&error) || self.is_restarting(&error) => self.pause(pause)?,
                other => return other,
            }
        }
        attempt()
    }

    /// Whether an error may be temporary.
    pub(super) fn may_be_temporary(&self, error: &XapiError) -> bool {
        error.is_transient() || self.is_restarting(error)
    }

    /// Whether a pool refuses connections to which a login has succeeded before.
    fn is_restarting(&self, error: &XapiError) -> bool {
        error.is_connection_refused() && self.is_known.load(Ordering::Relaxed)
    }

    /// Waits before a retry, depending on the number of attempts.
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
