//! A file, or the folder of a Parallels disk, that appears complete or not at all.
//!
//! It is written under a temporary name in its final folder, and renamed when it is complete and durable. A killed
//! program leaves a file `.NAME.RANDOM.partial`; the next program that creates the same file deletes it.
//!
//! Locks on the folder (flock(2)) show which processes are alive, since they end with their process: a process that
//! writes a partial file holds a shared lock, and only the holder of an exclusive lock deletes leftovers. If folders
//! cannot be locked, nothing is deleted.

use std::ffi::{OsStr, OsString};
use std::fs::{DirEntry, File, FileType};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use holdfast_block::{FileDeviceMut, IoMode, sync_folder_of};
use holdfast_image::ImageMut;
use holdfast_repo::Environment;
use rustix::fs::{Access, CWD, FlockOperation, RenameFlags, flock, renameat_with};

use super::block_target;
use crate::job::{Error, Progress, Result};

/// What to do with an existing file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existing {
    /// Keep it, and refuse the new one.
    Keep,
    /// Replace it.
    Replace,
}

/// A file that is being written; if it is dropped before [`finish`](Self::finish), it is removed.
pub(crate) struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    existing: Existing,
    is_finished: bool,
    /// Partial files of killed programs that were deleted.
    cleared: Vec<PathBuf>,
    /// Prevents others from treating the partial file as a leftover.
    _lock: Option<File>,
    /// Prevents machines from using the file that is replaced: they would write to an unnamed file.
    _replaced: Option<ImageMut>,
}

/// Refuses a symbolic link of another user at the target: it may lead to another file than intended. The kernel does
/// not follow such links in sticky folders (`fs.protected_symlinks`), but it does not see a link that is resolved here.
fn refuse_link_of_others(path: &Path) -> Result<()> {
    let Ok(found) = path.symlink_metadata() else {
        return Ok(());
    };
    let user = rustix::process::geteuid().as_raw();
    if !found.is_symlink() || found.uid() == user || found.uid() == 0 {
        return Ok(());
    }
    Err(Error::File {
        action: "replace",
        path: path.to_owned(),
        source: std::io::Error::new(
            std::io::ErrorKind::PermissionDenied,
            format!(
                "it is a symbolic link of user {}: name the file that it leads to",
                found.uid()
            ),
        ),
    })
}

impl NewFile {
    /// Chooses a temporary name, at which nothing exists yet.
    ///
    /// # Errors
    /// The existing object is not a file, or a machine uses the file to replace.
    pub(crate) fn begin(path: &Path, existing: Existing, environment: &Environment) -> Result<Self> {
        let path = &Self::place(path, existing)?;
        let mut random = [0; 4];
        environment.randomness.fill(&mut random)?;
        let replaced = Self::lock_replaced(path, existing)?;
        Self::begin_with(path, existing, u32::from_be_bytes(random), replaced)
    }

    /// Checks that a file could be created; creates and deletes nothing.
    ///
    /// # Errors
    /// Those of [`begin`](Self::begin), and that the folder is missing or cannot be written.
    pub(crate) fn check(path: &Path, existing: Existing) -> Result<()> {
        let place = Self::place(path, existing)?;
        Self::lock_replaced(&place, existing)?;
        refuse_taken(&place, existing)?;
        check_folder(folder_of(&place), path)
    }

    /// The final path. A symbolic link is kept, and the file that it leads to is replaced: it may have been moved to larger storage.
    fn place(path: &Path, existing: Existing) -> Result<PathBuf> {
        if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return Err(Error::NotAFile { path: path.to_owned() });
        }
        let linked = path.canonicalize().ok();
        refuse_link_of_others(path)?;
        Ok(match (existing, linked) {
            (Existing::Replace, Some(linked)) if path.is_symlink() => linked,
            _ => path.to_owned(),
        })
    }

    /// Locks the file that is to be replaced.
    fn lock_replaced(path: &Path, existing: Existing) -> Result<Option<ImageMut>> {
        match existing {
            Existing::Keep => Ok(None),
            Existing::Replace => match block_target::lock(path) {
                Err(error @ Error::Image(holdfast_image::Error::Locked { .. })) => Err(error),
                // It does not exist, or cannot be used by a machine.
                other => Ok(other.ok()),
            },
        }
    }

    /// Like [`begin`](Self::begin), with a given random number; the existing file may be in use.
    pub(crate) fn begin_as(path: &Path, existing: Existing, random: u32) -> Result<Self> {
        Self::begin_with(path, existing, random, None)
    }

    fn begin_with(path: &Path, existing: Existing, random: u32, replaced: Option<ImageMut>) -> Result<Self> {
        let name = refuse_taken(path, existing)?;
        let (lock, cleared) = lock_folder(path, name);
        let mut partial = OsString::from(".");
        partial.push(name);
        partial.push(format!(".{random:08x}.partial"));
        Ok(Self {
            path: path.to_owned(),
            partial: path.with_file_name(partial),
            existing,
            is_finished: false,
            cleared,
            _lock: lock,
            _replaced: replaced,
        })
    }

    /// Reports the leftovers that were deleted.
    pub(crate) fn report_cleared(&self, progress: &dyn Progress) {
        report_cleared(&self.cleared, progress);
    }

    /// The temporary path.
    pub(crate) fn partial(&self) -> &Path {
        &self.partial
    }

    /// The final path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates it as an empty file that no other user may read.
    pub(crate) fn create_private(&self) -> std::io::Result<File> {
        File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&self.partial)
    }

    /// Creates it as a sparse file of this size. Writes bypass the page cache: the file may be larger than memory, and
    /// this process does not read it again.
    pub(crate) fn create_sparse(&self, size_bytes: u64) -> Result<FileDeviceMut> {
        Ok(FileDeviceMut::create_new(
            &self.partial,
            size_bytes,
            IoMode::LargeDirect,
        )?)
    }

    /// Renames the file to its final name, durably. Its content must be durable already.
    ///
    /// A file that replaces another one gets its owner and mode, so that the same users can use it.
    pub(crate) fn finish(mut self) -> Result<()> {
        let failed = |source: std::io::Error| Error::File {
            action: "create",
            path: self.path.clone(),
            source,
        };
        match self.existing {
            Existing::Replace => self.replace().map_err(failed)?,
            Existing::Keep => rename_to_free(&self.partial, &self.path)?,
        }
        sync_folder_of(&self.path).map_err(failed)?;
        self.is_finished = true;
        Ok(())
    }

    /// Like [`finish`](Self::finish), but keeps the replaced file as `kept_at`. If this is interrupted, the old file
    /// has that name, and its place is empty.
    pub(crate) fn finish_beside(mut self, kept_at: &Path) -> Result<()> {
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source: std::io::Error| Error::File { action, path, source }
        };
        let old = self.path.metadata().map_err(failed("look at", &self.path))?;
        if !self.partial.is_dir() {
            self.take_access_of(&old).map_err(failed("create", &self.path))?;
        }
        rename_to_free(&self.path, kept_at)?;
        if let Err(error) = rename_to_free(&self.partial, &self.path) {
            // The original error is more helpful than one about this cleanup.
            drop(rename_to_free(kept_at, &self.path));
            return Err(error);
        }
        sync_folder_of(&self.path).map_err(failed("create", &self.path))?;
        self.is_finished = true;
        Ok(())
    }

    /// Gives the new file the owner and the mode of the old one.
    fn take_access_of(&self, old: &std::fs::Metadata) -> std::io::Result<()> {
        // Only root may change the owner of a file; otherwise the mode applies to the new owner.
        std::os::unix::fs::chown(&self.partial, Some(old.uid()), Some(old.gid())).ok();
        std::fs::set_permissions(&self.partial, old.permissions())
    }

    fn replace(&self) -> std::io::Result<()> {
        let is_folder = self.partial.is_dir();
        if let Ok(old) = self.path.symlink_metadata()
            && old.is_file()
        {
            if is_folder {
                // A folder cannot replace a file by renaming, but both can be exchanged.
                renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::EXCHANGE)?;
                return std::fs::remove_file(&self.partial);
            }
            self.take_access_of(&old)?;
        }
        std::fs::rename(&self.partial, &self.path)
    }
}

/// The file name of a path that is free, or may be replaced.
fn refuse_taken(path: &Path, existing: Existing) -> Result<&OsStr> {
    if existing == Existing::Keep && path.symlink_metadata().is_ok() {
        return Err(Error::TargetExists { path: path.to_owned() });
    }
    path.file_name().ok_or_else(|| Error::File {
        action: "create",
        path: path.to_owned(),
        source: ErrorKind::IsADirectory.into(),
    })
}

/// Fails if `made` cannot be created in `folder`.
pub(crate) fn check_folder(folder: &Path, made: &Path) -> Result<()> {
    let failed = |source: std::io::Error| Error::File {
        action: "create",
        path: made.to_owned(),
        source,
    };
    if !folder.metadata().map_err(failed)?.is_dir() {
        return Err(failed(ErrorKind::NotADirectory.into()));
    }
    rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(|errno| failed(errno.into()))
}

/// Renames a file to an unused name.
fn rename_to_free(from: &Path, to: &Path) -> Result<()> {
    let taken = || Error::TargetExists { path: to.to_owned() };
    let failed = |source| Error::File {
        action: "create",
        path: to.to_owned(),
        source,
    };
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) => Err(taken()),
        // Some file systems do not support this in one step.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            if to.symlink_metadata().is_ok() {
                return Err(taken());
            }
            std::fs::rename(from, to).map_err(failed)
        }
        Err(errno) => Err(failed(errno.into())),
    }
}

pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Locks the folder of `path`, and deletes leftovers of the file `name` if no other process works in the folder.
///
/// Errors are ignored: without a lock a new file can still be created, and leftovers stay.
fn lock_folder(path: &Path, name: &OsStr) -> (Option<File>, Vec<PathBuf>) {
    let folder = folder_of(path);
    let Ok(lock) = File::open(folder) else {
        return (None, Vec::new());
    };
    let mut cleared = Vec::new();
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if is_partial_of(&entry, name) && remove_partial(&entry.path()).is_ok() {
                cleared.push(entry.path());
            }
        }
    }
    let is_locked = flock(&lock, FlockOperation::NonBlockingLockShared).is_ok();
    (is_locked.then_some(lock), cleared)
}

/// Deletes the leftovers of files that are about to be created together: once the first is started, its lock prevents
/// the deletion of the others' leftovers.
pub(crate) fn clear_left(paths: &[&Path], progress: &dyn Progress) {
    for path in paths {
        report_cleared(&clear(path), progress);
    }
}

/// Deletes leftovers of the file `path` if no other process works in its folder; returns their paths.
pub(crate) fn clear(path: &Path) -> Vec<PathBuf> {
    path.file_name().map_or_else(Vec::new, |name| lock_folder(path, name).1)
}

/// Leftovers of the file `path`; empty if a process may work in its folder.
pub(crate) fn left_of(path: &Path) -> Vec<PathBuf> {
    let (Some(name), Ok(lock)) = (path.file_name(), File::open(folder_of(path))) else {
        return Vec::new();
    };
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(folder_of(path)).into_iter().flatten().flatten();
    let left = entries.filter(|entry| is_partial_of(entry, name));
    left.map(|entry| entry.path()).collect()
}

/// Leftovers in a folder; empty if a process may work in it.
pub(crate) fn left_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(lock) = File::open(folder) else {
        return Vec::new();
    };
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let left = entries.filter(|entry| {
        let found = entry.file_name();
        let name = found
            .as_bytes()
            .strip_suffix(b".partial")
            .and_then(|rest| rest.strip_prefix(b"."));
        let name = name.and_then(|name| {
            name.len()
                .checked_sub(9)
                .map(|length| OsStr::from_bytes(&name[..length]))
        });
        name.is_some_and(|name| !name.is_empty() && is_partial_of(entry, name))
    });
    left.map(|entry| entry.path()).collect()
}

/// Deletes a leftover, unless a process now works in its folder.
pub(crate) fn delete_left(partial: &Path) -> std::io::Result<()> {
    let lock = File::open(folder_of(partial))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    remove_partial(partial)
}

/// Reports the leftovers that were deleted.
pub(crate) fn report_cleared(cleared: &[PathBuf], progress: &dyn Progress) {
    for path in cleared {
        progress.note(&format!("deleted {}, which a killed program had left", path.display()));
    }
}

/// Deletes a partial file or folder.
fn remove_partial(partial: &Path) -> std::io::Result<()> {
    if partial.symlink_metadata()?.is_dir() {
        std::fs::remove_dir_all(partial)
    } else {
        std::fs::remove_file(partial)
    }
}

/// Whether `entry` is a file or folder called `.NAME.RANDOM.partial`.
fn is_partial_of(entry: &DirEntry, name: &OsStr) -> bool {
    let found = entry.file_name();
    let has_type = |kind: FileType| kind.is_file() || kind.is_dir();
    let random = found
        .as_bytes()
        .strip_prefix(b".")
        .and_then(|rest| rest.strip_prefix(name.as_bytes()))
        .and_then(|rest| rest.strip_prefix(b"."))
        .and_then(|rest| rest.strip_suffix(b".partial"));
    entry.file_type().is_ok_and(has_type)
        && random.is_some_and(|random| {
            random.len() == 8 && random.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
        })
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_finished {
            // It may not exist; the original error is more helpful than one about this cleanup.
            drop(remove_partial(&self.partial));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, read, read_dir};
    use std::io::Write as _;
    use std::sync::Arc;

    use holdfast_block::BlockDeviceMut as _;
    use holdfast_repo::key::SystemRandomness;
    use holdfast_repo::{Environment, SystemProcesses};

    use super::{Existing, NewFile};
    use crate::job::Error;

    fn environment() -> Environment {
        Environment {
            randomness: Arc::new(SystemRandomness),
            processes: Arc::new(SystemProcesses),
            now_ms: Arc::new(|| 0),
        }
    }

    #[test]
    fn a_file_is_there_when_it_is_finished_and_leaves_nothing_when_it_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let begun = NewFile::begin(&path, Existing::Keep, &environment()).unwrap();
        begun.create_sparse(3).unwrap().write_at(b"abc", 0).unwrap();
        assert!(!path.exists());
        drop(begun);
        assert_eq!(read_dir(folder.path()).unwrap().count(), 0);

        let begun = NewFile::begin(&path, Existing::Keep, &environment()).unwrap();
        begun.create_sparse(3).unwrap().write_at(b"abc", 0).unwrap();
        begun.finish().unwrap();
        assert_eq!(read(&path).unwrap(), b"abc");
        assert_eq!(read_dir(folder.path()).unwrap().count(), 1);
    }

    /// In a folder that all users may write to, any user can put a link in place of a target.
    #[test]
    fn a_link_of_another_user_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        File::create(&target).unwrap().write_all(b"theirs").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let begin = || NewFile::begin(&link, Existing::Replace, &environment()).map(drop);
        assert!(begin().is_ok(), "our own leads to what is meant");
        if !rustix::process::geteuid().is_root() {
            return;
        }
        std::os::unix::fs::lchown(&link, Some(65_534), None).unwrap();
        assert!(matches!(begin(), Err(Error::File { action: "replace", .. })));
        assert_eq!(read(&target).unwrap(), b"theirs");
    }

    /// Also if the file appeared between begin and finish.
    #[test]
    fn a_file_that_exists_isreplaced_only_where_that_is_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let late = NewFile::begin(&path, Existing::Keep, &environment()).unwrap();
        late.create_sparse(1).unwrap();
        File::create(&path).unwrap().write_all(b"precious").unwrap();
        assert!(matches!(late.finish(), Err(Error::TargetExists { .. })));
        assert!(matches!(
            NewFile::begin(&path, Existing::Keep, &environment()),
            Err(Error::TargetExists { .. })
        ));
        assert_eq!(read(&path).unwrap(), b"precious");
        let new = NewFile::begin(&path, Existing::Replace, &environment()).unwrap();
        new.create_sparse(1).unwrap();
        new.finish().unwrap();
        assert_eq!(read(&path).unwrap(), [0]);
        assert_eq!(read_dir(folder.path()).unwrap().count(), 1);
    }

    /// Partial files of killed programs are deleted; those of running programs, and files with similar names, are kept.
    #[test]
    fn what_killed_programs_left_is_deleted_when_no_process_writes() {
        let folder = tempfile::tempdir().unwrap();
        let names = || {
            let entries = read_dir(folder.path()).unwrap();
            let mut names: Vec<_> = entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let others = [
            ".disk.raw.0123456.partial",
            ".disk.raw.012345678.partial",
            ".disk.raw.0123456X.partial",
            ".other.raw.01234567.partial",
            "disk.raw.01234567.partial",
        ];
        let left = ".disk.raw.01234567.partial";
        for name in others.iter().chain([&left]) {
            File::create(folder.path().join(name)).unwrap();
        }
        let path = folder.path().join("disk.raw");
        let begin = || NewFile::begin(&path, Existing::Keep, &environment()).unwrap();
        let first = begin();
        assert_eq!(first.cleared, [folder.path().join(left)]);
        assert_eq!(names(), {
            let mut others = others.to_vec();
            others.sort_unstable();
            others
        });
        drop(first.create_sparse(3).unwrap());
        let second = begin();
        assert!(
            second.cleared.is_empty() && first.partial().exists(),
            "the first is at work"
        );
        drop(second);
        drop(first);
        assert_eq!(names().len(), others.len());
    }
}
