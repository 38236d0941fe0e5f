//! Small files that note work in progress, for the process that cleans up after a killed one: each is complete or absent, and durable.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use holdfast_block::rename_durably;
use holdfast_host::{LOCK_HOLDER, Wait};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use crate::job::{Error, Result};

/// File name extension of notes.
const ENDING: &str = "json";
/// Largest note in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// The content of a note of this version; none if it is not a note, or of another version.
pub(crate) fn note_of_schema(bytes: &[u8], schema: u64) -> Option<Value> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    (value.get("schema")?.as_u64()? == schema).then_some(value)
}

/// A path for a note: text, or its bytes if it is not UTF-8.
pub(crate) fn written_path(path: &Path) -> Value {
    match path.to_str() {
        Some(text) => json!(text),
        None => json!({ "bytes": path.as_os_str().as_bytes() }),
    }
}

/// Parses a path in a note.
pub(crate) fn read_path(value: &Value) -> Option<PathBuf> {
    if let Some(text) = value.as_str() {
        return Some(text.into());
    }
    let bytes = value.get("bytes")?.as_array()?.iter();
    let bytes = bytes.map(|byte| u8::try_from(byte.as_u64()?).ok());
    let bytes: Vec<u8> = bytes.collect::<Option<_>>()?;
    Some(OsString::from_vec(bytes).into())
}

/// Writes a state file that only its owner can read. Until it is complete, it is at `half`, in the same folder.
pub fn write_note(path: &Path, half: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = lock_half(half)?;
    file.set_len(0)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    rename_durably(half, path)
}

/// Locks the incomplete note: a process that holds this lock is still writing it.
fn lock_half(half: &Path) -> std::io::Result<File> {
    loop {
        let mut options = File::options();
        let file = options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(half)?;
        let _wait = Wait::for_answer(LOCK_HOLDER);
        // If files cannot be locked, nothing is deleted.
        flock(&file, FlockOperation::LockExclusive).ok();
        let (opened, named) = (file.metadata()?, half.symlink_metadata());
        // If it was deleted between opening and locking, the written file would have no name.
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino())) {
            return Ok(file);
        }
    }
}

/// Incomplete notes in a folder that no process is writing.
pub(crate) fn half_notes(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let is_half = |path: &PathBuf| path.extension().is_some_and(|found| found == ending) && lock_left(path).is_some();
    paths.filter(is_half).collect()
}

/// Deletes an incomplete note, unless a process is writing it now.
pub(crate) fn delete_half_note(path: &Path) -> std::io::Result<()> {
    match lock_left(path) {
        Some(_lock) => std::fs::remove_file(path),
        None => Err(ErrorKind::WouldBlock.into()),
    }
}

fn lock_left(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(file)
}

/// The content of all notes in a folder, valid or not; empty if the folder does not exist.
///
/// # Errors
/// The folder exists, and cannot be read.
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
        // The file may be removed meanwhile.
        if read.is_ok() {
            notes.push(bytes);
        }
    }
    Ok(notes)
}

/// Removes a note; a missing note is not an error.
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

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::File;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use serde_json::json;

    use super::{
        delete_half_note, half_notes, lock_half, note_of_schema, read_notes, read_path, write_note, written_path,
    };

    #[test]
    fn a_note_of_another_version_is_none() {
        assert_eq!(note_of_schema(b"{\"schema\":1}", 1), Some(json!({ "schema": 1 })));
        for other in [&b"{\"schema\":2}"[..], b"{}", b"{\"schema\":\"1\"}", b"[1]", b"{", b""] {
            assert_eq!(note_of_schema(other, 1), None);
        }
    }

    #[test]
    fn a_path_comes_back_with_all_its_bytes() {
        for bytes in [&b"/a b"[..], b"", b"/a\xff\xfe/b\n", "/\u{e9}".as_bytes()] {
            let path = Path::new(OsStr::from_bytes(bytes));
            assert_eq!(read_path(&written_path(path)).as_deref(), Some(path));
        }
        assert_eq!(written_path(Path::new("/a")), json!("/a"));
        let others = [
            json!(null),
            json!({}),
            json!(["a"]),
            json!({ "bytes": [256] }),
            json!({ "bytes": ["a"] }),
        ];
        for other in others {
            assert_eq!(read_path(&other), None);
        }
    }

    #[test]
    fn a_half_note_is_a_leftover_when_no_process_writes_it() {
        let folder = tempfile::tempdir().unwrap();
        let [note, half] = ["a.json", "a.partial"].map(|name| folder.path().join(name));
        let writer = lock_half(&half).unwrap();
        assert!(half_notes(folder.path(), "partial").is_empty() && delete_half_note(&half).is_err());
        drop(writer);
        assert_eq!(half_notes(folder.path(), "partial"), std::slice::from_ref(&half));
        // The next writer of the same note takes it over.
        std::io::Write::write_all(&mut File::create(&half).unwrap(), b"longer than the note").unwrap();
        write_note(&note, &half, b"{}").unwrap();
        assert_eq!(read_notes(folder.path()).unwrap(), [b"{}"]);
        assert!(half_notes(folder.path(), "partial").is_empty());
        drop(lock_half(&half).unwrap());
        delete_half_note(&half).unwrap();
        assert!(!half.exists());
    }
}
