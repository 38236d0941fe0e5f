//! The folder of a job. It either exists with its full content, or not under its final name.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};

use super::fill;
use crate::job::{Error, Result};
use crate::machine::state::scratch::lock_unneeded;

/// The suffix of a job's folder that is not complete yet.
const NEW: &str = "new";

/// The path of the folder until it is complete.
pub(super) fn name_until_complete(place: &Path, number: u32) -> PathBuf {
    let mut name = place.as_os_str().to_owned();
    name.push(format!(".{number:08x}.{NEW}"));
    name.into()
}

/// A new folder. Dropping it removes the folder with its content, unless it was kept.
pub(super) struct NewJobFolder {
    path: Option<PathBuf>,
    /// The lock on the parent folder, shared by all processes that create a job there, held until the folder has its
    /// final name.
    making: Option<File>,
}

impl NewJobFolder {
    /// Creates the folder. Other users may pass through it to the socket, but cannot list it.
    pub(super) fn make(path: &Path) -> Result<Self> {
        let making = path.parent().and_then(|around| File::open(around).ok());
        let making = making.filter(|making| flock(making, FlockOperation::NonBlockingLockShared).is_ok());
        let made = std::fs::DirBuilder::new().mode(0o711).create(path);
        made.map_err(|source| match source.kind() {
            std::io::ErrorKind::AlreadyExists => Error::TargetExists { path: path.to_owned() },
            _ => Error::File {
                action: "make the folder",
                path: path.to_owned(),
                source,
            },
        })?;
        let folder = Self {
            path: Some(path.to_owned()),
            making,
        };
        // The umask of this process does not apply here.
        let opened = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o711));
        opened.map_err(|source| Error::File {
            action: "open the folder to the machine's user,",
            path: path.to_owned(),
            source,
        })?;
        Ok(folder)
    }

    /// Renames the folder, durably.
    pub(super) fn rename(&mut self, name: &Path) -> Result<()> {
        let before = self.path.as_deref().expect("it is not kept yet");
        let failed = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::AlreadyExists => Error::TargetExists { path: name.to_owned() },
            _ => Error::File {
                action: "make the folder",
                path: name.to_owned(),
                source,
            },
        };
        renameat_with(CWD, before, CWD, name, RenameFlags::NOREPLACE).map_err(|errno| failed(errno.into()))?;
        self.path = Some(name.to_owned());
        self.making = None;
        let parent = name.parent().unwrap_or(Path::new("/"));
        File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed)
    }

    pub(super) fn keep(mut self) {
        self.path = None;
    }
}

/// Removes incomplete folders of killed processes. Call this before this process creates anything in `place`.
pub(super) fn remove_left(place: &Path) {
    let (Some(folder), Some(name)) = (place.parent(), place.file_name().and_then(OsStr::to_str)) else {
        return;
    };
    for unfinished in unfinished_folders(folder) {
        if name_of_unfinished(&unfinished) == Some(name) {
            // A leftover that cannot be removed does no harm.
            drop(std::fs::remove_dir_all(unfinished));
        }
    }
}

/// The incomplete folders in `place` that killed processes left: none of them holds a lock. Returns nothing if a
/// process may be working in `place`, since a folder exists before its lock does.
pub(crate) fn unfinished_folders(place: &Path) -> Vec<PathBuf> {
    let Some(_alone) = lock_unneeded(place) else {
        return Vec::new();
    };
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let left = entries.map(|entry| entry.path()).filter(|path| {
        let is_free = || match File::open(path.join(fill::LOCK)) {
            Ok(file) => flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        name_of_unfinished(path).is_some() && is_free()
    });
    left.collect()
}

/// Whether a folder may be deleted as an incomplete one: of a job, or of another kind.
pub(crate) fn is_still_unfinished(folder: &Path) -> bool {
    name_of_unfinished(folder).is_none()
        || folder
            .parent()
            .is_some_and(|place| unfinished_folders(place).iter().any(|left| left == folder))
}

/// The final name of an incomplete folder.
fn name_of_unfinished(folder: &Path) -> Option<&str> {
    let rest = folder.file_name()?.to_str()?.strip_suffix(NEW)?.strip_suffix('.')?;
    let (name, number) = rest.rsplit_once('.')?;
    let is_number = number.len() == 8 && number.bytes().all(|digit| digit.is_ascii_hexdigit());
    (is_number && name.starts_with('.') && name.ends_with(".holdfast")).then_some(name)
}

impl Drop for NewJobFolder {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // This runs after another error, which is more useful than one about the cleanup.
            drop(std::fs::remove_dir_all(path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{NewJobFolder, is_still_unfinished, name_until_complete, remove_left, unfinished_folders};

    #[test]
    fn a_folder_that_is_being_made_is_not_taken_for_one_that_was_left() {
        let place = tempfile::tempdir().unwrap();
        let name = place.path().join(".web1.holdfast");
        let hidden = name_until_complete(&name, 7);
        let mut folder = NewJobFolder::make(&hidden).unwrap();
        assert_eq!(unfinished_folders(place.path()), [""; 0].map(std::path::PathBuf::from));
        assert!(!is_still_unfinished(&hidden));
        remove_left(&name);
        assert!(hidden.is_dir());
        folder.rename(&name).unwrap();
        folder.keep();
        assert!(name.is_dir());

        // The state after a kill.
        NewJobFolder::make(&hidden).unwrap().keep();
        assert_eq!(unfinished_folders(place.path()), std::slice::from_ref(&hidden));
        assert!(is_still_unfinished(&hidden) && is_still_unfinished(&name));
        remove_left(&name);
        assert!(!hidden.exists());
    }
}
