//! A folder on its way: it is there whole, or as it was before.

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

/// A folder on its way; dropped before [`keep`](Self::keep), it is empty, or gone, as it was before.
///
/// Names may lead elsewhere by then: another user may have moved the folder or a file and put something else in its place. So what was
/// made is held open, which keeps its number from being given to anything else, and only what is still that is removed.
pub(crate) struct NewFolder {
    path: PathBuf,
    folder: OwnedFd,
    was_there: bool,
    files: Vec<(String, OwnedFd)>,
}

impl NewFolder {
    /// Checks that it could be made; makes nothing.
    ///
    /// # Errors
    /// Those of [`make`](Self::make), and that the folder around it cannot be written.
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

    /// Makes it. It may be there if nothing is in it.
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

    /// Has a file of it made, which goes with it. One that `make` fails to make it takes away itself.
    pub(crate) fn file<T>(&mut self, name: &str, make: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let made = make(&self.path.join(name))?;
        // One that cannot be found is not there any more, or the folder is another one: nothing of that is ours.
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

    /// It is whole.
    pub(crate) fn keep(mut self) {
        self.files.clear();
        self.was_there = true;
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // An error that brought us here says more than one about this. What others have put there stays.
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

/// What the image of a disk is called in a folder.
pub(crate) fn image_name(disk: &str, format: Format) -> String {
    format!("{disk}.{format}")
}

/// What the file with the variables of a machine's firmware is called in a folder.
pub(crate) fn variables_name(machine: &str) -> String {
    format!("{machine}_VARS.fd")
}

/// What happens to the disks of a configuration where the images of those that the folder `has` are there, and nothing else: drives are empty,
/// and of other disks, which the machine does not have any more, `left_out` learns.
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

/// Whether both are there, and one file.
fn is_same(left: rustix::io::Result<Stat>, right: rustix::io::Result<Stat>) -> bool {
    matches!((left, right), (Ok(left), Ok(right)) if (left.st_dev, left.st_ino) == (right.st_dev, right.st_ino))
}

/// Whether it is what a killed program has left of a file that was to be there: the next program that makes that file deletes it.
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

    /// A folder that was made with two files in it.
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

    /// Another user moves what was made away, and puts something else under its names.
    #[test]
    fn what_is_not_its_own_is_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, away) = (folder.path().join("new"), folder.path().join("away"));
        // A file.
        let new = made(&path);
        remove_file(path.join("a")).unwrap();
        File::create_new(path.join("a")).unwrap();
        File::create_new(path.join("c")).unwrap();
        drop(new);
        assert_eq!(names(&path), ["a", "c"]);
        std::fs::remove_dir_all(&path).unwrap();
        // The folder, to one with files of the same names; its own go where they are now.
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
        // The folder, to an empty one.
        let new = made(&path);
        rename(&path, &away).unwrap();
        create_dir(&path).unwrap();
        drop(new);
        assert!(path.exists());
        // One that was swapped before a file was made in it: that belongs to another user now.
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
