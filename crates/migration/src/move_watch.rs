//! What threads wait for while the memory is sent.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_host::qmp::QmpCommand;
use serde_json::Value;

use crate::disks::MachineStop;
use crate::error::{Error, Result};
use crate::far::FarRequest;
use crate::memory_convergence::MemoryStatus;
use crate::migration_tools::RunningTools;

/// Interval of asking whether the machine is stopped, when it soon is.
const WATCH_INTERVAL: Duration = Duration::from_millis(1);
/// The same before. Each question takes processor time from the guest.
const EARLY_INTERVAL: Duration = Duration::from_millis(20);
/// The forecast may be wrong by this.
const FORECAST_ERROR: Duration = Duration::from_millis(200);
/// Interval of the other questions.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// How QEMU describes a machine that it has stopped to send the rest of its memory, and afterwards. Another program cannot
/// resume it.
const STOPPED_FOR_MIGRATION: [&str; 2] = ["finish-migrate", "postmigrate"];

/// Waits until the hypervisor has stopped the machine. None if that is not awaited any more.
///
/// A pause by another program is not that stop: the program may resume the machine, which would write to disks that are handed
/// over.
pub(crate) fn wait_for_stop(tools: &RunningTools<'_>, end: &AtomicBool) -> Option<MachineStop> {
    let status = QmpCommand::new("query-status", Value::Null);
    let clock = &*tools.common.clock;
    let (mut forecast_at, mut interval) = (Duration::ZERO, EARLY_INTERVAL);
    let (mut paused, mut ran_at) = (None, clock.now());
    while !end.load(Ordering::Acquire) {
        match tools.watched.monitor().execute(&status) {
            Ok(status) => {
                let state = status["status"].as_str().unwrap_or_default();
                if STOPPED_FOR_MIGRATION.contains(&state) {
                    let while_running = MachineStop::WhileRunning { ran_at };
                    return Some(paused.map_or(while_running, |state| MachineStop::WhilePaused { state }));
                }
                ran_at = clock.now();
                paused = (status["running"] == false).then(|| state.to_owned());
                if clock.now() >= forecast_at {
                    interval = interval_before_stop(tools);
                    forecast_at = clock.now() + EARLY_INTERVAL;
                }
                clock.sleep(interval);
            }
            // The machine may have ended; the thread that waits for the hypervisor learns of it.
            Err(_) => clock.sleep(LOOK_INTERVAL),
        }
    }
    None
}

fn interval_before_stop(tools: &RunningTools<'_>) -> Duration {
    let time = MemoryStatus::query(tools.watched).map(|status| status.time_to_stop(tools.downtime_max()));
    match time {
        Some(time) if time <= FORECAST_ERROR => WATCH_INTERVAL,
        _ => EARLY_INTERVAL,
    }
}

/// Asks the other host whether its hypervisor has the files of the copies open, until it has, or the migration ends.
/// `report` gets each answer.
pub(crate) fn verify(
    tools: &RunningTools<'_>,
    uuid: &str,
    paths: &[PathBuf],
    end: &AtomicBool,
    report: impl Fn(Result<()>),
) {
    while !end.load(Ordering::Acquire) {
        let request = FarRequest::VerifyDisks {
            uuid: uuid.to_owned(),
            paths: paths.to_vec(),
        };
        let verified = tools.common.far.ask(&request).map(drop);
        let may_change = matches!(verified, Err(Error::Refused { .. }));
        report(verified);
        if !may_change {
            return;
        }
        tools.common.clock.sleep(LOOK_INTERVAL);
    }
}
