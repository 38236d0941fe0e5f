//! What is lent to QEMU while it is read: files without names, for what a guest overwrites, and the socket at which it serves.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use crate::job::{Error, Result};

/// How the names of folders in the runtime folder begin.
pub(crate) const RUNTIME_FOLDERS: &str = "holdfast-";
/// The socket in such a folder.
pub(crate) const SOCKET: &str = "nbd";

/// Such a file. It is deleted when the last process that has it open closes it.
pub(crate) struct Scratch {
    /// For QEMU.
    pub(crate) given: OwnedFd,
    /// For us, to see how much is in it.
    pub(crate) watched: File,
}

impl Scratch {
    /// Makes one of `size_bytes` in `folder`, with nothing in it.
    pub(crate) fn create(folder: &Path, size_bytes: u64) -> Result<Self> {
        let failed = |source| Error::File {
            action: "create a scratch file in",
            path: folder.to_owned(),
            source,
        };
        let unnamed = i32::try_from(rustix::fs::OFlags::TMPFILE.bits()).expect("flags are small");
        let opened = File::options()
            .read(true)
            .write(true)
            .custom_flags(unnamed)
            .mode(0o600)
            .open(folder);
        let file = match opened {
            // Not every file system knows files without names.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) => {
                tempfile::tempfile_in(folder).map_err(failed)?
            }
            other => other.map_err(failed)?,
        };
        file.set_len(size_bytes).map_err(failed)?;
        Ok(Self {
            given: file.try_clone().map_err(failed)?.into(),
            watched: file,
        })
    }
}

/// A folder of our own in the runtime folder, for sockets and pipes. It is locked as long as it is needed: what is not locked was left by a process that
/// was killed.
pub(crate) struct RuntimeFolder {
    folder: TempDir,
    _lock: Option<File>,
}

/// Attempts to make the folder: one that is not locked yet may be taken for one that was left.
const ATTEMPT_COUNT: u32 = 5;

impl RuntimeFolder {
    /// Makes one in `runtime`, which only we can reach.
    pub(crate) fn make(runtime: &Path) -> Result<Self> {
        let failed = |source| Error::File {
            action: "create a folder in",
            path: runtime.to_owned(),
            source,
        };
        let mut attempt = 1;
        loop {
            let folder = tempfile::Builder::new().prefix(RUNTIME_FOLDERS).tempdir_in(runtime);
            let folder = folder.map_err(failed)?;
            let lock = lock_of_new(folder.path());
            // Where files cannot be locked it is made all the same.
            if lock.is_some() || attempt == ATTEMPT_COUNT && folder.path().is_dir() {
                return Ok(Self { folder, _lock: lock });
            }
            if attempt == ATTEMPT_COUNT {
                return Err(failed(std::io::ErrorKind::NotFound.into()));
            }
            attempt += 1;
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// The lock of a new folder; none where another process had it first, which may have deleted the folder by then.
fn lock_of_new(folder: &Path) -> Option<File> {
    let lock = File::open(folder).ok()?;
    flock(&lock, FlockOperation::NonBlockingLockShared).ok()?;
    let (locked, named) = (lock.metadata().ok()?, folder.symlink_metadata().ok()?);
    ((locked.dev(), locked.ino()) == (named.dev(), named.ino())).then_some(lock)
}

/// A socket in a folder of its own in `runtime`, which only we can reach.
pub(crate) fn listen(runtime: &Path) -> Result<(RuntimeFolder, OwnedFd)> {
    let folder = RuntimeFolder::make(runtime)?;
    let path = folder.path().join(SOCKET);
    match UnixListener::bind(&path) {
        Ok(listener) => Ok((folder, listener.into())),
        Err(source) => Err(Error::File {
            action: "create",
            path,
            source,
        }),
    }
}

/// The lock of a folder that is not needed any more; none where another process has it. It has to be held while the folder is deleted.
pub(crate) fn lock_unneeded(folder: &Path) -> Option<File> {
    let lock = File::open(folder).ok()?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(lock)
}

#[cfg(test)]
mod tests {
    use super::{RuntimeFolder, lock_of_new, lock_unneeded};

    #[test]
    fn a_folder_is_locked_as_long_as_it_is_needed() {
        let runtime = tempfile::tempdir().unwrap();
        let folder = RuntimeFolder::make(runtime.path()).unwrap();
        let path = folder.path().to_owned();
        assert!(lock_unneeded(&path).is_none());
        // As a kill leaves it.
        let RuntimeFolder { folder, _lock: lock } = folder;
        std::mem::forget(folder);
        drop(lock);
        assert!(lock_unneeded(&path).is_some());
    }

    /// A cleanup may have looked between the creation and the lock.
    #[test]
    fn a_folder_that_was_deleted_before_it_was_locked_is_none() {
        let runtime = tempfile::tempdir().unwrap();
        let path = runtime.path().join("holdfast-x");
        std::fs::create_dir(&path).unwrap();
        let clearing = lock_unneeded(&path).unwrap();
        assert!(lock_of_new(&path).is_none());
        drop(clearing);
        assert!(lock_of_new(&path).is_some());
        std::fs::remove_dir(&path).unwrap();
        assert!(lock_of_new(&path).is_none());
    }
}
