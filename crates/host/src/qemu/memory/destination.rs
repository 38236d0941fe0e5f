//! The other host of a migration, which is noted in QEMU as long as the machine is here: a command that finds the machine
//! stopped knows why.

use holdfast_block::Clock;
use serde_json::{Value, json};

use super::migrate::{CANCELLING, STATUS, cancel};
use crate::qemu::qmp::{Monitor, QmpCommand, Result};
use crate::qemu::qom::property;

/// QEMU's name for the object that has the address. An object for secrets has a text.
const OBJECT: &str = "hf-destination";
/// QEMU has stopped the machine, and waits for a command before it gives the disks up and sends the rest.
pub(crate) const HELD: &str = "pre-switchover";

/// Notes the address of the other host.
pub(crate) fn note_destination(monitor: &dyn Monitor, address: &str) -> Result<()> {
    forget_destination(monitor);
    let object = json!({ "qom-type": "secret", "id": OBJECT, "data": address });
    monitor.execute(&QmpCommand::new("object-add", object)).map(drop)
}

/// The other host; none if another program migrates the machine, or none does.
pub(crate) fn noted_destination(monitor: &dyn Monitor) -> Result<Option<String>> {
    match property(monitor, &format!("/objects/{OBJECT}"), "data") {
        Ok(address) => Ok(address.as_str().map(str::to_owned)),
        Err(error) if error.is_refusal() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The machine runs here. A failure does not harm it.
pub(crate) fn forget_destination(monitor: &dyn Monitor) {
    let object = json!({ "id": OBJECT });
    monitor.execute(&QmpCommand::new("object-del", object)).ok();
}

/// Whether a migration of Holdfast has stopped the machine, which has not given its disks up.
pub(crate) fn is_held(monitor: &dyn Monitor) -> Result<bool> {
    let status = monitor.execute(&QmpCommand::new(STATUS, Value::Null))?;
    let is_stopped = [HELD, CANCELLING].iter().any(|word| status["status"] == *word);
    Ok(is_stopped && noted_destination(monitor)?.is_some())
}

/// Cancels a migration whose program was killed while the machine was held: QEMU would wait forever. It resumes the machine.
pub fn cancel_held_migration(monitor: &dyn Monitor, clock: &dyn Clock) -> Result<()> {
    if is_held(monitor)? {
        cancel(monitor, clock)?;
        forget_destination(monitor);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use holdfast_block::ManualClock;
    use serde_json::{Value, json};

    use super::{HELD, cancel_held_migration};
    use crate::qemu::qmp::{Monitor, QmpCommand, Result};

    /// The answers of a QEMU before 10.0 whose migration is cancelled at the moment at which it begins to wait.
    struct LateWait(Mutex<&'static str>);

    impl Monitor for LateWait {
        fn execute(&self, command: &QmpCommand) -> Result<Value> {
            let mut status = self.0.lock().unwrap();
            match command.name {
                "query-migrate" => return Ok(json!({ "status": *status })),
                "migrate_cancel" => *status = "cancelling",
                "migrate-continue" if command.arguments == json!({ "state": "cancelling" }) => *status = "cancelled",
                "qom-get" => return Ok(json!("ssh://host2")),
                _ => {}
            }
            Ok(json!({}))
        }
    }

    #[test]
    fn a_cancelled_migration_that_waits_is_ended() {
        let monitor = LateWait(Mutex::new(HELD));
        cancel_held_migration(&monitor, &ManualClock::new()).unwrap();
        assert_eq!(*monitor.0.lock().unwrap(), "cancelled");
        // The process that has cancelled it was killed.
        let monitor = LateWait(Mutex::new("cancelling"));
        cancel_held_migration(&monitor, &ManualClock::new()).unwrap();
        assert_eq!(*monitor.0.lock().unwrap(), "cancelled");
    }
}
