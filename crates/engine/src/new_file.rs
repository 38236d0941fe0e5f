//! A file that is there complete, or not at all.
//!
//! It is written under another name in the folder where it will be, and gets its own when it is complete and durable. What a
//! killed program leaves is called `.NAME.RANDOM.partial` and can be deleted.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use holdfast_block::{FileDeviceMut, IoMode};
use holdfast_repo::Surroundings;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::error::{Error, Result};

/// What to do about a file that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existing {
    /// It stays, and the new one is refused.
    Keep,
    /// The new one takes its place.
    Replace,
}

/// A file on its way; dropped before [`finish`](Self::finish), it was never there.
#[derive(Debug)]
pub(crate) struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    existing: Existing,
    is_finished: bool,
}

impl NewFile {
    /// Chooses a name to write under; there is nothing at it yet.
    pub(crate) fn begin(path: &Path, existing: Existing, surroundings: &Surroundings) -> Result<Self> {
        if existing == Existing::Keep && path.symlink_metadata().is_ok() {
            return Err(Error::TargetExists { path: path.to_owned() });
        }
        let name = path.file_name().ok_or_else(|| Error::File {
            action: "create",
            path: path.to_owned(),
            source: ErrorKind::IsADirectory.into(),
        })?;
        let mut random = [0; 4];
        surroundings.randomness.fill(&mut random)?;
        let mut partial = OsString::from(".");
        partial.push(name);
        partial.push(format!(".{:08x}.partial", u32::from_be_bytes(random)));
        Ok(Self {
            path: path.to_owned(),
            partial: path.with_file_name(partial),
            existing,
            is_finished: false,
        })
    }

    /// Where to write it.
    pub(crate) fn partial(&self) -> &Path {
        &self.partial
    }

    /// Makes it a sparse file of this size. It is written past the page cache: it may be larger than memory, and whoever
    /// uses it next is not this program.
    pub(crate) fn create_sparse(&self, size_bytes: u64) -> Result<FileDeviceMut> {
        Ok(FileDeviceMut::create_new(
            &self.partial,
            size_bytes,
            IoMode::LargeDirect,
        )?)
    }

    /// Gives it its name, durably. What is in it must be durable already.
    pub(crate) fn finish(mut self) -> Result<()> {
        let failed = |source: std::io::Error| Error::File {
            action: "create",
            path: self.path.clone(),
            source,
        };
        match self.existing {
            Existing::Replace => std::fs::rename(&self.partial, &self.path).map_err(failed)?,
            Existing::Keep => self.rename_if_free()?,
        }
        let folder = match self.path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed)?;
        self.is_finished = true;
        Ok(())
    }

    fn rename_if_free(&self) -> Result<()> {
        let taken = || Error::TargetExists {
            path: self.path.clone(),
        };
        let failed = |source| Error::File {
            action: "create",
            path: self.path.clone(),
            source,
        };
        match renameat_with(CWD, &self.partial, CWD, &self.path, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::EXIST) => Err(taken()),
            // Some file systems cannot do both in one step.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                if self.path.symlink_metadata().is_ok() {
                    return Err(taken());
                }
                std::fs::rename(&self.partial, &self.path).map_err(failed)
            }
            Err(errno) => Err(failed(errno.into())),
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_finished {
            // It may not exist yet, or no longer; an error that brought us here says more than one about this.
            drop(std::fs::remove_file(&self.partial));
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
    use holdfast_repo::{Surroundings, SystemProcesses};

    use super::{Existing, NewFile};
    use crate::Error;

    fn surroundings() -> Surroundings {
        Surroundings {
            randomness: Arc::new(SystemRandomness),
            processes: Arc::new(SystemProcesses),
            now_ms: Arc::new(|| 0),
        }
    }

    #[test]
    fn a_file_is_there_when_it_is_finished_and_leaves_nothing_when_it_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let begun = NewFile::begin(&path, Existing::Keep, &surroundings()).unwrap();
        begun.create_sparse(3).unwrap().write_at(b"abc", 0).unwrap();
        assert!(!path.exists());
        drop(begun);
        assert_eq!(read_dir(folder.path()).unwrap().count(), 0);

        let begun = NewFile::begin(&path, Existing::Keep, &surroundings()).unwrap();
        begun.create_sparse(3).unwrap().write_at(b"abc", 0).unwrap();
        begun.finish().unwrap();
        assert_eq!(read(&path).unwrap(), b"abc");
        assert_eq!(read_dir(folder.path()).unwrap().count(), 1);
    }

    /// Also where it came between the beginning and the end.
    #[test]
    fn a_file_that_exists_is_replaced_only_where_that_is_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let late = NewFile::begin(&path, Existing::Keep, &surroundings()).unwrap();
        late.create_sparse(1).unwrap();
        File::create(&path).unwrap().write_all(b"precious").unwrap();
        assert!(matches!(late.finish(), Err(Error::TargetExists { .. })));
        assert!(matches!(
            NewFile::begin(&path, Existing::Keep, &surroundings()),
            Err(Error::TargetExists { .. })
        ));
        assert_eq!(read(&path).unwrap(), b"precious");
        let new = NewFile::begin(&path, Existing::Replace, &surroundings()).unwrap();
        new.create_sparse(1).unwrap();
        new.finish().unwrap();
        assert_eq!(read(&path).unwrap(), [0]);
        assert_eq!(read_dir(folder.path()).unwrap().count(), 1);
    }
}
