//! What is known of each job from run to run: a small file for each, `jobs/NAME.json`.
//!
//! Only who holds a job's lock writes its file, so that a daemon and a run by hand beside it do not lose each other's words. It is
//! written under another name, made durable, and renamed. Where that is impossible, on a disk that is full, what should have been
//! written is kept in memory, believed before the file, and written as soon as it can be.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use holdfast_policy::Timestamp;
use holdfast_policy::schedule::JobState;
use serde_json::{Value, json};

use super::outcome::Outcome;
use holdfast_engine::write_note;
use holdfast_engine::{Error, Result};

/// Something that is bad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alert {
    /// Since when.
    pub since: Timestamp,
    /// Time of the last notice.
    pub told: Option<Timestamp>,
}

/// All that is kept of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobRecord {
    /// What the schedule knows.
    pub state: JobState,
    /// How its last run ended, and when.
    pub last: Option<(Timestamp, Outcome)>,
    /// Since when it fails.
    pub failing: Option<Alert>,
    /// Machines that have no fresh snapshot.
    pub silent: BTreeMap<String, Alert>,
}

impl JobRecord {
    /// Of a job that is new.
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
        let alert = |alert: &Alert| json!({"since": alert.since.to_string(), "told": time(alert.told)});
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

    /// As it was written; none where it makes no sense.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(bytes).ok()?;
        let time = |value: &Value| value.as_str()?.parse::<Timestamp>().ok();
        let alert = |value: &Value| {
            Some(Alert {
                since: time(&value["since"])?,
                told: time(&value["told"]),
            })
        };
        let outcome = value["last_outcome"].as_str().and_then(Outcome::of_word);
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

/// The records of jobs.
#[derive(Debug)]
pub struct Ledger {
    folder: PathBuf,
    /// Those that could not be written.
    unwritten: BTreeMap<String, JobRecord>,
}

impl Ledger {
    /// Of the folder where the scheduler keeps its state.
    pub fn new(state: &Path) -> Self {
        Self {
            folder: state.join("jobs"),
            unwritten: BTreeMap::new(),
        }
    }

    /// The record of a job; none where there is none that makes sense.
    ///
    /// # Errors
    /// It is there, and cannot be read.
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

    /// Keeps the record of a job, durably; where that fails, in memory, and the error says so.
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

    /// Writes what could not be written before; whether there is nothing left.
    pub(super) fn write_rest(&mut self) -> bool {
        for (job, record) in std::mem::take(&mut self.unwritten) {
            // What fails again is kept again.
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
    use super::{Alert, JobRecord, Ledger, Outcome};

    fn record() -> JobRecord {
        let time = |text: &str| text.parse().unwrap();
        let alert = Alert {
            since: time("2026-11-20T10:00:00Z"),
            told: Some(time("2026-11-20T11:00:00Z")),
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
    fn a_record_reads_back_and_what_makes_no_sense_is_none() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("jobs")).unwrap();
        let mut ledger = Ledger::new(folder.path());
        assert_eq!(ledger.read("a").unwrap(), None);
        for record in [record(), JobRecord::new("2026-11-20T10:00:00Z".parse().unwrap())] {
            ledger.write("a", record.clone()).unwrap();
            assert_eq!(ledger.read("a").unwrap(), Some(record));
        }
        let bytes = record().encode();
        for length in 0..bytes.len() - 2 {
            assert_eq!(JobRecord::parse(&bytes[..length]), None);
        }
    }

    #[test]
    fn what_cannot_be_written_is_believed_all_the_same_and_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::new(folder.path());
        assert!(ledger.write("a", record()).is_err());
        assert_eq!(ledger.read("a").unwrap(), Some(record()));
        assert!(!ledger.write_rest());
        std::fs::create_dir(folder.path().join("jobs")).unwrap();
        assert!(ledger.write_rest());
        assert_eq!(Ledger::new(folder.path()).read("a").unwrap(), Some(record()));
    }
}
