//! Records of machines that run at another host while their disks are still here: that host pulls them.
//!
//! A record is a file `UUID.pull` in a folder of its user, from before the machine moves until all disks are complete there. Its
//! first line describes the move. When the hypervisor here has given the images up, a line with their stamps follows: whether they
//! have changed since is seen by these. `docs/format/migration.md` describes it.

use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::run_journal::HALF;
use crate::files::state_file::write_note;
use crate::job::error::ServingError;
use crate::job::{Error, Result};

const VERSION: u32 = 1;
const ENDING: &str = "pull";
const BYTES_MAX: u64 = 1 << 20;

/// A machine whose disks another host pulls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullRecord {
    version: u32,
    /// Its name.
    pub machine: String,
    /// Its UUID.
    pub uuid: String,
    /// The address of the other host, as the user has written it.
    pub destination: String,
    /// Its disks.
    pub disks: Vec<RecordedDisk>,
    /// What it had at the other host before.
    pub former_files: Vec<PathBuf>,
}

/// A disk that another host pulls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedDisk {
    /// Its target in the machine.
    pub disk: String,
    /// Its image here.
    pub path: PathBuf,
    /// The format; none if it is to be detected.
    pub format: Option<String>,
    /// Its image at the other host.
    pub path_there: PathBuf,
}

/// The line that follows when the images were given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReleasedLine {
    /// In the order of the disks; null if a device does not show whether it was written.
    stamps: Vec<Option<String>>,
}

impl PullRecord {
    /// The record of a machine that is about to move.
    pub fn new(machine: String, uuid: String, destination: String) -> Self {
        Self {
            version: VERSION,
            machine,
            uuid,
            destination,
            disks: Vec::new(),
            former_files: Vec::new(),
        }
    }
}

/// A record that this process holds: no other one serves these disks.
#[derive(Debug)]
pub struct PullNote {
    path: PathBuf,
    file: File,
    /// The record.
    pub record: PullRecord,
    /// The stamps of the images when the hypervisor gave them up, in the order of the disks; none if it has not.
    pub stamps: Option<Vec<Option<String>>>,
}

impl PullNote {
    /// Writes a record durably. It replaces one of an earlier move of the machine.
    ///
    /// # Errors
    /// It cannot be written, or another process holds the earlier one.
    pub fn begin(folder: &Path, record: PullRecord) -> Result<Self> {
        let path = path_of(folder, &record.uuid);
        let failed = failed("write", &path);
        let mut options = DirBuilder::new();
        options.recursive(true).mode(0o700).create(folder).map_err(&failed)?;
        // Dropped after the new record is in its place.
        let _former = Self::lock(&path)?;
        let line = line_of(&record).map_err(&failed)?;
        write_note(&path, &path.with_extension(HALF), &line).map_err(&failed)?;
        let file = Self::lock(&path)?.ok_or_else(|| failed(ErrorKind::NotFound.into()))?;
        Ok(Self {
            path,
            file,
            record,
            stamps: None,
        })
    }

    /// The record of a machine; none if there is none.
    ///
    /// # Errors
    /// Another process holds it, or it cannot be read.
    pub fn find(folder: &Path, uuid: &str) -> Result<Option<Self>> {
        let path = path_of(folder, uuid);
        let Some(file) = Self::lock(&path)? else {
            return Ok(None);
        };
        let (record, stamps) = read(&file).map_err(failed("read", &path))?;
        Ok(Some(Self {
            path,
            file,
            record,
            stamps,
        }))
    }

    /// The file of the record.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes that the hypervisor has given the images up. Not durable before [`sync`](Self::sync): the machine is stopped
    /// meanwhile.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn note_release(&self, stamps: &[Option<String>]) -> Result<()> {
        let line = line_of(&ReleasedLine {
            stamps: stamps.to_vec(),
        });
        let written = line.and_then(|line| (&self.file).write_all(&line));
        written.map_err(failed("write", &self.path))
    }

    /// Makes the record durable.
    ///
    /// # Errors
    /// The disk fails.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(failed("write", &self.path))
    }

    /// Deletes the record: the disks here are not needed any more.
    ///
    /// # Errors
    /// It cannot be deleted.
    pub fn forget(&self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(failed("delete", &self.path))
    }

    /// The locked file; none if it does not exist.
    fn lock(path: &Path) -> Result<Option<File>> {
        loop {
            let file = match File::options().read(true).append(true).open(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                opened => opened.map_err(failed("open", path))?,
            };
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                let record = path.to_owned();
                return Err(ServingError::PullInProgress { record }.into());
            }
            // It may have been replaced or deleted before it was locked.
            let (opened, named) = (file.metadata().map_err(failed("open", path))?, path.symlink_metadata());
            if named.is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino())) {
                return Ok(Some(file));
            }
        }
    }
}

/// A record that no process holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftPull {
    pub(crate) path: PathBuf,
    pub(crate) machine: String,
    pub(crate) uuid: String,
    pub(crate) destination: String,
    /// Whether the hypervisor has given the images up, so that the machine may run there.
    pub(crate) is_released: bool,
}

/// The records that no process holds.
pub(crate) fn left_pulls(folder: &Path) -> Vec<LeftPull> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let records = paths.filter(|path| path.extension().is_some_and(|ending| ending == ENDING));
    let left = records.filter_map(|path| {
        let file = PullNote::lock(&path).ok()??;
        let (record, stamps) = read(&file).ok()?;
        Some(LeftPull {
            path,
            machine: record.machine,
            uuid: record.uuid,
            destination: record.destination,
            is_released: stamps.is_some(),
        })
    });
    left.collect()
}

fn path_of(folder: &Path, uuid: &str) -> PathBuf {
    folder.join(format!("{uuid}.{ENDING}"))
}

fn line_of(value: &impl Serialize) -> std::io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// The record, and the last stamps that were written completely.
fn read(mut file: &File) -> std::io::Result<(PullRecord, Option<Vec<Option<String>>>)> {
    let mut text = String::new();
    (&mut file).take(BYTES_MAX).read_to_string(&mut text)?;
    let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let record: PullRecord = serde_json::from_str(lines.next().unwrap_or_default())?;
    if record.version != VERSION {
        return Err(std::io::Error::other("it is of another version of holdfast"));
    }
    let released = lines
        .next_back()
        .map(serde_json::from_str::<ReleasedLine>)
        .transpose()?;
    Ok((record, released.map(|line| line.stamps)))
}

fn failed(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File {
        action,
        path: path.clone(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{PullNote, PullRecord, RecordedDisk, left_pulls};
    use crate::job::Error;
    use crate::job::error::ServingError;

    /// As docs/format/migration.md describes it.
    const VERSION_1: &str = include_str!("../../tests/fixtures/pull-record-1.pull");

    fn record() -> PullRecord {
        let disk = |disk: &str, path: &str, format: Option<&str>| RecordedDisk {
            disk: disk.to_owned(),
            path: path.into(),
            format: format.map(str::to_owned),
            path_there: format!("/srv/vm/{disk}.qcow2").into(),
        };
        PullRecord {
            disks: vec![
                disk("vda", "/srv/web1.qcow2", Some("qcow2")),
                disk("vdb", "/dev/vg/web1", None),
            ],
            former_files: vec!["/srv/vm/web1.raw".into()],
            ..PullRecord::new(
                "web1".to_owned(),
                "10a5e1b6-6f0b-4b39-8e25-6a2a3f0d7c11".to_owned(),
                "ssh://root@host2/srv/vm".to_owned(),
            )
        }
    }

    fn found(folder: &Path) -> PullNote {
        PullNote::find(folder, &record().uuid).unwrap().unwrap()
    }

    #[test]
    fn version_1_is_read_and_written_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let stamps = [Some("11:4096:1700000000.000000001".to_owned()), None];
        let note = PullNote::begin(folder.path(), record()).unwrap();
        note.note_release(&stamps).unwrap();
        assert_eq!(std::fs::read_to_string(&note.path).unwrap(), VERSION_1);
        drop(note);
        let note = found(folder.path());
        assert_eq!((&note.record, note.stamps.as_deref()), (&record(), Some(&stamps[..])));
    }

    #[test]
    fn a_record_is_held_by_one_process_until_it_is_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("pulls");
        assert!(PullNote::find(&folder, &record().uuid).unwrap().is_none());
        let note = PullNote::begin(&folder, record()).unwrap();
        let held =
            |result: Result<(), Error>| matches!(result, Err(Error::Serving(ServingError::PullInProgress { .. })));
        assert!(held(PullNote::find(&folder, &record().uuid).map(drop)));
        assert!(held(PullNote::begin(&folder, record()).map(drop)));
        assert_eq!(left_pulls(&folder), []);
        drop(note);
        let left = left_pulls(&folder);
        assert_eq!(
            (left.len(), &left[0].uuid, left[0].is_released),
            (1, &record().uuid, false)
        );
        found(&folder).forget().unwrap();
        assert!(PullNote::find(&folder, &record().uuid).unwrap().is_none());
    }

    #[test]
    fn a_line_that_was_not_written_completely_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let note = PullNote::begin(folder.path(), record()).unwrap();
        note.note_release(&[None, None]).unwrap();
        let length = note.file.metadata().unwrap().len();
        note.file.set_len(length - 1).unwrap();
        drop(note);
        let note = found(folder.path());
        assert_eq!(note.stamps, None);
        note.file.set_len(10).unwrap();
        drop(note);
        PullNote::find(folder.path(), &record().uuid).unwrap_err();
    }
}
