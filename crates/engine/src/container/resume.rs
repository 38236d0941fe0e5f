//! The resume of the processes of a container from the memory of a snapshot.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::sync_folder_of;
use holdfast_image::{
    ContainerLock, ContainerTree, LiveChain, LiveOptions, MEMORY_PROPERTY, is_memory_folder, plan_switch,
};

use super::memory::{
    BUNDLE_PROPERTY, CONFIG_FILE, IMAGE_FOLDER, MOUNT_PROPERTY, RUNTIME_ID_PROPERTY, RUNTIME_ROOT_PROPERTY, file_error,
    make_log_folder,
};
use super::place::ContainerPlace;
use super::runtime::{CriuFolders, RuntimeRequest, RuntimeState, memory_error};
use crate::job::error::{ContainerError, MemoryProblem};
use crate::job::{Error, Job, Result};

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
    match ended_container(plan, runtime)? {
        None => Ok(()),
        Some(_) => runtime.forget(),
    }
}

/// Checks what [`check_resume`] checks, and changes nothing.
///
/// # Errors
/// Those of [`check_resume`].
pub fn preview_resume(plan: &ResumePlan, runtime: &RuntimeRequest<'_>) -> Result<()> {
    ended_container(plan, runtime).map(drop)
}

/// The container of the name in `plan`, if runc knows one that has ended.
fn ended_container(plan: &ResumePlan, runtime: &RuntimeRequest<'_>) -> Result<Option<RuntimeState>> {
    runtime.check_programs()?;
    match runtime.state()? {
        Some(state) if state.status != "stopped" => Err(memory_error(
            MemoryProblem::IdInUse,
            format!("the container {} of runc is {}", plan.id, state.status),
        )),
        state => Ok(state),
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
