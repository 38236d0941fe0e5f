//! Limits how fast a guest writes to a disk, so that a live copy converges.
//!
//! QEMU puts a device with limits into a group, whose name has the number of the run: so the limits of a killed run are
//! found and removed.

use serde_json::{Value, json};

use super::disks::device_path;
use super::names::{RunId, run_of};
use crate::qemu::jobs::list;
use crate::qemu::qmp::{Monitor, QmpCommand, Result};

/// The limits in QEMU's description of a device.
const LIMITS: [&str; 6] = ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"];

/// A device with limits.
#[derive(Debug)]
struct LimitedDevice {
    path: String,
    group: String,
}

/// The most that a guest may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteLimit {
    /// Bytes per second.
    pub bytes_per_s: u64,
    /// Requests per second. A request of few bytes may make more of them dirty.
    pub requests_per_s: u64,
}

/// Limits the writes of the guest to the device at a QOM path. False if the owner of the machine has set limits, which are
/// kept.
pub fn limit_writes(monitor: &dyn Monitor, run: RunId, device: &str, limit: WriteLimit) -> Result<bool> {
    let group = run.thing("limit");
    let others = limited(monitor)?;
    if others
        .iter()
        .any(|other| other.path == device && run_of(&other.group) != Some(run))
    {
        return Ok(false);
    }
    // Each device has a group of its own: devices of one group share the limit.
    let number = device.bytes().fold(0_u32, |number, byte| {
        number.wrapping_mul(31).wrapping_add(u32::from(byte))
    });
    let arguments = json!({
        "id": device, "group": format!("{group}-{number:08x}"),
        "bps": 0, "bps_rd": 0, "bps_wr": limit.bytes_per_s.max(1),
        "iops": 0, "iops_rd": 0, "iops_wr": limit.requests_per_s.max(1),
    });
    monitor.execute(&QmpCommand::new("block_set_io_throttle", arguments))?;
    Ok(true)
}

/// Removes the limits of a run from all devices.
pub fn unlimit_writes(monitor: &dyn Monitor, run: RunId) -> Result<()> {
    for device in limited(monitor)? {
        if run_of(&device.group) == Some(run) {
            let mut arguments = json!({ "id": device.path });
            for limit in LIMITS {
                arguments[limit] = json!(0);
            }
            monitor.execute(&QmpCommand::new("block_set_io_throttle", arguments))?;
        }
    }
    Ok(())
}

/// The runs that limit devices.
pub(super) fn limiting_runs(monitor: &dyn Monitor) -> Result<Vec<RunId>> {
    Ok(limited(monitor)?
        .iter()
        .filter_map(|device| run_of(&device.group))
        .collect())
}

fn limited(monitor: &dyn Monitor) -> Result<Vec<LimitedDevice>> {
    let devices = list(monitor, "query-block", Value::Null)?;
    Ok(devices.iter().filter_map(limited_device).collect())
}

fn limited_device(device: &Value) -> Option<LimitedDevice> {
    let inserted = device.get("inserted")?;
    let is_set = |limit: &str| {
        inserted
            .get(limit)
            .and_then(Value::as_u64)
            .is_some_and(|value| value > 0)
    };
    LIMITS.into_iter().find(|limit| is_set(limit))?;
    Some(LimitedDevice {
        path: device_path(device.get("qdev")?.as_str()?),
        group: inserted
            .get("group")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned(),
    })
}
