//! Small files that say what is going on, for whoever comes after one who was killed: each is whole or not there, and lasts.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::error::{Error, Result};

/// How the names of notes end.
const ENDING: &str = "json";
/// Bytes of a note, at most.
const BYTES_MAX: u64 = 1 << 20;

/// Writes a note, which only its owner can read. As long as it is half it is at `half`, in the same folder.
pub(crate) fn write_note(path: &Path, half: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut options = File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(half)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(half, path)?;
    // The name has to last as the content does.
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// What the notes in a folder say, whether that makes sense or not; nothing where there is no folder.
///
/// # Errors
/// The folder is there, and cannot be read.
pub(crate) fn read_notes(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let failed = |source| Error::File {
        action: "read the notes in",
        path: folder.to_owned(),
        source,
    };
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut notes = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_none_or(|extension| extension != ENDING) {
            continue;
        }
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| file.take(BYTES_MAX).read_to_end(&mut bytes));
        // It may go while we look.
        if read.is_ok() {
            notes.push(bytes);
        }
    }
    Ok(notes)
}

/// Takes a note away; one that is gone is no error.
pub(crate) fn forget_note(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::File {
            action: "delete",
            path: path.to_owned(),
            source: error,
        }),
        _ => Ok(()),
    }
}
