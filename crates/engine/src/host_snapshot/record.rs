//! The record that is stored with a host snapshot.
//!
//! One line of JSON of at most [`BYTES_MAX`] bytes, the limit of ZFS: `docs/format/host-snapshot-record.md`.

use std::fmt;

use holdfast_repo::ProcessIdentity;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::guest_report::GuestReport;
use super::{Group, HostSnapshotRequest, NamedSnapshotSet};
use crate::machine::run_journal::{read_process, written_process};

/// Identifies a set: the host snapshots of one point in time, and the states of their machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SetId(pub u64);

impl fmt::Display for SetId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

impl SetId {
    /// Parses a set id: 16 digits.
    pub fn parse(text: &str) -> Option<Self> {
        let is_written = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_written.then(|| u64::from_str_radix(text, 16).ok().map(Self))?
    }
}

/// The largest record that every ZFS can store, in bytes.
pub(super) const BYTES_MAX: usize = 1000;
const SCHEMA: u64 = 1;

/// The record of a host snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshotRecord {
    /// The program that made it.
    pub program: String,
    /// Its point in time.
    pub time: Timestamp,
    /// "file system" if all running machines in it were frozen, "crash" if one was not, "shut off" if none was running;
    /// empty if no machine was considered.
    pub consistency: String,
    /// Number of machines in it.
    pub machine_count: u64,
    /// Their names; incomplete if there is no room for all.
    pub machines: Vec<String>,
    /// The set that it belongs to; none before version 0.1.
    pub set: Option<SetId>,
    /// Whether the set is complete, and the machines were frozen or paused meanwhile.
    pub is_whole: bool,
    /// Number of datasets in the set.
    pub dataset_count: u64,
    /// Their names; incomplete if there is no room for all.
    pub datasets: Vec<String>,
    /// The process that makes it, until its result is known.
    pub maker: Option<ProcessIdentity>,
    /// Longest time for which file systems of a machine were frozen, in milliseconds.
    pub frozen_ms: u64,
    /// Longest pause of a machine, in milliseconds.
    pub paused_ms: u64,
}

impl Default for HostSnapshotRecord {
    fn default() -> Self {
        Self {
            program: String::new(),
            time: Timestamp::default(),
            consistency: String::new(),
            machine_count: 0,
            machines: Vec::new(),
            set: None,
            is_whole: true,
            dataset_count: 0,
            datasets: Vec::new(),
            maker: None,
            frozen_ms: 0,
            paused_ms: 0,
        }
    }
}

impl HostSnapshotRecord {
    /// The record at the point in time: not yet confirmed that the guests stayed frozen until the end, and that the set
    /// will be completed.
    pub(super) fn unconfirmed(&self, group: &Group<'_>, maker: Option<&ProcessIdentity>) -> Self {
        let consistency = match &self.consistency[..] {
            "file system" => "crash",
            other => other,
        };
        Self {
            consistency: consistency.to_owned(),
            maker: maker.cloned(),
            is_whole: group.is_whole_at_cut,
            ..self.of_cut(group.cut)
        }
    }

    /// The record for one name.
    pub(super) fn of_cut(&self, cut: &NamedSnapshotSet) -> Self {
        Self {
            dataset_count: cut.wanted.len() as u64,
            datasets: cut.wanted.iter().map(|one| one.dataset.to_string()).collect(),
            ..self.clone()
        }
    }

    pub(super) fn new(request: &HostSnapshotRequest<'_>, time: Timestamp, guests: &[GuestReport]) -> Self {
        let millis = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let frozen = guests.iter().map(|guest| guest.quiesced.frozen()).max();
        let paused = guests.iter().filter_map(|guest| guest.paused).max();
        // The weakest consistency of all machines.
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
            ..Self::default()
        }
    }

    /// The record as it is stored. Names without room are left out, those of machines first.
    pub fn encode(&self) -> String {
        let (mut machines, mut datasets) = (self.machines.clone(), self.datasets.clone());
        loop {
            let mut value = json!({
                "schema": SCHEMA,
                "program": self.program,
                "time": self.time.to_string(),
                "consistency": self.consistency,
                "set": self.set.map(|set| set.to_string()),
                "machine_count": self.machine_count,
                "machines": machines,
                "is_whole": self.is_whole,
                "dataset_count": self.dataset_count,
                "datasets": datasets,
                "frozen_ms": self.frozen_ms,
                "paused_ms": self.paused_ms,
            });
            if let Some(maker) = &self.maker {
                value["maker"] = written_process(maker);
            }
            let text = value.to_string();
            if text.len() <= BYTES_MAX || machines.pop().is_none() && datasets.pop().is_none() {
                return text;
            }
        }
    }

    /// Parses a stored record; none if it is not a record, or of an unknown version.
    pub fn parse(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        if value.get("schema")?.as_u64()? != SCHEMA {
            return None;
        }
        let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let number = |key: &str| value.get(key).and_then(Value::as_u64).unwrap_or_default();
        let machines = value.get("machines")?.as_array()?.iter();
        let datasets = value.get("datasets").and_then(Value::as_array);
        let datasets = datasets.into_iter().flatten().filter_map(Value::as_str);
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
            // The first versions wrote the record only at the end.
            is_whole: value.get("is_whole").and_then(Value::as_bool).unwrap_or(true),
            dataset_count: number("dataset_count"),
            datasets: datasets.map(str::to_owned).collect(),
            maker: value.get("maker").and_then(read_process),
            frozen_ms: number("frozen_ms"),
            paused_ms: number("paused_ms"),
        })
    }
}

#[cfg(test)]
mod tests {
    use holdfast_repo::{Processes as _, SystemProcesses};

    use super::{BYTES_MAX, HostSnapshotRecord};
    use crate::host_snapshot::record::SetId;

    #[test]
    fn a_record_comes_back_as_it_was() {
        let record = HostSnapshotRecord {
            program: "holdfast 0.1.0".to_owned(),
            time: "2026-11-22T16:45:00.25Z".parse().unwrap(),
            consistency: "file system".to_owned(),
            set: Some(SetId(0x00ab_cdef_0123_4567)),
            machine_count: 2,
            machines: vec!["web1".to_owned(), "a \"b\"\tc".to_owned()],
            is_whole: false,
            dataset_count: 2,
            datasets: vec!["zfs:tank/vm".to_owned(), "btrfs:/srv/a b".to_owned()],
            maker: Some(SystemProcesses.this()),
            frozen_ms: 12,
            paused_ms: 3,
        };
        let text = record.encode();
        // ZFS lists properties one per line, with tabs in between.
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
    fn a_record_of_a_program_that_did_not_tell_is_of_a_whole_one() {
        let text = "{\"schema\":1,\"program\":\"p\",\"time\":\"2026-11-22T16:45:00Z\",\"consistency\":\"crash\",\"machines\":[]}";
        let record = HostSnapshotRecord::parse(text).unwrap();
        assert!(record.is_whole && record.datasets.is_empty());
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
        assert!(parsed.is_whole && parsed.maker.is_none());
        assert!(parsed.machines.len() > 30 && parsed.machines[..] == record.machines[..parsed.machines.len()]);
    }
}
