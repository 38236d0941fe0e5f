//! Creates containers with a file system.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::BlockDeviceMut as _;
use holdfast_host::Tools;
use holdfast_host::fuse_mount::MountAccess;
use holdfast_image::{ContainerLock, Format, LiveChain, LiveOptions, NewContainer};
use holdfast_serve::fuse::MountEvents;

use super::attach::{FileSystemKind, find_file_system};
use super::temporary::ServedDisk;
use crate::job::{Error, Job, Result};

/// How the name of a folder ends in which a container is made; it begins with a dot.
pub(crate) const PARTIAL_ENDING: &str = ".holdfast-new";

/// A container to create.
pub struct CreateContainerRequest<'a> {
    /// Its folder, which must not exist.
    pub folder: PathBuf,
    /// Size of its disk.
    pub size_bytes: u64,
    /// The format of its layers: qcow2 or Parallels.
    pub format: Format,
    /// The file system to create; without one the disk is empty.
    pub file_system: Option<FileSystemKind>,
    /// Facts to record.
    pub properties: BTreeMap<String, String>,
    /// The folder for mount points.
    pub runtime: PathBuf,
    /// Runs the programs of file systems.
    pub tools: &'a dyn Tools,
    /// Receives errors of reads and writes.
    pub events: Arc<dyn MountEvents>,
}

/// The result of [`create_container`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateContainerReport {
    /// Its folder.
    pub folder: PathBuf,
    /// Size of its disk.
    pub size_bytes: u64,
    /// The format of its layers.
    pub format: Format,
    /// Its file system.
    pub file_system: Option<FileSystemKind>,
}

/// Creates a container, and fills its root folder with `fill`. It appears under its name when it is complete.
///
/// # Errors
/// The folder exists, or a step fails; nothing is left then.
pub fn create_container(
    request: &CreateContainerRequest<'_>,
    fill: Option<&mut dyn FnMut(&Path) -> Result<BTreeMap<String, String>>>,
    job: Job<'_>,
) -> Result<CreateContainerReport> {
    create_complete(&request.folder, |partial| create_at(partial, request, fill, job))?;
    Ok(CreateContainerReport {
        folder: request.folder.clone(),
        size_bytes: request.size_bytes,
        format: request.format,
        file_system: request.file_system,
    })
}

/// Lets `make` create a container in a temporary folder, which then gets its name. After an error nothing is left.
///
/// # Errors
/// The folder exists, or `make` fails.
pub(crate) fn create_complete<T>(folder: &Path, make: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let failed = |action: &'static str, source: std::io::Error| Error::File {
        action,
        path: folder.to_owned(),
        source,
    };
    if folder.symlink_metadata().is_ok() {
        return Err(failed("create", std::io::ErrorKind::AlreadyExists.into()));
    }
    let partial = partial_of(folder);
    // What a killed process has left.
    remove_partial(&partial).map_err(|error| failed("replace", error))?;
    let made = make(&partial);
    if made.is_err() {
        remove_partial(&partial).ok();
    }
    let made = made?;
    holdfast_block::rename_durably(&partial, folder).map_err(|error| failed("create", error))?;
    Ok(made)
}

/// The folder in which a container is made.
fn partial_of(folder: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(folder.file_name().unwrap_or_default());
    name.push(PARTIAL_ENDING);
    folder.with_file_name(name)
}

fn remove_partial(partial: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(partial) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn create_at(
    folder: &Path,
    request: &CreateContainerRequest<'_>,
    fill: Option<&mut dyn FnMut(&Path) -> Result<BTreeMap<String, String>>>,
    job: Job<'_>,
) -> Result<()> {
    let on = |error: holdfast_image::Error| Error::from(error).on(folder);
    let mut properties = request.properties.clone();
    if let Some(kind) = request.file_system {
        properties.insert("filesystem".to_owned(), kind.name().to_owned());
    }
    let new = NewContainer {
        size_bytes: request.size_bytes,
        format: request.format,
        properties: properties.clone(),
    };
    holdfast_image::create_container(folder, &new).map_err(on)?;
    let Some(kind) = request.file_system else {
        return Ok(());
    };
    let lock = ContainerLock::take(folder).map_err(on)?;
    let chain = Arc::new(LiveChain::open(folder, LiveOptions::default()).map_err(on)?);
    let disk = ServedDisk::writable(&request.runtime, Arc::clone(&chain) as _, Arc::clone(&request.events))?;
    kind.make(&disk.file(), request.tools)?;
    if let Some(fill) = fill {
        let found = find_file_system(Arc::clone(&chain) as _, folder)?;
        let facts = disk.with_file_system(found, MountAccess::Writable, fill)?;
        properties.extend(facts);
    }
    disk.end(job)?;
    chain.flush()?;
    chain.set_properties(properties).map_err(on)?;
    drop(lock);
    Ok(())
}
