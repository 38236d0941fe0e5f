//! The journal of runs. A process that is about to change a machine's QEMU first writes a small note, which is removed
//! when none of its changes is left.
//!
//! The note of a dead process says what may be wrong with which machine. Each run has a file `RUN.json`: an object with
//! the fields of [`RunRecord`]. It is written under a temporary name, made durable, and renamed, so that no incomplete
//! note exists.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use holdfast_host::qemu::RunId;
use holdfast_repo::{Liveness, ProcessIdentity, Processes};
use serde_json::{Value, json};

use crate::files::state_file::{forget_note, note_of_schema, read_notes, read_path, write_note, written_path};
use crate::job::{Error, Result};

const SCHEMA: u64 = 1;
/// The extension of a note.
const ENDING: &str = ".json";
/// The extension of a note while it is written.
pub(crate) const HALF: &str = "partial";

/// The phase of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Nothing was changed yet.
    Preparing,
    /// From the first change to QEMU until the machine runs again: it may be paused, and its file systems may be
    /// frozen.
    Freezing,
    /// The machine runs, and the frozen disks are read.
    Reading,
    /// What was read is being stored.
    Storing,
    /// The run's objects in QEMU are removed.
    ClearingUp,
    /// An overlay is committed into its base.
    Committing,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 6] = [
        Self::Preparing,
        Self::Freezing,
        Self::Reading,
        Self::Storing,
        Self::ClearingUp,
        Self::Committing,
    ];

    /// The keyword of the phase in notes.
    pub fn word(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Freezing => "freezing",
            Self::Reading => "reading",
            Self::Storing => "storing",
            Self::ClearingUp => "clearing up",
            Self::Committing => "committing",
        }
    }
}

/// The note of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRecord {
    /// Its number.
    pub run: RunId,
    /// The machine's name at its hypervisor.
    pub machine: String,
    /// The machine's UUID.
    pub uuid: String,
    /// The arguments by which another process connects to the machine: `--connect`, its address...
    pub way: Vec<String>,
    /// The process of the run.
    pub process: ProcessIdentity,
    /// The start, in milliseconds since 1970-01-01 UTC.
    pub start_ms: i64,
    /// How far it is.
    pub phase: Phase,
    /// Whether the machine was running: one that was paused before must stay paused.
    pub was_running: bool,
    /// The folder of its scratch files.
    pub scratch: PathBuf,
}

impl RunRecord {
    /// The address of the machine's hypervisor: `qemu:///system`, `qmp:/run/web1.qmp`.
    pub fn address(&self) -> Option<&str> {
        let place = self.way.iter().position(|word| word == "--connect")?;
        self.way.get(place + 1).map(String::as_str)
    }

    /// Whether the process of the run is alive.
    pub fn liveness(&self, processes: &dyn Processes) -> Liveness {
        liveness_of(&self.process, processes)
    }

    fn encode(&self) -> Vec<u8> {
        let process = &self.process;
        let value = json!({
            "schema": SCHEMA,
            "run": self.run.to_string(),
            "machine": self.machine,
            "uuid": self.uuid,
            "way": self.way,
            "process": written_process(process),
            "start_ms": self.start_ms,
            "phase": self.phase.word(),
            "was_running": self.was_running,
            "scratch": written_path(&self.scratch),
        });
        format!("{value:#}\n").into_bytes()
    }

    /// Parses a note; none if it is not valid.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let value = note_of_schema(bytes, SCHEMA)?;
        let text = |value: &Value, key: &str| Some(value.get(key)?.as_str()?.to_owned());
        let phase = text(&value, "phase")?;
        let way = value.get("way")?.as_array()?.iter();
        Some(Self {
            run: RunId(u32::from_str_radix(value.get("run")?.as_str()?, 16).ok()?),
            machine: text(&value, "machine")?,
            uuid: text(&value, "uuid")?,
            way: way
                .map(|word| word.as_str().map(str::to_owned))
                .collect::<Option<_>>()?,
            process: read_process(value.get("process")?)?,
            start_ms: value.get("start_ms")?.as_i64()?,
            phase: Phase::ALL.into_iter().find(|known| known.word() == phase)?,
            was_running: value.get("was_running")?.as_bool()?,
            scratch: read_path(value.get("scratch")?)?,
        })
    }
}

/// The form of a process in notes.
pub(crate) fn written_process(process: &ProcessIdentity) -> Value {
    json!({
        "host": process.host,
        "boot": process.boot,
        "namespace": process.namespace,
        "process": process.process,
        "started": process.started,
    })
}

/// Parses a process in a note.
pub(crate) fn read_process(value: &Value) -> Option<ProcessIdentity> {
    let text = |key: &str| Some(value.get(key)?.as_str()?.to_owned());
    Some(ProcessIdentity {
        host: text("host")?,
        boot: text("boot")?,
        namespace: text("namespace")?,
        process: u32::try_from(value.get("process")?.as_u64()?).ok()?,
        started: value.get("started")?.as_u64()?,
    })
}

/// Whether a process that was noted on this host is alive: one from before the last boot is dead.
pub(crate) fn liveness_of(process: &ProcessIdentity, processes: &dyn Processes) -> Liveness {
    let this = processes.this();
    let is_of_this_host = !this.host.is_empty() && this.host == process.host;
    if is_of_this_host && !this.boot.is_empty() && this.boot != process.boot {
        return Liveness::Dead;
    }
    processes.liveness(process)
}

/// Where a run is noted, and for which process.
#[derive(Debug, Clone)]
pub struct JournalPlace {
    /// The folder of the notes.
    pub folder: PathBuf,
    /// The arguments by which another process connects to the machine.
    pub way: Vec<String>,
    /// The process of the run.
    pub process: ProcessIdentity,
}

/// The path of a run's note.
pub fn note_path(folder: &Path, run: RunId) -> PathBuf {
    folder.join(format!("{run}{ENDING}"))
}

/// The note of a run. Dropping it keeps the note, since what it says may be true.
#[derive(Debug)]
pub(crate) struct RunNote {
    folder: PathBuf,
    record: RunRecord,
}

impl RunNote {
    /// Writes the note of a new run, durably.
    pub(crate) fn begin(folder: &Path, record: RunRecord) -> Result<Self> {
        let failed = |source| Error::File {
            action: "create the folder of the journal,",
            path: folder.to_owned(),
            source,
        };
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let note = Self {
            folder: folder.to_owned(),
            record,
        };
        note.write()?;
        Ok(note)
    }

    /// Notes that the run enters this phase.
    pub(crate) fn phase(&mut self, phase: Phase) -> Result<()> {
        self.record.phase = phase;
        self.write()
    }

    /// Removes the note because nothing of the run is left.
    pub(crate) fn close(self) -> Result<()> {
        forget_run(&self.folder, self.record.run)
    }

    fn write(&self) -> Result<()> {
        let path = note_path(&self.folder, self.record.run);
        let written = write_note(&path, &path.with_extension(HALF), &self.record.encode());
        written.map_err(|source| Error::File {
            action: "write the journal,",
            path,
            source,
        })
    }
}

/// Deletes the note of a run; a missing note is no error.
pub fn forget_run(folder: &Path, run: RunId) -> Result<()> {
    forget_note(&note_path(folder, run))
}

/// All noted runs; other files are skipped.
///
/// # Errors
/// The folder exists and cannot be read.
pub fn noted_runs(folder: &Path) -> Result<Vec<RunRecord>> {
    let notes = read_notes(folder)?;
    let mut records: Vec<RunRecord> = notes.iter().filter_map(|note| RunRecord::parse(note)).collect();
    records.sort_by_key(|record| (record.start_ms, record.run));
    Ok(records)
}

#[cfg(test)]
mod tests {
    use holdfast_host::qemu::RunId;
    use holdfast_repo::{Liveness, Processes as _, SystemProcesses};

    use super::{Phase, RunNote, RunRecord, noted_runs};

    fn record() -> RunRecord {
        RunRecord {
            run: RunId(0xab),
            machine: "web1".to_owned(),
            uuid: "u".to_owned(),
            way: ["--connect", "qmp:/a b", "--machine", "web1"]
                .map(str::to_owned)
                .to_vec(),
            process: SystemProcesses.this(),
            start_ms: 17,
            phase: Phase::Preparing,
            was_running: true,
            scratch: "/var/tmp".into(),
        }
    }

    #[test]
    fn a_run_is_noted_until_it_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("state/runs");
        assert!(noted_runs(&folder).unwrap().is_empty());
        let mut note = RunNote::begin(&folder, record()).unwrap();
        assert_eq!(noted_runs(&folder).unwrap(), [record()]);
        assert_eq!(record().address(), Some("qmp:/a b"));
        for phase in Phase::ALL {
            note.phase(phase).unwrap();
            assert_eq!(noted_runs(&folder).unwrap()[0].phase, phase);
        }
        // Another file, or an incomplete note, does no harm.
        for (name, bytes) in [
            ("x.json", &b"{"[..]),
            ("y.json", b"{\"run\":\"zz\"}"),
            ("notes", b"hello"),
        ] {
            std::io::Write::write_all(&mut std::fs::File::create(folder.join(name)).unwrap(), bytes).unwrap();
        }
        assert_eq!(noted_runs(&folder).unwrap().len(), 1);
        note.close().unwrap();
        assert!(noted_runs(&folder).unwrap().is_empty());
    }

    #[test]
    fn a_process_of_an_earlier_start_of_this_host_is_dead_and_one_of_another_host_is_not_known() {
        let mut record = record();
        assert_eq!(record.liveness(&SystemProcesses), Liveness::Alive);
        record.process.started += 1;
        assert_eq!(record.liveness(&SystemProcesses), Liveness::Dead);
        record.process.boot.push('x');
        assert_eq!(record.liveness(&SystemProcesses), Liveness::Dead);
        record.process.host.push('x');
        assert_eq!(record.liveness(&SystemProcesses), Liveness::Unknown);
    }
}
