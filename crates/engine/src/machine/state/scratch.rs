//! Files that QEMU uses during a backup: unnamed scratch files for data that a guest overwrites, and the socket of its
//! NBD server.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use crate::job::{Error, Result};

/// The prefix of folders in the runtime folder.
pub(crate) const RUNTIME_FOLDERS: &str = "holdfast-";
/// The prefix of those of mounted containers. Their control sockets have another protocol than those of servers.
pub(crate) const CONTAINER_FOLDERS: &str = "holdfast-container-";
/// The name of the socket in such a folder.
pub(crate) const SOCKET: &str = "nbd";
/// The name of the control socket of a server in such a folder.
pub(crate) const CONTROL_SOCKET: &str = "control";

/// The names of sockets in such a folder that a migration forwards to the other host: of its hypervisor, and for the memory.
pub const MIGRATION_SOCKETS: [&str; 2] = ["hypervisor", "memory"];
/// The name of the socket in such a folder at which a host serves the migration that brings a machine back.
pub const RETURN_SOCKET: &str = "return";
/// The folder in which QEMU and libvirt may create sockets, on every host.
pub(crate) const HYPERVISOR_SOCKETS: &str = "/var/lib/libvirt/qemu";
/// The folder of sockets on hosts without libvirt.
pub(crate) const PLAIN_SOCKETS: &str = "/run";
const MEMORY_SOCKET_ENDING: &str = ".memory";
const RETURN_SOCKET_ENDING: &str = ".return";
/// A number follows.
const DISK_SOCKET_ENDING: &str = ".disk";

/// The socket for the memory of a migration, on both hosts. `run` is the number of the run.
pub fn memory_socket(run: u32) -> PathBuf {
    shared_socket(run, MEMORY_SOCKET_ENDING)
}

/// The socket for the memory of a migration on a host without libvirt, which may be the other one only.
pub fn plain_memory_socket(run: u32) -> PathBuf {
    Path::new(PLAIN_SOCKETS).join(format!("{RUNTIME_FOLDERS}{run:08x}{MEMORY_SOCKET_ENDING}"))
}

/// The socket of another host that ssh forwards to [`RETURN_SOCKET`].
pub fn return_socket(run: u32) -> PathBuf {
    shared_socket(run, RETURN_SOCKET_ENDING)
}

/// The socket of the host to which a machine moves at which its QEMU gets the disk with this number.
pub fn disk_socket(run: u32, disk: usize) -> PathBuf {
    shared_socket(run, &format!("{DISK_SOCKET_ENDING}{disk}"))
}

fn shared_socket(run: u32, ending: &str) -> PathBuf {
    Path::new(HYPERVISOR_SOCKETS).join(format!("{RUNTIME_FOLDERS}{run:08x}{ending}"))
}

/// Whether [`memory_socket`] or [`plain_memory_socket`] returns such a path.
pub fn is_memory_socket(path: &Path) -> bool {
    is_socket_in(HYPERVISOR_SOCKETS, path, MEMORY_SOCKET_ENDING)
        || is_socket_in(PLAIN_SOCKETS, path, MEMORY_SOCKET_ENDING)
}

/// Whether [`disk_socket`] returns such a path.
pub fn is_disk_socket(path: &Path) -> bool {
    let name = path.to_str().unwrap_or_default();
    let without_number = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    without_number != name && is_shared_socket(Path::new(without_number), DISK_SOCKET_ENDING)
}

/// Whether [`memory_socket`], [`plain_memory_socket`], [`return_socket`] or [`disk_socket`] returns such a path.
pub(crate) fn is_migration_socket(path: &Path) -> bool {
    is_memory_socket(path) || is_shared_socket(path, RETURN_SOCKET_ENDING) || is_disk_socket(path)
}

fn is_shared_socket(path: &Path, ending: &str) -> bool {
    is_socket_in(HYPERVISOR_SOCKETS, path, ending)
}

fn is_socket_in(folder: &str, path: &Path, ending: &str) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let number = name.strip_prefix(RUNTIME_FOLDERS);
    let number = number.and_then(|number| number.strip_suffix(ending));
    path.parent() == Some(Path::new(folder))
        && number.is_some_and(|number| number.len() == 8 && number.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// An unnamed scratch file. It is deleted when the last process closes it.
pub(crate) struct Scratch {
    /// The descriptor for QEMU.
    pub(crate) given: OwnedFd,
    /// The descriptor for this process, to check the file's size.
    pub(crate) watched: File,
}

impl Scratch {
    /// Creates an empty file of `size_bytes` in `folder`.
    pub(crate) fn create(folder: &Path, size_bytes: u64) -> Result<Self> {
        let failed = |source| Error::File {
            action: "create a scratch file in",
            path: folder.to_owned(),
            source,
        };
        let file = unnamed_file(folder, size_bytes).map_err(failed)?;
        Ok(Self {
            given: file.try_clone().map_err(failed)?.into(),
            watched: file,
        })
    }
}

/// Creates a file of `size_bytes` in `folder` without a name. Nothing is left of it, however the process ends, unless the
/// file system has no such files and the process is killed before the name is removed.
pub(crate) fn unnamed_file(folder: &Path, size_bytes: u64) -> std::io::Result<File> {
    let unnamed = i32::try_from(rustix::fs::OFlags::TMPFILE.bits()).expect("flags are small");
    let opened = File::options()
        .read(true)
        .write(true)
        .custom_flags(unnamed)
        .mode(0o600)
        .open(folder);
    let file = match opened {
        // Not every file system supports unnamed files.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) => {
            tempfile::tempfile_in(folder)?
        }
        other => other?,
    };
    file.set_len(size_bytes)?;
    Ok(file)
}

/// A private folder in the runtime folder, for sockets and pipes. It is locked while it is used: an unlocked one is a
/// leftover of a killed process.
pub struct RuntimeFolder {
    folder: TempDir,
    _lock: Option<File>,
}

/// How often creating the folder is tried: until it is locked, a cleanup may take it for a leftover.
const ATTEMPT_COUNT: u32 = 5;

impl RuntimeFolder {
    /// Creates one in `runtime` that only the current user can access.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn make(runtime: &Path) -> Result<Self> {
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
            // If the file system has no locks, the folder is used without one.
            if lock.is_some() || attempt == ATTEMPT_COUNT && folder.path().is_dir() {
                return Ok(Self { folder, _lock: lock });
            }
            if attempt == ATTEMPT_COUNT {
                return Err(failed(std::io::ErrorKind::NotFound.into()));
            }
            attempt += 1;
        }
    }

    /// Its path. It is deleted when this is dropped.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Locks a new folder; none if another process locked it first, which may have deleted the folder since.
fn lock_of_new(folder: &Path) -> Option<File> {
    let lock = File::open(folder).ok()?;
    flock(&lock, FlockOperation::NonBlockingLockShared).ok()?;
    let (locked, named) = (lock.metadata().ok()?, folder.symlink_metadata().ok()?);
    ((locked.dev(), locked.ino()) == (named.dev(), named.ino())).then_some(lock)
}

/// Folders of this user in `place` with one of these prefixes, as canonical paths.
pub(crate) fn own_folders(place: &Path, beginnings: &[&str]) -> Vec<PathBuf> {
    let Ok(place) = place.canonicalize() else {
        return Vec::new();
    };
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let us = rustix::process::geteuid().as_raw();
    let own = entries.filter(|entry| {
        let name = entry.file_name();
        let is_called_so = beginnings.iter().any(|start| name.to_string_lossy().starts_with(start));
        is_called_so && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == us)
    });
    let mut folders: Vec<_> = own.map(|entry| entry.path()).collect();
    folders.sort();
    folders
}

/// Listens on a socket in a new folder in `runtime` that only the current user can access.
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

/// Locks an unused folder; none if another process holds the lock. The lock must be held while the folder is deleted.
pub(crate) fn lock_unneeded(folder: &Path) -> Option<File> {
    let lock = File::open(folder).ok()?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(lock)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{
        HYPERVISOR_SOCKETS, RuntimeFolder, is_memory_socket, is_migration_socket, lock_of_new, lock_unneeded,
        memory_socket, plain_memory_socket, return_socket,
    };

    #[test]
    fn sockets_of_migrations_are_recognized() {
        assert!(is_memory_socket(&memory_socket(0xc0_ffee)));
        assert!(is_memory_socket(&plain_memory_socket(0xc0_ffee)));
        assert!(!is_memory_socket(&return_socket(0xc0_ffee)));
        assert!([memory_socket, return_socket].map(|make| is_migration_socket(&make(7))) == [true, true]);
        for other in [
            "holdfast-00c0ffee",
            "holdfast-x0c0ffee.memory",
            "web1.memory",
            "../holdfast-00c0ffee.return",
        ] {
            assert!(
                !is_migration_socket(&Path::new(HYPERVISOR_SOCKETS).join(other)),
                "{other}"
            );
        }
    }

    #[test]
    fn a_folder_is_locked_as_long_as_it_is_needed() {
        let runtime = tempfile::tempdir().unwrap();
        let folder = RuntimeFolder::make(runtime.path()).unwrap();
        let path = folder.path().to_owned();
        assert!(lock_unneeded(&path).is_none());
        // The state after a kill.
        let RuntimeFolder { folder, _lock: lock } = folder;
        std::mem::forget(folder);
        drop(lock);
        assert!(lock_unneeded(&path).is_some());
    }

    /// A cleanup may run between the creation and the lock.
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
