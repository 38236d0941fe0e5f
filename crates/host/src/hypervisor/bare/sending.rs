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
use crate::hypervisor::migration::{GuestSpeed, MigrationRequest, ReceiverStart};
use crate::hypervisor::qom::property;
use crate::qemu::memory::MigrationSettings;
use crate::qemu::qmp::{MonitorError, QmpCommand, Result as MonitorResult};

/// Practically no limit, in bytes per second.
const BANDWIDTH: u64 = 64 << 30;
/// QEMU's name for the connection.
const CONNECTION: &str = "hf-migration";
/// QEMU's name for an object that has the address of the other host, for a command that finds the machine paused.
const DESTINATION: &str = "hf-destination";
/// Interval of asking while the memory is sent, and when the machine is stopped.
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
    let capabilities = match request.guest_speed {
        GuestSpeed::Kept => &["return-path"][..],
        GuestSpeed::SlowedIfNeeded => &["return-path", "auto-converge"],
    };
    let parameters = json!({ "max-bandwidth": BANDWIDTH });
    let settings = MigrationSettings::change(&*qemu.monitor, capabilities, &parameters);
    let settings = settings.map_err(|error| qemu.failed(error))?;
    let sent = sender.note_destination().and_then(|()| sender.send());
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
            forget_destination(qemu);
            request.receiver.discard();
            resumed.map_err(|error| qemu.failed(error))?;
            Err(refused(reason))
        }
    }
}

/// The other host of the migration; none if another program has migrated the machine.
pub(super) fn destination_of(qemu: &BareConnection) -> Result<Option<String>> {
    let found = property(&*qemu.monitor, &format!("/objects/{DESTINATION}"), "data");
    match found {
        Ok(address) => Ok(address.as_str().map(str::to_owned)),
        Err(error) if error.is_refusal() => Ok(None),
        Err(error) => Err(qemu.failed(error)),
    }
}

/// The machine runs here. A failure does not harm it.
pub(super) fn forget_destination(qemu: &BareConnection) {
    qemu.ask("object-del", json!({ "id": DESTINATION })).ok();
}

struct MemoryMove<'a> {
    qemu: &'a BareConnection,
    request: &'a MigrationRequest<'a>,
}

impl MemoryMove<'_> {
    fn execute(&self, name: &'static str, arguments: Value) -> MonitorResult<Value> {
        self.qemu.monitor.execute(&QmpCommand::new(name, arguments))
    }

    /// Notes the other host in QEMU, where it is as long as the machine is here. An object for secrets has a text.
    fn note_destination(&self) -> MonitorResult<()> {
        forget_destination(self.qemu);
        let object = json!({ "qom-type": "secret", "id": DESTINATION, "data": self.request.destination });
        self.execute("object-add", object).map(drop)
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
        loop {
            let status = self.execute("query-migrate", Value::Null)?;
            match status["status"].as_str().unwrap_or_default() {
                "completed" => return Ok(()),
                "failed" | "cancelled" => return Err(failure(&status)),
                "active" | "setup" | "none" | "" => self.clock().sleep(SENDING_INTERVAL),
                _ => self.clock().sleep(STOPPED_INTERVAL),
            }
        }
    }

    /// After a failure, QEMU resumes a machine that it has stopped. It does not after it has sent everything.
    fn resume_here(&self) -> MonitorResult<()> {
        let until = self.clock().now() + RESUME_PATIENCE;
        loop {
            let status = self.execute("query-status", Value::Null)?;
            if status["running"] == true {
                return Ok(());
            }
            if status["status"] == "postmigrate" || self.clock().now() >= until {
                return self.execute("cont", Value::Null).map(drop);
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
