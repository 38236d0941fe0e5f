//! When jobs run: from what is known of each and the time, to what is due and when to look again.
//!
//! [`JobState`] is what is kept of a job from run to run; [`Timing`] is what its configuration says; [`turns`] chooses among jobs
//! that are due. Nothing here has a clock: whoever acts asks with the time, tells when a job starts and ends, and keeps the states.
//!
//! A state remembers up to which instant times of the calendar are dealt with ([`JobState::seen`]). The next time after it is the one
//! that is due, so
//! - a time that was missed is caught up, and many that were missed are caught up once;
//! - a time that was dealt with does not come again when the clock is set back.
//!
//! A clock that is set back leaves `seen` in the future. It is believed as far as half of the longest gap between the next few times,
//! and cut down to that otherwise ([`JobState::mend`]): a job of once a day does not run twice when the clock goes back by an hour,
//! and a job of every quarter of an hour does not stand still for that hour. Where it was the future that was wrong, a clock that
//! was a year ahead, nothing waits for that year.

mod turns;

#[cfg(test)]
mod tests;

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::Calendar;

pub use turns::{Candidate, Claims, Thing, turns};

/// How many gaps between times are looked at.
const GAPS_LOOKED_AT: usize = 4;
/// A time that is caught later than this was missed.
const LATE: Duration = Duration::from_secs(60);
/// The longest wait before a retry.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(6 * 3600);

/// When a job is to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// The times; one of several expressions is enough.
    pub when: Vec<Calendar>,
    /// How long after each time this job waits on this host.
    pub delay: Duration,
    /// Whether a time that was missed is caught up.
    pub is_caught_up: bool,
    /// How often a run that failed is tried again, at most.
    pub retry_count_max: u32,
    /// How long to wait before the first of these; twice as long before each that follows.
    pub retry_delay: Duration,
}

/// What is kept of a job from run to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobState {
    /// Up to here, times are dealt with.
    pub seen: Timestamp,
    /// When the run began that has not ended.
    pub running: Option<Timestamp>,
    /// How many runs of this series have failed.
    pub failed_count: u32,
    /// When the next run of this series is tried.
    pub retry_at: Option<Timestamp>,
}

/// When a job runs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// It should run, since then.
    Since(Timestamp),
    /// Not before then.
    At(Timestamp),
    /// It runs.
    Running,
    /// Never.
    Never,
}

/// Why a run is begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// It is due.
    Due,
    /// A person wants it now.
    Person,
}

/// How a run ended, as far as the schedule is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// It was done.
    Done,
    /// It was not, and may be another time.
    Failed,
    /// It was not, and trying again is of no use before somebody has done something.
    FailedForGood,
    /// It was told to stop, and is to be done when that is possible again.
    Stopped,
}

/// What follows from an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consequence {
    /// The series is over, and well.
    Well,
    /// It is tried again, then.
    Retry(Timestamp),
    /// It is given up until its next time.
    GivenUp,
}

impl Timing {
    /// The first time later than `after`.
    pub fn next_after(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        self.when
            .iter()
            .filter_map(|calendar| calendar.next_after(after, zone))
            .min()
    }

    /// The longest gap between the next few times, by which a clock that was set back is judged.
    fn gap(&self, now: Timestamp, zone: &TimeZone) -> Option<Duration> {
        let times = std::iter::successors(self.next_after(now, zone), |last| self.next_after(*last, zone));
        let times: Vec<_> = times.take(GAPS_LOOKED_AT + 1).collect();
        let gaps = times.windows(2).map(|pair| between(pair[0], pair[1]));
        // A single time that is left is as far away as it is.
        gaps.max().or_else(|| Some(between(now, *times.first()?)))
    }
}

/// How long a job waits on a host: the same for each of its times, spread evenly over `most` among jobs and hosts.
pub fn own_delay(most: Duration, host: &str, job: &str) -> Duration {
    // FNV-1a: what matters is that it is the same for ever, and that names which are alike come apart.
    let words = host.bytes().chain([0]).chain(job.bytes());
    let mut hash = words.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // Its last letters reach the upper bits only.
    hash ^= hash >> 32;
    hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Duration::from_secs((hash >> 16) % (most.as_secs() + 1))
}

impl JobState {
    /// Of a job that is new: its first time is the next one.
    pub fn new(now: Timestamp) -> Self {
        Self {
            seen: now,
            running: None,
            failed_count: 0,
            retry_at: None,
        }
    }

    /// Takes back what only a clock that was wrong can have made, and times that were missed and are not to be caught up.
    pub fn mend(&mut self, timing: &Timing, zone: &TimeZone, now: Timestamp) {
        if let Some(gap) = timing.gap(now, zone) {
            self.seen = self.seen.min(later(now, gap / 2));
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

    /// When it runs next. To be asked of a state that is mended.
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
        match timing.next_after(self.seen, zone).map(|time| later(time, timing.delay)) {
            Some(time) if time <= now => Due::Since(time),
            Some(time) => Due::At(time),
            None => Due::Never,
        }
    }

    /// It runs from now on.
    pub fn start(&mut self, timing: &Timing, cause: Cause, now: Timestamp) {
        // What a person starts is no part of a series, and what has failed before counts where it is tried again.
        if self.retry_at.is_none() || cause == Cause::Person {
            self.failed_count = 0;
        }
        self.retry_at = None;
        self.running = Some(now);
        self.pass(timing, now);
    }

    /// All times whose delay is over are dealt with.
    fn pass(&mut self, timing: &Timing, now: Timestamp) {
        self.seen = self.seen.max(earlier(now, timing.delay));
    }

    /// It has ended.
    pub fn end(&mut self, timing: &Timing, end: RunEnd, cause: Cause, now: Timestamp) -> Consequence {
        self.running = None;
        match end {
            RunEnd::Done => {
                self.failed_count = 0;
                Consequence::Well
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
            RunEnd::Failed | RunEnd::FailedForGood | RunEnd::Stopped => Consequence::GivenUp,
        }
    }

    /// How long to wait after the failures there are.
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

/// Nothing where `to` is before `from`.
fn between(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).try_into().unwrap_or_default()
}
