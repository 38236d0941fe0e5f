//! The journal of runs: `runs.jsonl`, with a line of JSON for each completed run and for each notice that was delivered
//! or failed.
//!
//! A line is appended and synced at once. A line that is incomplete because of a full disk or a power cut is skipped by
//! readers, and terminated by the next writer. A large journal is rotated to `runs.jsonl.1`, which replaces the
//! previous one. Entries that cannot be written are kept in memory, up to a limit, and written as soon as possible.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::locks;
use super::run_report::RunReport;
use holdfast_engine::{Error, Result};

/// Size at which the journal is rotated.
const BYTES_MAX: u64 = 8 << 20;
/// Maximum length of a line; a longer one is invalid.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Limit of entries kept in memory while the disk is full.
const UNWRITTEN_COUNT_MAX: usize = 10_000;

/// An entry of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "entry", rename_all = "lowercase")]
pub enum JournalEntry {
    /// A run has ended.
    Run(RunEntry),
    /// A notification was delivered, or its delivery failed.
    Notice(NoticeEntry),
}

/// A run that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEntry {
    /// The job.
    pub job: String,
    /// The kind of the job.
    pub kind: String,
    /// What started the run: `daemon`, `run`, `cron`.
    pub by: String,
    /// The start of the run.
    pub start: String,
    /// The end of the run. If the result is unknown, the time at which that was detected.
    pub end: String,
    /// The duration.
    pub duration_ms: u64,
    /// The outcome in one word.
    pub outcome: String,
    /// The exit code.
    pub exit_code: Option<i32>,
    /// Number of failed runs of the series before this one.
    pub failed_before: u32,
    /// The time of the retry, if there is one.
    pub retry_at: Option<String>,
    /// The error.
    pub error: Option<String>,
    /// The last lines of the output.
    pub lines: Vec<String>,
    /// The results of the run.
    #[serde(flatten)]
    pub result: RunReport,
}

/// A notification that was delivered, or whose delivery failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoticeEntry {
    /// The recipient.
    pub to: String,
    /// The event.
    pub event: String,
    /// The job.
    pub job: String,
    /// A short description.
    pub subject: String,
    /// The time.
    pub time: String,
    /// The error of the delivery.
    pub error: Option<String>,
}

/// The journal in the scheduler's state folder.
#[derive(Debug)]
pub struct JobJournal {
    folder: PathBuf,
    unwritten: VecDeque<JournalEntry>,
    lost_count: u64,
}

impl JobJournal {
    /// The journal in the scheduler's state folder.
    pub fn new(state: &Path) -> Self {
        Self {
            folder: state.to_owned(),
            unwritten: VecDeque::new(),
            lost_count: 0,
        }
    }

    /// The path of the current journal file.
    pub fn path(&self) -> PathBuf {
        self.folder.join("runs.jsonl")
    }

    fn path_before(&self) -> PathBuf {
        self.folder.join("runs.jsonl.1")
    }

    /// Appends an entry. If that fails, the entry is kept in memory, and the error is returned.
    pub fn append(&mut self, entry: JournalEntry) -> Result<()> {
        if self.unwritten.len() == UNWRITTEN_COUNT_MAX {
            self.unwritten.pop_front();
            self.lost_count += 1;
        }
        self.unwritten.push_back(entry);
        self.write_pending()
    }

    /// Writes entries that could not be written before, in their order.
    pub fn write_pending(&mut self) -> Result<()> {
        while let Some(entry) = self.unwritten.front() {
            let mut line = serde_json::to_vec(entry).map_err(|error| self.failed(error.into()))?;
            line.push(b'\n');
            self.append_line(&line)?;
            self.unwritten.pop_front();
        }
        Ok(())
    }

    /// The number of entries that were lost because too many could not be written.
    pub fn lost_count(&self) -> u64 {
        self.lost_count
    }

    fn append_line(&self, line: &[u8]) -> Result<()> {
        let failed = |source| self.failed(source);
        // A manual run may append at the same time.
        let _turn = locks::lock(&self.folder.join("journal.lock"))?;
        let mut file = self.open().map_err(failed)?;
        let mut length = file.metadata().map_err(failed)?.len();
        if length > 0 && length + line.len() as u64 > BYTES_MAX {
            std::fs::rename(self.path(), self.path_before()).map_err(failed)?;
            file = self.open().map_err(failed)?;
            length = 0;
        }
        let written = (|| {
            if length > 0 {
                let mut last = [0];
                file.seek(SeekFrom::Start(length - 1))?;
                file.read_exact(&mut last)?;
                if last != [b'\n'] {
                    file.write_all(b"\n")?;
                }
            }
            file.write_all(line)?;
            file.sync_data()
        })();
        if written.is_err() {
            // Removes a partial line. If this fails too, readers skip the line.
            file.set_len(length).ok();
        }
        written.map_err(failed)
    }

    fn open(&self) -> std::io::Result<File> {
        let mut options = File::options();
        options
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.path())
    }

    fn failed(&self, source: std::io::Error) -> Error {
        Error::File {
            action: "write the journal of runs,",
            path: self.path(),
            source,
        }
    }

    /// Reads all entries, oldest first; invalid lines are skipped.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn read(&self) -> Result<Vec<JournalEntry>> {
        let mut entries = Vec::new();
        for path in [self.path_before(), self.path()] {
            let file = match File::open(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                other => other.map_err(|source| Error::File {
                    action: "read",
                    path: path.clone(),
                    source,
                })?,
            };
            let mut reader = BufReader::new(file);
            let mut line = Vec::new();
            loop {
                line.clear();
                match (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                    Ok(0) => break,
                    Ok(_) => entries.extend(serde_json::from_slice(&line).ok()),
                    Err(source) => {
                        return Err(Error::File {
                            action: "read",
                            path,
                            source,
                        });
                    }
                }
            }
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use super::{BYTES_MAX, JobJournal, JournalEntry, NoticeEntry, RunEntry};
    use crate::run_report::{RunReport, RunSnapshot};

    fn run(job: &str) -> JournalEntry {
        JournalEntry::Run(RunEntry {
            job: job.to_owned(),
            kind: "backup".to_owned(),
            by: "daemon".to_owned(),
            start: "2026-11-20T10:00:00Z".to_owned(),
            end: "2026-11-20T10:00:01Z".to_owned(),
            duration_ms: 1000,
            outcome: "failed".to_owned(),
            exit_code: Some(1),
            failed_before: 0,
            retry_at: None,
            error: Some("why\nnot".to_owned()),
            lines: vec!["x".repeat(100)],
            result: RunReport::default(),
        })
    }

    #[test]
    fn entries_are_read_and_torn_lines_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = JobJournal::new(folder.path());
        assert_eq!(journal.read().unwrap(), []);
        let notice = JournalEntry::Notice(NoticeEntry {
            to: "admin".to_owned(),
            event: "failure".to_owned(),
            job: "a".to_owned(),
            subject: "a has failed".to_owned(),
            time: "2026-11-20T10:00:01Z".to_owned(),
            error: None,
        });
        journal.append(run("a")).unwrap();
        journal.append(notice.clone()).unwrap();
        let mut file = File::options().append(true).open(journal.path()).unwrap();
        file.write_all(b"{\"entry\":\"run\",\"job\":\"to").unwrap();
        assert_eq!(journal.read().unwrap(), [run("a"), notice.clone()]);
        journal.append(run("b")).unwrap();
        file.write_all(b"\xff\xfe\n{}\n\n[]\n").unwrap();
        journal.append(run("c")).unwrap();
        assert_eq!(journal.read().unwrap(), [run("a"), notice, run("b"), run("c")]);
    }

    /// A line from a version without results of runs, and a line from a newer version with an unknown key.
    #[test]
    fn lines_of_older_and_newer_programs_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let journal = JobJournal::new(folder.path());
        let start = r#"{"entry":"run","job":"nightly","kind":"backup","by":"daemon","start":"2026-11-20T10:00:00Z","end":"2026-11-20T10:00:01Z","duration_ms":1000,"outcome":"done","exit_code":0,"failed_before":0,"retry_at":null,"error":null,"lines":[]"#;
        let result = r#""snapshots":[{"machine":"web","id":"01"}],"read_bytes":5,"stored_bytes":3,"warnings":["odd"],"later":{}"#;
        let mut file = File::create(journal.path()).unwrap();
        write!(file, "{start}}}\n{start},{result}}}\n").unwrap();
        let results = journal.read().unwrap().into_iter().map(|entry| match entry {
            JournalEntry::Run(run) => run.result,
            JournalEntry::Notice(notice) => panic!("{notice:?} is no run"),
        });
        let expected = RunReport {
            snapshots: vec![RunSnapshot {
                machine: "web".to_owned(),
                id: "01".to_owned(),
            }],
            read_bytes: Some(5),
            stored_bytes: Some(3),
            warnings: vec!["odd".to_owned()],
        };
        assert_eq!(results.collect::<Vec<_>>(), [RunReport::default(), expected]);
    }

    #[test]
    fn a_large_journal_is_put_aside() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = JobJournal::new(folder.path());
        let mut file = File::create(journal.path()).unwrap();
        file.write_all(&vec![b'\n'; usize::try_from(BYTES_MAX).unwrap()])
            .unwrap();
        journal.append(run("a")).unwrap();
        journal.append(run("b")).unwrap();
        assert_eq!(journal.read().unwrap(), [run("a"), run("b")]);
        assert!(journal.path().metadata().unwrap().len() < 1000);
        assert_eq!(journal.path_before().metadata().unwrap().len(), BYTES_MAX);
    }

    #[test]
    fn failed_writes_are_retried() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let mut journal = JobJournal::new(&state);
        assert!(journal.append(run("a")).is_err());
        assert!(journal.append(run("b")).is_err());
        std::fs::create_dir(&state).unwrap();
        journal.append(run("c")).unwrap();
        assert_eq!(journal.read().unwrap(), [run("a"), run("b"), run("c")]);
    }
}
