//! The journal of runs: `runs.jsonl`, a line of JSON for each run that has ended and for each notice that was, or was not, delivered.
//!
//! A line is appended at once and made durable. One that a full disk or a power cut has torn is passed over by readers, and ended by the
//! next writer. A journal that has grown large becomes `runs.jsonl.1`, in the place of the one before. What cannot be written is kept in
//! memory, as much as fits, and written when that is possible again.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::locks;
use super::run_result::RunResult;
use holdfast_engine::{Error, Result};

/// A journal that is larger is put aside.
const BYTES_MAX: u64 = 8 << 20;
/// Bytes of a line, at most; a longer one is none of ours.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Entries that are kept for a disk that is full.
const KEPT_COUNT_MAX: usize = 10_000;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "entry", rename_all = "lowercase")]
pub enum JournalEntry {
    /// A run has ended.
    Run(RunEntry),
    /// Somebody was told, or could not be.
    Notice(NoticeEntry),
}

/// A run that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEntry {
    /// The job.
    pub job: String,
    /// What it does.
    pub kind: String,
    /// Who started it: `daemon`, `run`, `cron`.
    pub by: String,
    /// When it began.
    pub start: String,
    /// When it ended; of one that nobody saw end, when that was found out.
    pub end: String,
    /// How long it took.
    pub duration_ms: u64,
    /// In a word.
    pub outcome: String,
    /// Its program's exit code.
    pub exit_code: Option<i32>,
    /// How many runs of its series had failed before.
    pub failed_before: u32,
    /// When it is tried again.
    pub retry_at: Option<String>,
    /// Why it was not done.
    pub error: Option<String>,
    /// The last lines that it said.
    pub lines: Vec<String>,
    /// What it has achieved.
    #[serde(flatten)]
    pub result: RunResult,
}

/// A notice that was delivered, or could not be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoticeEntry {
    /// Who was to be told.
    pub to: String,
    /// Of what.
    pub event: String,
    /// The job.
    pub job: String,
    /// In a few words.
    pub subject: String,
    /// When.
    pub time: String,
    /// Why it could not be delivered.
    pub error: Option<String>,
}

/// The journal of a scheduler's folder.
#[derive(Debug)]
pub struct JobJournal {
    folder: PathBuf,
    unwritten: VecDeque<JournalEntry>,
    lost_count: u64,
}

impl JobJournal {
    /// Of the folder where the scheduler keeps its state.
    pub fn new(state: &Path) -> Self {
        Self {
            folder: state.to_owned(),
            unwritten: VecDeque::new(),
            lost_count: 0,
        }
    }

    /// Its file.
    pub fn path(&self) -> PathBuf {
        self.folder.join("runs.jsonl")
    }

    fn path_before(&self) -> PathBuf {
        self.folder.join("runs.jsonl.1")
    }

    /// Notes something; where that fails, it is kept in memory, and the error says so.
    pub fn note(&mut self, entry: JournalEntry) -> Result<()> {
        if self.unwritten.len() == KEPT_COUNT_MAX {
            self.unwritten.pop_front();
            self.lost_count += 1;
        }
        self.unwritten.push_back(entry);
        self.write_rest()
    }

    /// Writes what could not be written before, in its order.
    pub fn write_rest(&mut self) -> Result<()> {
        while let Some(entry) = self.unwritten.front() {
            let mut line = serde_json::to_vec(entry).map_err(|error| self.failed(error.into()))?;
            line.push(b'\n');
            self.append(&line)?;
            self.unwritten.pop_front();
        }
        Ok(())
    }

    /// How many entries were lost, since there was no room for them for too long.
    pub fn lost_count(&self) -> u64 {
        self.lost_count
    }

    fn append(&self, line: &[u8]) -> Result<()> {
        let failed = |source| self.failed(source);
        // A run by hand may note its end at the same moment.
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
            // What was torn is as if it had never been; where even that fails, readers pass over it.
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

    /// What happened, oldest first; lines that make no sense are passed over.
    ///
    /// # Errors
    /// It is there, and cannot be read.
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
    use crate::run_result::{RunResult, RunSnapshot};

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
            result: RunResult::default(),
        })
    }

    #[test]
    fn what_is_noted_is_read_and_what_is_torn_harms_nobody() {
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
        journal.note(run("a")).unwrap();
        journal.note(notice.clone()).unwrap();
        let mut file = File::options().append(true).open(journal.path()).unwrap();
        file.write_all(b"{\"entry\":\"run\",\"job\":\"to").unwrap();
        assert_eq!(journal.read().unwrap(), [run("a"), notice.clone()]);
        journal.note(run("b")).unwrap();
        file.write_all(b"\xff\xfe\n{}\n\n[]\n").unwrap();
        journal.note(run("c")).unwrap();
        assert_eq!(journal.read().unwrap(), [run("a"), notice, run("b"), run("c")]);
    }

    /// A line as it was written before runs had results, and one of a later program with a key that is not known here.
    #[test]
    fn lines_of_older_and_newer_programs_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let journal = JobJournal::new(folder.path());
        let start = r#"{"entry":"run","job":"nightly","kind":"backup","by":"daemon","start":"2026-11-20T10:00:00Z","end":"2026-11-20T10:00:01Z","duration_ms":1000,"outcome":"done","exit_code":0,"failed_before":0,"retry_at":null,"error":null,"lines":[]"#;
        let result = r#""snapshots":[{"machine":"web","id":"01"}],"read_bytes":5,"stored_bytes":3,"warnings":["odd"],"later":{}"#;
        std::fs::write(journal.path(), format!("{start}}}\n{start},{result}}}\n")).unwrap();
        let results = journal.read().unwrap().into_iter().map(|entry| match entry {
            JournalEntry::Run(run) => run.result,
            JournalEntry::Notice(notice) => panic!("{notice:?} is no run"),
        });
        let expected = RunResult {
            snapshots: vec![RunSnapshot {
                machine: "web".to_owned(),
                id: "01".to_owned(),
            }],
            read_bytes: Some(5),
            stored_bytes: Some(3),
            warnings: vec!["odd".to_owned()],
        };
        assert_eq!(results.collect::<Vec<_>>(), [RunResult::default(), expected]);
    }

    #[test]
    fn a_large_journal_is_put_aside() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = JobJournal::new(folder.path());
        let mut file = File::create(journal.path()).unwrap();
        file.write_all(&vec![b'\n'; usize::try_from(BYTES_MAX).unwrap()])
            .unwrap();
        journal.note(run("a")).unwrap();
        journal.note(run("b")).unwrap();
        assert_eq!(journal.read().unwrap(), [run("a"), run("b")]);
        assert!(journal.path().metadata().unwrap().len() < 1000);
        assert_eq!(journal.path_before().metadata().unwrap().len(), BYTES_MAX);
    }

    #[test]
    fn what_cannot_be_written_is_written_when_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let mut journal = JobJournal::new(&state);
        assert!(journal.note(run("a")).is_err());
        assert!(journal.note(run("b")).is_err());
        std::fs::create_dir(&state).unwrap();
        journal.note(run("c")).unwrap();
        assert_eq!(journal.read().unwrap(), [run("a"), run("b"), run("c")]);
    }
}
