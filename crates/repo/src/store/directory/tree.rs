//! The folders of a directory store: opened component by component, never through a link, and made durable.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs::File;
use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fsync, mkdirat, openat, statat};
use rustix::io::Errno;

use crate::store::{ObjectKind, ObjectName, Result, StoreError};

const FOLDER_MODE: Mode = Mode::RWXU;
const FOLDER_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW);

/// The folders of a store.
#[derive(Debug)]
pub(super) struct FolderTree {
    path: PathBuf,
    root: File,
    /// Folders whose entry in the parent folder was synced by this process. The existence of a folder is not
    /// sufficient: its creator may not have synced it yet, and a power failure would lose it with its content.
    durable: Mutex<HashSet<String>>,
}

/// An entry of a folder.
pub(super) struct FolderEntry<'a> {
    pub(super) name: &'a CStr,
    pub(super) file_type: FileType,
    pub(super) length: u64,
    /// Whether it has several hard links.
    pub(super) is_linked: bool,
    pub(super) modified_seconds: i64,
}

impl FolderEntry<'_> {
    pub(super) fn modified(&self) -> SystemTime {
        let seconds = Duration::from_secs(self.modified_seconds.unsigned_abs());
        let time = if self.modified_seconds < 0 {
            SystemTime::UNIX_EPOCH.checked_sub(seconds)
        } else {
            SystemTime::UNIX_EPOCH.checked_add(seconds)
        };
        time.unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

/// The folders on the path to an object, from the root.
pub(super) fn folders(name: &ObjectName) -> Vec<&str> {
    match name.kind() {
        ObjectKind::Config => Vec::new(),
        kind => [kind.folder()].into_iter().chain(name.fan_out()).collect(),
    }
}

/// Makes the entries of a folder durable.
pub(super) fn sync(folder: impl AsFd) -> IoResult<()> {
    rustix::io::retry_on_intr(|| fsync(folder.as_fd()))?;
    Ok(())
}

impl FolderTree {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match openat(CWD, path, flags, Mode::empty()) {
            Ok(root) => Ok(Self {
                path: path.to_owned(),
                root: root.into(),
                durable: Mutex::default(),
            }),
            Err(Errno::NOENT) => Err(StoreError::NoStore { store: describe(path) }),
            Err(errno) => Err(StoreError::from_io(
                describe(path),
                "open",
                "the root".to_owned(),
                errno.into(),
            )),
        }
    }

    /// Creates the root directory durably if it does not exist.
    pub(super) fn create(path: &Path) -> Result<()> {
        let error = |errno: Errno| StoreError::from_io(describe(path), "create", "the root".to_owned(), errno.into());
        match mkdirat(CWD, path, FOLDER_MODE) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Ok(()),
            Err(Errno::NOENT) => {
                return Err(StoreError::NoStore {
                    store: describe(path.parent().unwrap_or(path)),
                });
            }
            Err(errno) => return Err(error(errno)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let above = match path.parent() {
            Some(above) if !above.as_os_str().is_empty() => above,
            _ => Path::new("."),
        };
        let above = openat(CWD, above, flags, Mode::empty()).map_err(error)?;
        rustix::io::retry_on_intr(|| fsync(&above)).map_err(error)
    }

    pub(super) fn describe(&self) -> String {
        describe(&self.path)
    }

    /// Converts an error of the operating system about `subject`, which is not an object.
    pub(super) fn error(&self, action: &'static str, subject: &str, source: IoError) -> StoreError {
        StoreError::from_io(self.describe(), action, subject.to_owned(), source)
    }

    /// Converts an error of the operating system about the object `name`.
    pub(super) fn object_error(&self, action: &'static str, name: &ObjectName, source: IoError) -> StoreError {
        match source.kind() {
            ErrorKind::NotFound => StoreError::NotFound { name: name.clone() },
            _ => StoreError::from_io(self.describe(), action, name.to_string(), source),
        }
    }

    /// Opens the folder at the path `folders`, relative to the root.
    pub(super) fn open_folder(&self, folders: &[&str]) -> IoResult<File> {
        let Some((first, rest)) = folders.split_first() else {
            return Ok(openat(&self.root, ".", FOLDER_FLAGS, Mode::empty())?.into());
        };
        let mut folder = openat(&self.root, *first, FOLDER_FLAGS, Mode::empty())?;
        for name in rest {
            folder = openat(&folder, *name, FOLDER_FLAGS, Mode::empty())?;
        }
        Ok(folder.into())
    }

    /// Opens the folder at the path `folders`, relative to the root, and creates missing folders; all of them are
    /// durable.
    pub(super) fn make_folder(&self, folders: &[&str]) -> IoResult<File> {
        let mut folder = self.open_folder(&[])?;
        for depth in 1..=folders.len() {
            let name = folders[depth - 1];
            let inner = open_or_make(folder.as_fd(), name)?;
            let path = folders[..depth].join("/");
            if !self.is_durable(&path) {
                sync(&folder)?;
                self.lock_durable().insert(path);
            }
            folder = inner.into();
        }
        Ok(folder)
    }

    fn is_durable(&self, path: &str) -> bool {
        self.lock_durable().contains(path)
    }

    fn lock_durable(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        self.durable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anything has the name of the object.
    pub(super) fn has_object(&self, name: &ObjectName) -> Result<bool> {
        let found = self
            .open_folder(&folders(name))
            .and_then(|folder| Ok(statat(folder, name.name(), AtFlags::SYMLINK_NOFOLLOW)?));
        match found {
            Ok(_) => Ok(true),
            Err(source) if source.kind() == ErrorKind::NotFound => Ok(false),
            Err(source) => Err(self.object_error("look up", name, source)),
        }
    }

    /// Makes the name of an object durable that another process has put.
    pub(super) fn sync_folder_of(&self, name: &ObjectName) -> Result<()> {
        self.make_folder(&folders(name))
            .and_then(sync)
            .map_err(|source| self.error("sync", &name.to_string(), source))
    }

    /// Calls `visit` with all entries of the folder; entries that disappear meanwhile are skipped.
    pub(super) fn walk(
        &self,
        folder: &File,
        path: &str,
        visit: &mut dyn FnMut(&FolderEntry<'_>) -> Result<()>,
    ) -> Result<()> {
        let error = |errno: Errno| self.error("list", path, errno.into());
        for item in Dir::read_from(folder).map_err(error)? {
            let item = item.map_err(error)?;
            let name = item.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let stat = match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                other => other.map_err(error)?,
            };
            visit(&FolderEntry {
                name,
                file_type: FileType::from_raw_mode(stat.st_mode),
                length: stat.st_size.cast_unsigned(),
                is_linked: stat.st_nlink > 1,
                modified_seconds: stat.st_mtime,
            })?;
        }
        Ok(())
    }
}

fn describe(path: &Path) -> String {
    format!("directory {}", path.display())
}

fn open_or_make(folder: BorrowedFd<'_>, name: &str) -> IoResult<OwnedFd> {
    match openat(folder, name, FOLDER_FLAGS, Mode::empty()) {
        Err(Errno::NOENT) => {}
        other => return Ok(other?),
    }
    match mkdirat(folder, name, FOLDER_MODE) {
        Ok(()) | Err(Errno::EXIST) => Ok(openat(folder, name, FOLDER_FLAGS, Mode::empty())?),
        Err(errno) => Err(errno.into()),
    }
}
