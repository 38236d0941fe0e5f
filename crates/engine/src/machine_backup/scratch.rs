//! What is lent to QEMU while it is read: files without names, for what a guest overwrites, and the socket at which it serves.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

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

/// A socket in a folder of its own in `runtime`, which only we can reach.
pub(crate) fn listen(runtime: &Path) -> Result<(TempDir, OwnedFd)> {
    let failed = |path: PathBuf| {
        move |source| Error::File {
            action: "create",
            path,
            source,
        }
    };
    let folder = tempfile::Builder::new().prefix("holdfast-").tempdir_in(runtime);
    let folder = folder.map_err(failed(runtime.to_owned()))?;
    let path = folder.path().join("nbd");
    let listener = UnixListener::bind(&path).map_err(failed(path))?;
    Ok((folder, listener.into()))
}
