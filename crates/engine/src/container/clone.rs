//! Clones containers: a new container with the disk of a snapshot, or of the current state, and with files of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_image::{
    ContainerDuplicate, ContainerTree, Continue, ImageId, PointInTime, SnapshotEntry, duplicate_container,
};
use holdfast_repo::{Liveness, ProcessIdentity, Processes};

use super::change::{SnapshotRequest, TakenSnapshot, delete_snapshots, take_snapshot};
use super::control::Consistency;
use super::create::{check_new_folder, create_complete};
use super::place::ContainerPlace;
use super::state::{CLONE_PROCESS_PROPERTY, REPOSITORY_PROPERTY};
use crate::job::{Error, Interrupt, Job, Result, Unit};
use crate::machine::run_journal::liveness_of;

/// How long to wait until a merge has written the layers of a snapshot.
const MERGE_PATIENCE: Duration = Duration::from_secs(600);
const MERGE_INTERVAL: Duration = Duration::from_millis(100);

/// A container to clone.
pub struct CloneContainerRequest<'a> {
    /// The container.
    pub source: &'a ContainerPlace,
    /// The name of a snapshot; without one, the current state is cloned.
    pub snapshot: Option<&'a str>,
    /// The folder of the new container, which must not exist: an absolute path.
    pub target: &'a Path,
    /// Whether the file system is frozen, if the current state of a mounted container is cloned.
    pub consistency: Consistency,
    /// The current time, in seconds since 1970.
    pub now_s: u64,
    /// This process.
    pub process: &'a ProcessIdentity,
}

/// The result of [`clone_container`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloneContainerReport {
    /// The folder of the new container.
    pub folder: PathBuf,
    /// Its id.
    pub id: String,
    /// Size of its disk.
    pub size_bytes: u64,
    /// Files of layers that share their bytes with the source.
    pub shared_count: usize,
    /// Files of layers that were copied.
    pub copied_count: usize,
    /// Bytes that were copied.
    pub copied_bytes: u64,
    /// How the current state was held, if it was cloned.
    pub taken: Option<TakenSnapshot>,
}

/// Checks what [`clone_container`] needs: the snapshot and the name. Nothing is created.
///
/// # Errors
/// There is no such snapshot, or the target exists.
pub fn check_clone(request: &CloneContainerRequest<'_>) -> Result<()> {
    find(request)?;
    check_new_folder(request.target)
}

/// The snapshot, if one is named.
fn find(request: &CloneContainerRequest<'_>) -> Result<Option<ImageId>> {
    let folder = &request.source.folder;
    let found =
        ContainerTree::open(folder).and_then(|tree| request.snapshot.map(|name| tree.find_snapshot(name)).transpose());
    found.map_err(|error| Error::from(error).on(folder))
}

/// Makes a new container. It appears under its name when it is complete. The snapshots below the cloned one are in it,
/// except those of backups and of other clones.
///
/// # Errors
/// There is no such snapshot, the target exists, or a file cannot be read or written; no target is left then.
pub fn clone_container(request: &CloneContainerRequest<'_>, job: Job<'_>) -> Result<CloneContainerReport> {
    check_new_folder(request.target)?;
    match find(request)? {
        Some(id) => duplicate(request, id, None, job),
        None => clone_current_state(request, job),
    }
}

/// The clone has the current state as a hidden layer: its own first use merges it.
fn clone_current_state(request: &CloneContainerRequest<'_>, job: Job<'_>) -> Result<CloneContainerReport> {
    let snapshot = SnapshotRequest {
        name: None,
        comment: format!("for the clone {}", request.target.display()),
        created_s: request.now_s,
        properties: BTreeMap::from([(CLONE_PROCESS_PROPERTY.to_owned(), process_text(request.process))]),
        consistency: request.consistency,
    };
    let taken = take_snapshot(request.source, &snapshot, job)?;
    let id = taken.id.parse::<ImageId>().map_err(Error::from);
    let made = id.and_then(|id| duplicate(request, id, Some(&taken), job));
    // Also after an interruption.
    let never = Interrupt::new();
    let cleaning = Job {
        interrupt: &never,
        ..job
    };
    if let Err(error) = delete_snapshots(request.source, std::slice::from_ref(&taken.id), cleaning) {
        job.progress.warning(&format!(
            "{}: the snapshot {} that was taken for the clone is not deleted yet, which holdfast container delete does: {}",
            request.source.folder.display(),
            taken.id,
            error_text(&error)
        ));
    }
    made
}

fn process_text(process: &ProcessIdentity) -> String {
    serde_json::to_string(process).expect("strings and numbers are JSON")
}

/// Whether a clone that was killed has left this snapshot.
pub(crate) fn is_left_by_clone(entry: &SnapshotEntry, processes: &dyn Processes) -> bool {
    let process = entry.properties.get(CLONE_PROCESS_PROPERTY);
    let process = process.and_then(|text| serde_json::from_str::<ProcessIdentity>(text).ok());
    process.is_some_and(|process| liveness_of(&process, processes) == Liveness::Dead)
}

fn duplicate(
    request: &CloneContainerRequest<'_>,
    snapshot: ImageId,
    taken: Option<&TakenSnapshot>,
    job: Job<'_>,
) -> Result<CloneContainerReport> {
    let source = &request.source.folder;
    let on = |error: holdfast_image::Error| Error::from(error).on(source);
    // Its layers are not merged while it is open.
    let point = open_snapshot(request.source, snapshot, job)?;
    let tree = ContainerTree::open(source).map_err(on)?;
    let is_of_program = |entry: &SnapshotEntry| {
        let properties = &entry.properties;
        properties.contains_key(REPOSITORY_PROPERTY) || properties.contains_key(CLONE_PROCESS_PROPERTY)
    };
    let of_programs = tree.snapshots().into_iter().filter(|(_, entry)| is_of_program(entry));
    let hidden: Vec<ImageId> = of_programs.map(|(id, _)| id).collect();
    job.progress.phase("cloning the layers", Unit::Bytes);
    let made = create_complete(request.target, |target| {
        let new = ContainerDuplicate {
            source,
            snapshot,
            target,
            hidden: &hidden,
        };
        let made = duplicate_container(&new, &mut |bytes| {
            job.progress.advance(bytes);
            match job.interrupt.check() {
                Ok(()) => Continue::Go,
                Err(_) => Continue::Stop,
            }
        });
        // Instead of the error by which the copy has ended.
        job.interrupt.check()?;
        made.map_err(on)
    })?;
    drop(point);
    Ok(CloneContainerReport {
        folder: request.target.to_owned(),
        id: made.id.to_string(),
        size_bytes: made.size_bytes,
        shared_count: made.shared_count,
        copied_count: made.copied_count,
        copied_bytes: made.copied_bytes,
        taken: taken.cloned(),
    })
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
