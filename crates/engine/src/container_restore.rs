//! Restores a container from a snapshot: as a new container, or the files of its file system as a directory or tar.
//!
//! Files are read by the kernel of this host, from the disk in the snapshot, mounted read-only. Since a file system can
//! be made to attack the kernel that mounts it, this is only done for snapshots of containers, whose file systems this
//! or another host of the user has mounted before, and only by these functions. `files restore` reads file systems
//! without the kernel.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::BlockDevice;
use holdfast_image::{ContainerLock, Format, LiveChain, LiveOptions, NewContainer, create_container};
use holdfast_repo::{DiskRecord, Manifest, Repository, TargetState};
use jiff::tz::TimeZone;

use crate::capture::container::ContainerConfiguration;
use crate::container::{ServedFileSystem, create_complete, find_file_system, with_served_file_system};
use crate::container_content::{FillReport, PackReport, PackRootOptions, copy_root, pack_root};
use crate::job::error::ContainerError;
use crate::job::{Job, Result, Unit};
use crate::notes::{NOTE_CONSISTENCY, NOTE_CONTAINER, STREAM_CONTAINER};
use crate::repository::open::find_snapshot;
use crate::repository::snapshot_name::SnapshotName;
use crate::restore::small_stream::bytes_of;
use crate::restore::target::{DiskTarget, RestoredDisk};

/// A snapshot of a container.
pub struct StoredContainer {
    /// The snapshot.
    pub snapshot: Manifest,
    disk: DiskRecord,
    configuration: ContainerConfiguration,
}

/// A new container to restore to.
#[derive(Debug, Clone)]
pub struct ContainerTarget {
    /// Its folder, which must not exist.
    pub folder: PathBuf,
    /// The format of its layers; by default that of the container in the snapshot.
    pub format: Option<Format>,
}

/// What the files of a snapshot are read with.
pub struct ContainerFiles<'a> {
    /// The folder for mount points.
    pub runtime: PathBuf,
    /// Starts a process that serves a disk, named `SNAPSHOT:DISK`, in a folder, and waits until it does.
    pub serve: &'a dyn Fn(&Path, &str) -> Result<()>,
}

impl StoredContainer {
    /// Finds the snapshot `name`.
    ///
    /// # Errors
    /// There is no such snapshot, or it is not of a container.
    pub fn find(repository: &Repository, name: &SnapshotName, zone: &TimeZone, job: Job<'_>) -> Result<Self> {
        let snapshot = find_snapshot(repository, &name.snapshot, zone, job.progress)?;
        let is_of_container = |disk: &&DiskRecord| disk.notes.contains_key(NOTE_CONTAINER);
        let disk = snapshot.disks.iter().find(is_of_container).cloned();
        let configuration = snapshot
            .disks
            .iter()
            .find(|disk| disk.name == STREAM_CONTAINER)
            .cloned();
        let (Some(disk), Some(configuration)) = (disk, configuration) else {
            return Err(ContainerError::NotOfContainer {
                machine: snapshot.machine.clone(),
                snapshot: snapshot.id.short(),
            }
            .into());
        };
        Ok(Self {
            configuration: ContainerConfiguration::decode(&bytes_of(repository, &configuration)?)?,
            disk,
            snapshot,
        })
    }

    /// Size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.disk.size_bytes
    }

    /// The format of the layers of a container that is restored to `target`.
    pub fn format_of(&self, target: &ContainerTarget) -> Format {
        target.format.unwrap_or(self.configuration.format)
    }

    /// Restores it as a new container with one layer. It appears under its name when it is complete.
    ///
    /// # Errors
    /// The folder exists, the snapshot is damaged, or a file cannot be written. Nothing is left then.
    pub fn restore_container(
        &self,
        repository: &Repository,
        target: &ContainerTarget,
        job: Job<'_>,
    ) -> Result<RestoredDisk> {
        self.begin("restoring", job);
        job.progress.total(self.disk.size_bytes);
        let restored = create_complete(&target.folder, |partial| {
            let on = |error: holdfast_image::Error| crate::Error::from(error).on(partial);
            let new = NewContainer {
                size_bytes: self.disk.size_bytes,
                format: self.format_of(target),
                properties: self.configuration.properties.clone(),
            };
            create_container(partial, &new).map_err(on)?;
            let lock = ContainerLock::take(partial).map_err(on)?;
            let chain = LiveChain::open(partial, LiveOptions::default()).map_err(on)?;
            let disk = DiskTarget {
                path: &target.folder,
                device: &chain,
                state: TargetState::Zeroed,
                format: None,
            };
            let restored = disk.write(repository, &self.disk, job)?;
            drop(chain);
            drop(lock);
            Ok(restored)
        });
        restored.map_err(|error| error.unless_removed(repository, self.snapshot.id))
    }

    /// Copies its files to the directory `to`, which is created if it does not exist, and must be empty.
    ///
    /// # Errors
    /// The disk has no file system that can be mounted, or a file cannot be written.
    pub fn restore_directory(
        &self,
        repository: &Repository,
        to: &Path,
        files: &ContainerFiles<'_>,
        job: Job<'_>,
    ) -> Result<FillReport> {
        self.begin("restoring files of", job);
        self.with_files(repository, files, job, |root| copy_root(root, to, job))
    }

    /// Writes its files to a tar archive.
    ///
    /// # Errors
    /// The disk has no file system that can be mounted, or the output cannot be written.
    pub fn restore_tar(
        &self,
        repository: &Repository,
        output: &mut dyn Write,
        files: &ContainerFiles<'_>,
        job: Job<'_>,
    ) -> Result<PackReport> {
        self.begin("restoring files of", job);
        self.with_files(repository, files, job, |root| {
            pack_root(root, output, PackRootOptions::default(), job)
        })
    }

    fn begin(&self, doing: &str, job: Job<'_>) {
        job.progress
            .phase(&format!("{doing} {}", self.snapshot.machine), Unit::Bytes);
    }

    fn with_files<T>(
        &self,
        repository: &Repository,
        files: &ContainerFiles<'_>,
        job: Job<'_>,
        work: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        let device: Arc<dyn BlockDevice> = Arc::new(repository.device_checking_prints(&self.disk));
        let file_system = find_file_system(Arc::clone(&device), Path::new(&self.snapshot.machine))?;
        if self
            .snapshot
            .notes
            .get(NOTE_CONSISTENCY)
            .is_some_and(|state| state == "crash")
        {
            job.progress.warning(
                "the file system was not frozen for this snapshot, and its journal is not replayed: files that were written at that time may be missing or incomplete",
            );
        }
        let served = ServedFileSystem {
            file_system,
            file: &format!("{}.raw", self.disk.name),
            runtime: &files.runtime,
            serve: &|folder: &Path| (files.serve)(folder, &format!("{}:{}", self.snapshot.id, self.disk.name)),
        };
        with_served_file_system(&served, job, work)
    }
}
