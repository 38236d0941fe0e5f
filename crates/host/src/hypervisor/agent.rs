//! The QEMU guest agent: freezing and thawing the guest's file systems.
//!
//! Source: QEMU's `qga/qapi-schema.json`. The guest's own hooks (`fsfreeze-hook`) run as part of a freeze: if a hook
//! fails, the freeze fails.

pub(crate) mod socket;

use std::time::Duration;

use serde_json::{Value, json};

use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::traits::Machine;
use crate::qemu::qmp::{Monitor, QmpCommand};

/// Freezes the file systems of the guest, and returns their number.
///
/// # Errors
/// The agent does not answer in time, or reports an error. The guest may be frozen nevertheless, so the caller must
/// thaw it.
pub fn freeze(machine: &dyn Machine, deadline: Duration) -> Result<u64> {
    count(machine, "guest-fsfreeze-freeze", deadline)
}

/// Thaws the file systems of the guest, and returns how many were frozen. It is not an error if none is frozen.
pub fn thaw(machine: &dyn Machine, deadline: Duration) -> Result<u64> {
    count(machine, "guest-fsfreeze-thaw", deadline)
}

/// Sets the guest's clock to `now_ms` milliseconds since 1970.
pub fn set_clock(machine: &dyn Machine, now_ms: i64, deadline: Duration) -> Result<()> {
    let command = json!({ "execute": "guest-set-time", "arguments": { "time": now_ms.saturating_mul(1_000_000) } });
    machine.ask_agent(&command.to_string(), deadline).map(drop)
}

/// Whether the guest's file systems are frozen.
///
/// # Errors
/// The agent does not answer in time, or reports an error.
pub fn is_frozen(machine: &dyn Machine, deadline: Duration) -> Result<bool> {
    const COMMAND: &str = "guest-fsfreeze-status";
    let answer = machine.ask_agent(&json!({ "execute": COMMAND }).to_string(), deadline)?;
    let value: Value = serde_json::from_str(&answer).unwrap_or_default();
    match value.get("return").and_then(Value::as_str) {
        Some("frozen") => Ok(true),
        Some("thawed") => Ok(false),
        _ => Err(Error::Refused {
            action: "ask the guest agent of",
            machine: machine.name().to_owned(),
            reason: format!("{COMMAND} was answered with {answer:?}"),
        }),
    }
}

/// Whether a process in the guest has the agent's channel open. The agent may be unresponsive nevertheless.
pub fn is_connected(monitor: &dyn Monitor) -> crate::qemu::qmp::Result<bool> {
    let Some(label) = crate::qemu::qom::agent_channel(monitor)? else {
        return Ok(false);
    };
    let channels = monitor.execute(&QmpCommand::new("query-chardev", Value::Null))?;
    let channels = channels.as_array().into_iter().flatten();
    let mut its = channels.filter(|channel| channel.get("label").and_then(Value::as_str) == Some(&label));
    Ok(its.any(|channel| channel.get("frontend-open").and_then(Value::as_bool) == Some(true)))
}

fn count(machine: &dyn Machine, command: &'static str, deadline: Duration) -> Result<u64> {
    let answer = machine.ask_agent(&json!({ "execute": command }).to_string(), deadline)?;
    log::debug!("the guest agent of {} answers {command} with {answer}", machine.name());
    let value: Value = serde_json::from_str(&answer).unwrap_or_default();
    value
        .get("return")
        .and_then(Value::as_u64)
        .ok_or_else(|| Error::Refused {
            action: "ask the guest agent of",
            machine: machine.name().to_owned(),
            reason: format!("{command} was answered with {answer:?}"),
        })
}
