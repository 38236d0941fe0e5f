//! Creates a container whose disk is that of a template.
//!
//! As in a pull, nothing is used before the signature was verified, and the container appears under its name only after
//! all of its content was compared with the signed digests.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _};
use holdfast_image::{ContainerLock, Format, LiveChain, LiveOptions, NewContainer, check_new_container};
use holdfast_repo::Repository;

use super::checked::CheckedDevice;
use super::entry::Entry;
use super::index::TemplateIndex;
use super::label::TemplateReference;
use super::pull::vouched;
use super::statement::Statement;
use super::trust::{SignedBy, Trust, Unsigned};
use crate::capture::container::ContainerConfiguration;
use crate::container::{FileSystemKind, GROW_PROPERTY, check_new_folder, create_complete, find_file_system};
use crate::image::convert::fill_zeroed;
use crate::job::error::ContainerError;
use crate::job::{Error, Job, Result, Unit};
use crate::notes::STREAM_CONTAINER;
use crate::repository::forget::Execution;
use crate::repository::removed::keep_readable;

/// A container to create from a template with one disk.
#[derive(Debug, Clone)]
pub struct TemplateContainerRequest {
    /// The template.
    pub template: TemplateReference,
    /// What to do with an unsigned template.
    pub unsigned: Unsigned,
    /// The folder of the container, which must not exist.
    pub folder: PathBuf,
    /// Size of its disk; that of the template's disk if not given.
    pub size_bytes: Option<u64>,
    /// The format of its layers.
    pub format: Format,
    /// Whether anything is written. A plan does not read the disk.
    pub execution: Execution,
}

/// A container that was created from a template.
#[derive(Debug, Clone)]
pub struct TemplateContainer {
    /// The statement of the template.
    pub statement: Statement,
    /// Its signer.
    pub signed: SignedBy,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Its file system, if this host can mount it.
    pub file_system: Option<FileSystemKind>,
}

/// Creates a container from a template, or plans that. Its file system grows to the size of the disk with the first
/// mount.
///
/// # Errors
/// The template has no trusted signature or several disks, its content differs from the signed one, the size is too
/// small, or the folder exists. Nothing is left then.
pub fn create_container_from_template(
    repository: &Repository,
    request: &TemplateContainerRequest,
    trust: &Trust<'_>,
    job: Job<'_>,
) -> Result<TemplateContainer> {
    // First of all, so that every template that is found stays readable.
    let is_written = request.execution == Execution::Execute;
    let _pause = is_written.then(|| keep_readable(repository, job.progress));
    let index = TemplateIndex::read(repository)?;
    index.warn_of_unreadable(job.progress);
    let entry = index.find(&request.template, Some(trust))?;
    let signed = vouched(entry, trust, request.unsigned, job)?;
    let new = NewDisk::plan(repository, entry, request, job)?;
    match request.execution {
        Execution::DryRun => new.check()?,
        Execution::Execute => create_complete(&request.folder, |partial| new.create(partial, job))?,
    }
    Ok(TemplateContainer {
        statement: entry.statement.clone(),
        signed,
        size_bytes: new.container.size_bytes,
        file_system: new.file_system,
    })
}

/// The disk of the new container.
struct NewDisk<'a> {
    repository: &'a Repository,
    entry: &'a Entry,
    request: &'a TemplateContainerRequest,
    container: NewContainer,
    file_system: Option<FileSystemKind>,
}

impl<'a> NewDisk<'a> {
    fn plan(
        repository: &'a Repository,
        entry: &'a Entry,
        request: &'a TemplateContainerRequest,
        job: Job<'_>,
    ) -> Result<Self> {
        let piece = entry.only_disk(&request.folder)?;
        let size_bytes = request.size_bytes.unwrap_or(piece.size_bytes);
        let size_bytes = size_bytes.checked_next_multiple_of(512).unwrap_or(u64::MAX);
        if size_bytes < piece.size_bytes {
            return Err(Error::TargetTooSmall {
                path: request.folder.clone(),
                target_bytes: size_bytes,
                disk_bytes: piece.size_bytes,
            });
        }
        let mut properties = match entry.file(STREAM_CONTAINER, repository)? {
            Some(bytes) => ContainerConfiguration::decode(&bytes)?.properties,
            None => BTreeMap::new(),
        };
        let label = &entry.statement.label;
        properties.insert(
            "source".to_owned(),
            format!("template {label}@{}", entry.statement.content().short()),
        );
        let record = entry.manifest.disk(Some(piece.name.as_str()))?;
        let disk: Arc<dyn BlockDevice> = Arc::new(repository.device_checking_prints(record));
        let file_system = match find_file_system(disk, &request.folder) {
            Ok(found) => {
                let is_grown = size_bytes > piece.size_bytes;
                if is_grown && found.partition_bytes.is_some() {
                    job.progress
                        .warning("the file system is in a partition, which does not grow with the disk");
                } else if is_grown {
                    properties.insert(GROW_PROPERTY.to_owned(), size_bytes.to_string());
                }
                properties.insert("filesystem".to_owned(), found.kind.name().to_owned());
                Some(found.kind)
            }
            Err(Error::Container(error)) if matches!(*error, ContainerError::NoFileSystem { .. }) => {
                job.progress
                    .warning(&format!("{error}: the container can only be mounted with --disk"));
                None
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            repository,
            entry,
            request,
            container: NewContainer {
                size_bytes,
                format: request.format,
                properties,
            },
            file_system,
        })
    }

    fn check(&self) -> Result<()> {
        check_new_folder(&self.request.folder)?;
        check_new_container(&self.container).map_err(|error| Error::from(error).on(&self.request.folder))
    }

    fn create(&self, partial: &std::path::Path, job: Job<'_>) -> Result<()> {
        let on = |error: holdfast_image::Error| Error::from(error).on(partial);
        let piece = self.entry.only_disk(partial)?;
        let stored = self
            .repository
            .device_checking_prints(self.entry.manifest.disk(Some(piece.name.as_str()))?);
        let checked = CheckedDevice::new(&stored);
        holdfast_image::create_container(partial, &self.container).map_err(on)?;
        let _lock = ContainerLock::take(partial).map_err(on)?;
        let chain = LiveChain::open(partial, LiveOptions::default()).map_err(on)?;
        job.progress.phase("writing the disk of the container", Unit::Bytes);
        job.progress.total(piece.size_bytes);
        fill_zeroed(&checked, &chain, job)?;
        checked.check_end(piece)?;
        Ok(chain.flush()?)
    }
}
