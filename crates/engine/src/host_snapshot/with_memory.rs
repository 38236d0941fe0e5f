//! Captures the memory of a running machine, and makes the host snapshots of its disks at the end of the capture.
//!
//! QEMU sends the memory as for a migration, and has stopped the machine when everything is sent; at that moment the
//! disks are cut. No overlay is needed, which would have to be committed again.

use std::time::Duration;

use holdfast_host::qemu::memory::{Memory, MemoryMode};
use holdfast_host::qemu::{PausePolicy, PointInTime, PointInTimeEvent, PointInTimeRequest, RunId};
use holdfast_host::qmp::MonitorError;

use super::guests::{PAUSE_DEADLINE, Session};
use crate::job::{Error, Job, Result};
use crate::machine::state::memory::MemoryOptions;
use crate::machine::state::memory::{LIVE_MEMORY_DEADLINE, MEMORY_DEADLINE, begin, not_kept};
use crate::machine::state::scratch::listen;

/// QEMU serves no disks here, and accepts only whole seconds.
const NO_WRITES: Duration = Duration::from_secs(1);

impl Session<'_> {
    /// Captures the memory; `within` is called when it is complete and the machine is paused.
    pub(super) fn send_memory(
        &mut self,
        wish: &MemoryOptions,
        job: Job<'_>,
        within: &mut dyn FnMut(),
    ) -> Result<Memory> {
        let machine = self.report.name.clone();
        let monitor = self.guest.machine.monitor();
        let (memory, receiving) = begin(wish.way, monitor, &machine, &wish.scratch, job)?;
        // There are no connections: no disks are served.
        let (_folder, listener) = listen(&wish.runtime)?;
        let is_running = self.runs();
        if is_running {
            self.guard.about_to_pause(match memory.1 {
                MemoryMode::Live => LIVE_MEMORY_DEADLINE,
                MemoryMode::Stopped => MEMORY_DEADLINE,
            })?;
            // From here on the machine may be paused.
            self.stopped = Some(job.clock.now());
        }
        let request = PointInTimeRequest {
            run: RunId(self.guest.run),
            disks: Vec::new(),
            write_deadline: NO_WRITES,
            listener,
            memory: Some(memory),
            pause_policy: PausePolicy::Always,
        };
        let guard = &mut self.guard;
        let tell = &mut |moment| match moment {
            // A watchdog that has died cannot be notified; the pause ends before that matters.
            PointInTimeEvent::Stopped if is_running => drop(guard.about_to_pause(PAUSE_DEADLINE)),
            PointInTimeEvent::Running if is_running => drop(guard.about_to_pause(LIVE_MEMORY_DEADLINE)),
            PointInTimeEvent::Stopped | PointInTimeEvent::Running => {}
            PointInTimeEvent::Reached => within(),
        };
        let made = PointInTime::make(monitor, job.clock, request, tell);
        let memory = receiving.finish();
        let memory = memory.map_err(|source| not_kept(&machine, &wish.scratch, source));
        if is_running && self.is_running() {
            // A watchdog that does not receive this is dead, and cannot do harm.
            self.guard.runs().ok();
        }
        match (made, memory) {
            (Ok(cut), memory) => {
                self.report.paused = is_running.then_some(cut.pause.total);
                if cut.is_left_paused {
                    // Its owner has paused it meanwhile: only the owner resumes it.
                    self.guard.runs().ok();
                    self.stopped = None;
                }
                if let Err(error) = cut.release(monitor, job.clock) {
                    job.progress.note(&format!("{machine}: {error}"));
                }
                let memory = memory?;
                self.report.memory_bytes = Some(memory.0.size_bytes());
                Ok(memory)
            }
            // The error of the memory capture is more helpful than QEMU's error.
            (Err(_), Err(of_memory @ Error::MemoryNotKept { .. })) => Err(of_memory),
            (Err(MonitorError::Busy { with: holder }), _) => Err(holdfast_host::Error::Busy { machine, holder }.into()),
            (Err(source), _) => Err(holdfast_host::Error::Monitor { machine, source }.into()),
        }
    }
}
