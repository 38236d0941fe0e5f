//! Snapshots and other changes of a container, mounted or not.

use std::collections::BTreeMap;

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, Clock};
use holdfast_host::Tools;
use holdfast_host::freeze::trim_file_system;
use holdfast_image::{
    ChainStatus, ContainerLock, ContainerTree, Continue, CurrentState, LiveChain, LiveOptions, MergeObserver,
    MergeProgress, NewSnapshot, SwitchPlan, plan_switch, switch,
};

use super::control::{Consistency, ContainerControlRequest, ControlClient, ControlResult};
use super::place::ContainerPlace;
use super::serve::{GROW_PROPERTY, grow_mounted};
use super::state::{CONSISTENCY_PROPERTY, SnapshotState};
use crate::job::error::ContainerError;
use crate::job::{Error, Job, Result};

/// A snapshot to take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// Its name.
    pub name: Option<String>,
    /// A comment.
    pub comment: String,
    /// The current time, in seconds since 1970.
    pub created_s: u64,
    /// Further facts to record.
    pub properties: BTreeMap<String, String>,
    /// Whether the file system of a mounted container is frozen.
    pub consistency: Consistency,
}

/// A snapshot that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenSnapshot {
    /// Its id.
    pub id: String,
    /// Its name; the id if it has none.
    pub name: String,
    /// How the disk was.
    pub state: SnapshotState,
    /// How long writes waited, in microseconds; 0 if the container was not mounted.
    pub paused_us: u64,
    /// Why the file system was not frozen, although that was requested.
    pub not_frozen: Option<String>,
    /// Why the file system could not be thawed.
    pub thaw_failure: Option<String>,
}

/// A container that no other process uses.
struct Offline {
    chain: LiveChain,
    _lock: ContainerLock,
}

/// How a container can be changed.
enum Access {
    Offline(Box<Offline>),
    Online(ControlClient),
}

impl Access {
    fn open(place: &ContainerPlace, job: Job<'_>) -> Result<Self> {
        if let Some(client) = ControlClient::connect(place)? {
            return Ok(Self::Online(client));
        }
        let on = |error: holdfast_image::Error| Error::from(error).on(&place.folder);
        match ContainerLock::take(&place.folder) {
            Ok(lock) => {
                let chain = LiveChain::open(&place.folder, LiveOptions::default()).map_err(on)?;
                Ok(Self::Offline(Box::new(Offline { chain, _lock: lock })))
            }
            // A worker was killed, and its successor does not listen yet.
            Err(holdfast_image::Error::Locked { .. }) => {
                Ok(Self::Online(ControlClient::connect_to_used(place, job.clock)?))
            }
            Err(error) => Err(on(error)),
        }
    }
}

/// The answer does not belong to the request.
fn unexpected(place: &ContainerPlace) -> Error {
    ContainerError::OtherVersion {
        container: place.folder.clone(),
    }
    .into()
}

/// Takes a snapshot.
///
/// # Errors
/// The name is taken or not valid; the file system cannot be frozen; a file cannot be written.
pub fn take_snapshot(place: &ContainerPlace, request: &SnapshotRequest, job: Job<'_>) -> Result<TakenSnapshot> {
    match Access::open(place, job)? {
        Access::Online(mut client) => request.taken(client.call(request.online(), job)?, place),
        Access::Offline(offline) => {
            let mut properties = request.properties.clone();
            properties.insert(
                CONSISTENCY_PROPERTY.to_owned(),
                SnapshotState::Unmounted.word().to_owned(),
            );
            let prepared = offline.chain.prepare_snapshot(NewSnapshot {
                name: request.name.clone(),
                comment: request.comment.clone(),
                created_s: Some(request.created_s),
                properties,
            })?;
            let id = prepared.commit()?.to_string();
            Ok(TakenSnapshot {
                name: request.name.clone().unwrap_or_else(|| id.clone()),
                id,
                state: SnapshotState::Unmounted,
                paused_us: 0,
                not_frozen: None,
                thaw_failure: None,
            })
        }
    }
}

/// Takes a snapshot of a mounted container. It cannot be interrupted: after an interruption, it would not be known
/// whether there is a snapshot.
pub(super) fn take_mounted_snapshot(
    place: &ContainerPlace,
    request: &SnapshotRequest,
    clock: &dyn Clock,
) -> Result<TakenSnapshot> {
    let mut client = ControlClient::connect_to_used(place, clock)?;
    request.taken(client.request(request.online())?, place)
}

impl SnapshotRequest {
    fn online(&self) -> ContainerControlRequest {
        ContainerControlRequest::Snapshot {
            name: self.name.clone(),
            comment: self.comment.clone(),
            created_s: self.created_s,
            properties: self.properties.clone(),
            consistency: self.consistency,
        }
    }

    fn taken(&self, result: ControlResult, place: &ContainerPlace) -> Result<TakenSnapshot> {
        let ControlResult::Taken {
            id,
            is_frozen,
            paused_us,
            not_frozen,
            thaw_failure,
        } = result
        else {
            return Err(unexpected(place));
        };
        let state = if is_frozen {
            SnapshotState::Frozen
        } else {
            SnapshotState::Crash
        };
        Ok(TakenSnapshot {
            name: self.name.clone().unwrap_or_else(|| id.clone()),
            id,
            state,
            paused_us,
            not_frozen,
            thaw_failure,
        })
    }
}

/// The result of a deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotDeletion {
    /// Layers that were merged into the one below.
    pub merged_count: usize,
    /// Layers that were deleted.
    pub removed_count: usize,
}

struct JobObserver<'a>(Job<'a>);

impl MergeObserver for JobObserver<'_> {
    fn advanced(&self, progress: &MergeProgress) -> Continue {
        self.0.progress.total(progress.size_bytes);
        self.0.progress.advance(progress.step_bytes);
        if self.0.interrupt.is_requested() {
            return Continue::Stop;
        }
        Continue::Go
    }
}

/// Deletes snapshots. Their data is merged into the layers that need it.
///
/// # Errors
/// One of them does not exist; a layer is in use or damaged; the job is interrupted, after which a mount or
/// [`fold_layers`] continues.
pub fn delete_snapshots(place: &ContainerPlace, names: &[String], job: Job<'_>) -> Result<SnapshotDeletion> {
    match Access::open(place, job)? {
        Access::Online(mut client) => {
            let names = names.to_vec();
            deletion_of(&client.call(ContainerControlRequest::Delete { names }, job)?, place)
        }
        Access::Offline(offline) => {
            let tree = offline.chain.tree();
            let ids: std::result::Result<Vec<_>, _> = names.iter().map(|name| tree.find_snapshot(name)).collect();
            offline.chain.hide_snapshots(&ids?)?;
            collapse(&offline.chain, job)
        }
    }
}

/// Merges the layers of deleted snapshots, after an interrupted deletion.
///
/// # Errors
/// Those of [`delete_snapshots`].
pub fn fold_layers(place: &ContainerPlace, job: Job<'_>) -> Result<SnapshotDeletion> {
    match Access::open(place, job)? {
        Access::Online(mut client) => deletion_of(&client.call(ContainerControlRequest::Collapse {}, job)?, place),
        Access::Offline(offline) => collapse(&offline.chain, job),
    }
}

fn collapse(chain: &LiveChain, job: Job<'_>) -> Result<SnapshotDeletion> {
    let done = chain.collapse(&JobObserver(job));
    job.interrupt.check()?;
    let done = done?;
    chain.flush()?;
    Ok(SnapshotDeletion {
        merged_count: done.merged_count,
        removed_count: done.removed_count,
    })
}

fn deletion_of(result: &ControlResult, place: &ContainerPlace) -> Result<SnapshotDeletion> {
    match result {
        ControlResult::Collapsed {
            merged_count,
            removed_count,
        } => Ok(SnapshotDeletion {
            merged_count: *merged_count,
            removed_count: *removed_count,
        }),
        _ => Err(unexpected(place)),
    }
}

/// The result of [`grow_container`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// The disk and its file system have the new size.
    Complete,
    /// The disk has the new size; the file system gets it with the next mount.
    AtNextMount,
}

/// Grows the disk of a container, and its file system.
///
/// # Errors
/// The disk would become smaller, its format does not support the size, or the file system cannot grow.
pub fn grow_container(place: &ContainerPlace, size_bytes: u64, tools: &dyn Tools, job: Job<'_>) -> Result<Growth> {
    match Access::open(place, job)? {
        Access::Online(mut client) => {
            client.call(ContainerControlRequest::Grow { size_bytes }, job)?;
            if grow_mounted(place, tools, job)? {
                return Ok(Growth::Complete);
            }
            let mut properties = ContainerTree::open(&place.folder)?.properties().clone();
            properties.insert(GROW_PROPERTY.to_owned(), size_bytes.to_string());
            let mut client = ControlClient::connect_to_used(place, job.clock)?;
            client.request(ContainerControlRequest::SetProperties { properties })?;
            Ok(Growth::AtNextMount)
        }
        Access::Offline(offline) => {
            let chain = &offline.chain;
            let before_bytes = chain.size_bytes();
            chain.grow(size_bytes)?;
            let mut properties = chain.tree().properties().clone();
            if size_bytes == before_bytes || !properties.contains_key("filesystem") {
                return Ok(Growth::Complete);
            }
            properties.insert(GROW_PROPERTY.to_owned(), size_bytes.to_string());
            chain.set_properties(properties)?;
            Ok(Growth::AtNextMount)
        }
    }
}

/// Finds out what a switch to the snapshot `name` would delete.
///
/// # Errors
/// There is no such snapshot.
pub fn plan_container_switch(place: &ContainerPlace, name: &str) -> Result<SwitchPlan> {
    let on = |error: holdfast_image::Error| Error::from(error).on(&place.folder);
    let tree = ContainerTree::open(&place.folder).map_err(on)?;
    plan_switch(&place.folder, tree.find_snapshot(name).map_err(on)?).map_err(on)
}

/// Switches a container that is not mounted to the snapshot `name`.
///
/// # Errors
/// It is mounted, or there is no such snapshot.
pub fn switch_container(place: &ContainerPlace, name: &str, current: &CurrentState) -> Result<()> {
    let on = |error: holdfast_image::Error| Error::from(error).on(&place.folder);
    let lock = match ContainerLock::take(&place.folder) {
        Err(holdfast_image::Error::Locked { .. }) => {
            return Err(ContainerError::Mounted {
                container: place.folder.clone(),
            }
            .into());
        }
        lock => lock.map_err(on)?,
    };
    // Completes what a killed process has left.
    drop(LiveChain::open(&place.folder, LiveOptions::default()).map_err(on)?);
    let tree = ContainerTree::open(&place.folder).map_err(on)?;
    switch(&place.folder, tree.find_snapshot(name).map_err(on)?, current).map_err(on)?;
    drop(lock);
    Ok(())
}

/// Tells the disk of a mounted container what its file system does not use, and frees it. Returns the bytes.
///
/// # Errors
/// It is not mounted, or its file system does not support it.
pub fn trim_container(place: &ContainerPlace) -> Result<u64> {
    let Some(point) = place.mount_points().into_iter().next() else {
        return Err(ContainerError::NotMounted {
            container: place.folder.clone(),
        }
        .into());
    };
    trim_file_system(&point).map_err(|source| Error::File {
        action: "trim",
        path: point,
        source,
    })
}

/// The state of a container.
#[derive(Debug, Clone)]
pub struct ContainerState {
    /// Its layers and snapshots.
    pub chain: ChainStatus,
    /// Where its file system is mounted.
    pub mount_points: Vec<std::path::PathBuf>,
    /// Whether a process uses it.
    pub is_used: bool,
    /// Requests since its server began, if it is mounted.
    pub traffic: Option<ContainerTraffic>,
}

/// Requests to the disk of a mounted container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContainerTraffic {
    /// Reads.
    pub read_count: u64,
    /// Bytes of reads.
    pub read_bytes: u64,
    /// Writes.
    pub write_count: u64,
    /// Bytes of writes.
    pub write_bytes: u64,
    /// Flushes.
    pub flush_count: u64,
}

/// Reads the state of a container.
///
/// # Errors
/// It is damaged.
pub fn container_state(place: &ContainerPlace) -> Result<ContainerState> {
    let on = |error: holdfast_image::Error| Error::from(error).on(&place.folder);
    // The server may be ending.
    let asked = ControlClient::connect(place)?.map(|mut client| client.request(ContainerControlRequest::Status {}));
    let traffic = match asked {
        Some(Ok(ControlResult::Status {
            read_count,
            read_bytes,
            write_count,
            write_bytes,
            flush_count,
        })) => Some(ContainerTraffic {
            read_count,
            read_bytes,
            write_count,
            write_bytes,
            flush_count,
        }),
        _ => None,
    };
    Ok(ContainerState {
        chain: ChainStatus::load(&place.folder).map_err(on)?,
        mount_points: place.mount_points(),
        is_used: ContainerLock::is_held(&place.folder).map_err(on)?,
        traffic,
    })
}
