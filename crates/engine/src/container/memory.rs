//! Points in time with memory: the processes of a container of runc, its disk and its configuration at one moment.
//!
//! ```text
//! syncfs                       what was written until now need not be written during the pause
//! runc pause                   the freezer: no process changes memory or files from here on
//!   CRIU                       memory -> memory-UUID.partial/images
//!   fsync, rename              the memory is durable before a snapshot lists it
//!   snapshot of the disk       the worker freezes the file system, and thaws it
//! runc resume
//! ```
//! Pages that a process has written to a file, and that are not on the disk yet, are written by the freeze of the file
//! system: memory and disk agree, because no process runs in between.
//!
//! If this process is killed, the worker of the container resumes the processes ([`super::pause`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::rename_durably;
use holdfast_host::provider::Mounts;
use holdfast_image::{ContainerTree, MEMORY_PARTIAL_SUFFIX, MEMORY_PROPERTY, new_memory_folder};

use super::change::{SnapshotRequest, TakenSnapshot, take_mounted_snapshot};
use super::pause::{PauseLock, may_be_paused};
use super::place::ContainerPlace;
use super::runtime::{CriuFolders, RuntimeRequest, RuntimeState, RuntimeVersions, memory_error};
use crate::job::error::{ContainerError, MemoryProblem};
use crate::job::{Error, Job, Result};

/// The configuration of the container, in the folder with its memory.
pub(super) const CONFIG_FILE: &str = "config.json";
/// The folder with what CRIU has written.
pub(super) const IMAGE_FOLDER: &str = "images";
/// The file that CRIU writes last.
const INVENTORY_FILE: &str = "inventory.img";
/// The folder with the logs of the last checkpoint or restore that failed.
const LOG_FOLDER: &str = "memory-log";

/// Properties of a snapshot with memory.
const RUNTIME_PROPERTY: &str = "runtime";
pub(super) const RUNTIME_ID_PROPERTY: &str = "runtime.id";
pub(super) const RUNTIME_ROOT_PROPERTY: &str = "runtime.root";
pub(super) const BUNDLE_PROPERTY: &str = "runtime.bundle";
pub(super) const MOUNT_PROPERTY: &str = "runtime.mount";

/// A snapshot with memory that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenMemory {
    /// The snapshot of the disk.
    pub snapshot: TakenSnapshot,
    /// How long the processes were paused in all.
    pub paused: Duration,
    /// How long CRIU took.
    pub memory: Duration,
    /// How long it took to make the memory durable.
    pub sync: Duration,
    /// Bytes of the memory.
    pub memory_bytes: u64,
}

/// The folders of a snapshot with memory that is being made. They are deleted on drop, unless it is complete.
struct NewMemory {
    partial: PathBuf,
    complete: PathBuf,
    name: String,
    log: PathBuf,
    /// A snapshot lists the folder, or may list it.
    is_listed: bool,
}

impl NewMemory {
    fn make(place: &ContainerPlace, config: &[u8]) -> Result<Self> {
        let name = new_memory_folder()?;
        let complete = place.folder.join(&name);
        let new = Self {
            partial: place.folder.join(format!("{name}{MEMORY_PARTIAL_SUFFIX}")),
            log: make_log_folder(place)?,
            complete,
            name,
            is_listed: false,
        };
        make_folder(&new.partial)?;
        make_folder(&new.images())?;
        let path = new.partial.join(CONFIG_FILE);
        // It is synced with the rest of the folder.
        let written = File::create_new(&path).and_then(|mut file| file.write_all(config));
        written.map_err(|source| file_error("write", &path, source))?;
        Ok(new)
    }

    fn images(&self) -> PathBuf {
        self.partial.join(IMAGE_FOLDER)
    }

    /// Makes the folder durable, under its final name. Returns its bytes.
    fn complete(&self) -> Result<u64> {
        let failed = |source| file_error("sync", &self.partial, source);
        if !self.images().join(INVENTORY_FILE).is_file() {
            return Err(memory_error(
                MemoryProblem::Checkpoint,
                format!("CRIU has reported success, and has written no {INVENTORY_FILE}"),
            ));
        }
        let bytes = sync_tree(&self.partial).map_err(failed)?;
        rename_durably(&self.partial, &self.complete).map_err(failed)?;
        Ok(bytes)
    }
}

/// Whether a snapshot of the container lists the memory `name`; also if that cannot be found out.
fn may_be_listed(place: &ContainerPlace, name: &str) -> bool {
    let is_name = |value: &String| value == name;
    ContainerTree::open(&place.folder).map_or(true, |tree| {
        let mut snapshots = tree.snapshots().into_iter();
        snapshots.any(|(_, entry)| entry.properties.get(MEMORY_PROPERTY).is_some_and(is_name))
    })
}

impl Drop for NewMemory {
    fn drop(&mut self) {
        if !self.is_listed {
            // A leftover is deleted when the container is opened again.
            std::fs::remove_dir_all(&self.partial).ok();
            std::fs::remove_dir_all(&self.complete).ok();
        }
    }
}

pub(super) fn file_error(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::File {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Only the owner may read the memory of processes.
fn make_folder(path: &Path) -> Result<()> {
    let made = std::fs::DirBuilder::new().mode(0o700).create(path);
    made.map_err(|source| file_error("create", path, source))
}

pub(super) fn make_log_folder(place: &ContainerPlace) -> Result<PathBuf> {
    let path = place.folder.join(LOG_FOLDER);
    match std::fs::remove_dir_all(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(file_error("replace", &path, error)),
        _ => make_folder(&path).map(|()| path),
    }
}

/// Syncs a folder with its files and the folders in it; returns the bytes.
fn sync_tree(folder: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            bytes += sync_tree(&entry.path())?;
        } else if kind.is_file() {
            let file = File::open(entry.path())?;
            file.sync_all()?;
            bytes += file.metadata()?.len();
        }
    }
    File::open(folder)?.sync_all()?;
    Ok(bytes)
}

/// What the preflight has found.
struct Checked {
    versions: RuntimeVersions,
    state: RuntimeState,
    /// Where the disk is mounted.
    point: PathBuf,
    config: Vec<u8>,
}

/// Checks everything that can be checked before something is touched.
fn preflight(place: &ContainerPlace, request: &SnapshotRequest, runtime: &RuntimeRequest<'_>) -> Result<Checked> {
    let tree = ContainerTree::open(&place.folder).map_err(|error| Error::from(error).on(&place.folder))?;
    tree.check_new_name(request.name.as_deref())?;
    let versions = runtime.check_programs()?;
    let Some(state) = runtime.state()? else {
        return Err(memory_error(
            MemoryProblem::NotRunning,
            format!("runc knows no container {}", runtime.id),
        ));
    };
    if state.status != "running" {
        return Err(memory_error(
            MemoryProblem::NotRunning,
            format!("the container {} of runc is {}", runtime.id, state.status),
        ));
    }
    let points = place.mount_points();
    if points.is_empty() {
        return Err(ContainerError::NotMounted {
            container: place.folder.clone(),
        }
        .into());
    }
    let rootfs = state.rootfs.canonicalize().unwrap_or_else(|_| state.rootfs.clone());
    // Another file system may be mounted below the mount point.
    let mounts = Mounts::read()?;
    let is_on = |point: &PathBuf| mounts.point_of(&rootfs) == Some(point);
    let Some(point) = points.into_iter().find(is_on) else {
        return Err(memory_error(
            MemoryProblem::OtherDisk,
            format!(
                "the root file system of {}, {}, is not on the disk of {}",
                runtime.id,
                rootfs.display(),
                place.folder.display()
            ),
        ));
    };
    check_text(&[
        &place.folder,
        &state.bundle,
        &point,
        runtime.root.as_deref().unwrap_or(Path::new("")),
    ])?;
    let config = state.bundle.join(CONFIG_FILE);
    Ok(Checked {
        config: std::fs::read(&config).map_err(|source| file_error("read", &config, source))?,
        versions,
        state,
        point,
    })
}

/// Paths are recorded in the snapshot, and are arguments of runc.
fn check_text(paths: &[&Path]) -> Result<()> {
    match paths.iter().find(|path| path.to_str().is_none()) {
        None => Ok(()),
        Some(path) => Err(memory_error(
            MemoryProblem::NoText,
            format!("the path {} is not valid UTF-8", path.display()),
        )),
    }
}

/// Takes a snapshot of the disk of a container, with the memory and the configuration of its processes, which are
/// paused meanwhile and run on afterwards.
///
/// # Errors
/// runc or CRIU cannot do it, or a step fails: there is no snapshot then, and the processes run on.
pub fn take_memory_snapshot(
    place: &ContainerPlace,
    request: &SnapshotRequest,
    runtime: &RuntimeRequest<'_>,
    job: Job<'_>,
) -> Result<TakenMemory> {
    let taken = PauseLock::take(place);
    if taken.is_err() {
        // Without a mounted container there is no lock, and the preflight names what else is missing.
        preflight(place, request, runtime)?;
    }
    let Some(lock) = taken? else {
        return Err(memory_error(
            MemoryProblem::Busy,
            format!(
                "another snapshot with memory of {} is being taken",
                place.folder.display()
            ),
        ));
    };
    if let Some(ended) = lock.end_abandoned(runtime.tools) {
        ended.result?;
    }
    let checked = preflight(place, request, runtime)?;
    let mut new = NewMemory::make(place, &checked.config)?;
    // What is written here needs not be written while the processes wait.
    let folder = File::open(&checked.point).map_err(|source| file_error("open", &checked.point, source))?;
    rustix::fs::syncfs(&folder).map_err(|errno| file_error("sync", &checked.point, errno.into()))?;
    lock.note(runtime)?;
    let start = job.clock.now();
    // A pause that fails may have paused some of the processes.
    let taken = runtime
        .pause()
        .and_then(|()| take_paused(place, request, runtime, &checked, &mut new, job));
    let resumed = runtime.resume();
    let paused = job.clock.now().saturating_sub(start);
    // After a failed pause nothing may be paused, and a failed resume says nothing. The worker ends what is left.
    if resumed.is_ok() || !may_be_paused(runtime) {
        lock.resolve();
    }
    let mut taken = taken?;
    resumed?;
    std::fs::remove_dir_all(&new.log).ok();
    taken.paused = paused;
    Ok(taken)
}

/// What is done while the processes are paused.
fn take_paused(
    place: &ContainerPlace,
    request: &SnapshotRequest,
    runtime: &RuntimeRequest<'_>,
    checked: &Checked,
    new: &mut NewMemory,
    job: Job<'_>,
) -> Result<TakenMemory> {
    let start = job.clock.now();
    runtime.checkpoint(CriuFolders {
        images: &new.images(),
        work: &new.log,
    })?;
    let dumped = job.clock.now();
    let memory_bytes = new.complete()?;
    let synced = job.clock.now();
    job.interrupt.check()?;
    let text = |path: &Path| path.display().to_string();
    let mut request = request.clone();
    request.properties.extend(BTreeMap::from([
        (MEMORY_PROPERTY.to_owned(), new.name.clone()),
        (
            RUNTIME_PROPERTY.to_owned(),
            format!("runc {}, CRIU {}", checked.versions.runc, checked.versions.criu),
        ),
        (RUNTIME_ID_PROPERTY.to_owned(), runtime.id.clone()),
        (BUNDLE_PROPERTY.to_owned(), text(&checked.state.bundle)),
        (MOUNT_PROPERTY.to_owned(), text(&checked.point)),
    ]));
    if let Some(root) = &runtime.root {
        let root = (RUNTIME_ROOT_PROPERTY.to_owned(), text(root));
        request.properties.extend([root]);
    }
    let taken = take_mounted_snapshot(place, &request, job.clock);
    // A worker that has ended may have taken it before.
    new.is_listed = taken.is_ok() || may_be_listed(place, &new.name);
    let snapshot = taken?;
    Ok(TakenMemory {
        snapshot,
        paused: Duration::ZERO,
        memory: dumped.saturating_sub(start),
        sync: synced.saturating_sub(dumped),
        memory_bytes,
    })
}
