//! The records of jobs: the stored state of each job between runs, in a small file `jobs/NAME.json`.
//!
//! Only the holder of a job's lock writes its file, so that a daemon and a manual run do not overwrite each other's
//! changes. A record is written under another name, synced, and renamed. If that fails, for example because the disk is
//! full, the record is kept in memory, takes precedence over the file, and is written as soon as possible.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use holdfast_policy::Timestamp;
use holdfast_policy::schedule::JobState;
use serde_json::{Value, json};

use super::outcome::Outcome;
use holdfast_engine::write_note;
use holdfast_engine::{Error, Result};

/// A lasting problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alert {
    /// The time at which the problem began.
    pub since: Timestamp,
    /// Time of the last notification.
    pub notified_at: Option<Timestamp>,
}

/// The record of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobRecord {
    /// The state of the job's schedule.
    pub state: JobState,
    /// The end and the outcome of the last run.
    pub last: Option<(Timestamp, Outcome)>,
    /// Present while the job fails.
    pub failing: Option<Alert>,
    /// Machines without a fresh snapshot.
    pub silent: BTreeMap<String, Alert>,
}

impl JobRecord {
    /// The record of a new job.
    pub fn new(now: Timestamp) -> Self {
        Self {
            state: JobState::new(now),
            last: None,
            failing: None,
            silent: BTreeMap::new(),
        }
    }

    fn encode(&self) -> Vec<u8> {
        let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
        let alert = |alert: &Alert| json!({"since": alert.since.to_string(), "told": time(alert.notified_at)});
        let silent: serde_json::Map<String, Value> = self
            .silent
            .iter()
            .map(|(machine, one)| (machine.clone(), alert(one)))
            .collect();
        let value = json!({
            "schema": 1,
            "seen": self.state.handled_until.to_string(),
            "running": time(self.state.running),
            "failed_count": self.state.failed_count,
            "retry_at": time(self.state.retry_at),
            "last_end": time(self.last.map(|(end, _)| end)),
            "last_outcome": self.last.map(|(_, outcome)| outcome.word()),
            "failing": self.failing.as_ref().map(alert),
            "silent": silent,
        });
        format!("{value:#}\n").into_bytes()
    }

    /// Parses a record; `None` if it is invalid.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(bytes).ok()?;
        let time = |value: &Value| value.as_str()?.parse::<Timestamp>().ok();
        let alert = |value: &Value| {
            Some(Alert {
                since: time(&value["since"])?,
                notified_at: time(&value["told"]),
            })
        };
        let outcome = value["last_outcome"].as_str().and_then(Outcome::from_word);
        let silent = value["silent"].as_object()?.iter();
        Some(Self {
            state: JobState {
                handled_until: time(&value["seen"])?,
                running: time(&value["running"]),
                failed_count: u32::try_from(value["failed_count"].as_u64()?).ok()?,
                retry_at: time(&value["retry_at"]),
            },
            last: time(&value["last_end"]).zip(outcome),
            failing: alert(&value["failing"]),
            silent: silent
                .filter_map(|(machine, value)| Some((machine.clone(), alert(value)?)))
                .collect(),
        })
    }
}

/// The records of all jobs.
#[derive(Debug)]
pub struct JobRecords {
    folder: PathBuf,
    /// Records that could not be written to their files.
    unwritten: BTreeMap<String, JobRecord>,
}

impl JobRecords {
    /// The records in the scheduler's state folder.
    pub fn new(state: &Path) -> Self {
        Self {
            folder: state.join("jobs"),
            unwritten: BTreeMap::new(),
        }
    }

    /// The record of a job; `None` if there is no valid one.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn read(&self, job: &str) -> Result<Option<JobRecord>> {
        if let Some(record) = self.unwritten.get(job) {
            return Ok(Some(record.clone()));
        }
        let path = self.path(job);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(JobRecord::parse(&bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::File {
                action: "read",
                path,
                source,
            }),
        }
    }

    /// Stores the record of a job durably. If that fails, the record is kept in memory, and the error is returned.
    pub(super) fn write(&mut self, job: &str, record: JobRecord) -> Result<()> {
        let path = self.path(job);
        let written = write_note(&path, &path.with_extension("partial"), &record.encode());
        if written.is_err() {
            self.unwritten.insert(job.to_owned(), record);
        } else {
            self.unwritten.remove(job);
        }
        written.map_err(|source| Error::File {
            action: "write",
            path,
            source,
        })
    }

    /// Writes records that could not be written before; returns whether all are written now.
    pub(super) fn write_pending(&mut self) -> bool {
        for (job, record) in std::mem::take(&mut self.unwritten) {
            // A record that fails again is kept in memory.
            self.write(&job, record).ok();
        }
        self.unwritten.is_empty()
    }

    fn path(&self, job: &str) -> PathBuf {
        self.folder.join(format!("{job}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::{Alert, JobRecord, JobRecords, Outcome};

    fn record() -> JobRecord {
        let time = |text: &str| text.parse().unwrap();
        let alert = Alert {
            since: time("2026-11-20T10:00:00Z"),
            notified_at: Some(time("2026-11-20T11:00:00Z")),
        };
        let mut record = JobRecord::new(time("2026-11-20T10:00:00.5Z"));
        record.state.retry_at = Some(time("2026-11-20T12:00:00Z"));
        record.state.running = Some(time("2026-11-20T12:00:00Z"));
        record.state.failed_count = 2;
        record.last = Some((time("2026-11-20T12:00:00Z"), Outcome::TimedOut));
        record.failing = Some(alert.clone());
        record.silent.insert("web 1\n".to_owned(), alert);
        record
    }

    #[test]
    fn a_record_survives_a_round_trip_and_invalid_ones_are_none() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("jobs")).unwrap();
        let mut records = JobRecords::new(folder.path());
        assert_eq!(records.read("a").unwrap(), None);
        for record in [record(), JobRecord::new("2026-11-20T10:00:00Z".parse().unwrap())] {
            records.write("a", record.clone()).unwrap();
            assert_eq!(records.read("a").unwrap(), Some(record));
        }
        let bytes = record().encode();
        for length in 0..bytes.len() - 2 {
            assert_eq!(JobRecord::parse(&bytes[..length]), None);
        }
    }

    #[test]
    fn unwritten_records_are_kept_in_memory_and_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let mut records = JobRecords::new(folder.path());
        assert!(records.write("a", record()).is_err());
        assert_eq!(records.read("a").unwrap(), Some(record()));
        assert!(!records.write_pending());
        std::fs::create_dir(folder.path().join("jobs")).unwrap();
        assert!(records.write_pending());
        assert_eq!(JobRecords::new(folder.path()).read("a").unwrap(), Some(record()));
    }
}
