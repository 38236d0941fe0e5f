//! Views of snapshots, which are activated for reading and deactivated afterwards.
//!
//! Several views, also of several processes, may use one snapshot. They share a lock, and the last view to be closed
//! gets the lock exclusively. A killed process leaves an active snapshot. The snapshot is read-only and harmless, and
//! can still be viewed and removed.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::Clock;
use rustix::fs::{FlockOperation, OFlags, flock};

use super::super::folder::{file_error, make_folder};
use super::super::{HostSnapshotName, ProviderError, ProviderResult, View};
use super::{ATTEMPT_COUNT, ATTEMPT_INTERVAL, LVCHANGE, Lvm};
use crate::system::waits::{LOCK_HOLDER, Wait};

/// Creates the device nodes of volumes without udev.
const MAKE_NODES: &str = "vgmknodes";

impl Lvm {
    /// Serializes holds, releases, and removals of snapshots without holds.
    pub(super) fn lock_holds(&self) -> ProviderResult<File> {
        LockFile::open(&self.locks.join("lvm-holds.lock"), FlockOperation::LockExclusive).map(|locked| locked.file)
    }

    /// Activates a snapshot until the view is dropped.
    pub(super) fn activate(&self, snapshot: &HostSnapshotName) -> ProviderResult<View> {
        let volumes = self.volumes_of(&snapshot.dataset.name)?;
        let volume = volumes.snapshot(snapshot)?.volume;
        let full = volume.full_name();
        let path = self.locks.join(format!("lvm-view-{}.lock", volume.uuid));
        let lock = LockFile::open(&path, FlockOperation::LockShared)?;
        // A snapshot of another program that was already active is not deactivated.
        let belongs_to_others = volume.is_active && volume.tags.snapshot.is_none();
        let arguments = ["-qq", "--yes", "--activate", "y", "--ignoreactivationskip", &full];
        self.ask("view", &snapshot.to_string(), LVCHANGE, &arguments)?;
        let device = PathBuf::from(&volume.path);
        let view = View {
            folder: device.clone(),
            cleanup: Some(self.deactivate_on_drop(lock, (!belongs_to_others).then_some(full.clone()))),
        };
        self.await_device(&full, &device)?;
        Ok(view)
    }

    /// Waits for a device: udev may be slow, or missing.
    pub(super) fn await_device(&self, full: &str, device: &Path) -> ProviderResult<()> {
        for attempt in 0..ATTEMPT_COUNT {
            if device.exists() {
                return Ok(());
            }
            if attempt == ATTEMPT_COUNT / 2 {
                drop(self.tools.ask(MAKE_NODES, &["-qq", full]));
            }
            self.clock.sleep(ATTEMPT_INTERVAL);
        }
        Err(ProviderError::Refused {
            action: "find the device of",
            what: full.to_owned(),
            reason: format!("{} does not appear; udev should create it", device.display()),
        })
    }

    fn deactivate_on_drop(&self, lock: LockFile, full: Option<String>) -> Box<dyn FnOnce() + Send> {
        let (tools, clock) = (Arc::clone(&self.tools), Arc::clone(&self.clock));
        Box::new(move || {
            let is_last = lock.release_shared();
            let (Some(_alone), Some(full)) = (is_last, full) else {
                return;
            };
            deactivate(&*tools, &*clock, &full);
        })
    }
}

/// Deactivates a snapshot. A process that has just read the device keeps it open for a moment, which is waited for. A
/// process that keeps the device open for longer also keeps the snapshot active.
fn deactivate(tools: &dyn crate::system::process::Tools, clock: &dyn Clock, full: &str) {
    for _ in 0..3 {
        match tools.ask(LVCHANGE, &["-qq", "--yes", "--activate", "n", full]) {
            Ok(answer) if !answer.is_success && answer.stderr.contains("in use") => clock.sleep(ATTEMPT_INTERVAL),
            _ => return,
        }
    }
}

pub(super) struct LockFile {
    path: PathBuf,
    pub(super) file: File,
}

impl LockFile {
    /// Locks a file, and creates it if necessary. The holder of an exclusive lock may remove the file.
    pub(super) fn open(path: &Path, operation: FlockOperation) -> ProviderResult<Self> {
        if let Some(folder) = path.parent() {
            make_folder(folder)?;
        }
        let no_links = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
        loop {
            let mut options = File::options();
            let open = options
                .create(true)
                .write(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(no_links);
            let file = open.open(path).map_err(|source| file_error("open", path, source))?;
            let wait = Wait::for_answer(LOCK_HOLDER);
            flock(&file, operation).map_err(|error| file_error("lock", path, error.into()))?;
            drop(wait);
            let found = file.metadata().map_err(|source| file_error("inspect", path, source))?;
            // The previous holder may have removed the file.
            if found.nlink() > 0 {
                return Ok(Self {
                    path: path.to_owned(),
                    file,
                });
            }
        }
    }

    /// Releases a shared lock. If no other process has the lock, returns it as an exclusive lock and removes the
    /// file.
    fn release_shared(self) -> Option<File> {
        flock(&self.file, FlockOperation::Unlock).ok()?;
        flock(&self.file, FlockOperation::NonBlockingLockExclusive).ok()?;
        // Another process closed the last view, and the name now belongs to another file.
        if self.file.metadata().ok()?.nlink() == 0 {
            return None;
        }
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => None,
            // The lock belongs to the file, not to its name. A waiting process notices that the name was removed, and
            // creates a new file.
            _ => Some(self.file),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::FlockOperation;

    use super::LockFile;

    #[test]
    fn the_last_user_gets_the_exclusive_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("locks/a.lock");
        let shared = || LockFile::open(&path, FlockOperation::LockShared).unwrap();
        let (first, second) = (shared(), shared());
        assert!(first.release_shared().is_none() && path.exists());
        let third = shared();
        assert!(second.release_shared().is_none());
        assert!(third.release_shared().is_some() && !path.exists());
        assert!(shared().release_shared().is_some());
    }
}
