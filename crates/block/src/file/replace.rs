//! Replaces small files: after a crash at any time the file has either the old or the complete new content.

use std::fs::{File, Metadata, Permissions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

/// Replaces the content of the file at `path` by `bytes`, durably. The content is written to `partial`, a path in the
/// same folder, which is then renamed. A leftover at `partial` from a killed process is deleted.
///
/// A file that replaces `old` gets its permissions, and its owner if this process may change owners. Otherwise only the
/// user of this process can read the file.
///
/// # Errors
/// The file cannot be written or renamed. The old file is then unchanged, and there is no file at `partial`.
pub fn replace_file(path: &Path, partial: &Path, bytes: &[u8], old: Option<&Metadata>) -> io::Result<()> {
    let replaced = write_new_file(partial, bytes, old).and_then(|()| rename_durably(partial, path));
    if replaced.is_err() {
        // The first error is the one to report.
        drop(std::fs::remove_file(partial));
    }
    replaced
}

/// Renames a file inside its folder, durably. An existing file at `to` is replaced.
///
/// # Errors
/// The file cannot be renamed, or the folder cannot be synced. In the second case the file may have either name after a
/// power cut.
pub fn rename_durably(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::rename(from, to)?;
    sync_folder_of(to)
}

/// Makes the name of a file that was created, renamed or deleted durable.
///
/// # Errors
/// The folder cannot be opened or synced.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    File::open(directory_of(path))?.sync_all()
}

fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Writes a file that replaces `old` by a rename later; its content is durable, its name is not. A file at `path` is
/// deleted first. Permissions and owner are those of [`replace_file`].
///
/// # Errors
/// The file cannot be written. A part of it may exist.
pub fn write_new_file(path: &Path, bytes: &[u8], old: Option<&Metadata>) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    if let Some(old) = old {
        // Without the right to change owners, the file belongs to the current user, which does not affect readers.
        fchown(&file, Some(old.uid()), Some(old.gid())).ok();
        file.set_permissions(Permissions::from_mode(old.mode() & 0o777))?;
    }
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs::{File, Permissions, read, read_dir, set_permissions};
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::replace_file;

    fn mode(path: &std::path::Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_file_is_replaced_with_its_permissions_and_a_leftover_is_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let (path, partial) = (folder.path().join("state"), folder.path().join(".state.new"));
        let mut leftover = File::create(&partial).unwrap();
        leftover.write_all(b"longer than what is written now").unwrap();
        replace_file(&path, &partial, b"one", None).unwrap();
        assert_eq!((read(&path).unwrap(), mode(&path)), (b"one".to_vec(), 0o600));
        set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let old = path.metadata().unwrap();
        replace_file(&path, &partial, b"two", Some(&old)).unwrap();
        assert_eq!((read(&path).unwrap(), mode(&path)), (b"two".to_vec(), 0o640));
        assert_eq!(read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_replaced_keeps_its_content_and_leaves_no_partial_file() {
        let folder = tempfile::tempdir().unwrap();
        let (path, partial) = (folder.path().join("state"), folder.path().join(".state.new"));
        std::fs::create_dir(&path).unwrap();
        File::create(path.join("inside")).unwrap();
        replace_file(&path, &partial, b"two", None).unwrap_err();
        assert!(path.join("inside").exists() && !partial.exists());
    }
}
