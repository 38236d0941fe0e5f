//! Sends the memory of a machine to a QEMU of another host.
//!
//! The other QEMU does not run the machine when it has everything: it waits for a command. So the machine runs at no host
//! after an interruption at the wrong moment, and never at both.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use super::BareConnection;
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::migration::{GuestSpeed, MigrationRequest, ReceiverStart, Switchover};
use crate::qemu::memory::{CANCELLING, HELD, MigrationSettings, forget_destination, note_destination, wake_cancelled};
use crate::qemu::qmp::{MonitorError, QmpCommand, Result as MonitorResult};

/// Practically no limit, in bytes per second.
const BANDWIDTH: u64 = 64 << 30;
/// QEMU's name for the connection.
const CONNECTION: &str = "hf-migration";
/// Interval of asking while the memory is sent, and when its rest is.
const SENDING_INTERVAL: Duration = Duration::from_millis(20);
const STOPPED_INTERVAL: Duration = Duration::from_millis(1);
/// How long QEMU may take to resume the machine here after a failure.
const RESUME_PATIENCE: Duration = Duration::from_secs(5);

/// Moves the machine, and returns when it runs there.
///
/// # Errors
/// It runs here, unless the other host does not answer: then it runs here only if it was not stopped.
pub(super) fn migrate(qemu: &BareConnection, request: &MigrationRequest<'_>) -> Result<()> {
    let refused = |reason: String| Error::Refused {
        action: "migrate",
        machine: qemu.name.clone(),
        reason,
    };
    request.receiver.prepare().map_err(refused)?;
    let sender = MemoryMove { qemu, request };
    // QEMU 10 does not say which parts of a disk have changed after it has given the disk up.
    let capabilities = match request.guest_speed {
        GuestSpeed::Kept => &["return-path", "pause-before-switchover"][..],
        GuestSpeed::SlowedIfNeeded => &["return-path", "pause-before-switchover", "auto-converge"],
    };
    let parameters = json!({ "max-bandwidth": BANDWIDTH });
    let settings = MigrationSettings::change(&*qemu.monitor, capabilities, &parameters);
    let settings = settings.map_err(|error| qemu.failed(error))?;
    let sent = note_destination(&*qemu.monitor, request.destination).and_then(|()| sender.send());
    let ended = match sent {
        Ok(()) => request.receiver.start(),
        Err(error) => ReceiverStart::IsGone(holdfast_block::error_text(&error)),
    };
    match ended {
        ReceiverStart::Runs => Ok(()),
        ReceiverStart::Unknown(reason) => Err(refused(reason)),
        ReceiverStart::IsGone(reason) => {
            let resumed = sender.resume_here();
            settings.restore(&*qemu.monitor);
            forget_destination(&*qemu.monitor);
            request.receiver.discard();
            resumed.map_err(|error| qemu.failed(error))?;
            Err(refused(reason))
        }
    }
}

struct MemoryMove<'a> {
    qemu: &'a BareConnection,
    request: &'a MigrationRequest<'a>,
}

impl MemoryMove<'_> {
    fn execute(&self, name: &'static str, arguments: Value) -> MonitorResult<Value> {
        self.qemu.monitor.execute(&QmpCommand::new(name, arguments))
    }

    /// Sends the memory, and leaves the machine stopped.
    fn send(&self) -> MonitorResult<()> {
        // QEMU may run as a user that cannot connect.
        let connection = connect(self.request.memory_socket)?;
        let named = QmpCommand::new("getfd", json!({ "fdname": CONNECTION }));
        self.qemu.monitor.execute(&named.with_file(connection))?;
        if let Err(error) = self.execute("migrate", json!({ "uri": format!("fd:{CONNECTION}") })) {
            self.execute("closefd", json!({ "fdname": CONNECTION })).ok();
            return Err(error);
        }
        let mut decided = None;
        loop {
            let status = self.execute("query-migrate", Value::Null)?;
            match status["status"].as_str().unwrap_or_default() {
                "completed" => return Ok(()),
                "failed" | "cancelled" => return Err(failure(&status)),
                CANCELLING => {
                    wake_cancelled(&*self.qemu.monitor);
                    self.clock().sleep(SENDING_INTERVAL);
                }
                // QEMU reports that the machine is stopped before it waits for the decision.
                word if decided.is_some() && word != HELD => self.clock().sleep(STOPPED_INTERVAL),
                _ => {
                    decided = self.request.receiver.wait_for_switchover(SENDING_INTERVAL);
                    if let Some(decision) = decided {
                        self.go_on(decision)?;
                    }
                }
            }
        }
    }

    fn go_on(&self, decision: Switchover) -> MonitorResult<()> {
        let gone_on = match decision {
            Switchover::Continue => self.execute("migrate-continue", json!({ "state": HELD })),
            Switchover::Cancel => self.execute("migrate_cancel", Value::Null),
        };
        match gone_on {
            // It is not held yet, or has failed.
            Err(error) if error.is_refusal() => Ok(()),
            gone_on => gone_on.map(drop),
        }
    }

    /// After a failure, QEMU resumes a machine that it has stopped, unless another program had paused it. It does not after it has
    /// sent everything.
    fn resume_here(&self) -> MonitorResult<()> {
        let until = self.clock().now() + RESUME_PATIENCE;
        loop {
            let is_sent = self.execute("query-migrate", Value::Null)?["status"] == "completed";
            let status = self.execute("query-status", Value::Null)?;
            if is_sent || self.clock().now() >= until {
                return self.execute("cont", Value::Null).map(drop);
            }
            if status["status"] != "finish-migrate" {
                return Ok(());
            }
            self.clock().sleep(STOPPED_INTERVAL);
        }
    }

    fn clock(&self) -> &dyn Clock {
        &*self.qemu.clock
    }
}

fn connect(path: &Path) -> MonitorResult<OwnedFd> {
    let connection = UnixStream::connect(path).map_err(|source| MonitorError::Refused {
        command: "migrate".to_owned(),
        class: "GenericError".to_owned(),
        description: format!("{}: {source}", path.display()),
    })?;
    Ok(connection.into())
}

fn failure(status: &Value) -> MonitorError {
    let reason = status["error-desc"]
        .as_str()
        .unwrap_or("the memory was not sent completely");
    MonitorError::Refused {
        command: "migrate".to_owned(),
        class: "GenericError".to_owned(),
        description: reason.to_owned(),
    }
}
