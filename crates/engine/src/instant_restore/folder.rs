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

/// Removes folders in which somebody who was killed had just begun: nobody has their lock.
pub(super) fn remove_left(place: &Path) {
    let (Some(folder), Some(name)) = (place.parent(), place.file_name().and_then(OsStr::to_str)) else {
        return;
    };
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let other = entry.file_name();
        let rest = other
            .to_str()
            .and_then(|other| other.strip_prefix(name)?.strip_prefix('.'));
        let is_left = rest.and_then(|rest| rest.strip_suffix(NEW)).is_some();
        let is_free = match std::fs::File::open(entry.path().join(fill::LOCK)) {
            Ok(file) => flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if is_left && is_free {
            // It harms nobody where it cannot be removed.
            drop(std::fs::remove_dir_all(entry.path()));
        }
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Another error brought us here, and says more than one about this.
            drop(std::fs::remove_dir_all(path));
        }
    }
}
