//! What is lent to QEMU while it is read: files without names, for what a guest overwrites, and the socket at which it serves.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use crate::error::{Error, Result};

/// Such a file. It is gone when the last who has it open lets go, whatever happens.
pub(super) struct Scratch {
    /// For QEMU.
    pub(super) given: OwnedFd,
    /// For us, to see how much is in it.
    pub(super) watched: File,
}

impl Scratch {
    /// Makes one of `size_bytes` in `folder`, with nothing in it.
    pub(super) fn create(folder: &Path, size_bytes: u64) -> Result<Self> {
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

/// A folder with a socket, which is locked as long as somebody needs it.
pub(crate) struct SocketFolder {
    folder: TempDir,
    _lock: Option<File>,
}

impl SocketFolder {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Attempts to make the folder: one that is not locked yet may be taken for one that was left.
const ATTEMPT_COUNT: u32 = 3;

/// A socket in a folder of its own in `runtime`, which only we can reach.
pub(crate) fn listen(runtime: &Path) -> Result<(SocketFolder, OwnedFd)> {
    let failed = |path: PathBuf| {
        move |source| Error::File {
            action: "create",
            path,
            source,
        }
    };
    for attempt in 1.. {
        let folder = tempfile::Builder::new().prefix("holdfast-").tempdir_in(runtime);
        let folder = folder.map_err(failed(runtime.to_owned()))?;
        let lock = File::open(folder.path()).ok();
        let lock = lock.filter(|lock| flock(lock, FlockOperation::NonBlockingLockShared).is_ok());
        let path = folder.path().join("nbd");
        match UnixListener::bind(&path) {
            Ok(listener) => return Ok((SocketFolder { folder, _lock: lock }, listener.into())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && attempt < ATTEMPT_COUNT => {}
            Err(error) => return Err(failed(path)(error)),
        }
    }
    unreachable!("the last attempt returns")
}

/// Whether nobody has the lock of a folder for a socket.
pub(crate) fn is_folder_free(folder: &Path) -> bool {
    File::open(folder).is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}
