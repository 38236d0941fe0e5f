//! `restore`: restores disks of a snapshot to files, block devices or a stream.

use std::io::Write;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{BlockDeviceMut, IoMode};
use holdfast_image::{CreateOptions, Error as ImageError, Format, OpenOptions};
use holdfast_repo::{DiskContent, DiskRecord, Environment, Manifest, Repository, SnapshotDevice, TargetState};
use jiff::tz::TimeZone;

use super::dry_run::UnwrittenTarget;
use super::stored_memory::{MEMORY_STREAM, StoredMemory};
use super::target::DiskTarget;
pub use super::target::RestoredDisk;
use crate::SnapshotName;
use crate::files::atomic_file::{Existing, NewFile};
use crate::files::block_target::LockedDevice;
use crate::files::ordered_stream::write_to_stream;
use crate::files::room::warn_of_missing_room;
use crate::image::sector_size::{kept_sector, noted_sector, warn_of_lost_sector, warn_of_other_sectors};
use crate::job::{DiskName, Error, Job, Result, Unit};
use crate::notes::{NOTE_FORMAT, is_part_of_memory};
use crate::repository::forget::Execution;
use crate::repository::only_disk::only_disk;
use crate::repository::open::find_snapshot;

/// What to restore, and the target.
pub struct RestoreRequest<'a> {
    /// The snapshot, or one of its disks.
    pub name: SnapshotName,
    /// The target.
    pub target: RestoreTarget<'a>,
    /// How existing content at the target is treated.
    pub mode: RestoreMode,
    /// Whether data is written. A dry run only reads the snapshot and the target.
    pub execution: Execution,
    /// The format of the target. By default the file name decides for new files, and the content for existing ones.
    pub format: Option<Format>,
    /// The time zone of times in the snapshot's name.
    pub zone: TimeZone,
}

/// The target of a restore.
pub enum RestoreTarget<'a> {
    /// A file, a block device, or a folder that receives one file per disk.
    Path(PathBuf),
    /// A stream that receives the bytes of one disk.
    Stream(&'a mut dyn Write),
}

/// How existing content at the target is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoreMode {
    /// Fail if the target exists: only new files are created.
    #[default]
    New,
    /// Replace an existing file once the new one is complete; overwrite a whole block device.
    Replace,
    /// Write only the ranges that differ.
    InPlace,
}

/// What was restored.
#[derive(Debug, Clone)]
pub struct RestoreReport {
    /// The snapshot that was restored.
    pub snapshot: Manifest,
    /// The restored disks.
    pub disks: Vec<RestoredDisk>,
    /// How long the restore took.
    pub duration: Duration,
}

/// Restores disks of a snapshot; all data is durable when this returns.
///
/// A new file gets its final name when it is complete. A target that is changed in place holds a mixture of old and new
/// content until then; repeating the restore completes it.
pub fn restore(
    repository: &Repository,
    request: RestoreRequest<'_>,
    environment: &Environment,
    job: Job<'_>,
) -> Result<RestoreReport> {
    let start = job.clock.now();
    let snapshot = find_snapshot(repository, &request.name.snapshot, &request.zone, job.progress)?;
    let disks = restore_from(&snapshot, repository, request, environment, job);
    Ok(RestoreReport {
        disks: disks.map_err(|error| error.unless_removed(repository, snapshot.id))?,
        duration: job.clock.now().saturating_sub(start),
        snapshot,
    })
}

fn restore_from(
    snapshot: &Manifest,
    repository: &Repository,
    request: RestoreRequest<'_>,
    environment: &Environment,
    job: Job<'_>,
) -> Result<Vec<RestoredDisk>> {
    let disks = chosen_disks(snapshot, request.name.disk.as_ref())?;
    job.progress
        .phase(&format!("restoring {}", snapshot.machine), Unit::Bytes);
    job.progress.total(disks.iter().map(|disk| disk.size_bytes).sum());
    let path = match request.target {
        RestoreTarget::Stream(stream) => return Ok(vec![to_stream(repository, only_disk(&disks)?, stream, job)?]),
        RestoreTarget::Path(path) => path,
    };
    let restorer = Restorer {
        repository,
        environment,
        job,
        mode: request.mode,
        execution: request.execution,
        format: request.format,
    };
    match request.name.disk {
        None if path.is_dir() => restorer.to_paths(disks, &path, StoredMemory::open(repository, snapshot)?),
        _ => restorer.to_paths(disks, &path, None),
    }
}

/// A disk of a snapshot, to be read.
pub struct OpenedDisk {
    /// The snapshot.
    pub snapshot: Manifest,
    /// The name of the disk.
    pub name: String,
    /// Its content. A block that is read and is not as it was stored is an error.
    pub device: SnapshotDevice,
}

/// Opens a disk of a snapshot; without a name, the only one.
///
/// # Errors
/// There is no such snapshot, or it has several disks.
pub fn open_snapshot_disk(
    repository: &Repository,
    name: &SnapshotName,
    zone: &TimeZone,
    job: Job<'_>,
) -> Result<OpenedDisk> {
    let snapshot = find_snapshot(repository, &name.snapshot, zone, job.progress)?;
    let record = only_disk(&chosen_disks(&snapshot, name.disk.as_ref())?)?;
    Ok(OpenedDisk {
        name: record.name.clone(),
        device: repository.device_checking_prints(record),
        snapshot,
    })
}

fn chosen_disks<'m>(snapshot: &'m Manifest, disk: Option<&DiskName>) -> Result<Vec<&'m DiskRecord>> {
    match disk {
        Some(name) => Ok(vec![snapshot.disk(Some(name.as_str()))?]),
        None => Ok(snapshot.disks.iter().collect()),
    }
}

/// The target of each disk: `path` itself, or `DISK.FORMAT` in the existing folder `path`. A file that was stored
/// beside the disks keeps its name.
fn placed<'m>(disks: &[&'m DiskRecord], path: &Path, format: Option<Format>) -> Result<Vec<(&'m DiskRecord, PathBuf)>> {
    let extension = format.unwrap_or(Format::Raw);
    if !path.is_dir() {
        return Ok(vec![(only_disk(disks)?, path.to_owned())]);
    }
    let place = |disk: &&'m DiskRecord| {
        // The snapshot's writer chose the name: it must not point outside the folder.
        let name = DiskName::new(disk.name.as_str())?;
        Ok((
            *disk,
            path.join(if is_file(disk) {
                name.to_string()
            } else {
                format!("{name}.{extension}")
            }),
        ))
    };
    disks.iter().map(place).collect()
}

/// Whether the record is a file of the machine and not a disk: `domain.xml`.
fn is_file(disk: &DiskRecord) -> bool {
    disk.content == DiskContent::Stream && disk.name.contains('.')
}

/// Writes a disk to a stream, from start to end.
fn to_stream(repository: &Repository, disk: &DiskRecord, stream: &mut dyn Write, job: Job<'_>) -> Result<RestoredDisk> {
    let device = repository.device_checking_prints(disk);
    write_to_stream(&device, stream, job)?;
    Ok(RestoredDisk {
        name: disk.name.clone(),
        target: None,
        size_bytes: disk.size_bytes,
        written_bytes: disk.size_bytes,
        equal_bytes: 0,
        zero_bytes: 0,
    })
}

/// The format that the extension of a file names.
fn named_format(path: &Path) -> Option<Format> {
    let extension = path.extension().and_then(std::ffi::OsStr::to_str)?;
    Format::from_name(&extension.to_ascii_lowercase())
}

/// The format of a file that is changed in place, by its content and name. An image whose header is lost would be taken
/// for a raw disk, and no machine would start from the result. A disk that was raw when it was backed up stays raw: its
/// guest may have written a header of another format.
fn format_in_place(disk: &DiskRecord, path: &Path) -> Result<Format> {
    let found = holdfast_image::detect(path).map_err(|error| damaged(path, error))?;
    let named = named_format(path);
    let before = disk
        .notes
        .get(NOTE_FORMAT)
        .filter(|before| *before == Format::Raw.name());
    match (before, named) {
        (Some(before), _) if found != Format::Raw && named != Some(found) => Err(Error::FormatChanged {
            path: path.to_owned(),
            before: before.clone(),
            now: found.to_string(),
        }),
        (_, Some(named)) if found == Format::Raw && named != Format::Raw => Err(Error::TargetNotAnImage {
            path: path.to_owned(),
            format: named,
        }),
        _ => Ok(found),
    }
}

fn damaged(path: &Path, error: holdfast_image::Error) -> Error {
    if error.is_corrupt() || matches!(error, holdfast_image::Error::NotWritable { .. }) {
        Error::TargetDamaged {
            path: path.to_owned(),
            source: Box::new(error),
        }
    } else {
        error.into()
    }
}

fn image_of(format: Format) -> OpenOptions {
    OpenOptions {
        format: Some(format),
        ..OpenOptions::default()
    }
}

/// How a disk is written to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DiskPlace {
    /// To a new file.
    NewFile(Existing, Format),
    /// Into the existing file.
    File(Format),
    /// To the existing block device.
    BlockDevice(TargetState),
}

struct Restorer<'a> {
    repository: &'a Repository,
    environment: &'a Environment,
    job: Job<'a>,
    mode: RestoreMode,
    execution: Execution,
    format: Option<Format>,
}

impl Restorer<'_> {
    /// Restores disks to a file, to a block device or into a folder, and the memory into that folder.
    fn to_paths(
        &self,
        mut disks: Vec<&DiskRecord>,
        path: &Path,
        memory: Option<StoredMemory>,
    ) -> Result<Vec<RestoredDisk>> {
        disks.retain(|disk| memory.is_none() || !is_part_of_memory(disk));
        // All refusals come before the first byte is written.
        let places = placed(&disks, path, self.format)?
            .into_iter()
            .map(|(disk, path)| Ok((disk, self.place(disk, &path)?, path)));
        let places: Vec<(&DiskRecord, DiskPlace, PathBuf)> = places.collect::<Result<_>>()?;
        let stream = path.join(MEMORY_STREAM);
        let existing = match self.mode {
            RestoreMode::New if memory.is_some() && stream.symlink_metadata().is_ok() => {
                return Err(Error::TargetExists { path: stream });
            }
            RestoreMode::New => Existing::Keep,
            RestoreMode::Replace | RestoreMode::InPlace => Existing::Replace,
        };
        let restore = |(disk, place, path): &(&DiskRecord, DiskPlace, PathBuf)| {
            let restored = match self.execution {
                Execution::Execute => self.to_path(disk, *place, path),
                Execution::DryRun => self.to_nothing(disk, *place, path),
            };
            restored.map_err(|error| error.on(path))
        };
        let mut restored = places.iter().map(restore).collect::<Result<Vec<_>>>()?;
        if let Some(memory) = memory {
            restored.push(match self.execution {
                Execution::Execute => memory.to_file(&stream, existing, self.environment, self.job)?,
                Execution::DryRun => memory.to_nothing(&stream, self.job)?,
            });
        }
        if self.execution == Execution::DryRun && self.mode != RestoreMode::InPlace {
            let files = restored
                .iter()
                .filter_map(|disk| Some((disk.target.as_deref()?, disk.written_bytes)));
            warn_of_missing_room(files, "the restore", self.job.progress);
        }
        Ok(restored)
    }

    /// Decides how to write to `path`; refuses to overwrite data without a request.
    fn place(&self, disk: &DiskRecord, path: &Path) -> Result<DiskPlace> {
        let found = match std::fs::metadata(path) {
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => None,
            other => Some(other.map_err(|source| Error::File {
                action: "open",
                path: path.to_owned(),
                source,
            })?),
        };
        let is_block_device = found.as_ref().is_some_and(|found| found.file_type().is_block_device());
        let path_owned = || path.to_owned();
        let place = match (self.mode, found) {
            (RestoreMode::New, Some(_)) if is_block_device => return Err(Error::DeviceExists { path: path_owned() }),
            (RestoreMode::New, Some(_)) => return Err(Error::TargetExists { path: path_owned() }),
            (RestoreMode::InPlace, None) => return Err(Error::NoTarget { path: path_owned() }),
            (RestoreMode::Replace, Some(_)) if is_block_device => DiskPlace::BlockDevice(TargetState::Unknown),
            (RestoreMode::InPlace, Some(_)) if is_block_device => DiskPlace::BlockDevice(TargetState::Similar),
            (RestoreMode::InPlace, Some(_)) => DiskPlace::File(match self.format {
                Some(format) => format,
                None => format_in_place(disk, path)?,
            }),
            (RestoreMode::New, None) => DiskPlace::NewFile(Existing::Keep, self.new_format(disk, path)?),
            (RestoreMode::Replace, _) => DiskPlace::NewFile(Existing::Replace, self.new_format(disk, path)?),
        };
        let format = match place {
            DiskPlace::NewFile(_, format) | DiskPlace::File(format) => format,
            DiskPlace::BlockDevice(_) => self.format.unwrap_or(Format::Raw),
        };
        match (place, format) {
            (_, Format::Raw) => Ok(place),
            (DiskPlace::NewFile(..) | DiskPlace::File(_), format) if Format::SUPPORTED.contains(&format) => Ok(place),
            (_, format) => Err(Error::TargetFormat {
                path: path_owned(),
                format: format.to_string(),
            }),
        }
    }

    /// The format of a new file; by default the one its name says. A raw disk in a file named .qcow2 would not start.
    fn new_format(&self, disk: &DiskRecord, path: &Path) -> Result<Format> {
        match self.format {
            _ if is_file(disk) => Ok(Format::Raw),
            Some(format) => Ok(format),
            None => Ok(Format::of_new_file(path)?),
        }
    }

    /// The options for opening an existing image. If its format is detected from its content, no other files are
    /// opened.
    fn image_at(&self, path: &Path, format: Format) -> OpenOptions {
        match self.format {
            None if path.is_file() => OpenOptions::default(),
            _ => image_of(format),
        }
    }

    fn to_path(&self, disk: &DiskRecord, place: DiskPlace, path: &Path) -> Result<RestoredDisk> {
        match place {
            DiskPlace::BlockDevice(state) => {
                let target = LockedDevice::open(path, IoMode::LargeDirect)?;
                warn_of_other_sectors(&*target, noted_sector(&disk.notes), &disk.name, self.job.progress);
                let restored = self.to_device(disk, path, &*target, state)?;
                target.check_alone()?;
                Ok(restored)
            }
            DiskPlace::File(Format::Raw) => {
                let target = LockedDevice::open(path, IoMode::Buffered)?;
                self.to_device(disk, path, &*target, TargetState::Similar)
            }
            DiskPlace::File(format) => {
                let options = self.image_at(path, format);
                let target = holdfast_image::open_mut(path, &options).map_err(|error| damaged(path, error))?;
                self.to_device(disk, path, &target, TargetState::Similar)
            }
            DiskPlace::NewFile(existing, Format::Raw) => {
                warn_of_lost_sector(noted_sector(&disk.notes), &disk.name, self.job.progress);
                let file = NewFile::begin(path, existing, self.environment)?;
                file.report_cleared(self.job.progress);
                let target = file.create_sparse(disk.size_bytes)?;
                let restored = self.to_device(disk, path, &target, TargetState::Zeroed)?;
                file.finish()?;
                Ok(restored)
            }
            DiskPlace::NewFile(existing, format) => {
                let file = NewFile::begin(path, existing, self.environment)?;
                file.report_cleared(self.job.progress);
                let mut options = CreateOptions::new(format, disk.size_bytes)
                    .with_final_path(path)
                    .of_whole_sectors();
                let sector_bytes = noted_sector(&disk.notes);
                options.blocks.sector_bytes =
                    kept_sector(format, disk.size_bytes, sector_bytes, &disk.name, self.job.progress);
                holdfast_image::create(file.partial(), &options).map_err(|error| does_not_fit(error, disk, format))?;
                let target = holdfast_image::open_mut(file.partial(), &image_of(format))?;
                let restored = self.to_device(disk, path, &target, TargetState::Zeroed)?;
                drop(target);
                file.finish()?;
                Ok(restored)
            }
        }
    }

    /// Counts what [`Restorer::to_path`] would write.
    fn to_nothing(&self, disk: &DiskRecord, place: DiskPlace, path: &Path) -> Result<RestoredDisk> {
        let (target, state) = match place {
            DiskPlace::NewFile(..) => (UnwrittenTarget::new_file(disk.size_bytes), TargetState::Zeroed),
            DiskPlace::BlockDevice(state) => (UnwrittenTarget::raw(path)?, state),
            DiskPlace::File(Format::Raw) => (UnwrittenTarget::raw(path)?, TargetState::Similar),
            DiskPlace::File(format) => {
                let options = self.image_at(path, format);
                (UnwrittenTarget::image(path, &options)?, TargetState::Similar)
            }
        };
        let target = DiskTarget {
            path,
            device: &target,
            state,
            format: None,
        };
        target.count(self.repository, disk, self.job)
    }

    fn to_device(
        &self,
        disk: &DiskRecord,
        path: &Path,
        device: &dyn BlockDeviceMut,
        state: TargetState,
    ) -> Result<RestoredDisk> {
        let target = DiskTarget {
            path,
            device,
            state,
            format: None,
        };
        target.write(self.repository, disk, self.job)
    }
}

/// Reports a disk size that the format does not support as an error of the disk, not of the command line.
fn does_not_fit(error: ImageError, disk: &DiskRecord, format: Format) -> Error {
    match error {
        ImageError::InvalidOption { option: "size", detail } => Error::DiskDoesNotFit {
            size_bytes: disk.size_bytes,
            format: format.to_string(),
            detail,
        },
        other => other.into(),
    }
}
