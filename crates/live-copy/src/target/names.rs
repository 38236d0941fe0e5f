//! The names of a file that is a target: a temporary one beside its own, until the copy is complete.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_block::sync_folder_of;

use crate::error::{Error, Result};

pub(super) const SUFFIX: &str = ".holdfast-copy";
pub(super) const JOURNAL_SUFFIX: &str = ".holdfast-copy.journal";

/// The temporary name of a file beside the target.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(suffix);
    path.with_file_name(name)
}

/// Gives the file of a copy that is not complete its own name, besides the temporary one: the hypervisor of a machine that
/// moves opens it before.
///
/// # Errors
/// Another file has that name.
pub fn name_early(path: &Path) -> Result<()> {
    let partial = beside(path, SUFFIX);
    if is_same_file(&partial, path) {
        return Ok(());
    }
    let linked = std::fs::hard_link(&partial, path).and_then(|()| sync_folder_of(path));
    linked.map_err(|source| Error::File {
        action: "name the copy",
        path: path.to_owned(),
        source,
    })
}

/// Removes the name that [`name_early`] has given. A file without a temporary name is a complete copy, or of another
/// origin, and is kept.
pub fn remove_early_name(path: &Path) -> Result<()> {
    if !is_named_early(path) {
        return Ok(());
    }
    let removed = std::fs::remove_file(path).and_then(|()| sync_folder_of(path));
    removed.map_err(|source| Error::File {
        action: "delete the early name",
        path: path.to_owned(),
        source,
    })
}

/// Removes the journal of a copy that was deleted.
pub fn remove_journal(path: &Path) -> Result<()> {
    let journal = beside(path, JOURNAL_SUFFIX);
    match std::fs::remove_file(&journal) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(Error::File {
            action: "delete",
            path: journal,
            source,
        }),
        _ => Ok(()),
    }
}

/// Removes the temporary name of a file that was given its own name before.
pub(super) fn remove_partial(partial: &Path) -> Result<()> {
    let removed = std::fs::remove_file(partial).and_then(|()| sync_folder_of(partial));
    removed.map_err(|source| Error::File {
        action: "delete the temporary name",
        path: partial.to_owned(),
        source,
    })
}

/// Bytes that an interrupted copy to the file `path` has stored.
pub fn interrupted_bytes(path: &Path) -> u64 {
    let partial = beside(path, SUFFIX).symlink_metadata();
    partial.map_or(0, |found| found.blocks().saturating_mul(512))
}

/// Whether the file at `path` is a copy that is not complete: [`name_early`] has named it.
pub fn is_named_early(path: &Path) -> bool {
    is_same_file(&beside(path, SUFFIX), path)
}

pub(super) fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.symlink_metadata().ok().map(|found| (found.dev(), found.ino()));
    identity(one).is_some_and(|found| Some(found) == identity(other))
}
