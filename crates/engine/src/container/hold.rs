//! The current state of a container, held by a snapshot of its own while a command reads it.
//!
//! The snapshot names the process that needs it, so that `doctor` deletes what a killed process leaves.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_block::{BlockDevice, error_text};
use holdfast_image::{ImageId, PointInTime, SnapshotEntry};
use holdfast_repo::{Liveness, ProcessIdentity, Processes};

use super::change::{SnapshotRequest, TakenSnapshot, delete_snapshots, take_snapshot};
use super::control::Consistency;
use super::place::ContainerPlace;
use super::state::CLONE_PROCESS_PROPERTY;
use crate::job::{Error, Interrupt, Job, Result};
use crate::machine::run_journal::liveness_of;

/// How long to wait until a merge has written the layers of a snapshot.
const MERGE_PATIENCE: Duration = Duration::from_secs(600);
const MERGE_INTERVAL: Duration = Duration::from_millis(100);

/// A container whose current state is needed for a while.
pub struct HoldContainerRequest<'a> {
    /// The container.
    pub place: &'a ContainerPlace,
    /// What the state is needed for, for people.
    pub comment: String,
    /// Whether the file system is frozen, if the container is mounted.
    pub consistency: Consistency,
    /// The current time, in seconds since 1970.
    pub now_s: u64,
    /// This process.
    pub process: &'a ProcessIdentity,
}

/// The disk of a container, as it was when it was held. The container is used meanwhile.
pub struct ContainerHold<'a> {
    place: &'a ContainerPlace,
    taken: TakenSnapshot,
    point: PointInTime,
}

impl<'a> ContainerHold<'a> {
    /// Takes a snapshot, and opens it.
    ///
    /// # Errors
    /// The snapshot cannot be taken or opened; none is left then.
    pub fn hold(request: &HoldContainerRequest<'a>, job: Job<'_>) -> Result<Self> {
        let place = request.place;
        let taken = take_held(request, job)?;
        let id = taken.id.parse::<ImageId>().map_err(Error::from);
        match id.and_then(|id| open_snapshot(place, id, job)) {
            Ok(point) => Ok(Self { place, taken, point }),
            Err(error) => {
                release_held(place, &taken, job);
                Err(error)
            }
        }
    }

    /// The disk.
    pub fn device(&self) -> &dyn BlockDevice {
        &self.point
    }

    /// How it was taken.
    pub fn taken(&self) -> &TakenSnapshot {
        &self.taken
    }

    /// Deletes the snapshot; a failure is a warning.
    pub fn release(self, job: Job<'_>) {
        drop(self.point);
        release_held(self.place, &self.taken, job);
    }
}

/// Takes a snapshot that names this process.
pub(super) fn take_held(request: &HoldContainerRequest<'_>, job: Job<'_>) -> Result<TakenSnapshot> {
    let snapshot = SnapshotRequest {
        name: None,
        comment: request.comment.clone(),
        created_s: request.now_s,
        properties: BTreeMap::from([(CLONE_PROCESS_PROPERTY.to_owned(), process_text(request.process))]),
        consistency: request.consistency,
    };
    take_snapshot(request.place, &snapshot, job)
}

/// Deletes such a snapshot, also after an interruption of the job.
pub(super) fn release_held(place: &ContainerPlace, taken: &TakenSnapshot, job: Job<'_>) {
    let never = Interrupt::new();
    let cleaning = Job {
        interrupt: &never,
        ..job
    };
    if let Err(error) = delete_snapshots(place, std::slice::from_ref(&taken.id), cleaning) {
        job.progress.warning(&format!(
            "{}: the snapshot {} that was taken to read the current state is not deleted yet, which holdfast container delete does: {}",
            place.folder.display(),
            taken.id,
            error_text(&error)
        ));
    }
}

fn process_text(process: &ProcessIdentity) -> String {
    serde_json::to_string(process).expect("strings and numbers are JSON")
}

/// Whether a process that was killed has left this snapshot.
pub fn is_left_by_killed_process(entry: &SnapshotEntry, processes: &dyn Processes) -> bool {
    let process = entry.properties.get(CLONE_PROCESS_PROPERTY);
    let process = process.and_then(|text| serde_json::from_str::<ProcessIdentity>(text).ok());
    process.is_some_and(|process| liveness_of(&process, processes) == Liveness::Dead)
}

/// Opens a snapshot. Waits for a merge that writes one of its layers.
///
/// # Errors
/// There is no such snapshot, a layer is damaged, or the merge takes too long.
pub(crate) fn open_snapshot(place: &ContainerPlace, id: ImageId, job: Job<'_>) -> Result<PointInTime> {
    let deadline = job.clock.now() + MERGE_PATIENCE;
    loop {
        match PointInTime::open(&place.folder, id) {
            Ok(point) => return Ok(point),
            // The files of layers are renamed at the end of a merge.
            Err(error) if job.clock.now() >= deadline || error.is_corrupt() => {
                return Err(Error::from(error).on(&place.folder));
            }
            Err(_) => {
                job.interrupt.check()?;
                job.clock.sleep(MERGE_INTERVAL);
            }
        }
    }
}
