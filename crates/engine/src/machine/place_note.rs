//! Notes of the folders in which a process creates files: images, archives, the folder of an instant restore.
//!
//! Leftovers of a killed process beside the images of machines are found there. Elsewhere, only the note leads to them.
//! Each process that creates files has a note `NUMBER.json` in a folder of its user, from before the first change until
//! the process has finished.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use holdfast_repo::ProcessIdentity;
use serde_json::{Value, json};

use super::run_journal::{HALF, read_process, written_process};
use crate::files::state_file::{forget_note, note_of_schema, read_notes, read_path, write_note, written_path};
use crate::job::{Error, Result};

const SCHEMA: u64 = 1;

/// Where places are noted, and for which process.
#[derive(Debug, Clone)]
pub struct PlaceJournal {
    /// The folder of the notes.
    pub folder: PathBuf,
    /// The process that creates files.
    pub process: ProcessIdentity,
}

/// The content of a note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlaceRecord {
    /// The number in the note's name.
    pub(crate) number: u32,
    /// The folder in which files are created.
    pub(crate) place: PathBuf,
    /// The process that creates them.
    pub(crate) process: ProcessIdentity,
    /// The snapshot that is held meanwhile.
    pub(crate) held: Option<HeldSnapshotNote>,
}

/// A snapshot that is held for an instant restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldSnapshotNote {
    /// The id of the repository.
    pub(crate) repository: String,
    /// The id of the snapshot.
    pub(crate) snapshot: String,
    /// The holder's number in the name of the hold.
    pub(crate) holder: u32,
    /// The folder of the instant restore. If it exists, the hold belongs to that restore.
    pub(crate) folder: PathBuf,
}

impl PlaceRecord {
    fn encode(&self) -> Vec<u8> {
        let held = self.held.as_ref().map(|held| {
            json!({
                "repository": held.repository,
                "snapshot": held.snapshot,
                "holder": held.holder,
                "folder": written_path(&held.folder),
            })
        });
        let value = json!({
            "schema": SCHEMA,
            "number": self.number,
            "place": written_path(&self.place),
            "process": written_process(&self.process),
            "held": held,
        });
        format!("{value:#}\n").into_bytes()
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let value = note_of_schema(bytes, SCHEMA)?;
        let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let text = |value: &Value| Some(value.as_str()?.to_owned());
        let held = match &value["held"] {
            Value::Null => None,
            held => Some(HeldSnapshotNote {
                repository: text(&held["repository"])?,
                snapshot: text(&held["snapshot"])?,
                holder: number(&held["holder"])?,
                folder: read_path(&held["folder"])?,
            }),
        };
        Some(Self {
            number: number(&value["number"])?,
            place: read_path(&value["place"])?,
            process: read_process(&value["process"])?,
            held,
        })
    }
}

/// The note of a place. Dropping it removes the note.
#[derive(Debug)]
pub struct PlaceNote(PathBuf);

impl PlaceNote {
    /// Notes, durably, that files are created in the folder `place`.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn begin(journal: &PlaceJournal, place: &Path, number: u32) -> Result<Self> {
        Self::holding(journal, place, number, None)
    }

    pub(crate) fn holding(
        journal: &PlaceJournal,
        place: &Path,
        number: u32,
        held: Option<HeldSnapshotNote>,
    ) -> Result<Self> {
        let path = path_of(&journal.folder, number);
        let failed = |source| Error::File {
            action: "write the note",
            path: path.clone(),
            source,
        };
        let record = PlaceRecord {
            number,
            place: std::path::absolute(place).map_err(failed)?,
            process: journal.process.clone(),
            held,
        };
        let mut builder = std::fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o700).create(&journal.folder);
        let written = made.and_then(|()| write_note(&path, &path.with_extension(HALF), &record.encode()));
        written.map_err(failed)?;
        Ok(Self(path))
    }
}

impl Drop for PlaceNote {
    fn drop(&mut self) {
        // If the note stays, it names a dead process, and doctor finds nothing in the place.
        drop(forget_note(&self.0));
    }
}

fn path_of(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("{number:08x}.json"))
}

/// All notes; other files are skipped.
pub(crate) fn noted_places(folder: &Path) -> Result<Vec<PlaceRecord>> {
    let notes = read_notes(folder)?;
    let mut records: Vec<PlaceRecord> = notes.iter().filter_map(|note| PlaceRecord::parse(note)).collect();
    records.sort_by_key(|record| record.number);
    Ok(records)
}

/// Deletes the note of a place; a missing note is no error.
pub(crate) fn forget_place(folder: &Path, number: u32) -> Result<()> {
    forget_note(&path_of(folder, number))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use holdfast_repo::{Processes as _, SystemProcesses};

    use super::{HeldSnapshotNote, PlaceJournal, PlaceNote, noted_places};

    #[test]
    fn a_place_is_noted_until_the_note_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let journal = PlaceJournal {
            folder: folder.path().join("places"),
            process: SystemProcesses.this(),
        };
        assert_eq!(noted_places(&journal.folder).unwrap(), []);
        let held = HeldSnapshotNote {
            repository: "r".to_owned(),
            snapshot: "s".to_owned(),
            holder: 7,
            folder: OsStr::from_bytes(b"/srv/\xfe/.web1.holdfast").into(),
        };
        // The path is not UTF-8; leftovers of a kill are found there all the same.
        let place = Path::new(OsStr::from_bytes(b"/srv/\xff"));
        let notes = [None, Some(held.clone())].map(|held| {
            let number = u32::from(held.is_some());
            PlaceNote::holding(&journal, place, number, held).unwrap()
        });
        let noted = noted_places(&journal.folder).unwrap();
        assert_eq!((noted.len(), &noted[0].held, &noted[1].held), (2, &None, &Some(held)));
        assert_eq!(noted[0].place, place);
        assert_eq!(noted[0].process, SystemProcesses.this());
        drop(notes);
        assert_eq!(noted_places(&journal.folder).unwrap(), []);
    }
}
