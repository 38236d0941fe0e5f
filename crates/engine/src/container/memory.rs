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

use holdfast_block::{rename_durably, sync_folder_of};
use holdfast_image::{
    ContainerLock, ContainerTree, LiveChain, LiveOptions, MEMORY_PARTIAL_SUFFIX, MEMORY_PROPERTY, is_memory_folder,
    new_memory_folder, plan_switch,
};

use super::attach::mount_points;
use super::change::{SnapshotRequest, TakenSnapshot, take_snapshot_with};
use super::pause::PauseNote;
use super::place::ContainerPlace;
use super::runtime::{CriuFolders, RuntimeRequest, RuntimeState, RuntimeVersions, memory_error};
use crate::job::error::{ContainerError, MemoryProblem};
use crate::job::{Error, Job, Result};

/// The configuration of the container, in the folder with its memory.
const CONFIG_FILE: &str = "config.json";
/// The folder with what CRIU has written.
const IMAGE_FOLDER: &str = "images";
/// The folder with the logs of the last checkpoint or restore that failed.
const LOG_FOLDER: &str = "memory-log";

/// Properties of a snapshot with memory.
const RUNTIME_PROPERTY: &str = "runtime";
const RUNTIME_ID_PROPERTY: &str = "runtime.id";
const RUNTIME_ROOT_PROPERTY: &str = "runtime.root";
const BUNDLE_PROPERTY: &str = "runtime.bundle";
const MOUNT_PROPERTY: &str = "runtime.mount";

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
        let bytes = sync_tree(&self.partial).map_err(failed)?;
        rename_durably(&self.partial, &self.complete).map_err(failed)?;
        Ok(bytes)
    }
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

fn file_error(action: &'static str, path: &Path, source: std::io::Error) -> Error {
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

fn make_log_folder(place: &ContainerPlace) -> Result<PathBuf> {
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
    let points = mount_points(&place.disk_file());
    if points.is_empty() {
        return Err(ContainerError::NotMounted {
            container: place.folder.clone(),
        }
        .into());
    }
    let rootfs = state.rootfs.canonicalize().unwrap_or_else(|_| state.rootfs.clone());
    let Some(point) = points.into_iter().find(|point| rootfs.starts_with(point)) else {
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
    let config = state.bundle.join(CONFIG_FILE);
    Ok(Checked {
        config: std::fs::read(&config).map_err(|source| file_error("read", &config, source))?,
        versions,
        state,
        point,
    })
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
    let checked = preflight(place, request, runtime)?;
    let mut new = NewMemory::make(place, &checked.config)?;
    // What is written here needs not be written while the processes wait.
    let folder = File::open(&checked.point).map_err(|source| file_error("open", &checked.point, source))?;
    rustix::fs::syncfs(&folder).map_err(|errno| file_error("sync", &checked.point, errno.into()))?;
    let note = PauseNote::write(place, runtime)?;
    let start = job.clock.now();
    // A pause that fails may have paused some of the processes.
    let taken = runtime
        .pause()
        .and_then(|()| take_paused(place, request, runtime, &checked, &new, job));
    let resumed = runtime.resume();
    let paused = job.clock.now().saturating_sub(start);
    let mut taken = match (taken, resumed) {
        (Ok(taken), Ok(())) => taken,
        (Err(error), _) => {
            // After a failed pause nothing may be paused, so a failed resume tells nothing.
            if runtime.state()?.is_some_and(|state| state.status == "paused") {
                note.keep();
            }
            return Err(error);
        }
        (Ok(_), Err(error)) => {
            // The worker tries again.
            new.is_listed = true;
            note.keep();
            return Err(error);
        }
    };
    new.is_listed = true;
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
    new: &NewMemory,
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
    let mut properties = BTreeMap::from([
        (MEMORY_PROPERTY.to_owned(), new.name.clone()),
        (
            RUNTIME_PROPERTY.to_owned(),
            format!("runc {}, CRIU {}", checked.versions.runc, checked.versions.criu),
        ),
        (RUNTIME_ID_PROPERTY.to_owned(), runtime.id.clone()),
        (BUNDLE_PROPERTY.to_owned(), text(&checked.state.bundle)),
        (MOUNT_PROPERTY.to_owned(), text(&checked.point)),
    ]);
    if let Some(root) = &runtime.root {
        properties.insert(RUNTIME_ROOT_PROPERTY.to_owned(), text(root));
    }
    let snapshot = take_snapshot_with(place, request, properties, job)?;
    Ok(TakenMemory {
        snapshot,
        paused: Duration::ZERO,
        memory: dumped.saturating_sub(start),
        sync: synced.saturating_sub(dumped),
        memory_bytes,
    })
}

/// A container to start from the memory of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumePlan {
    /// The name of the snapshot.
    pub snapshot: String,
    /// Where its disk has to be mounted.
    pub folder: PathBuf,
    /// The name of the container for runc.
    pub id: String,
    /// The folder with the state of runc, if not its default.
    pub root: Option<PathBuf>,
    /// The folder with the configuration.
    pub bundle: PathBuf,
    /// The folder with the memory.
    memory: PathBuf,
}

/// What the user says about a container to resume; the rest is as in the snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResumeChoice {
    /// The name of the container for runc.
    pub id: Option<String>,
    /// The folder with the state of runc.
    pub root: Option<PathBuf>,
    /// A folder whose configuration is used, whatever it is.
    pub bundle: Option<PathBuf>,
}

/// Finds out what has to be done to resume the processes of the snapshot that the container was switched to.
///
/// # Errors
/// The container is mounted, its current state is not that of a snapshot with memory, or the configuration has changed.
pub fn plan_resume(place: &ContainerPlace, choice: &ResumeChoice) -> Result<ResumePlan> {
    let on = |error: holdfast_image::Error| Error::from(error).on(&place.folder);
    if ContainerLock::is_held(&place.folder).map_err(on)? {
        return Err(ContainerError::Mounted {
            container: place.folder.clone(),
        }
        .into());
    }
    let tree = ContainerTree::open(&place.folder).map_err(on)?;
    let base = tree.chain_of(tree.top()).get(1).map(|layer| layer.id);
    let found = tree.snapshots().into_iter().find(|(id, _)| Some(*id) == base);
    let no_memory = || {
        memory_error(
            MemoryProblem::NoMemory,
            format!("{} is not at a snapshot with memory", place.folder.display()),
        )
    };
    let (id, entry) = found.ok_or_else(no_memory)?;
    let property = |key: &str| entry.properties.get(key).cloned();
    let memory = property(MEMORY_PROPERTY).filter(|name| is_memory_folder(name));
    let memory = place.folder.join(memory.ok_or_else(no_memory)?);
    if plan_switch(&place.folder, id).map_err(on)?.written_bytes > 0 {
        return Err(memory_error(
            MemoryProblem::DiskChanged,
            format!(
                "the disk of {} was written after the switch to {}: it does not fit the memory any more",
                place.folder.display(),
                tree.name_of(id)
            ),
        ));
    }
    let recorded = property(BUNDLE_PROPERTY).map(PathBuf::from);
    let bundle = match (&choice.bundle, recorded) {
        (Some(bundle), _) => bundle.clone(),
        (None, Some(bundle)) => {
            check_config(&bundle, &memory)?;
            bundle
        }
        (None, None) => return Err(no_memory()),
    };
    Ok(ResumePlan {
        snapshot: tree.name_of(id),
        folder: property(MOUNT_PROPERTY).map(PathBuf::from).ok_or_else(no_memory)?,
        id: choice
            .id
            .clone()
            .or_else(|| property(RUNTIME_ID_PROPERTY))
            .ok_or_else(no_memory)?,
        root: choice
            .root
            .clone()
            .or_else(|| property(RUNTIME_ROOT_PROPERTY).map(PathBuf::from)),
        bundle,
        memory,
    })
}

fn check_config(bundle: &Path, memory: &Path) -> Result<()> {
    let recorded = memory.join(CONFIG_FILE);
    let wanted = std::fs::read(&recorded).map_err(|source| file_error("read", &recorded, source))?;
    if std::fs::read(bundle.join(CONFIG_FILE)).is_ok_and(|current| current == wanted) {
        return Ok(());
    }
    Err(memory_error(
        MemoryProblem::ConfigChanged,
        format!(
            "{} is missing or not the one of the snapshot, {}",
            bundle.join(CONFIG_FILE).display(),
            recorded.display()
        ),
    ))
}

/// Checks that runc and CRIU can resume `plan`, and lets runc forget a container of this name that has ended.
///
/// # Errors
/// They cannot, or a container of this name runs.
pub fn check_resume(plan: &ResumePlan, runtime: &RuntimeRequest<'_>) -> Result<()> {
    runtime.check_programs()?;
    match runtime.state()? {
        None => Ok(()),
        Some(state) if state.status == "stopped" => runtime.forget(),
        Some(state) => Err(memory_error(
            MemoryProblem::IdInUse,
            format!("the container {} of runc is {}", plan.id, state.status),
        )),
    }
}

/// Starts the processes of `plan` from their memory; its disk is mounted. Returns how long it took.
///
/// # Errors
/// runc or CRIU has failed.
pub fn restore_memory(
    place: &ContainerPlace,
    plan: &ResumePlan,
    runtime: &RuntimeRequest<'_>,
    job: Job<'_>,
) -> Result<Duration> {
    let start = job.clock.now();
    let log = make_log_folder(place)?;
    let folders = CriuFolders {
        images: &plan.memory.join(IMAGE_FOLDER),
        work: &log,
    };
    runtime.restore(&plan.bundle, folders, job.clock)?;
    std::fs::remove_dir_all(&log).ok();
    sync_folder_of(&log).ok();
    Ok(job.clock.now().saturating_sub(start))
}

/// Puts the disk, which a mount has changed, back to the snapshot of `plan`, so that the resume can be repeated.
///
/// # Errors
/// The container is in use.
pub fn return_to_memory(place: &ContainerPlace, plan: &ResumePlan) -> Result<()> {
    let on = |error: holdfast_image::Error| Error::from(error).on(&place.folder);
    let lock = ContainerLock::take(&place.folder).map_err(on)?;
    drop(LiveChain::open(&place.folder, LiveOptions::default()).map_err(on)?);
    let tree = ContainerTree::open(&place.folder).map_err(on)?;
    let id = tree.find_snapshot(&plan.snapshot).map_err(on)?;
    holdfast_image::switch(&place.folder, id, &holdfast_image::CurrentState::Discard).map_err(on)?;
    drop(lock);
    Ok(())
}
