//! What is noted of a host snapshot, with the snapshot itself.
//!
//! One line of JSON, of at most [`BYTES_MAX`] bytes, since ZFS keeps no more: `docs/format/host-snapshot-record.md`.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::HostSnapshotRequest;
use super::guests::GuestReport;
use crate::machine_state::SetId;

/// What every ZFS can keep.
pub(super) const BYTES_MAX: usize = 1000;
const SCHEMA: u64 = 1;

/// The record of a host snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostSnapshotRecord {
    /// The program that made it.
    pub program: String,
    /// Its instant.
    pub time: Timestamp,
    /// "file system" where all running machines in it were frozen, "crash" where one was not, "shut off" where none was running;
    /// empty where no machine was asked.
    pub consistency: String,
    /// How many machines are in it.
    pub machine_count: u64,
    /// Their names; not all where there is no room for them.
    pub machines: Vec<String>,
    /// What it has in common with others of its instant, and with the states of its machines; none before version 0.1.
    pub set: Option<SetId>,
    /// The longest that file systems of one were frozen, in milliseconds.
    pub frozen_ms: u64,
    /// The longest that one stood still, in milliseconds.
    pub paused_ms: u64,
}

impl HostSnapshotRecord {
    pub(super) fn new(request: &HostSnapshotRequest<'_>, time: Timestamp, guests: &[GuestReport]) -> Self {
        let millis = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let frozen = guests.iter().map(|guest| guest.quiesced.frozen()).max();
        let paused = guests.iter().filter_map(|guest| guest.paused).max();
        // The worst of them.
        let words = ["crash", "file system", "shut off"].into_iter();
        let consistency = words
            .into_iter()
            .find(|word| guests.iter().any(|guest| guest.consistency_of_disks() == *word));
        Self {
            program: request.program.clone(),
            time,
            consistency: consistency.unwrap_or_default().to_owned(),
            set: Some(request.set),
            machine_count: guests.len() as u64,
            machines: guests.iter().map(|guest| guest.name.clone()).collect(),
            frozen_ms: frozen.map(millis).unwrap_or_default(),
            paused_ms: paused.map(millis).unwrap_or_default(),
        }
    }

    /// As it is kept. Names that have no room are left out.
    pub fn encode(&self) -> String {
        let mut machines = self.machines.clone();
        loop {
            let value = json!({
                "schema": SCHEMA,
                "program": self.program,
                "time": self.time.to_string(),
                "consistency": self.consistency,
                "set": self.set.map(|set| set.to_string()),
                "machine_count": self.machine_count,
                "machines": machines,
                "frozen_ms": self.frozen_ms,
                "paused_ms": self.paused_ms,
            });
            let text = value.to_string();
            if text.len() <= BYTES_MAX || machines.pop().is_none() {
                return text;
            }
        }
    }

    /// A record as it was kept; none where it is not one, or of a version that is not known.
    pub fn parse(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        if value.get("schema")?.as_u64()? != SCHEMA {
            return None;
        }
        let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let number = |key: &str| value.get(key).and_then(Value::as_u64).unwrap_or_default();
        let machines = value.get("machines")?.as_array()?.iter();
        if number("machine_count") < machines.len() as u64 {
            return None;
        }
        Some(Self {
            program: text("program")?,
            time: text("time")?.parse().ok()?,
            consistency: text("consistency")?,
            set: text("set").as_deref().and_then(SetId::parse),
            machine_count: number("machine_count"),
            machines: machines
                .map(|name| name.as_str().map(str::to_owned))
                .collect::<Option<_>>()?,
            frozen_ms: number("frozen_ms"),
            paused_ms: number("paused_ms"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{BYTES_MAX, HostSnapshotRecord};
    use crate::machine_state::SetId;

    #[test]
    fn a_record_comes_back_as_it_was() {
        let record = HostSnapshotRecord {
            program: "holdfast 0.1.0".to_owned(),
            time: "2026-11-22T16:45:00.25Z".parse().unwrap(),
            consistency: "file system".to_owned(),
            set: Some(SetId(0x00ab_cdef_0123_4567)),
            machine_count: 2,
            machines: vec!["web1".to_owned(), "a \"b\"\tc".to_owned()],
            frozen_ms: 12,
            paused_ms: 3,
        };
        let text = record.encode();
        // ZFS tells properties by the line, with tabs in between.
        assert!(!text.contains(['\n', '\t']));
        assert_eq!(HostSnapshotRecord::parse(&text), Some(record));
        for other in [
            "",
            "{}",
            "[]",
            "{\"schema\": 2}",
            "null",
            "{\"schema\":1,\"machines\":[1]}",
        ] {
            assert_eq!(HostSnapshotRecord::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_record_of_many_machines_is_small_all_the_same() {
        let record = HostSnapshotRecord {
            machine_count: 300,
            machines: (0..300).map(|number| format!("machine-{number}")).collect(),
            ..HostSnapshotRecord::default()
        };
        let text = record.encode();
        assert!(text.len() <= BYTES_MAX);
        let parsed = HostSnapshotRecord::parse(&text).unwrap();
        assert_eq!(parsed.machine_count, 300);
        assert!(parsed.machines.len() > 30 && parsed.machines[..] == record.machines[..parsed.machines.len()]);
    }
}
