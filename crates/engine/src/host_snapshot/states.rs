//! The state of machines in host snapshots beside their disks: configuration, variables of the firmware, state of the TPM, memory.
//!
//! It is stored in a separate repository, the *state store*, which deduplicates, compresses and checks it. A state is a
//! snapshot there without disks. Its notes name the host snapshots that it belongs to, and the paths of the machine's
//! disks in them: `docs/format/host-snapshot-record.md`. The host snapshots of one point in time, and the states of
//! their machines, form a *set* with a number. When the last host snapshot of a set is removed, its states are removed.

mod kept;
mod sweep;
mod unfinished;

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_repo::key::{Cipher, Credential, KdfParameters};
use holdfast_repo::store::{DirectoryStore, MemoryStore, ObjectName, Store as _, StoreError};
use holdfast_repo::{Environment, InitRequest, Repository};
use rustix::fs::{FlockOperation, flock};

use crate::job::{Error, Job, Result};
use crate::repository::open::{Location, Unlock, open, snapshots};
pub(crate) use kept::StateToKeep;
pub use kept::{KeptDisk, KeptState};
pub use sweep::{SweepReport, sweep_states};
pub use unfinished::{Unfinished, UnfinishedFile, UnfinishedKind};

/// Name of the repository in the folder of the store.
const REPOSITORY: &str = "repository";
/// Folder for the memory of a machine before it is stored in the repository.
const SCRATCH: &str = "scratch";
const LOCK: &str = "lock";
/// Interval between attempts to lock the store.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Parameters of the new repository.
fn new_repository() -> InitRequest<'static> {
    InitRequest {
        credential: Credential::Open,
        label: "states of machines",
        parameters: KdfParameters::default(),
        cipher: Cipher::default(),
    }
}

/// The store for states of machines.
pub struct StateStore {
    folder: PathBuf,
    repository: Repository,
}

impl StateStore {
    /// Opens the store in `folder`, and creates it if it does not exist.
    ///
    /// It is as readable as the folder: its content is no more secret than the disks in their host snapshots.
    pub fn open_or_create(folder: &Path, environment: &Environment, job: Job<'_>) -> Result<Self> {
        if let Some(store) = Self::open(folder, environment, job)? {
            return Ok(store);
        }
        for folder in [folder, &folder.join(SCRATCH)] {
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
            made.map_err(|source| Error::File {
                action: "create",
                path: folder.to_owned(),
                source,
            })?;
        }
        let made = DirectoryStore::create(&folder.join(REPOSITORY))?;
        match Repository::init(Arc::new(made), &new_repository(), environment.clone()) {
            // Another process may have created it at the same time.
            Ok(_) | Err(holdfast_repo::Error::AlreadyARepository { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let made = Self::open(folder, environment, job)?;
        made.ok_or_else(|| Error::File {
            action: "find what was made in",
            path: folder.to_owned(),
            source: std::io::ErrorKind::NotFound.into(),
        })
    }

    /// Opens the store in `folder` for reading; if it does not exist, an empty store in memory. Nothing is created.
    pub fn open_to_look(folder: Option<&Path>, environment: &Environment, job: Job<'_>) -> Result<Self> {
        let open = |folder| Self::open(folder, environment, job);
        if let Some(store) = folder.map(open).transpose()?.flatten() {
            return Ok(store);
        }
        Ok(Self {
            folder: folder.map(Path::to_owned).unwrap_or_default(),
            repository: Repository::init(Arc::new(MemoryStore::new()), &new_repository(), environment.clone())?,
        })
    }

    /// Opens the store in `folder`; none if it does not exist.
    pub fn open(folder: &Path, environment: &Environment, job: Job<'_>) -> Result<Option<Self>> {
        let path = folder.join(REPOSITORY);
        let is_there = match DirectoryStore::open(&path) {
            Ok(store) => match store.length(&ObjectName::config()) {
                Err(StoreError::NotFound { .. }) => false,
                other => other.map(|_| true)?,
            },
            Err(_) if !path.exists() => false,
            Err(error) => return Err(error.into()),
        };
        if !is_there {
            return Ok(None);
        }
        let location = Location::parse(path.as_os_str())?;
        Ok(Some(Self {
            folder: folder.to_owned(),
            repository: open(&location, Unlock::Nothing, environment, job.progress)?,
        }))
    }

    /// The repository of the store.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// A folder for files that are too large for memory.
    pub fn scratch(&self) -> PathBuf {
        self.folder.join(SCRATCH)
    }

    /// All states, those of a machine ordered by time. Other objects are skipped.
    pub fn states(&self, job: Job<'_>) -> Result<Vec<KeptState>> {
        let manifests = snapshots(&self.repository, job.progress)?;
        Ok(manifests.into_iter().filter_map(KeptState::of).collect())
    }

    /// Takes a shared lock, for processes that store states; waits for a process that removes states.
    fn share(&self, job: Job<'_>) -> Result<File> {
        loop {
            if let Some(lock) = self.try_lock(FlockOperation::NonBlockingLockShared)? {
                return Ok(lock);
            }
            // Removing many states and reclaiming their space may take minutes.
            job.interrupt.check()?;
            job.clock.sleep(LOOK_INTERVAL);
        }
    }

    /// Takes an exclusive lock, for a process that removes states; none if another process has a lock. `operation` must not wait.
    fn try_lock(&self, operation: FlockOperation) -> Result<Option<File>> {
        let path = self.folder.join(LOCK);
        let failed = |source| Error::File {
            action: "lock",
            path: path.clone(),
            source,
        };
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(failed)?;
        match flock(&file, operation) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(failed(error.into())),
        }
    }
}
