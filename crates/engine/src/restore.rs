//! `restore`: from a snapshot to files, block devices or a stream.

use std::io::Write;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, FileDeviceMut, IoMode, to_usize};
use holdfast_image::Format;
use holdfast_repo::{DiskRecord, Manifest, Repository, Surroundings, TargetState};
use jiff::tz::TimeZone;

use crate::error::{Error, Result};
use crate::job::{Counting, Job};
use crate::new_file::{Existing, NewFile};
use crate::repository::find_snapshot;
use crate::{DiskName, SnapshotName, Unit};

/// What to restore, and where to.
pub struct RestoreRequest<'a> {
    /// The snapshot, and perhaps one of its disks.
    pub name: SnapshotName,
    /// Where to.
    pub target: Target<'a>,
    /// What to do about what is there.
    pub mode: RestoreMode,
    /// Whether a file at the target that looks like another format is a raw disk all the same.
    pub trust_raw: TrustRaw,
    /// In which times of the snapshot's name are meant.
    pub zone: TimeZone,
}

/// Where to restore to.
pub enum Target<'a> {
    /// A file, a block device, or a folder that gets one file per disk.
    Path(PathBuf),
    /// A stream that gets the bytes of one disk.
    Stream(&'a mut dyn Write),
}

/// What to do about what is at the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RestoreMode {
    /// Refuse it: only new files are made.
    #[default]
    New,
    /// Replace a file when the new one is complete; write all of a block device.
    Replace,
    /// Change it where it differs.
    InPlace,
}

/// Whether the format of a target is known without looking at its content, which its guest decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrustRaw {
    /// Look at it, and refuse to write a disk over the structure of an image.
    #[default]
    No,
    /// It is raw, whatever it looks like.
    Yes,
}

/// What was restored.
#[derive(Debug, Clone)]
pub struct RestoreReport {
    /// The snapshot.
    pub snapshot: Manifest,
    /// Each disk.
    pub disks: Vec<RestoredDisk>,
    /// How long it took.
    pub duration: Duration,
}

/// A disk that was restored.
#[derive(Debug, Clone)]
pub struct RestoredDisk {
    /// Its name.
    pub name: String,
    /// Where it is now; none for a stream.
    pub target: Option<PathBuf>,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes that the target had already.
    pub equal_bytes: u64,
    /// Bytes of zero, written or not.
    pub zero_bytes: u64,
}

/// Restores disks of a snapshot; all of it is durable when this returns.
///
/// A new file gets its name when it is complete; one that is changed in place is a mixture until then, and restoring again
/// completes it.
pub fn restore(
    repository: &Repository,
    request: RestoreRequest<'_>,
    surroundings: &Surroundings,
    job: Job<'_>,
) -> Result<RestoreReport> {
    let start = job.clock.now();
    let snapshot = find_snapshot(repository, &request.name.snapshot, &request.zone, job.progress)?;
    let disks = chosen_disks(&snapshot, request.name.disk.as_ref())?;
    job.progress
        .phase(&format!("restoring {}", snapshot.machine), Unit::Bytes);
    job.progress.total(disks.iter().map(|disk| disk.size_bytes).sum());
    let restored = match request.target {
        Target::Stream(stream) => vec![to_stream(repository, only(&disks)?, stream, job)?],
        Target::Path(path) => {
            let placed = placed(&disks, &path)?;
            let restorer = Restorer {
                repository,
                surroundings,
                job,
                mode: request.mode,
                trust_raw: request.trust_raw,
            };
            // All refusals come before the first byte is written.
            placed.iter().try_for_each(|(_, path)| restorer.check(path))?;
            let restore = |(disk, path): (&DiskRecord, PathBuf)| restorer.to_path(disk, &path);
            placed.into_iter().map(restore).collect::<Result<_>>()?
        }
    };
    Ok(RestoreReport {
        disks: restored,
        duration: job.clock.now().saturating_sub(start),
        snapshot,
    })
}

fn chosen_disks<'m>(snapshot: &'m Manifest, disk: Option<&DiskName>) -> Result<Vec<&'m DiskRecord>> {
    match disk {
        Some(name) => Ok(vec![snapshot.disk(Some(name.as_str()))?]),
        None => Ok(snapshot.disks.iter().collect()),
    }
}

/// The only disk; an error that names them where there are several.
fn only<'m>(disks: &[&'m DiskRecord]) -> Result<&'m DiskRecord> {
    match disks {
        [disk] => Ok(disk),
        _ => Err(Error::SeveralDisks {
            disks: disks.iter().map(|disk| disk.name.clone()).collect(),
        }),
    }
}

/// Where each disk goes: to `path` itself, or as `DISK.raw` into the folder `path`, which must exist.
fn placed<'m>(disks: &[&'m DiskRecord], path: &Path) -> Result<Vec<(&'m DiskRecord, PathBuf)>> {
    if !path.is_dir() {
        return Ok(vec![(only(disks)?, path.to_owned())]);
    }
    let place = |disk: &&'m DiskRecord| {
        // Whoever wrote the snapshot chose the name: it must not lead out of the folder.
        let name = DiskName::new(disk.name.as_str())?;
        Ok((*disk, path.join(format!("{name}.raw"))))
    };
    disks.iter().map(place).collect()
}

/// Writes a disk to a stream from its start to its end.
fn to_stream(repository: &Repository, disk: &DiskRecord, stream: &mut dyn Write, job: Job<'_>) -> Result<RestoredDisk> {
    const STEP_BYTES: u64 = 1 << 20;
    let device = repository.device(disk);
    let mut buffer = vec![0; to_usize(STEP_BYTES)];
    let mut offset = 0;
    while offset < disk.size_bytes {
        job.interrupt.check()?;
        let step = STEP_BYTES.min(disk.size_bytes - offset);
        let bytes = &mut buffer[..to_usize(step)];
        device.read_at(bytes, offset)?;
        stream.write_all(bytes).map_err(Error::Stdout)?;
        job.progress.advance(step);
        offset += step;
    }
    stream.flush().map_err(Error::Stdout)?;
    Ok(RestoredDisk {
        name: disk.name.clone(),
        target: None,
        size_bytes: disk.size_bytes,
        written_bytes: disk.size_bytes,
        equal_bytes: 0,
        zero_bytes: 0,
    })
}

/// What there is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    File,
    BlockDevice,
}

struct Restorer<'a> {
    repository: &'a Repository,
    surroundings: &'a Surroundings,
    job: Job<'a>,
    mode: RestoreMode,
    trust_raw: TrustRaw,
}

impl Restorer<'_> {
    fn find(path: &Path) -> Result<Found> {
        match std::fs::metadata(path) {
            Ok(metadata) if metadata.file_type().is_block_device() => Ok(Found::BlockDevice),
            Ok(_) => Ok(Found::File),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(Found::Nothing),
            Err(source) => Err(Error::File {
                action: "open",
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Refuses what would lose something that nobody gave up.
    fn check(&self, path: &Path) -> Result<()> {
        let path_owned = || path.to_owned();
        match (self.mode, Self::find(path)?) {
            (RestoreMode::New, Found::Nothing)
            | (RestoreMode::Replace, _)
            | (RestoreMode::InPlace, Found::BlockDevice) => Ok(()),
            (RestoreMode::New, _) => Err(Error::TargetExists { path: path_owned() }),
            (RestoreMode::InPlace, Found::Nothing) => Err(Error::NoTarget { path: path_owned() }),
            (RestoreMode::InPlace, Found::File) => {
                let format = match self.trust_raw {
                    TrustRaw::Yes => Format::Raw,
                    TrustRaw::No => holdfast_image::detect(path)?,
                };
                match format {
                    Format::Raw => Ok(()),
                    other => Err(Error::TargetFormat {
                        path: path_owned(),
                        format: other.to_string(),
                    }),
                }
            }
        }
    }

    fn to_path(&self, disk: &DiskRecord, path: &Path) -> Result<RestoredDisk> {
        match (self.mode, Self::find(path)?) {
            (RestoreMode::InPlace, _) => {
                let target = FileDeviceMut::open(path, IoMode::Buffered)?;
                self.to_device(disk, path, &target, TargetState::Similar)
            }
            (RestoreMode::Replace, Found::BlockDevice) => {
                let target = FileDeviceMut::open(path, IoMode::Buffered)?;
                self.to_device(disk, path, &target, TargetState::Unknown)
            }
            (mode, _) => {
                let existing = match mode {
                    RestoreMode::Replace => Existing::Replace,
                    _ => Existing::Keep,
                };
                let file = NewFile::begin(path, existing, self.surroundings)?;
                let target = file.create_sparse(disk.size_bytes)?;
                let restored = self.to_device(disk, path, &target, TargetState::Zeroed)?;
                file.finish()?;
                Ok(restored)
            }
        }
    }

    fn to_device(
        &self,
        disk: &DiskRecord,
        path: &Path,
        target: &dyn BlockDeviceMut,
        state: TargetState,
    ) -> Result<RestoredDisk> {
        let spare_bytes = target.size_bytes().saturating_sub(disk.size_bytes);
        let request = holdfast_repo::RestoreRequest {
            target,
            target_name: path.display().to_string(),
            state,
            thread_count: self.job.thread_count,
        };
        let device = self.repository.device(disk);
        let report = self
            .repository
            .restore(&device, &request, &self.job.watch(Counting::Bytes))?;
        if spare_bytes > 0 {
            self.job.progress.warning(&format!(
                "{} is larger than disk {}: its last {spare_bytes} bytes were left as they were",
                path.display(),
                disk.name
            ));
        }
        Ok(RestoredDisk {
            name: disk.name.clone(),
            target: Some(path.to_owned()),
            size_bytes: disk.size_bytes,
            written_bytes: report.written_bytes,
            equal_bytes: report.equal_bytes,
            zero_bytes: report.zero_bytes,
        })
    }
}
