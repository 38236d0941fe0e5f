//! A folder that appears complete, or is left as it was before.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::{DiskChange, DiskPlace, DomainXml, Medium};
use holdfast_host::{DiskKind, DiskSource};
use holdfast_image::Format;
use holdfast_repo::Environment;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, fstat, openat, statat, unlinkat};

use crate::files::atomic_file::{Existing, NewFile, check_folder, folder_of};
use crate::job::error::ExchangeError;
use crate::job::{Error, Result};

/// A folder that is being filled. If it is dropped before [`keep`](Self::keep), it is emptied or removed, as it was before.
///
/// Another user may have moved the folder or a file meanwhile, and put something else in its place. So the created
/// files are held open, which prevents the reuse of their inode numbers, and a file is removed only if it is still the
/// same.
pub(crate) struct NewFolder {
    path: PathBuf,
    folder: OwnedFd,
    was_there: bool,
    files: Vec<(String, OwnedFd)>,
}

impl NewFolder {
    /// Checks that the folder could be created; creates nothing.
    ///
    /// # Errors
    /// Those of [`make`](Self::make), and that the parent folder cannot be written.
    pub(crate) fn check(path: &Path) -> Result<()> {
        match std::fs::read_dir(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => check_folder(folder_of(path), path),
            Err(source) => Err(Error::File {
                action: "create",
                path: path.to_owned(),
                source,
            }),
            Ok(mut entries) => {
                if entries.any(|entry| !is_left(entry)) {
                    return Err(ExchangeError::FolderTaken { path: path.to_owned() }.into());
                }
                check_folder(path, path)
            }
        }
    }

    /// Creates the folder. It may exist if it is empty.
    pub(crate) fn make(path: &Path) -> Result<Self> {
        let failed = |source| Error::File {
            action: "create",
            path: path.to_owned(),
            source,
        };
        let was_there = match std::fs::create_dir(path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                if std::fs::read_dir(path).map_err(failed)?.any(|entry| !is_left(entry)) {
                    return Err(ExchangeError::FolderTaken { path: path.to_owned() }.into());
                }
                true
            }
            other => {
                other.map_err(failed)?;
                false
            }
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(CWD, path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
        Ok(Self {
            path: path.to_owned(),
            folder,
            was_there,
            files: Vec::new(),
        })
    }

    /// Creates a file in it by `make`; the file is removed with the folder. If `make` fails, it removes its own file.
    pub(crate) fn file<T>(&mut self, name: &str, make: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let made = make(&self.path.join(name))?;
        // A missing file was removed, or the folder was replaced: then nothing in it belongs to this process.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if let Ok(file) = openat(&self.folder, name, flags, Mode::empty()) {
            self.files.push((name.to_owned(), file));
        }
        Ok(made)
    }

    /// Its absolute path, for programs with another working folder.
    pub(crate) fn absolute_path(&self) -> Result<PathBuf> {
        std::path::absolute(&self.path).map_err(|source| Error::File {
            action: "find",
            path: self.path.clone(),
            source,
        })
    }

    /// Keeps the complete folder.
    pub(crate) fn keep(mut self) {
        self.files.clear();
        self.was_there = true;
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // The original error is more helpful than one about this cleanup. Files of others are kept.
        for (name, file) in &self.files {
            let found = statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW);
            if is_same(fstat(file), found) {
                unlinkat(&self.folder, name, AtFlags::empty()).ok();
            }
        }
        let found = statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW);
        if !self.was_there && is_same(fstat(&self.folder), found) {
            std::fs::remove_dir(&self.path).ok();
        }
    }
}

/// File name of a disk image in a folder.
pub(crate) fn image_name(disk: &str, format: Format) -> String {
    format!("{disk}.{format}")
}

/// File name of a machine's firmware variables in a folder.
pub(crate) fn variables_name(machine: &str) -> String {
    format!("{machine}_VARS.fd")
}

/// How to change the disks of a configuration for a folder that contains only the images of `has`: drives become empty;
/// other disks are removed from the machine and reported to `left_out`.
pub(crate) fn disks_in(
    folder: &Path,
    format: Format,
    xml: &DomainXml,
    has: impl Fn(&str) -> bool,
    left_out: &mut dyn FnMut(&str),
) -> BTreeMap<String, DiskChange> {
    let mut changes = BTreeMap::new();
    for disk in &xml.disks {
        let change = if has(&disk.target) {
            DiskChange::Place(DiskPlace {
                path: folder.join(image_name(&disk.target, format)),
                medium: Medium::File,
                format: format.qemu_name().to_owned(),
            })
        } else if matches!(disk.kind, DiskKind::Cdrom | DiskKind::Floppy) {
            if disk.source == DiskSource::Empty {
                continue;
            }
            DiskChange::Empty
        } else {
            left_out(&disk.target);
            DiskChange::Remove
        };
        changes.insert(disk.target.clone(), change);
    }
    changes
}

/// Whether both exist and are the same file.
fn is_same(left: rustix::io::Result<Stat>, right: rustix::io::Result<Stat>) -> bool {
    matches!((left, right), (Ok(left), Ok(right)) if (left.st_dev, left.st_ino) == (right.st_dev, right.st_ino))
}

/// Whether it is the partial file of a killed program; the next program that creates the same file deletes it.
fn is_left(entry: std::io::Result<std::fs::DirEntry>) -> bool {
    entry.is_ok_and(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with('.') && name.ends_with(".partial")
    })
}

/// Writes a small file, durably.
pub(crate) fn write_file(path: &Path, bytes: &[u8], environment: &Environment) -> Result<()> {
    let new = NewFile::begin(path, Existing::Keep, environment)?;
    let write = || {
        let mut file = new.create_private()?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|source| Error::File {
        action: "write",
        path: path.to_owned(),
        source,
    })?;
    new.finish()
}

#[cfg(test)]
mod tests {
    use std::fs::{File, create_dir, read_dir, remove_file, rename};
    use std::path::Path;

    use super::NewFolder;

    /// A new folder with two files in it.
    fn made(path: &Path) -> NewFolder {
        let mut made = NewFolder::make(path).unwrap();
        for name in ["a", "b"] {
            made.file(name, |path| Ok(File::create_new(path).unwrap())).unwrap();
        }
        made
    }

    fn names(path: &Path) -> Vec<String> {
        let names = read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_was_not_kept_is_as_it_was_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        drop(made(&path));
        assert!(!path.exists());
        create_dir(&path).unwrap();
        drop(made(&path));
        assert!(names(&path).is_empty());
        made(&path).keep();
        assert_eq!(names(&path), ["a", "b"]);
    }

    /// Another user moves the created files away, and puts other files in their place.
    #[test]
    fn what_is_not_its_own_is_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, away) = (folder.path().join("new"), folder.path().join("away"));
        // A file is replaced.
        let new = made(&path);
        remove_file(path.join("a")).unwrap();
        File::create_new(path.join("a")).unwrap();
        File::create_new(path.join("c")).unwrap();
        drop(new);
        assert_eq!(names(&path), ["a", "c"]);
        std::fs::remove_dir_all(&path).unwrap();
        // The folder is replaced by one with files of the same names; the created files stay in the moved folder.
        let new = made(&path);
        rename(&path, &away).unwrap();
        made(&path).keep();
        drop(new);
        assert_eq!(
            (names(&path), names(&away)),
            (vec!["a".to_owned(), "b".to_owned()], vec![])
        );
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::remove_dir_all(&away).unwrap();
        // The folder is replaced by an empty one.
        let new = made(&path);
        rename(&path, &away).unwrap();
        create_dir(&path).unwrap();
        drop(new);
        assert!(path.exists());
        // The folder is replaced before a file is created in it: the file then belongs to another user.
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::remove_dir_all(&away).unwrap();
        let mut new = NewFolder::make(&path).unwrap();
        rename(&path, &away).unwrap();
        create_dir(&path).unwrap();
        new.file("a", |path| Ok(File::create_new(path).unwrap())).unwrap();
        drop(new);
        assert_eq!(names(&path), ["a"]);
    }
}
