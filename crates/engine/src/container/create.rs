//! Creates containers with a file system.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use holdfast_host::{Answer, ToolError, Tools};
use holdfast_image::{ContainerLock, Format, LiveChain, LiveOptions, NewContainer};
use rustix::fs::{Access, AtFlags, CWD};

use super::attach::FileSystemKind;
use super::place::{ContainerPlace, DISK_FILE, MOUNT_PREFIX};
use super::serve::{ContainerMounter, MountedDisk, unmount_container};
use crate::job::error::ContainerError;
use crate::job::{Error, Job, Result};

/// Fills the root folder of a new container, and returns facts to record.
pub type RootFiller<'a> = dyn FnMut(&Path) -> Result<BTreeMap<String, String>> + 'a;
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
    /// Mounts the container.
    pub mount: &'a ContainerMounter<'a>,
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
    fill: Option<&mut RootFiller<'_>>,
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

/// Checks what [`create_container`] needs: the name, the size, and the program that creates the file system. Nothing is
/// created.
///
/// # Errors
/// Those that [`create_container`] would find at once.
pub fn check_create(request: &CreateContainerRequest<'_>) -> Result<()> {
    check_new_folder(&request.folder)?;
    let new = NewContainer {
        size_bytes: request.size_bytes,
        format: request.format,
        properties: BTreeMap::new(),
    };
    holdfast_image::check_new_container(&new).map_err(|error| Error::from(error).on(&request.folder))?;
    match request.file_system {
        Some(kind) => kind.make(Path::new(""), &VersionQuery(request.tools)),
        None => Ok(()),
    }
}

/// Checks that [`create_complete`] can create `folder`.
pub(crate) fn check_new_folder(folder: &Path) -> Result<()> {
    check_absent(folder)?;
    let failed = |path: &Path, source| Error::File {
        action: "create a folder in",
        path: path.to_owned(),
        source,
    };
    let parent = folder.parent().unwrap_or(Path::new("/"));
    rustix::fs::accessat(CWD, parent, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
        .map_err(|error| failed(parent, error.into()))?;
    if !parent.is_dir() {
        return Err(failed(parent, std::io::ErrorKind::NotADirectory.into()));
    }
    Ok(())
}

/// Asks programs for their version instead of running them with their arguments.
struct VersionQuery<'a>(&'a dyn Tools);

impl Tools for VersionQuery<'_> {
    fn ask(&self, program: &str, _: &[&str]) -> std::result::Result<Answer, ToolError> {
        self.0.ask(program, &["-V"])
    }
}

fn check_absent(folder: &Path) -> Result<()> {
    if folder.symlink_metadata().is_err() {
        return Ok(());
    }
    Err(ContainerError::Exists {
        folder: folder.to_owned(),
    }
    .into())
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
    check_absent(folder)?;
    let partial = partial_of(folder);
    // Its disk is mounted. Without its files, that could not be unmounted any more.
    if ContainerLock::is_held(&partial).unwrap_or(false) {
        return Err(ContainerError::BeingCreated {
            folder: folder.to_owned(),
        }
        .into());
    }
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
    fill: Option<&mut RootFiller<'_>>,
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
    let place = ContainerPlace::find(folder, &request.runtime)?;
    let mounted = TemporaryMount::new(&place, request, job)?;
    mounted.with(MountedDisk::File, |point| {
        kind.make(&point.join(DISK_FILE), request.tools)
    })?;
    if let Some(fill) = fill {
        let facts = mounted.with(MountedDisk::FileSystem, fill)?;
        properties.extend(facts);
        let lock = ContainerLock::take(folder).map_err(on)?;
        let chain = LiveChain::open(folder, LiveOptions::default()).map_err(on)?;
        chain.set_properties(properties).map_err(on)?;
        drop((chain, lock));
    }
    Ok(())
}

/// Mounts a container in a folder of this process alone.
struct TemporaryMount<'a> {
    place: &'a ContainerPlace,
    mount: &'a ContainerMounter<'a>,
    job: Job<'a>,
    folder: tempfile::TempDir,
}

impl<'a> TemporaryMount<'a> {
    fn new(place: &'a ContainerPlace, request: &'a CreateContainerRequest<'_>, job: Job<'a>) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix(MOUNT_PREFIX)
            .tempdir_in(&request.runtime)
            .map_err(|source| Error::File {
                action: "create a folder in",
                path: request.runtime.clone(),
                source,
            })?;
        Ok(Self {
            place,
            mount: request.mount,
            job,
            folder,
        })
    }

    /// Mounts the container while `work` runs.
    fn with<T>(&self, disk: MountedDisk, work: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        (self.mount)(self.place, self.folder.path(), disk)?;
        let done = work(self.folder.path());
        let unmounted = unmount_container(self.place, self.job);
        let done = done?;
        if unmounted?.is_complete {
            return Ok(done);
        }
        Err(ContainerError::InUse {
            folder: self.folder.path().to_owned(),
        }
        .into())
    }
}
