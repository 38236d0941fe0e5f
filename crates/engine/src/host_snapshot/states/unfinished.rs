//! Unfinished work on machines: rollbacks that write to their disks, clones that do not exist yet, and temporary host
//! snapshots for clones.
//!
//! Each is noted in `STORE/unfinished/UUID.json`, durably, before the first byte is changed, and the note is removed at
//! the end. So the leftovers of a killed process, and their machine, are known.

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
/// File name extension of a note that is being written.
const HALF: &str = "new";

/// Kind of work on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnfinishedKind {
    /// A rollback to a point in time: the disks of the machine are written.
    Rollback,
    /// A clone of the machine is made from host snapshots of another one.
    Clone,
    /// Temporary host snapshots, until clones of them are made. The id of their set takes the place of the UUID.
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

/// Unfinished work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// Its kind.
    pub kind: UnfinishedKind,
    /// The machine that is changed or created.
    pub machine: String,
    /// Its UUID.
    pub uuid: String,
    /// The machine of the point in time.
    pub of: String,
    /// The name of the point in time.
    pub point: String,
    /// Host snapshots: those of the states before a rollback, oldest first, since a rollback may be started several
    /// times; or the temporary ones.
    pub safety: Vec<String>,
    /// New files.
    pub files: Vec<UnfinishedFile>,
    /// The process that does the work.
    pub process: ProcessIdentity,
    /// When it started, in milliseconds since 1970-01-01 UTC.
    pub start_ms: i64,
}

/// A file that is being created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedFile {
    /// Its final path.
    pub path: PathBuf,
    /// Device and inode, noted just before the file gets its name.
    pub identity: Option<(u64, u64)>,
}

impl Unfinished {
    /// The name of the host snapshots of the state before the first attempt.
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

    /// Parses a note; none if it is not one.
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
    /// The unfinished work, whether or not its process is alive, oldest first; other files are skipped.
    pub fn unfinished(&self) -> Result<Vec<Unfinished>> {
        let notes = read_notes(&self.unfinished_folder())?;
        let mut found: Vec<Unfinished> = notes.iter().filter_map(|note| Unfinished::parse(note)).collect();
        found.sort_by_key(|one| one.start_ms);
        Ok(found)
    }

    /// Incomplete notes: still being written, or abandoned.
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

    /// The unfinished work on a machine.
    pub fn unfinished_on(&self, uuid: &str) -> Result<Option<Unfinished>> {
        Ok(self.unfinished()?.into_iter().find(|one| one.uuid == uuid))
    }

    /// Writes the note durably; there is one note per machine.
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

    /// Removes the note; a missing note is not an error.
    pub fn forget_unfinished(&self, uuid: &str) -> Result<()> {
        forget_note(&note_of(&self.unfinished_folder(), uuid))
    }

    fn unfinished_folder(&self) -> PathBuf {
        self.folder.join(FOLDER)
    }
}

/// Path of the note of a machine. The UUID comes from a hypervisor: characters that are unsafe in a path are removed.
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
