//! Work on machines that has begun and not ended: rollbacks that write to their disks, clones that are not there yet, and host snapshots that
//! are there only for these.
//!
//! Each is noted in `STORE/unfinished/UUID.json`, durably, before the first byte is changed, and the note goes when all is done. So what a
//! killed one has left is known, and whose it was.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use holdfast_repo::ProcessIdentity;
use serde_json::{Value, json};

use super::StateStore;
use crate::files::state_file::{forget_note, note_of_schema, read_notes, read_path, write_note, written_path};
use crate::job::{Error, Result};
use crate::machine::run_journal::{read_process, written_process};

const SCHEMA: u64 = 1;
const FOLDER: &str = "unfinished";
const ENDING: &str = ".json";
/// How the name of a note ends that is being written.
const HALF: &str = "new";

/// What is done to a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnfinishedKind {
    /// It goes back to a point in time: its disks are written.
    Rollback,
    /// It is made, of host snapshots of another one.
    Clone,
    /// Host snapshots of it are there until clones of them are made. What counts as its UUID is the set of these.
    Instant,
}

impl UnfinishedKind {
    const ALL: [Self; 3] = [Self::Rollback, Self::Clone, Self::Instant];

    /// The word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Rollback => "rollback",
            Self::Clone => "clone",
            Self::Instant => "instant",
        }
    }
}

/// Work that has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// What it is.
    pub kind: UnfinishedKind,
    /// The machine that is changed, or made.
    pub machine: String,
    /// Its UUID.
    pub uuid: String,
    /// The machine that the point in time is of.
    pub of: String,
    /// The name of the point in time.
    pub point: String,
    /// Host snapshots: of what was there before, the oldest first, as a rollback may have been begun several times; those of an instant.
    pub safety: Vec<String>,
    /// New files.
    pub files: Vec<UnfinishedFile>,
    /// The process that does it.
    pub process: ProcessIdentity,
    /// When it began, in milliseconds since 1970-01-01 UTC.
    pub start_ms: i64,
}

/// A file that is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedFile {
    /// Where it will be.
    pub path: PathBuf,
    /// Device and inode, from the moment on at which it is about to get its name.
    pub identity: Option<(u64, u64)>,
}

impl Unfinished {
    /// The name of the host snapshots of what was there before all of it.
    pub fn safety_name(&self) -> Option<&str> {
        self.safety.first()?.rsplit_once('@').map(|(_, name)| name)
    }

    fn encode(&self) -> Vec<u8> {
        let files = self.files.iter().map(|file| {
            json!({
                "path": written_path(&file.path),
                "device": file.identity.map(|(device, _)| device),
                "inode": file.identity.map(|(_, inode)| inode),
            })
        });
        let value = json!({
            "schema": SCHEMA,
            "kind": self.kind.word(),
            "machine": self.machine,
            "uuid": self.uuid,
            "of": self.of,
            "point": self.point,
            "safety": self.safety,
            "files": files.collect::<Vec<_>>(),
            "process": written_process(&self.process),
            "start_ms": self.start_ms,
        });
        format!("{value:#}\n").into_bytes()
    }

    /// A note as it was written; none where it is not one.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let value = note_of_schema(bytes, SCHEMA)?;
        let text = |key: &str| Some(value.get(key)?.as_str()?.to_owned());
        let kind = text("kind")?;
        let file = |value: &Value| {
            let number = |key: &str| value.get(key).and_then(Value::as_u64);
            Some(UnfinishedFile {
                path: read_path(value.get("path")?)?,
                identity: number("device").zip(number("inode")),
            })
        };
        let safety = value.get("safety")?.as_array()?.iter();
        Some(Self {
            kind: UnfinishedKind::ALL.into_iter().find(|known| known.word() == kind)?,
            machine: text("machine")?,
            uuid: text("uuid")?,
            of: text("of")?,
            point: text("point")?,
            safety: safety
                .map(|one| one.as_str().map(str::to_owned))
                .collect::<Option<_>>()?,
            files: value
                .get("files")?
                .as_array()?
                .iter()
                .map(file)
                .collect::<Option<_>>()?,
            process: read_process(value.get("process")?)?,
            start_ms: value.get("start_ms")?.as_i64()?,
        })
    }
}

impl StateStore {
    /// The work that has begun and not ended, whether or not its process is alive, the oldest first; other files are skipped.
    pub fn unfinished(&self) -> Result<Vec<Unfinished>> {
        let notes = read_notes(&self.unfinished_folder())?;
        let mut found: Vec<Unfinished> = notes.iter().filter_map(|note| Unfinished::parse(note)).collect();
        found.sort_by_key(|one| one.start_ms);
        Ok(found)
    }

    /// Notes that are being written, or were left incomplete.
    pub(crate) fn half_notes(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.unfinished_folder())
            .into_iter()
            .flatten()
            .flatten();
        let paths = entries.map(|entry| entry.path());
        paths
            .filter(|path| path.extension().is_some_and(|extension| extension == HALF))
            .collect()
    }

    /// What has begun on a machine and not ended.
    pub fn unfinished_on(&self, uuid: &str) -> Result<Option<Unfinished>> {
        Ok(self.unfinished()?.into_iter().find(|one| one.uuid == uuid))
    }

    /// Notes it, durably; there is one note of a machine.
    pub(crate) fn note_unfinished(&self, work: &Unfinished) -> Result<()> {
        let folder = self.unfinished_folder();
        let path = note_of(&folder, &work.uuid);
        let mut builder = std::fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o700).create(&folder);
        let written = made.and_then(|()| write_note(&path, &path.with_extension(HALF), &work.encode()));
        written.map_err(|source| Error::File {
            action: "write",
            path,
            source,
        })
    }

    /// It has ended; one of which nothing is noted is no error.
    pub fn forget_unfinished(&self, uuid: &str) -> Result<()> {
        forget_note(&note_of(&self.unfinished_folder(), uuid))
    }

    fn unfinished_folder(&self) -> PathBuf {
        self.folder.join(FOLDER)
    }
}

/// The note of a machine: its UUID comes from a hypervisor, and becomes a part of a path.
fn note_of(folder: &Path, uuid: &str) -> PathBuf {
    let is_safe = |letter: &char| letter.is_ascii_alphanumeric() || *letter == '-';
    let name: String = uuid.chars().filter(is_safe).collect();
    folder.join(format!("{name}{ENDING}"))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use holdfast_repo::{Processes as _, SystemProcesses};

    use super::{Unfinished, UnfinishedFile, UnfinishedKind, note_of};

    #[test]
    fn a_note_comes_back_as_it_was() {
        let work = Unfinished {
            kind: UnfinishedKind::Clone,
            machine: "trial".to_owned(),
            uuid: "u".to_owned(),
            of: "web1".to_owned(),
            point: "one".to_owned(),
            safety: vec!["zfs:tank/vm@before".to_owned(), "zfs:tank/vm@later".to_owned()],
            files: vec![
                UnfinishedFile {
                    path: "/a b/c".into(),
                    identity: Some((1, 2)),
                },
                UnfinishedFile {
                    path: OsStr::from_bytes(b"/d\xff").into(),
                    identity: None,
                },
            ],
            process: SystemProcesses.this(),
            start_ms: 17,
        };
        assert_eq!(Unfinished::parse(&work.encode()), Some(work.clone()));
        assert_eq!(work.safety_name(), Some("before"));
        for other in [&b""[..], b"{}", b"[]", b"{\"kind\":\"rollback\"}"] {
            assert_eq!(Unfinished::parse(other), None);
        }
    }

    #[test]
    fn a_note_stays_in_its_folder() {
        assert_eq!(note_of(Path::new("/n"), "../a/b-1"), Path::new("/n/ab-1.json"));
    }
}
