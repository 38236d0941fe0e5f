//! Decides when jobs run: from the state of each job and the time, to the jobs that are due and the next time to check.
//!
//! [`JobState`] is what is stored of a job between runs; [`Timing`] is its configured schedule; [`select_startable`]
//! selects among jobs that are due. Nothing here has a clock: the caller passes the time, reports when a job starts and
//! ends, and stores the states.
//!
//! A state records up to which instant scheduled times are handled ([`JobState::handled_until`]). The next scheduled
//! time after it is due, so
//! - a missed time is caught up, and many missed times are caught up once;
//! - a handled time does not occur again when the clock is set back.
//!
//! A clock that is set back leaves `handled_until` in the future. It is accepted up to half of the longest gap between
//! the next few times, and reduced to that otherwise ([`JobState::normalize`]): a daily job does not run twice when the
//! clock goes back by an hour, and a job of every quarter of an hour does not pause for that hour. If the future was
//! wrong, because a clock was a year ahead, nothing waits for that year.

mod admission;

#[cfg(test)]
mod tests;

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::Calendar;

pub use admission::{Claims, Resource, StartCandidate, select_startable};

/// Number of gaps between scheduled times to examine.
const GAPS_LOOKED_AT: usize = 4;
/// A run that starts later than this was missed.
const LATE: Duration = Duration::from_secs(60);
/// The longest delay before a retry.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(6 * 3600);

/// The schedule of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// The scheduled times; any of several expressions counts.
    pub when: Vec<Calendar>,
    /// The delay of this job on this host after each time.
    pub delay: Duration,
    /// Whether a missed run is caught up.
    pub is_caught_up: bool,
    /// Maximum number of retries of a failed run.
    pub retry_count_max: u32,
    /// The delay before the first retry; doubled before each further one.
    pub retry_delay: Duration,
}

/// What is stored of a job between runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobState {
    /// Scheduled times up to here are handled.
    pub handled_until: Timestamp,
    /// Start of the current run.
    pub running: Option<Timestamp>,
    /// Failed runs of this series.
    pub failed_count: u32,
    /// When the series is retried.
    pub retry_at: Option<Timestamp>,
}

/// When a job runs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// It is due, since this time.
    Since(Timestamp),
    /// It is due at this time.
    At(Timestamp),
    /// It is running.
    Running,
    /// Never.
    Never,
}

/// Why a run is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// It is due.
    Due,
    /// A user requested it.
    Person,
}

/// The result of a run, for the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// Success.
    Done,
    /// Failure; a retry may succeed.
    Failed,
    /// Failure that a retry cannot fix.
    FailedPermanently,
    /// The run was stopped, and is to be repeated as soon as possible.
    Stopped,
}

/// What follows from a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consequence {
    /// The series succeeded.
    Succeeded,
    /// A retry is scheduled.
    Retry(Timestamp),
    /// No further retry before the next scheduled time.
    NoMoreRetries,
}

impl Timing {
    /// The first scheduled time after `after`.
    pub fn next_after(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        self.when
            .iter()
            .filter_map(|calendar| calendar.next_after(after, zone))
            .min()
    }

    /// The longest gap between the next few times, the measure for a clock that was set back.
    fn gap(&self, now: Timestamp, zone: &TimeZone) -> Option<Duration> {
        let times = std::iter::successors(self.next_after(now, zone), |last| self.next_after(*last, zone));
        let times: Vec<_> = times.take(GAPS_LOOKED_AT + 1).collect();
        let gaps = times.windows(2).map(|pair| between(pair[0], pair[1]));
        // If only one time is left, its distance counts.
        gaps.max().or_else(|| Some(between(now, *times.first()?)))
    }
}

/// The delay of a job on a host: constant, and spread evenly up to `most` among jobs and hosts.
pub fn own_delay(most: Duration, host: &str, job: &str) -> Duration {
    // FNV-1a: it must be stable, and must separate similar names.
    let words = host.bytes().chain([0]).chain(job.bytes());
    let mut hash = words.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // The last letters affect only the lower bits otherwise.
    hash ^= hash >> 32;
    hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Duration::from_secs((hash >> 16) % (most.as_secs() + 1))
}

impl JobState {
    /// The state of a new job, whose first run is at the next scheduled time.
    pub fn new(now: Timestamp) -> Self {
        Self {
            handled_until: now,
            running: None,
            failed_count: 0,
            retry_at: None,
        }
    }

    /// Corrects the effects of a wrong clock, and skips missed times that are not to be caught up.
    pub fn normalize(&mut self, timing: &Timing, zone: &TimeZone, now: Timestamp) {
        if let Some(gap) = timing.gap(now, zone) {
            self.handled_until = self.handled_until.min(later(now, gap / 2));
        }
        let longest = self.retry_delay(timing);
        self.retry_at = self.retry_at.map(|at| at.min(later(now, longest)));
        if !timing.is_caught_up
            && let Due::Since(since) = self.regular(timing, zone, now)
            && between(since, now) > LATE
        {
            self.pass(timing, now);
        }
    }

    /// When the job runs next. The state must be normalized.
    pub fn due(&self, timing: &Timing, zone: &TimeZone, now: Timestamp) -> Due {
        if self.running.is_some() {
            return Due::Running;
        }
        let regular = self.regular(timing, zone, now);
        let retry = match self.retry_at {
            Some(at) if at <= now => Due::Since(at),
            Some(at) => Due::At(at),
            None => Due::Never,
        };
        match (regular, retry) {
            (Due::Since(one), Due::Since(other)) => Due::Since(one.min(other)),
            (Due::Since(one), _) | (_, Due::Since(one)) => Due::Since(one),
            (Due::At(one), Due::At(other)) => Due::At(one.min(other)),
            (Due::At(one), _) | (_, Due::At(one)) => Due::At(one),
            _ => Due::Never,
        }
    }

    /// The same without retries.
    fn regular(&self, timing: &Timing, zone: &TimeZone, now: Timestamp) -> Due {
        match timing
            .next_after(self.handled_until, zone)
            .map(|time| later(time, timing.delay))
        {
            Some(time) if time <= now => Due::Since(time),
            Some(time) => Due::At(time),
            None => Due::Never,
        }
    }

    /// Records the start of a run.
    pub fn start(&mut self, timing: &Timing, cause: Cause, now: Timestamp) {
        // A manual run starts a new series; a retry continues the series.
        if self.retry_at.is_none() || cause == Cause::Person {
            self.failed_count = 0;
        }
        self.retry_at = None;
        self.running = Some(now);
        self.pass(timing, now);
    }

    /// Marks all times whose delay is over as handled.
    fn pass(&mut self, timing: &Timing, now: Timestamp) {
        self.handled_until = self.handled_until.max(earlier(now, timing.delay));
    }

    /// Records the end of a run.
    pub fn end(&mut self, timing: &Timing, end: RunEnd, cause: Cause, now: Timestamp) -> Consequence {
        self.running = None;
        match end {
            RunEnd::Done => {
                self.failed_count = 0;
                Consequence::Succeeded
            }
            RunEnd::Stopped if cause == Cause::Due => {
                self.retry_at = Some(now);
                Consequence::Retry(now)
            }
            RunEnd::Failed if cause == Cause::Due && self.failed_count < timing.retry_count_max => {
                self.failed_count += 1;
                let at = later(now, self.retry_delay(timing));
                self.retry_at = Some(at);
                Consequence::Retry(at)
            }
            RunEnd::Failed | RunEnd::FailedPermanently | RunEnd::Stopped => Consequence::NoMoreRetries,
        }
    }

    /// The delay after the failures so far.
    fn retry_delay(&self, timing: &Timing) -> Duration {
        let doublings = self.failed_count.saturating_sub(1).min(16);
        let most = RETRY_DELAY_MAX.max(timing.retry_delay);
        timing.retry_delay.saturating_mul(1 << doublings).min(most)
    }
}

fn later(time: Timestamp, by: Duration) -> Timestamp {
    time.saturating_add(by).unwrap_or(Timestamp::MAX)
}

fn earlier(time: Timestamp, by: Duration) -> Timestamp {
    time.saturating_sub(by).unwrap_or(Timestamp::MIN)
}

/// Zero if `to` is before `from`.
fn between(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).try_into().unwrap_or_default()
}
