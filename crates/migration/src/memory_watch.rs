//! Watches the memory while it is sent: shows the progress, and ensures that it ends.

use std::time::Duration;

use holdfast_engine::Progress;
use holdfast_host::GuestSpeed;
use holdfast_live_copy::ThrottlePolicy;

use crate::error::{Error, Result};
use crate::memory_convergence::{MemoryConvergence, MemoryStatus};
use crate::migration_tools::RunningTools;
use crate::move_progress::MemoryProgress;
use crate::plan::{LiveMemory, MigrationPlan};

/// The hypervisor stops the machine as soon as the rest of its memory takes less than this. Only if the memory changes too fast
/// for that, it gets more, up to all the time that is permitted.
const DOWNTIME_AIM: Duration = Duration::from_millis(20);

/// How much more it gets at once.
const DOWNTIME_FACTOR: u32 = 4;

pub(crate) struct MemoryWatch {
    progress: MemoryProgress,
    convergence: MemoryConvergence,
    /// How long the hypervisor may stop the machine for the rest of its memory.
    downtime: Duration,
    /// By how much the processors of the guest are known to be slowed.
    slowed_percent: u64,
}

impl MemoryWatch {
    /// Before the memory is sent.
    pub(crate) fn begin(plan: &MigrationPlan, tools: &RunningTools<'_>, progress: &dyn Progress) -> Result<Self> {
        let mut watch = Self {
            progress: MemoryProgress::begin(progress),
            convergence: MemoryConvergence::default(),
            downtime: Duration::ZERO,
            slowed_percent: 0,
        };
        let downtime = match plan.live_memory {
            LiveMemory::Complete => DOWNTIME_AIM.min(tools.downtime_max()),
            // The less is sent while the machine runs, the less can be lost.
            LiveMemory::MayBeIncomplete => tools.downtime_max(),
        };
        watch.limit_downtime(downtime, plan, tools)?;
        Ok(watch)
    }

    /// # Errors
    /// The memory changes faster than it can be sent.
    pub(crate) fn look(
        &mut self,
        plan: &MigrationPlan,
        tools: &RunningTools<'_>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let Some(status) = MemoryStatus::query(tools.watched) else {
            return Ok(());
        };
        self.progress.update(&status, progress);
        if status.slowed_percent > self.slowed_percent {
            self.slowed_percent = status.slowed_percent;
            tools.common.observer.guest_slowed(status.slowed_percent);
        }
        let is_hopeless = self
            .convergence
            .is_hopeless(&status, guest_speed(tools.throttle), tools.common.clock.now());
        if !is_hopeless {
            return Ok(());
        }
        let downtime_max = tools.downtime_max();
        if self.downtime < downtime_max {
            self.convergence = MemoryConvergence::default();
            return self.limit_downtime((self.downtime * DOWNTIME_FACTOR).min(downtime_max), plan, tools);
        }
        Err(Error::MemoryChangesTooFast {
            machine: plan.machine.clone(),
            changed_bytes_per_s: status.changed_bytes_per_s,
            sent_bytes_per_s: status.sent_bytes_per_s,
            remaining_bytes: status.remaining_bytes,
        })
    }

    fn limit_downtime(&mut self, limit: Duration, plan: &MigrationPlan, tools: &RunningTools<'_>) -> Result<()> {
        self.downtime = limit;
        let limited = tools.common.control.limit_downtime(&plan.uuid, limit);
        limited.map_err(|error| Error::of_hypervisor(&plan.machine, error))
    }
}

/// Whether the guest may be slowed.
pub(crate) fn guest_speed(throttle: ThrottlePolicy) -> GuestSpeed {
    match throttle {
        ThrottlePolicy::Never => GuestSpeed::Kept,
        ThrottlePolicy::IfNeeded => GuestSpeed::SlowedIfNeeded,
    }
}
