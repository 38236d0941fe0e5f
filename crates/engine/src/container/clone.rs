//! Clones containers: a new container with the disk of a snapshot, or of the current state, and with files of its own.

use std::path::{Path, PathBuf};

use holdfast_image::{ContainerDuplicate, ContainerTree, Continue, ImageId, SnapshotEntry, duplicate_container};
use holdfast_repo::ProcessIdentity;

use super::change::TakenSnapshot;
use super::control::Consistency;
use super::create::{check_new_folder, create_complete};
use super::hold::{HoldContainerRequest, open_snapshot, release_held, take_held};
use super::place::ContainerPlace;
use super::state::{CLONE_PROCESS_PROPERTY, REPOSITORY_PROPERTY};
use crate::job::{Error, Job, Result, Unit};

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
    let hold = HoldContainerRequest {
        place: request.source,
        comment: format!("for the clone {}", request.target.display()),
        consistency: request.consistency,
        now_s: request.now_s,
        process: request.process,
    };
    let taken = take_held(&hold, job)?;
    let id = taken.id.parse::<ImageId>().map_err(Error::from);
    let made = id.and_then(|id| duplicate(request, id, Some(&taken), job));
    release_held(request.source, &taken, job);
    made
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
