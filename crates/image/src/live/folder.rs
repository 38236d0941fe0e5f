//! The folder of a container: its files by name.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{
    FileLock, LockOutcome, is_locked, lock_file, open_past_leases, rename_durably, replace_file, sync_folder_of,
    write_new_file,
};
use rustix::fs::{Mode, OFlags};

use crate::file::{Access, HostFile, ImageFile};
use crate::{Error, Result};

/// Name of the file that describes a container.
pub const CONTAINER_FILE: &str = "container.json";
/// Name of the file that is locked while a container is in use.
const LOCK_FILE: &str = "container.lock";
/// Limit of a file that is loaded as a whole.
const TEXT_BYTES_MAX: u64 = 4 << 20;

/// The name of the file with the staged content of `name`.
pub(super) fn staged_name(name: &str) -> String {
    format!("{name}.staged")
}

/// The files of a container. The crash tests have one in memory.
pub(crate) trait ChainFolder: Send + Sync {
    /// Opens a file, which must be a plain file of the folder.
    fn open(&self, name: &str, access: Access) -> Result<Arc<dyn ImageFile>>;

    /// Opens a file for reading, and prevents writes to it by any process until `Arc` and lock are dropped.
    fn pin(&self, name: &str) -> Result<Arc<dyn ImageFile>>;

    /// Creates a file that must not exist yet, and locks it for writing. Its name is durable after the next
    /// [`replace`](Self::replace).
    fn create(&self, name: &str) -> Result<Arc<dyn ImageFile>>;

    /// Deletes a file; no error if it does not exist.
    fn remove(&self, name: &str) -> Result<()>;

    /// Deletes a folder with everything in it; no error if it does not exist.
    fn remove_folder(&self, name: &str) -> Result<()>;

    /// Renames a file durably; an existing file at `to` is replaced.
    ///
    /// # Errors
    /// The file may have the old or the new name.
    fn rename(&self, from: &str, to: &str) -> Result<()>;

    /// Makes all names durable.
    fn sync(&self) -> Result<()>;

    /// Replaces the content of a small file atomically and durably.
    ///
    /// # Errors
    /// The file may have the old or the new content.
    fn replace(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Writes the next content of a small file, durably and beside it: [`put_staged`](Self::put_staged) needs neither
    /// space nor a sync.
    fn stage(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Replaces the content of a small file by what was staged, atomically. It is durable after the next
    /// [`sync`](Self::sync) or [`replace`](Self::replace); a power failure before leaves the old or the new content.
    ///
    /// # Errors
    /// The file may have the old or the new content.
    fn put_staged(&self, name: &str) -> Result<()>;

    /// The content of a small file; none if it does not exist.
    fn load(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// The names of all files; names that are not UTF-8 are left out.
    fn names(&self) -> Result<Vec<String>>;

    /// The path of a file, for messages.
    fn path(&self, name: &str) -> PathBuf;
}

/// A folder of this host.
#[derive(Debug, Clone)]
pub(crate) struct HostFolder {
    /// Canonical.
    path: PathBuf,
}

impl HostFolder {
    /// Opens the folder at `path`, or the folder of the file at `path`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let canonical = path.canonicalize().map_err(|source| Error::io("open", path, source))?;
        let is_folder = canonical.is_dir();
        let path = match canonical.parent() {
            Some(parent) if !is_folder => parent.to_owned(),
            _ => canonical,
        };
        Ok(Self { path })
    }
}

impl ChainFolder for HostFolder {
    fn open(&self, name: &str, access: Access) -> Result<Arc<dyn ImageFile>> {
        Ok(Arc::new(HostFile::open_canonical(&self.path(name), access)?))
    }

    fn pin(&self, name: &str) -> Result<Arc<dyn ImageFile>> {
        Ok(Arc::new(HostFile::open_canonical(
            &self.path(name),
            Access::ReadPinned,
        )?))
    }

    fn create(&self, name: &str) -> Result<Arc<dyn ImageFile>> {
        Ok(Arc::new(HostFile::create_new(&self.path(name))?))
    }

    fn remove(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("delete", &path, error)),
            _ => sync_folder_of(&path).map_err(|source| Error::io("sync", &self.path, source)),
        }
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("delete", &path, error)),
            _ => sync_folder_of(&path).map_err(|source| Error::io("sync", &self.path, source)),
        }
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let path = self.path(from);
        rename_durably(&path, &self.path(to)).map_err(|source| Error::io("rename", &path, source))
    }

    fn sync(&self) -> Result<()> {
        HostFile::sync_directory(&self.path)
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name);
        let partial = self.path(&format!("{name}.tmp"));
        let old = path.metadata().ok();
        replace_file(&path, &partial, bytes, old.as_ref()).map_err(|source| Error::io("replace", &path, source))
    }

    fn stage(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let staged = self.path(&staged_name(name));
        let old = self.path(name).metadata().ok();
        write_new_file(&staged, bytes, old.as_ref()).map_err(|source| {
            // A full disk gets its space back. The first error is the one to report.
            std::fs::remove_file(&staged).ok();
            Error::io("write", &staged, source)
        })
    }

    fn put_staged(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        std::fs::rename(self.path(&staged_name(name)), &path).map_err(|source| Error::io("replace", &path, source))
    }

    fn load(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(name);
        let file = match HostFile::open_canonical(&path, Access::Read) {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let length = file.length_bytes()?;
        if length > TEXT_BYTES_MAX {
            let image = path.display().to_string();
            return Err(crate::error::corrupt(
                &image,
                "container",
                0,
                format!("it has {length} bytes"),
            ));
        }
        let mut bytes = vec![0; holdfast_block::to_usize(length)];
        file.read_at(&mut bytes, 0)?;
        Ok(Some(bytes))
    }

    fn names(&self) -> Result<Vec<String>> {
        let failed = |source| Error::io("list", &self.path, source);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        Ok(names)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// The lock of a container: no other process changes it meanwhile.
#[derive(Debug)]
pub struct ContainerLock {
    _lock: Option<FileLock>,
    file: std::fs::File,
}

impl ContainerLock {
    /// Locks the container at `path`.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process uses it.
    pub fn take(path: &Path) -> Result<Self> {
        let folder = HostFolder::open(path)?;
        let path = folder.path(LOCK_FILE);
        let failed = |source| Error::io("lock", &path, source);
        // Who can read a file can take a shared lock, and would keep the container from being used.
        let file = open_lock(&path, OFlags::RDWR | OFlags::CREATE).map_err(failed)?;
        let lock = match lock_file(&file).map_err(failed)? {
            LockOutcome::Locked(lock) => Some(lock),
            LockOutcome::Unsupported => None,
            LockOutcome::HeldElsewhere => {
                return Err(Error::Locked {
                    image: folder.path.display().to_string(),
                });
            }
        };
        Ok(Self { _lock: lock, file })
    }

    /// Lets the programs that this process starts hold the lock too, until the last of them has ended.
    ///
    /// # Errors
    /// The flags of the descriptor cannot be changed.
    pub fn share_with_children(&self) -> std::io::Result<()> {
        Ok(rustix::io::fcntl_setfd(&self.file, rustix::io::FdFlags::empty())?)
    }

    /// Whether a process holds the lock of the container at `path`.
    ///
    /// # Errors
    /// The file cannot be examined.
    pub fn is_held(path: &Path) -> Result<bool> {
        let folder = HostFolder::open(path)?;
        let path = folder.path(LOCK_FILE);
        let failed = |source| Error::io("lock", &path, source);
        let file = match open_lock(&path, OFlags::RDONLY) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            file => file.map_err(failed)?,
        };
        is_locked(&file).map_err(failed)
    }
}

/// A link or a pipe in the place of the lock neither leads to another file nor blocks.
fn open_lock(path: &Path, flags: OFlags) -> std::io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let opened = open_past_leases(flags, |flags| rustix::fs::open(path, flags, mode));
    Ok(File::from(opened?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{ContainerLock, LOCK_FILE};
    use crate::Error;

    /// The question once took a shared lock for a moment, which kept another process from locking the container.
    #[test]
    fn a_question_about_the_lock_never_refuses_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        drop(ContainerLock::take(path).unwrap());
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Relaxed) {
                        ContainerLock::is_held(path).unwrap();
                    }
                });
            }
            let taken: Vec<bool> = (0..3000).map(|_| ContainerLock::take(path).is_ok()).collect();
            is_done.store(true, Ordering::Relaxed);
            assert_eq!(taken.iter().filter(|taken| !**taken).count(), 0);
        });
    }

    #[test]
    fn a_lock_is_seen_while_it_is_held() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!ContainerLock::is_held(folder.path()).unwrap());
        let lock = ContainerLock::take(folder.path()).unwrap();
        assert!(ContainerLock::is_held(folder.path()).unwrap());
        assert!(matches!(ContainerLock::take(folder.path()), Err(Error::Locked { .. })));
        drop(lock);
        assert!(!ContainerLock::is_held(folder.path()).unwrap());
    }

    #[test]
    fn a_lock_is_a_file_of_its_owner_and_no_link() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK_FILE);
        drop(ContainerLock::take(folder.path()).unwrap());
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
        std::fs::remove_file(&path).unwrap();
        let elsewhere = folder.path().join("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        ContainerLock::take(folder.path()).unwrap_err();
        ContainerLock::is_held(folder.path()).unwrap_err();
        assert!(!elsewhere.exists());
    }
}
