//! Commits an overlay into its base while the machine runs, and supervises the commit.
//!
//! libvirt does the commit and knows its state at every moment. It can be interrupted at any time: until the machine is
//! switched to the base, it stays on its overlay.

use std::num::NonZeroU64;
use std::path::Path;
use std::time::Duration;

use holdfast_host::Overlays;
use holdfast_host::qemu::resume;
use holdfast_host::qmp::{Monitor, QmpCommand};
use serde_json::Value;

use super::watchdog::Guard;
use crate::job::{Job, Unit};

const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The polling interval while the machine is paused.
const QUICK_INTERVAL: Duration = Duration::from_millis(5);
/// How often switching to the base is tried: it fails if the guest is writing at that moment.
const PIVOT_COUNT: u32 = 50;
/// If the remaining bytes do not decrease for so long, the commit does not converge.
const STALL: Duration = Duration::from_secs(5);
/// The maximum pause of the machine for committing the rest.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often the machine is paused for that.
const PAUSE_COUNT_MAX: u32 = 3;
/// If the machine must not be paused, the commit is aborted after so long without progress.
const PATIENCE: Duration = Duration::from_secs(600);

/// How long the hypervisor may be unreachable.
const UNREACHABLE_MAX: Duration = Duration::from_secs(60);

type TextResult<T> = Result<T, String>;

/// What to do about a machine that writes faster than its overlay can be committed.
pub(crate) enum SlowCommit<'g> {
    /// It stays on its overlay.
    GiveUp,
    /// It is paused for some seconds at most to commit the rest, supervised by the watchdog.
    Pause(&'g dyn Monitor, &'g mut Guard),
}

/// The commit of one disk's overlay.
pub(crate) struct OverlayCommit<'a> {
    pub(crate) overlays: &'a dyn Overlays,
    /// The machine's UUID.
    pub(crate) machine: &'a str,
    pub(crate) disk: &'a str,
    /// The maximum rate in bytes per second while the machine runs.
    pub(crate) rate: Option<NonZeroU64>,
    pub(crate) job: Job<'a>,
}

/// The progress of a commit.
struct CommitProgress {
    least_left_bytes: u64,
    /// When the remaining bytes decreased last, and how many bytes were committed then.
    since: (Duration, u64),
}

impl CommitProgress {
    /// Returns how long there was no progress, and the rate in bytes per second.
    fn look(&mut self, now: Duration, done_bytes: u64, left_bytes: u64) -> (Duration, u64) {
        if left_bytes < self.least_left_bytes {
            (self.least_left_bytes, self.since) = (left_bytes, (now, done_bytes));
        }
        let (then, done_then) = self.since;
        let stalled = now.saturating_sub(then);
        let millis = u64::try_from(stalled.as_millis()).unwrap_or(u64::MAX).max(1);
        (
            stalled,
            done_bytes.saturating_sub(done_then).saturating_mul(1000) / millis,
        )
    }
}

impl OverlayCommit<'_> {
    /// Commits until the machine is on `base`. Returns how long it was paused for that.
    ///
    /// # Errors
    /// The reason as text. The machine is on its overlay as before, and runs if it ran.
    pub(crate) fn to_the_end(&self, base: &Path, mut persistence: SlowCommit<'_>) -> TextResult<Duration> {
        let words = |error: holdfast_host::Error| error.to_string();
        let progress = || self.overlays.commit_progress(self.machine, self.disk).map_err(words);
        if progress()?.is_none() {
            self.overlays
                .begin_commit(self.machine, self.disk, base, self.rate)
                .map_err(words)?;
        }
        let title = format!("bringing disk {} down into its base", self.disk);
        self.job.progress.phase(&title, Unit::Bytes);
        let mut answered = self.job.clock.now();
        let (mut pause_count, mut paused) = (0, Duration::ZERO);
        let mut pivots = 0;
        let mut shown = 0;
        let mut approach = CommitProgress {
            least_left_bytes: u64::MAX,
            since: (self.job.clock.now(), 0),
        };
        loop {
            let now = match progress() {
                // libvirt may be restarted meanwhile; QEMU continues.
                Err(_) if self.job.clock.now().saturating_sub(answered) < UNREACHABLE_MAX => {
                    self.job.clock.sleep(LOOK_INTERVAL);
                    continue;
                }
                other => other?,
            };
            answered = self.job.clock.now();
            let Some(now) = now else {
                return Err(
                    "the commit has ended before it was complete; the machine is on its overlay as before".to_owned(),
                );
            };
            self.job.progress.total(now.total_bytes);
            self.job.progress.advance(now.done_bytes.saturating_sub(shown));
            shown = shown.max(now.done_bytes);
            if now.is_complete() {
                match self.overlays.pivot(self.machine, self.disk) {
                    Ok(()) => return Ok(paused),
                    Err(error) if pivots == PIVOT_COUNT => return Err(self.give_up(&error.to_string())),
                    Err(_) => pivots += 1,
                }
            }
            if self.job.interrupt.check().is_err() {
                return Err(self.give_up("interrupted"));
            }
            let left_bytes = now.total_bytes.saturating_sub(now.done_bytes);
            let (stalled, rate) = approach.look(self.job.clock.now(), now.done_bytes, left_bytes);
            let rest = Duration::from_millis(left_bytes.saturating_mul(1000) / rate.max(1));
            match &mut persistence {
                SlowCommit::Pause(monitor, guard)
                    if pause_count < PAUSE_COUNT_MAX && stalled > STALL && rest < PAUSE_MAX =>
                {
                    let (is_on_base, elapsed) = self.pause_and_commit(*monitor, guard, rest)?;
                    pause_count += 1;
                    paused += elapsed;
                    if is_on_base {
                        return Ok(paused);
                    }
                    approach.since = (self.job.clock.now(), now.done_bytes);
                }
                _ if stalled > PATIENCE => {
                    return Err(self.give_up("the machine writes faster than that goes"));
                }
                _ => {}
            }
            self.job.clock.sleep(LOOK_INTERVAL);
        }
    }

    /// Pauses the machine to commit the rest. Returns whether it is on its base then, and how long it was paused: the
    /// rest may take longer than expected.
    fn pause_and_commit(
        &self,
        monitor: &dyn Monitor,
        guard: &mut Guard,
        rest: Duration,
    ) -> TextResult<(bool, Duration)> {
        let at_most = rest * 2 + Duration::from_secs(1);
        guard
            .about_to_pause(at_most + PAUSE_MAX)
            .map_err(|error| self.give_up(&error.to_string()))?;
        let start = self.job.clock.now();
        // The rate limit protects the running machine, which is paused now.
        self.overlays.unthrottle_commit(self.machine, self.disk).ok();
        let stopped = monitor.execute(&QmpCommand::new("stop", Value::Null));
        let elapsed = || self.job.clock.now().saturating_sub(start);
        let mut is_on_base = false;
        while stopped.is_ok() && !is_on_base && elapsed() < at_most {
            let now = self.overlays.commit_progress(self.machine, self.disk);
            let is_complete = now.is_ok_and(|now| now.is_some_and(holdfast_host::CommitProgress::is_complete));
            is_on_base = is_complete && self.overlays.pivot(self.machine, self.disk).is_ok();
            self.job.clock.sleep(QUICK_INTERVAL);
        }
        let runs = resume(monitor).or_else(|_| resume(monitor));
        let paused = elapsed();
        match runs {
            Ok(()) => guard.runs().ok(),
            // The watchdog resumes the machine.
            Err(_) => None,
        };
        Ok((is_on_base, paused))
    }

    /// Aborts the commit: the machine stays on its overlay, and no job is left.
    fn give_up(&self, why: &str) -> String {
        match self.overlays.abandon_commit(self.machine, self.disk) {
            Ok(()) => format!("{why}; the machine is on its overlay as before"),
            Err(error) => format!("{why}; and the commit does not end: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::CommitProgress;

    #[test]
    fn what_comes_nearer_has_not_stalled_and_what_does_not_has_a_rate() {
        let second = Duration::from_secs(1);
        let mut approach = CommitProgress {
            least_left_bytes: u64::MAX,
            since: (Duration::ZERO, 0),
        };
        assert_eq!(approach.look(second, 10, 90), (Duration::ZERO, 0));
        assert_eq!(approach.look(2 * second, 20, 80), (Duration::ZERO, 0));
        // The machine writes as fast as the commit proceeds.
        assert_eq!(approach.look(4 * second, 220, 80), (2 * second, 100));
        assert_eq!(approach.look(7 * second, 520, 85), (5 * second, 100));
        assert_eq!(approach.look(8 * second, 530, 79), (Duration::ZERO, 0));
    }
}
