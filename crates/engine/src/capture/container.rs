//! `backup` of a container: its disk as of a snapshot, and its configuration.
//!
//! 1. A snapshot of the container is taken: with its file system frozen if it is mounted.
//! 2. The layers of that snapshot are read, which nothing writes any more ([`changes`]): those above the layer of the
//!    backup before, if they are still in the chain; otherwise all.
//! 3. After the commit, the snapshot of the backup before is deleted. Its own stays until the next backup.
//!
//! What was written since a backup is what the layers above its own contain. So it survives everything that the layers
//! survive: an unmount, a killed server, a power failure.
//!
//! A snapshot of a backup has properties that name the repository and the machine. If a backup is killed, the next one
//! deletes its snapshot: one that neither the newest snapshot of the repository nor the chosen parent is based on.

mod changes;
mod configuration;
mod held;

use std::num::NonZeroU64;
use std::time::Duration;

use holdfast_block::BlockDevice as _;
use holdfast_host::{MachineState, MachineSummary};
use holdfast_image::{ChainStatus, ContainerLock, ContainerTree, ImageId};
use holdfast_repo::{Manifest, Repository};

use super::plan::{BackupPlan, PlannedCapture, PlannedMethod, PlannedRead};
use super::sink::SnapshotSink;
use super::snapshot::SnapshotOptions;
use super::{Capture, CaptureOptions, MachineBackupReport, PreparedMachine, Steps, capture_into, plan_capture};
use crate::container::{Consistency, ContainerPlace, Relocation, SnapshotState};
use crate::job::{Error, Job, Result};
use crate::machine::hooks::HookCalls;
use changes::ChangesBase;
pub(crate) use configuration::ContainerConfiguration;
use held::HeldContainer;
pub(crate) use held::backup_layers;
pub use held::is_kept_for_backup;

/// The name of the disk of a container in snapshots.
const DISK: &str = "disk";
/// The keyword of the method.
const METHOD: &str = "container-snapshot";

/// What to back up.
pub struct ContainerBackupRequest<'a> {
    /// The container.
    pub place: ContainerPlace,
    /// Options that all hypervisors share.
    pub capture: CaptureOptions<'a>,
    /// Whether the file system of a mounted container is frozen.
    pub consistency: Consistency,
    /// The maximum rate of reading, in bytes per second.
    pub bytes_per_second: Option<NonZeroU64>,
}

/// How a container was read.
#[derive(Debug)]
pub struct ContainerReading {
    /// The state of the disk.
    pub state: SnapshotState,
    /// How long writes waited; zero if the container was not mounted.
    pub paused: Duration,
    /// The name of its disk in the snapshot.
    pub disk: String,
    /// Which part of the disk was read.
    pub change: ContainerChange,
    /// How long reading waited for the rate limit.
    pub waited: Duration,
    /// Whether a snapshot that is not needed any more could not be deleted.
    pub has_remains: bool,
}

/// Which part of the disk of a container was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContainerChange {
    /// What was written since the backup before.
    Since {
        /// Bytes in these ranges.
        changed_bytes: u64,
    },
    /// Everything, for this reason.
    Everything(String),
}

/// A container that is to be read.
pub(crate) struct ContainerCapture<'a> {
    request: ContainerBackupRequest<'a>,
    summary: MachineSummary,
    sink: &'a dyn SnapshotSink,
    hooks: &'a HookCalls<'a>,
    job: Job<'a>,
    is_locked: bool,
}

/// Backs up a container.
///
/// # Errors
/// The container is damaged, or its snapshot cannot be taken. After any error the snapshot is deleted.
pub fn back_up_container(
    repository: &Repository,
    request: ContainerBackupRequest<'_>,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<MachineBackupReport<ContainerReading>> {
    capture_into(repository, request, snapshot, job)
}

/// Plans a backup of a container.
///
/// # Errors
/// The container is damaged.
pub fn plan_container_backup(
    repository: &Repository,
    request: ContainerBackupRequest<'_>,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<BackupPlan> {
    plan_capture(repository, request, snapshot, job)
}

impl Capture for ContainerBackupRequest<'_> {
    type Found = MachineSummary;
    type Prepared<'c>
        = ContainerCapture<'c>
    where
        Self: 'c;
    type Reading = ContainerReading;

    fn options(&self) -> &CaptureOptions<'_> {
        &self.capture
    }

    fn find(&self) -> Result<MachineSummary> {
        Relocation::refuse(&self.place)?;
        let folder = &self.place.folder;
        let is_used = ContainerLock::is_held(folder).map_err(|error| Error::from(error).on(folder))?;
        Ok(MachineSummary {
            name: self.capture.name.to_string(),
            uuid: self.place.id.clone(),
            state: if is_used {
                MachineState::Running
            } else {
                MachineState::ShutOff
            },
        })
    }

    fn summary(found: &MachineSummary) -> &MachineSummary {
        found
    }

    fn prepare<'c>(self, found: MachineSummary, steps: Steps<'c>) -> Result<ContainerCapture<'c>>
    where
        Self: 'c,
    {
        self.tree()?;
        Ok(ContainerCapture {
            request: self,
            summary: found,
            sink: steps.sink,
            hooks: steps.hooks,
            job: steps.job,
            is_locked: steps.is_locked,
        })
    }
}

impl ContainerBackupRequest<'_> {
    fn tree(&self) -> Result<ContainerTree> {
        let folder = &self.place.folder;
        ContainerTree::open(folder).map_err(|error| Error::from(error).on(folder))
    }
}

impl PreparedMachine for ContainerCapture<'_> {
    type Held<'h>
        = HeldContainer
    where
        Self: 'h;
    type Reading = ContainerReading;

    fn plan(&self) -> Result<PlannedCapture> {
        let folder = &self.request.place.folder;
        let status = ChainStatus::load(folder).map_err(|error| Error::from(error).on(folder))?;
        let ids: Vec<ImageId> = status.layers.iter().map(|layer| layer.layer.id).collect();
        let base = ChangesBase::find(self.parent(), &self.request.place.id, &ids, &status.tree);
        let (layer_count, reason) = match base {
            ChangesBase::Layer(id) => (ids.iter().position(|known| *known == id).unwrap_or(ids.len()), None),
            ChangesBase::None(reason) => (ids.len(), Some(reason)),
        };
        let read = status.layers.iter().take(layer_count);
        let read_bytes = read
            .map(|layer| layer.allocated_bytes.unwrap_or(layer.file_bytes))
            .sum();
        Ok(PlannedCapture {
            method: PlannedMethod {
                word: METHOD,
                reason: self.reason().to_owned(),
            },
            disks: vec![PlannedRead {
                name: DISK.to_owned(),
                size_bytes: Some(status.size_bytes),
                read_bytes: Some(status.size_bytes.min(read_bytes)),
                reason,
            }],
            left_out: Vec::new(),
        })
    }

    fn freeze(&self) -> Result<HeldContainer> {
        if self.is_locked {
            self.clear_up();
        }
        self.job.interrupt.check()?;
        self.take()
    }

    fn read(&self, held: &mut HeldContainer) -> Result<ContainerReading> {
        let point = held.point.as_ref().expect("it is opened with the snapshot");
        self.store(held, point)
    }

    fn release(&self, held: HeldContainer, read: Result<ContainerReading>) -> Result<ContainerReading> {
        self.release_layers(held, read)
    }

    /// After an interruption, errors of streams are less useful than the interruption itself.
    fn explain(&self, error: Error) -> Error {
        self.job.interrupt.check().err().map_or(error, Error::from)
    }

    fn consistency(reading: &ContainerReading) -> &str {
        consistency_of(reading.state)
    }
}

impl ContainerCapture<'_> {
    fn parent(&self) -> Option<&Manifest> {
        self.sink.history().and_then(|history| history.parent)
    }

    /// The reason for the method.
    fn reason(&self) -> &'static str {
        match self.summary.state {
            MachineState::ShutOff => "it is not mounted",
            _ => "it is mounted",
        }
    }

    /// The bytes of the disk that have to be read.
    fn data_bytes(point: &holdfast_image::PointInTime) -> Result<u64> {
        let (mut at, mut bytes) = (0, 0);
        while at < point.size_bytes() {
            let list = point.extents(at..point.size_bytes(), changes::EXTENT_COUNT)?;
            let data = list.as_slice().iter();
            let data = data.filter(|extent| extent.kind == holdfast_block::ExtentKind::Data);
            bytes += data.map(|extent| extent.length).sum::<u64>();
            at = list.end();
        }
        Ok(bytes)
    }
}

/// The word for the consistency of a snapshot in a repository.
fn consistency_of(state: SnapshotState) -> &'static str {
    match state {
        SnapshotState::Frozen => "file system",
        SnapshotState::Crash => "crash",
        SnapshotState::Unmounted => "shut off",
    }
}
