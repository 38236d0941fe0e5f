//! Whether the memory will ever be sent: what QEMU reports of its passes over the memory.

use std::time::Duration;

use holdfast_host::qmp::QmpCommand;
use holdfast_host::{GuestSpeed, Machine};
use serde_json::Value;

/// Passes without progress after which the memory is taken to change faster than it can be sent.
const IDLE_PASS_COUNT_MAX: u64 = 3;
/// And for how long these passes last at least: a guest may be busy for a moment.
const IDLE_TIME_MIN: Duration = Duration::from_secs(10);
/// QEMU's words for a migration that has ended.
const OVER: [&str; 4] = ["none", "completed", "failed", "cancelled"];
/// QEMU slows the processors of a guest by at most this percentage.
const SLOWED_PERCENT_MAX: u64 = 99;

/// What QEMU reports of the memory that it sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct MemoryStatus {
    pub(crate) total_bytes: u64,
    pub(crate) remaining_bytes: u64,
    /// Number of passes that have begun.
    pub(crate) pass_count: u64,
    /// What the guest has changed per second in the last pass.
    pub(crate) changed_bytes_per_s: u64,
    pub(crate) sent_bytes_per_s: u64,
    /// The pages that were sent, with those that are zero, of which nothing is sent.
    pub(crate) done_bytes_per_s: u64,
    /// By how much the processors of the guest are slowed.
    pub(crate) slowed_percent: u64,
}

impl MemoryStatus {
    /// Asks QEMU. None before it sends memory, and if the machine has ended; the thread that waits for the hypervisor learns
    /// of that.
    ///
    /// Until then, QEMU reports the passes of an earlier migration.
    pub(crate) fn query(machine: &dyn Machine) -> Option<Self> {
        let query = QmpCommand::new("query-migrate", Value::Null);
        Self::parse(&machine.monitor().execute(&query).ok()?)
    }

    /// How long it takes at this rate until the rest takes less than `downtime`, when the hypervisor stops the machine.
    pub(crate) fn time_to_stop(&self, downtime: Duration) -> Duration {
        let remaining_us = self.remaining_bytes.saturating_mul(1_000_000) / self.done_bytes_per_s.max(1);
        Duration::from_micros(remaining_us).saturating_sub(downtime)
    }

    fn parse(status: &Value) -> Option<Self> {
        if OVER.contains(&status["status"].as_str()?) {
            return None;
        }
        let memory = &status["ram"];
        let number = |name: &str| memory[name].as_u64();
        let page_bytes = number("page-size").unwrap_or(4096);
        // Of the last second, in megabits.
        let megabits_per_s = memory["mbps"].as_f64().unwrap_or_default();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate for people"
        )]
        let sent_bytes_per_s = (megabits_per_s.max(0.0) * 1e6 / 8.0) as u64;
        Some(Self {
            total_bytes: number("total")?,
            remaining_bytes: number("remaining")?,
            pass_count: number("dirty-sync-count").unwrap_or_default(),
            changed_bytes_per_s: number("dirty-pages-rate")
                .unwrap_or_default()
                .saturating_mul(page_bytes),
            sent_bytes_per_s,
            done_bytes_per_s: number("pages-per-second")
                .unwrap_or_default()
                .saturating_mul(page_bytes),
            slowed_percent: status["cpu-throttle-percentage"].as_u64().unwrap_or_default(),
        })
    }
}

/// Follows the passes over the memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryConvergence {
    pass_count: u64,
    /// What was left at the beginning of the best pass.
    least_bytes: Option<u64>,
    /// The first pass after it, and when it began.
    idle_since: (u64, Duration),
}

impl MemoryConvergence {
    /// Whether the passes have made no progress for so long that they never will. A guest whose processors can still be slowed
    /// further is given time.
    pub(crate) fn is_hopeless(&mut self, status: &MemoryStatus, speed: GuestSpeed, now: Duration) -> bool {
        // The first pass sends everything.
        if status.pass_count < 2 || status.pass_count == self.pass_count {
            return false;
        }
        if status.pass_count < self.pass_count {
            // Another migration has begun.
            *self = Self::default();
        }
        self.pass_count = status.pass_count;
        let has_advanced = self
            .least_bytes
            .is_none_or(|least| status.remaining_bytes < least - least / 8);
        if has_advanced {
            self.least_bytes = Some(status.remaining_bytes);
            self.idle_since = (status.pass_count, now);
            return false;
        }
        let (first_pass, since) = self.idle_since;
        let can_slow = speed == GuestSpeed::SlowedIfNeeded && status.slowed_percent < SLOWED_PERCENT_MAX;
        status.pass_count - first_pass >= IDLE_PASS_COUNT_MAX && now.saturating_sub(since) >= IDLE_TIME_MIN && !can_slow
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_host::GuestSpeed;
    use serde_json::json;

    use super::{MemoryConvergence, MemoryStatus};

    /// Passes of two seconds, with what remains at the beginning of each. Returns the pass that gives up.
    fn hopeless_pass(remaining: &[u64], slowed: Option<&[u64]>) -> Option<usize> {
        let mut convergence = MemoryConvergence::default();
        remaining.iter().enumerate().position(|(pass, &remaining_bytes)| {
            let status = MemoryStatus {
                remaining_bytes,
                pass_count: pass as u64 + 1,
                slowed_percent: slowed.map_or(0, |percent| percent[pass]),
                ..MemoryStatus::default()
            };
            let now = Duration::from_secs(2 * pass as u64);
            // The same pass counts once.
            let speed = slowed.map_or(GuestSpeed::Kept, |_| GuestSpeed::SlowedIfNeeded);
            let first = convergence.is_hopeless(&status, speed, now);
            assert!(!convergence.is_hopeless(&status, speed, now));
            first
        })
    }

    #[test]
    fn passes_without_progress_are_hopeless() {
        // The first pass is not compared; the best one is the second, and ten seconds after it are over.
        assert_eq!(hopeless_pass(&[900, 50, 52, 49, 51, 50, 48, 50], None), Some(6));
        assert_eq!(hopeless_pass(&[900, 50, 40, 30, 25, 20, 15, 12, 10], None), None);
    }

    #[test]
    fn passes_of_an_earlier_migration_do_not_count() {
        let mut convergence = MemoryConvergence::default();
        let mut look = |pass_count, seconds| {
            let status = MemoryStatus {
                remaining_bytes: 50,
                pass_count,
                ..MemoryStatus::default()
            };
            convergence.is_hopeless(&status, GuestSpeed::Kept, Duration::from_secs(seconds))
        };
        assert!(!look(9, 0));
        let hopeless = (2..9).find(|&pass| look(pass, 5 * pass));
        assert_eq!(hopeless, Some(5));
    }

    #[test]
    fn a_guest_that_can_be_slowed_further_is_given_time() {
        let remaining = [50; 9];
        let slowed = [0, 0, 20, 30, 40, 50, 60, 70, 99];
        assert_eq!(hopeless_pass(&remaining, Some(&slowed)), Some(8));
    }

    #[test]
    fn the_stop_is_as_far_as_the_rest_and_its_rate_say() {
        let time = |remaining_bytes, done_bytes_per_s| {
            let status = MemoryStatus {
                remaining_bytes,
                done_bytes_per_s,
                ..MemoryStatus::default()
            };
            status.time_to_stop(Duration::from_millis(100)).as_millis()
        };
        assert_eq!(time(1000, 1000), 900);
        assert_eq!(time(100, 1000), 0);
        assert_eq!(time(50, 1000), 0);
        // No rate is known yet.
        assert!(time(1 << 30, 0) > 1_000_000);
        assert_eq!(time(0, 0), 0);
    }

    #[test]
    fn the_status_of_qemu_is_read() {
        let status = json!({"status": "active", "cpu-throttle-percentage": 20, "ram": {
            "total": 1000, "remaining": 300, "dirty-sync-count": 2, "dirty-pages-rate": 10, "page-size": 4096, "mbps": 8.0,
            "pages-per-second": 100,
        }});
        let expected = MemoryStatus {
            total_bytes: 1000,
            remaining_bytes: 300,
            pass_count: 2,
            changed_bytes_per_s: 40_960,
            sent_bytes_per_s: 1_000_000,
            done_bytes_per_s: 409_600,
            slowed_percent: 20,
        };
        assert_eq!(MemoryStatus::parse(&status), Some(expected));
        assert_eq!(MemoryStatus::parse(&json!({"status": "setup"})), None);
        let mut earlier = status;
        earlier["status"] = json!("cancelled");
        assert_eq!(MemoryStatus::parse(&earlier), None);
    }
}
