//! What belongs to machines in host snapshots beside their disks: configuration, variables of the firmware, state of the TPM, memory.
//!
//! It is kept in a repository of its own, the *state store*, where it is deduplicated, compressed and checked like everything else. A
//! state is a snapshot there without disks. Its notes say which host snapshots it belongs to, and where the disks of the machine
//! are in them: `docs/format/host-snapshot-record.md`. Host snapshots that were made at one instant, and the states of the machines in
//! them, are a *set*, and have its number. When the last host snapshot of a set is gone, its states are forgotten.

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

/// The repository, in the folder of the store.
const REPOSITORY: &str = "repository";
/// Where the memory of a machine is before it is in the repository.
const SCRATCH: &str = "scratch";
const LOCK: &str = "lock";
/// How often it is looked whether the store is free.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How the repository is made.
fn new_repository() -> InitRequest<'static> {
    InitRequest {
        credential: Credential::Open,
        label: "states of machines",
        parameters: KdfParameters::default(),
        cipher: Cipher::default(),
    }
}

/// Where states of machines are kept.
pub struct StateStore {
    folder: PathBuf,
    repository: Repository,
}

impl StateStore {
    /// The store in `folder`, made where there is none.
    ///
    /// It is as readable as the folder: what is in it is no more secret than the disks in their host snapshots.
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
            // Another process may have made it at the same time.
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

    /// The store in `folder`; where there is none, one in memory without any states, for readers: nothing is created.
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

    /// The store in `folder`; none where there is none.
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

    /// The repository that it is.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// A folder for files that are too large for memory.
    pub fn scratch(&self) -> PathBuf {
        self.folder.join(SCRATCH)
    }

    /// All states, those of a machine by time. Other objects are skipped.
    pub fn states(&self, job: Job<'_>) -> Result<Vec<KeptState>> {
        let manifests = snapshots(&self.repository, job.progress)?;
        Ok(manifests.into_iter().filter_map(KeptState::of).collect())
    }

    /// Processes that store states share the store, and wait for one that forgets some.
    fn share(&self, job: Job<'_>) -> Result<File> {
        loop {
            if let Some(lock) = self.try_lock(FlockOperation::NonBlockingLockShared)? {
                return Ok(lock);
            }
            // Much is forgotten at once, and its room is given back: that may take minutes.
            job.interrupt.check()?;
            job.clock.sleep(LOOK_INTERVAL);
        }
    }

    /// A process that forgets states has the store exclusively; none where another process has it. `operation` does not wait.
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
