//! Makes QEMU send its memory as for a migration, and stop at the end.
//!
//! libvirt does not know of this migration: it ignores a migration that it has not started, and sees a machine that
//! is paused and resumed. When everything is sent, QEMU has stopped the machine and released its images ("inactive"),
//! as for a migration to another host. The images are activated one by one, by a short NBD export of each. This is
//! the only method that works in all versions while the machine is paused.

use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use super::MemoryPipe;
use super::receive::StreamEnd;
use super::settings::MigrationSettings;
use crate::qemu::names::RunId;
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};
use crate::qemu::{Danger, QemuVersion};

/// Whether the machine runs while its memory is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryMode {
    /// The machine runs, and is paused for the last part.
    Live,
    /// The machine is paused from the first page to the last.
    Stopped,
}

/// The requested method of saving memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryMethod {
    /// Live, unless this version of QEMU may then send incomplete memory.
    #[default]
    Auto,
    /// Live, whatever the version of QEMU.
    Live,
    /// While the machine is paused.
    Stopped,
}

impl MemoryMethod {
    /// The mode for the machine behind `monitor`, and the QEMU version if its defect rules out the live mode.
    ///
    /// A QEMU with TCG may lose writes while its memory is sent ([`Danger::MemoryOfRunningTcg`]). KVM is not affected.
    pub fn mode(self, monitor: &dyn Monitor) -> Result<(MemoryMode, Option<QemuVersion>)> {
        if self == Self::Stopped {
            return Ok((MemoryMode::Stopped, None));
        }
        let version = QemuVersion::query(monitor)?;
        let is_lossy = version.defect(Danger::MemoryOfRunningTcg).is_some() && !is_accelerated(monitor)?;
        let mode = match self {
            Self::Auto if is_lossy => MemoryMode::Stopped,
            _ => MemoryMode::Live,
        };
        Ok((mode, is_lossy.then_some(version)))
    }
}

/// Whether the machine uses KVM.
fn is_accelerated(monitor: &dyn Monitor) -> Result<bool> {
    let answer = monitor.execute(&QmpCommand::new("query-kvm", Value::Null))?;
    answer["enabled"].as_bool().ok_or_else(|| MonitorError::Invalid {
        command: "query-kvm".to_owned(),
        detail: "the field \"enabled\" is missing".to_owned(),
    })
}

/// Practically no limit, in bytes per second: the reader of the pipe limits the rate. The run's number is added,
/// which identifies the migration as that of the run.
const BANDWIDTH: u64 = 64 << 30;
/// QEMU's defaults since version 5.2, restored when the previous values are unknown.
const BANDWIDTH_OF_QEMU: u64 = 128 << 20;
const DOWNTIME_MS_OF_QEMU: u64 = 300;
/// The initial limit on the downtime of the last pass.
const DOWNTIME_MS: u64 = 30;
const DOWNTIME_MS_MAX: u64 = 1000;
/// Number of passes after which the downtime limit is doubled, and after which the machine is stopped.
const PASS_COUNT_PATIENT: u64 = 4;
const PASS_COUNT_MAX: u64 = 12;
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Interval of the reports that the machine runs.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// Timeout from the last byte until QEMU reports completion.
const END_DEADLINE: Duration = Duration::from_secs(10);
const END_INTERVAL: Duration = Duration::from_millis(2);
pub(super) const STATUS: &str = "query-migrate";
/// QEMU's word for a migration that was cancelled and has not ended.
pub(crate) const CANCELLING: &str = "cancelling";

/// The result of a complete transfer: the machine is stopped, and all of its memory was sent.
pub(crate) struct Sent {
    /// How long the machine had been paused by the end of the transfer.
    pub(crate) paused_for: Duration,
    /// Whether another client had paused the machine before. If so, it stays paused.
    pub(crate) is_paused_by_others: bool,
    pub(crate) settings: MigrationSettings,
}

/// Sends the memory of a machine.
pub(crate) struct MemorySender<'a> {
    pub(crate) monitor: &'a dyn Monitor,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) run: RunId,
}

/// Called at intervals while the machine runs.
pub(crate) type OnRunning<'t> = dyn FnMut() + 't;

impl MemorySender<'_> {
    fn execute(&self, name: &'static str, arguments: Value) -> Result<Value> {
        self.monitor.execute(&QmpCommand::new(name, arguments))
    }

    /// Sends the memory, and leaves the machine stopped. Calls `runs` while the machine is still running.
    ///
    /// # Errors
    /// After every error, no migration that Holdfast started is in progress. The caller must check whether the
    /// machine runs.
    pub(crate) fn send(&self, pipe: MemoryPipe, mode: MemoryMode, runs: &mut OnRunning<'_>) -> Result<Sent> {
        let status = self.execute(STATUS, Value::Null)?;
        if !is_over(&status) {
            return Err(MonitorError::Busy {
                with: "another migration of the machine".to_owned(),
            });
        }
        let parameters = json!({ "max-bandwidth": bandwidth(self.run), "downtime-limit": DOWNTIME_MS });
        let settings = MigrationSettings::change(self.monitor, &[], &parameters)?;
        let start = self.clock.now();
        let sent = self
            .begin(pipe, mode)
            .and_then(|ended| self.follow(&ended, mode, runs).inspect_err(|_| self.cancel()));
        match sent {
            Ok((downtime, is_paused_by_others)) => Ok(Sent {
                is_paused_by_others,
                paused_for: match mode {
                    MemoryMode::Live => downtime,
                    MemoryMode::Stopped => self.clock.now().saturating_sub(start),
                },
                settings,
            }),
            Err(error) => {
                settings.restore(self.monitor);
                Err(error)
            }
        }
    }

    fn begin(&self, pipe: MemoryPipe, mode: MemoryMode) -> Result<StreamEnd> {
        let name = self.run.thing("memory");
        let (writer, ended) = pipe.split();
        self.monitor
            .execute(&QmpCommand::new("getfd", json!({ "fdname": name })).with_file(writer))?;
        if mode == MemoryMode::Stopped {
            self.execute("stop", Value::Null)?;
        }
        let begun = self.execute("migrate", json!({ "uri": format!("fd:{name}") }));
        if begun.as_ref().is_err_and(|error| !error.is_refusal()) {
            // The migration may have started. After a refusal, a running migration belongs to another client.
            self.cancel();
        }
        begun.map(|_| ended)
    }

    /// Waits for the end of the migration. Returns how long the machine was stopped, and whether another client had
    /// paused it.
    fn follow(&self, ended: &StreamEnd, mode: MemoryMode, runs: &mut OnRunning<'_>) -> Result<(Duration, bool)> {
        let mut downtime_ms = DOWNTIME_MS;
        let mut next_look = PASS_COUNT_PATIENT;
        let mut is_stopped = mode == MemoryMode::Stopped;
        let mut is_paused_by_others = false;
        let mut last_report = self.clock.now();
        while !ended.wait(POLL_INTERVAL) {
            let status = self.execute(STATUS, Value::Null)?;
            if let Some(error) = failure(&status) {
                return Err(error);
            }
            if !is_stopped {
                // QEMU reports the stop for the last pass, and `runs` is no longer called. A pause by another client
                // is not part of Holdfast's downtime.
                let state = self.execute("query-status", Value::Null)?;
                let is_paused = state["status"] == "paused";
                let is_success = state["running"] == true || is_paused;
                if is_success {
                    // In any other state, QEMU is completing the migration, and the earlier value is valid.
                    is_paused_by_others = is_paused;
                }
                if is_success && self.clock.now().saturating_sub(last_report) > REPORT_INTERVAL {
                    last_report = self.clock.now();
                    runs();
                }
            }
            let passes = status["ram"]["dirty-sync-count"].as_u64().unwrap_or_default();
            if is_stopped || passes < next_look {
                continue;
            }
            next_look = passes + 1;
            if passes >= PASS_COUNT_MAX {
                // The guest writes faster than the memory can be sent.
                self.execute("stop", Value::Null)?;
                is_stopped = true;
            } else if downtime_ms < DOWNTIME_MS_MAX {
                downtime_ms *= 2;
                self.execute("migrate-set-parameters", json!({ "downtime-limit": downtime_ms }))?;
            }
        }
        let end = self.clock.now();
        loop {
            let status = self.execute(STATUS, Value::Null)?;
            if let Some(error) = failure(&status) {
                return Err(error);
            }
            if status["status"] == "completed" {
                let downtime = Duration::from_millis(status["downtime"].as_u64().unwrap_or_default());
                return Ok((downtime + self.clock.now().saturating_sub(end), is_paused_by_others));
            }
            if self.clock.now().saturating_sub(end) > END_DEADLINE {
                return Err(refused("the memory was not sent completely"));
            }
            self.clock.sleep(END_INTERVAL);
        }
    }

    /// Cancels the migration that Holdfast started.
    fn cancel(&self) {
        cancel(self.monitor, self.clock).ok();
    }
}

/// Cancels the migration that `run` started, if it is still in progress: at its end it would stop the machine. Must
/// be called before a machine is resumed after a run that was killed.
///
/// A migration of another client is not cancelled. The bandwidth limit distinguishes them: libvirt sets its own.
pub fn end_sending(monitor: &dyn Monitor, clock: &dyn Clock, run: RunId) -> Result<()> {
    let parameters = monitor.execute(&QmpCommand::new("query-migrate-parameters", Value::Null))?;
    if parameters["max-bandwidth"] != bandwidth(run) {
        return Ok(());
    }
    cancel(monitor, clock)?;
    let begun_with = json!({ "max-bandwidth": BANDWIDTH_OF_QEMU, "downtime-limit": DOWNTIME_MS_OF_QEMU });
    monitor.execute(&QmpCommand::new("migrate-set-parameters", begun_with))?;
    Ok(())
}

/// Cancels a migration in progress, and waits until it has ended.
pub(super) fn cancel(monitor: &dyn Monitor, clock: &dyn Clock) -> Result<()> {
    let start = clock.now();
    let mut is_cancelled = false;
    while clock.now().saturating_sub(start) < END_DEADLINE {
        let status = monitor.execute(&QmpCommand::new(STATUS, Value::Null))?;
        if is_over(&status) {
            return Ok(());
        }
        if !is_cancelled {
            monitor.execute(&QmpCommand::new("migrate_cancel", Value::Null))?;
            is_cancelled = true;
        } else if status["status"] == CANCELLING {
            wake_cancelled(monitor);
        }
        clock.sleep(POLL_INTERVAL);
    }
    Err(refused("the migration does not stop"))
}

/// Ends the wait before the switchover. QEMU before 10.0 would wait forever if the migration was cancelled when it had decided to
/// wait and did not wait yet (`migration_maybe_pause`). Otherwise this has no effect.
pub(crate) fn wake_cancelled(monitor: &dyn Monitor) {
    let wake = QmpCommand::new("migrate-continue", json!({ "state": CANCELLING }));
    monitor.execute(&wake).ok();
}

/// The bandwidth limit that identifies the migration of a run.
fn bandwidth(run: RunId) -> u64 {
    BANDWIDTH + u64::from(run.0)
}

/// Whether no migration is in progress.
fn is_over(status: &Value) -> bool {
    let over = ["none", "completed", "failed", "cancelled"];
    status["status"].as_str().is_none_or(|status| over.contains(&status))
}

fn failure(status: &Value) -> Option<MonitorError> {
    let word = status["status"].as_str().unwrap_or_default();
    let message = status["error-desc"].as_str();
    match word {
        "failed" | "cancelled" | "cancelling" => Some(refused(message.unwrap_or("the memory was not sent completely"))),
        _ => None,
    }
}

fn refused(description: &str) -> MonitorError {
    MonitorError::Refused {
        command: "migrate".to_owned(),
        class: "GenericError".to_owned(),
        description: description.to_owned(),
    }
}
