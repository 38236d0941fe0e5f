//! The latency of the guest's writes, from QEMU's counters.

use std::time::Duration;

use serde_json::Value;

use super::disks::device_path;
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// QEMU's counters of the writes of some devices, since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteCounters {
    /// Completed writes.
    pub operation_count: u64,
    /// Total time of the writes.
    pub time: Duration,
}

impl WriteCounters {
    /// The average time of a write; none if there were no writes.
    pub fn average(&self) -> Option<Duration> {
        let count = u32::try_from(self.operation_count.max(1)).unwrap_or(u32::MAX);
        (self.operation_count > 0).then(|| self.time / count)
    }

    /// The difference to the counters at an earlier time.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            operation_count: self.operation_count.saturating_sub(earlier.operation_count),
            time: self.time.saturating_sub(earlier.time),
        }
    }
}

const COMMAND: &str = "query-blockstats";

/// The sum of the counters of these devices; `devices` are [`QemuDisk::device`](super::QemuDisk::device).
pub fn write_counters(monitor: &dyn Monitor, devices: &[String]) -> Result<WriteCounters> {
    let answer = monitor.execute(&QmpCommand::new(COMMAND, Value::Null))?;
    counters(&answer, devices).ok_or_else(|| MonitorError::Invalid {
        command: COMMAND.to_owned(),
        detail: "a device has no counters".to_owned(),
    })
}

fn counters(answer: &Value, devices: &[String]) -> Option<WriteCounters> {
    let mut sum = WriteCounters::default();
    for device in answer.as_array()? {
        let path = device.get("qdev").and_then(Value::as_str).map(device_path);
        if path.is_none_or(|path| !devices.contains(&path)) {
            continue;
        }
        let number = |key: &str| device.get("stats")?.get(key)?.as_u64();
        sum.operation_count += number("wr_operations")?;
        sum.time += Duration::from_nanos(number("wr_total_time_ns")?);
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::{WriteCounters, counters};

    #[test]
    fn the_counters_of_the_wanted_devices_are_added_up() {
        let device = |qdev: &str, count: u64| json!({ "qdev": qdev, "stats": { "wr_operations": count, "wr_total_time_ns": count * 1_000_000 } });
        let answer = json!([device("a", 2), device("/machine/b", 3), device("c", 100), { "stats": {} }]);
        let wanted = ["/machine/peripheral/a".to_owned(), "/machine/b".to_owned()];
        let found = counters(&answer, &wanted).unwrap();
        assert_eq!((found.operation_count, found.time), (5, Duration::from_millis(5)));
        assert_eq!(found.average(), Some(Duration::from_millis(1)));
        assert_eq!(found.since(&found), WriteCounters::default());
        assert_eq!(WriteCounters::default().average(), None);
        assert!(counters(&json!([{ "qdev": "a", "stats": {} }]), &wanted).is_none());
    }
}
