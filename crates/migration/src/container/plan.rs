//! What the migration of a container would do, and everything that prevents it.

use std::path::{Path, PathBuf};

use holdfast_engine::{ContainerPlace, ContainerState, DiskTransport, Relocation, container_state};
use holdfast_image::CONTAINER_FILE;

use super::far::{ArrivalState, ContainerCheck, FarContainers, MountTarget};
use crate::error::{Error, Result};

/// Where a container is mounted at the other host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountThere {
    /// Where it is mounted here, if it is.
    AsHere,
    /// On this folder.
    On(PathBuf),
}

/// The container, and where it goes.
pub struct ContainerPlanRequest<'a> {
    /// The container.
    pub place: &'a ContainerPlace,
    /// The other host.
    pub far: &'a FarContainers,
    /// Its folder there: an absolute path.
    pub folder: &'a Path,
    /// The address of this folder, for people.
    pub address: String,
    /// Where it is mounted there.
    pub mount: MountThere,
}

/// What the migration of a container does.
#[derive(Debug, Clone)]
pub struct ContainerPlan {
    /// Its folder there.
    pub folder: PathBuf,
    /// The address of this folder, for people.
    pub address: String,
    /// Its id.
    pub id: String,
    /// Where it is mounted here.
    pub mounted: Option<MountTarget>,
    /// Where it will be mounted there.
    pub mount: Option<MountTarget>,
    /// Whether an earlier attempt has brought everything there, and was ended afterwards.
    pub is_there: bool,
    /// Size of its disk.
    pub size_bytes: u64,
    /// Bytes that its layers take here.
    pub file_bytes: u64,
    /// Number of its layers.
    pub layer_count: usize,
    /// What prevents the migration.
    pub obstacles: Vec<String>,
    /// What a user should know.
    pub notes: Vec<String>,
}

impl ContainerPlan {
    /// # Errors
    /// Something prevents the migration.
    pub(super) fn require_no_obstacles(&self, place: &ContainerPlace) -> Result<()> {
        if self.obstacles.is_empty() {
            return Ok(());
        }
        Err(Error::Obstacles {
            machine: place.folder.display().to_string(),
            obstacles: self.obstacles.clone(),
        })
    }
}

/// Finds out what a migration would do. Nothing is changed.
///
/// # Errors
/// The container is damaged, or the other host does not answer.
pub fn plan_container(request: &ContainerPlanRequest<'_>) -> Result<ContainerPlan> {
    let place = request.place;
    let state = container_state(place)?;
    let relocation = Relocation::of(place)?;
    let mounted = state.mount_points.first().map(|point| MountTarget {
        point: point.clone(),
        transport: place.transport(),
    });
    // An interrupted migration has noted where it was mounted.
    let noted = relocation.as_ref().and_then(|noted| {
        let point = noted.mount_point.clone()?;
        Some(MountTarget {
            point,
            transport: noted.transport,
        })
    });
    let here = mounted.clone().or(noted);
    let mount = match &request.mount {
        MountThere::AsHere => here,
        MountThere::On(point) => Some(MountTarget {
            point: point.clone(),
            transport: here.map_or(DiskTransport::Fuse, |here| here.transport),
        }),
    };
    let mut obstacles = obstacles_here(place, &state);
    let id = state.chain.tree.id().to_string();
    let file_bytes = state
        .chain
        .layers
        .iter()
        .map(|layer| layer.allocated_bytes.unwrap_or(layer.file_bytes))
        .sum();
    let is_there = relocation.is_some()
        && matches!(
            request.far.state(request.folder, &id)?,
            ArrivalState::Complete | ArrivalState::InUse
        );
    let mut notes = Vec::new();
    if is_there {
        notes.push(format!("it is at {} already, by an earlier attempt", request.address));
    } else {
        let [obstacles_there, notes_there] = request.far.check(ContainerCheck {
            folder: request.folder.to_owned(),
            id: id.clone(),
            expected_bytes: file_bytes,
            mount: mount.clone(),
        })?;
        obstacles.extend(obstacles_there);
        notes.extend(notes_there);
    }
    Ok(ContainerPlan {
        folder: request.folder.to_owned(),
        address: request.address.clone(),
        id,
        mounted,
        mount,
        is_there,
        size_bytes: state.chain.size_bytes,
        file_bytes,
        layer_count: state.chain.layers.len(),
        obstacles,
        notes,
    })
}

/// What prevents the container from leaving this host.
fn obstacles_here(place: &ContainerPlace, state: &ContainerState) -> Vec<String> {
    let mut obstacles = Vec::new();
    if state.is_used && state.mount_points.is_empty() {
        obstacles.push("a process uses its disk here, and its file system is not mounted".to_owned());
    }
    if let [_, others @ ..] = &state.mount_points[..]
        && !others.is_empty()
    {
        let points: Vec<String> = others.iter().map(|point| point.display().to_string()).collect();
        obstacles.push(format!(
            "it is mounted more than once here: also on {}",
            points.join(", ")
        ));
    }
    if !place.folder.join(CONTAINER_FILE).is_file() {
        obstacles.push(format!(
            "it has no {CONTAINER_FILE}, which the first snapshot by holdfast writes"
        ));
    }
    obstacles
}
