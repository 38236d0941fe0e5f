//! Decides when jobs run: computes the due jobs and the next time to check from the state of each job and the time.
//!
//! [`JobState`] is what is stored of a job between runs; [`Timing`] is its configured schedule; [`select_startable`]
//! selects among jobs that are due. This module has no clock: the caller passes the time, reports when a job starts and
//! ends, and stores the states.
//!
//! A state records up to which instant scheduled times are handled ([`JobState::handled_until`]). The next scheduled
//! time after that instant is due. Therefore:
//! - a missed time is caught up, and several missed times are caught up by one run;
//! - a handled time does not occur again when the clock is set back.
//!
//! After a clock is set back, `handled_until` is in the future. It may be in the future by up to half of the longest
//! gap between the next few times, and is reduced to that otherwise ([`JobState::normalize`]). So a daily job does not
//! run twice when the clock is set back by an hour, and a job that runs every 15 minutes does not pause for that hour.
//! If the clock was wrong by a year, no job waits for a year.

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
/// A run that starts later than this after its scheduled time counts as missed.
const LATE: Duration = Duration::from_secs(60);
/// The longest delay before a retry.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(6 * 3600);

/// The schedule of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// The scheduled times: those of any of the expressions.
    pub when: Vec<Calendar>,
    /// The delay of this job on this host after each scheduled time.
    pub delay: Duration,
    /// Whether a missed run is caught up.
    pub is_caught_up: bool,
    /// Maximum number of retries of a failed run.
    pub retry_count_max: u32,
    /// The delay before the first retry; doubled before each further one.
    pub retry_delay: Duration,
}

/// The stored state of a job between runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobState {
    /// Scheduled times up to here are handled.
    pub handled_until: Timestamp,
    /// The start of the current run.
    pub running: Option<Timestamp>,
    /// The number of failed runs of this series.
    pub failed_count: u32,
    /// The time of the next retry.
    pub retry_at: Option<Timestamp>,
}

/// When a job runs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// The job is due, since this time.
    Since(Timestamp),
    /// The job will be due at this time.
    At(Timestamp),
    /// The job is running.
    Running,
    /// The job is never due.
    Never,
}

/// Why a run is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The job was due.
    Due,
    /// A user requested the run.
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

/// The consequence of a result for the schedule.
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

    /// The longest gap between the next few scheduled times: the tolerance for a clock that was set back depends on it.
    fn gap(&self, now: Timestamp, zone: &TimeZone) -> Option<Duration> {
        let times = std::iter::successors(self.next_after(now, zone), |last| self.next_after(*last, zone));
        let times: Vec<_> = times.take(GAPS_LOOKED_AT + 1).collect();
        let gaps = times.windows(2).map(|pair| between(pair[0], pair[1]));
        // If only one time is left, the time until then counts.
        gaps.max().or_else(|| Some(between(now, *times.first()?)))
    }
}

/// The delay of a job on a host: constant, and evenly distributed up to `most` among jobs and hosts.
pub fn own_delay(most: Duration, host: &str, job: &str) -> Duration {
    // FNV-1a: the hash must be stable, and must differ for similar names.
    let words = host.bytes().chain([0]).chain(job.bytes());
    let mut hash = words.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // Otherwise the last letters would affect only the lower bits.
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

    /// Corrects the effects of a wrong clock, and skips missed times if they are not to be caught up.
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

    /// Like [`due`](Self::due), without retries.
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

    /// Marks all times whose delay has passed as handled.
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

    /// The delay before the next retry.
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

/// The time from `from` to `to`; zero if `to` is earlier.
fn between(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).try_into().unwrap_or_default()
}
