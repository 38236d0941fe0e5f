//! The folder of a job, which is there with everything in it, or not at all.

use std::ffi::OsStr;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};

use super::fill;
use crate::error::{Error, Result};

/// How the folder of a job is called at its end, as long as not all is in it.
const NEW: &str = "new";

/// Where the folder is as long as not all is in it.
pub(super) fn name_until_complete(place: &Path, number: u32) -> PathBuf {
    let mut name = place.as_os_str().to_owned();
    name.push(format!(".{number:08x}.{NEW}"));
    name.into()
}

/// A folder that goes again with all that is in it, unless it is to be kept.
pub(super) struct NewFolder(Option<PathBuf>);

impl NewFolder {
    /// Others may pass through it, to the socket, and see nothing of it.
    pub(super) fn make(path: &Path) -> Result<Self> {
        let made = std::fs::DirBuilder::new().mode(0o711).create(path);
        made.map_err(|source| match source.kind() {
            std::io::ErrorKind::AlreadyExists => Error::TargetExists { path: path.to_owned() },
            _ => Error::File {
                action: "make the folder",
                path: path.to_owned(),
                source,
            },
        })?;
        let folder = Self(Some(path.to_owned()));
        // Whatever new folders of this process are allowed.
        let opened = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o711));
        opened.map_err(|source| Error::File {
            action: "open the folder to the machine's user,",
            path: path.to_owned(),
            source,
        })?;
        Ok(folder)
    }

    /// Gives it another name, durably.
    pub(super) fn rename(&mut self, name: &Path) -> Result<()> {
        let before = self.0.as_deref().expect("it is kept by nobody yet");
        let failed = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::AlreadyExists => Error::TargetExists { path: name.to_owned() },
            _ => Error::File {
                action: "make the folder",
                path: name.to_owned(),
                source,
            },
        };
        renameat_with(CWD, before, CWD, name, RenameFlags::NOREPLACE).map_err(|errno| failed(errno.into()))?;
        self.0 = Some(name.to_owned());
        let parent = name.parent().unwrap_or(Path::new("/"));
        std::fs::File::open(parent)
            .and_then(|parent| parent.sync_all())
            .map_err(failed)
    }

    pub(super) fn keep(mut self) {
        self.0 = None;
    }
}

/// Removes folders in which a process that was killed had just begun.
pub(super) fn remove_left(place: &Path) {
    let (Some(folder), Some(name)) = (place.parent(), place.file_name().and_then(OsStr::to_str)) else {
        return;
    };
    for unfinished in unfinished_folders(folder) {
        if name_of_unfinished(&unfinished) == Some(name) {
            // It harms nobody where it cannot be removed.
            drop(std::fs::remove_dir_all(unfinished));
        }
    }
}

/// The folders of jobs in `place` that were not made to their end by a process that was killed: none has a lock in them.
pub(crate) fn unfinished_folders(place: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let left = entries.map(|entry| entry.path()).filter(|path| {
        let is_free = || match std::fs::File::open(path.join(fill::LOCK)) {
            Ok(file) => flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        name_of_unfinished(path).is_some() && is_free()
    });
    left.collect()
}

/// The name that such a folder was to have.
fn name_of_unfinished(folder: &Path) -> Option<&str> {
    let rest = folder.file_name()?.to_str()?.strip_suffix(NEW)?.strip_suffix('.')?;
    let (name, number) = rest.rsplit_once('.')?;
    let is_number = number.len() == 8 && number.bytes().all(|digit| digit.is_ascii_hexdigit());
    (is_number && name.starts_with('.') && name.ends_with(".holdfast")).then_some(name)
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Another error brought us here, and says more than one about this.
            drop(std::fs::remove_dir_all(path));
        }
    }
}
