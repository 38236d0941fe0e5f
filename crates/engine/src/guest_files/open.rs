//! From a snapshot to its volumes, and from a path to a file.

use std::io;
use std::sync::Arc;

use holdfast_guest_files::protocol::{ReaderProcess, RemoteFileSystem};
use holdfast_guest_files::{Content, DiskSource, FileSystem, Found, ResolvedPath, Volume, find_volumes, resolve_path};
use holdfast_host::ConfinedReader;
use holdfast_repo::{DiskContent, Manifest, Repository};
use jiff::tz::TimeZone;

use super::GuestAddress;
use crate::job::error::GuestFilesError;
use crate::job::{Error, Job, Result};
use crate::notes::is_memory;
use crate::repository::open::find_snapshot;

/// Starts the process that reads file systems.
pub type ReaderLauncher<'a> = &'a dyn Fn() -> io::Result<ConfinedReader>;

/// Errors list at most this many volumes.
const LISTED_MAX: usize = 20;

/// The volumes of a snapshot.
pub struct GuestVolumes<'a> {
    snapshot: Manifest,
    disks: Vec<DiskSource>,
    found: Found,
    /// The disk whose volumes are meant.
    disk: Option<String>,
    /// The volume that is meant.
    volume: Option<String>,
    launch: ReaderLauncher<'a>,
}

/// A file or directory of a guest that was found.
pub struct LocatedFiles {
    /// The volume, as a user can name it: `vda:1`.
    pub volume: String,
    /// The file system of the volume.
    pub file_system: Box<dyn FileSystem>,
    /// The file or directory.
    pub found: ResolvedPath,
}

/// Finds the volumes on the disks of the snapshot in `address`. All disks are searched, because a volume group can lie on
/// several.
pub fn open_guest_volumes<'a>(
    repository: &Repository,
    address: &GuestAddress,
    zone: &TimeZone,
    launch: ReaderLauncher<'a>,
    job: Job<'_>,
) -> Result<GuestVolumes<'a>> {
    let snapshot = find_snapshot(repository, &address.name.snapshot, zone, job.progress)?;
    let records = snapshot.disks.iter();
    let records = records.filter(|record| record.content == DiskContent::Blocks && !is_memory(record));
    let disks: Vec<DiskSource> = records
        .map(|record| DiskSource {
            name: record.name.clone(),
            device: Arc::new(repository.device(record)),
        })
        .collect();
    let found = find_volumes(&disks).map_err(|error| match error {
        holdfast_guest_files::Error::Device(error) => Error::from(error),
        other => read_error("", other),
    });
    let found = found.map_err(|error| error.unless_removed(repository, snapshot.id))?;
    let mut volumes = GuestVolumes {
        snapshot,
        disks,
        found,
        disk: None,
        volume: address.volume.clone(),
        launch,
    };
    if let Some(name) = &address.name.disk {
        let is_disk = volumes.disks.iter().any(|disk| disk.name == name.as_str());
        let is_volume = || volumes.found.volumes.iter().any(|volume| volume.name == name.as_str());
        if !is_disk && address.volume.is_none() && is_volume() {
            volumes.volume = Some(name.as_str().to_owned());
        } else {
            // A disk that does not exist is an error with the names of the others.
            volumes.snapshot.disk(Some(name.as_str()))?;
            volumes.disk = Some(name.as_str().to_owned());
        }
    }
    for note in &volumes.found.notes {
        job.progress.warning(note);
    }
    Ok(volumes)
}

fn read_error(volume: &str, source: holdfast_guest_files::Error) -> Error {
    GuestFilesError::Read {
        volume: volume.to_owned(),
        path: String::new(),
        source,
    }
    .into()
}

/// A volume as a user can name it: with its disk, unless it belongs to a volume group.
fn full_name(volume: &Volume) -> String {
    match volume.disks.first() {
        Some(disk) if !volume.name.contains('/') => format!("{disk}:{}", volume.name),
        _ => volume.name.clone(),
    }
}

impl GuestVolumes<'_> {
    /// The snapshot.
    pub fn snapshot(&self) -> &Manifest {
        &self.snapshot
    }

    /// The volumes that the address selects.
    pub fn volumes(&self) -> Vec<&Volume> {
        let volumes = self.found.volumes.iter();
        let on_disk = |volume: &&Volume| self.disk.as_ref().is_none_or(|disk| volume.disks.contains(disk));
        let meant = |volume: &&Volume| self.volume.as_ref().is_none_or(|name| volume.name == *name);
        volumes.filter(on_disk).filter(meant).collect()
    }

    /// Whether the address names a volume.
    pub fn has_volume(&self) -> bool {
        self.volume.is_some()
    }

    /// Opens the volume that has `path`. A note about a file system is passed to `job`.
    ///
    /// # Errors
    /// [`GuestFilesError`]: no volume or several volumes have the path, or the only one cannot be read.
    pub fn locate(&self, path: &[u8], job: Job<'_>) -> Result<LocatedFiles> {
        let volumes = self.volumes();
        if let Some(name) = &self.volume {
            return match volumes.as_slice() {
                [] => Err(GuestFilesError::NoVolume {
                    name: name.clone(),
                    present: self.found.volumes.iter().take(LISTED_MAX).map(full_name).collect(),
                }
                .into()),
                [volume] => self.locate_in(volume, path, job),
                several => Err(ambiguous(
                    name,
                    several.iter().map(|volume| full_name(volume)).collect(),
                )),
            };
        }
        if let [volume] = volumes.as_slice() {
            return self.locate_in(volume, path, job);
        }
        let mut located: Vec<LocatedFiles> = Vec::new();
        let mut unread = Vec::new();
        for volume in volumes {
            job.interrupt.check()?;
            if !volume.content.holds_files() && volume.unreadable.is_none() {
                continue;
            }
            match self.locate_in(volume, path, job) {
                Ok(found) => located.push(found),
                Err(Error::GuestFiles(error)) if is_absence(&error) => {}
                Err(error @ Error::GuestFiles(_)) => {
                    unread.push(format!("{}: {}", full_name(volume), why_unread(volume, &error)));
                }
                Err(error) => return Err(error),
            }
        }
        let shown = String::from_utf8_lossy(path).into_owned();
        match (located.pop(), located.len()) {
            (Some(found), 0) => Ok(found),
            (Some(last), _) => {
                let names = located.into_iter().chain([last]).map(|found| found.volume);
                Err(ambiguous(&shown, names.collect()))
            }
            (None, _) => Err(GuestFilesError::NoSuchPath { path: shown, unread }.into()),
        }
    }

    fn locate_in(&self, volume: &Volume, path: &[u8], job: Job<'_>) -> Result<LocatedFiles> {
        let name = full_name(volume);
        let mut file_system = self.open(volume, &name)?;
        let found = resolve_path(&mut *file_system, path).map_err(|source| GuestFilesError::Read {
            volume: name.clone(),
            path: String::from_utf8_lossy(path).into_owned(),
            source,
        })?;
        for note in file_system.notes() {
            job.progress.note(&format!("{name}: {note}"));
        }
        Ok(LocatedFiles {
            volume: name,
            file_system,
            found,
        })
    }

    fn open(&self, volume: &Volume, name: &str) -> Result<Box<dyn FileSystem>> {
        if let Some(reason) = &volume.unreadable {
            return Err(GuestFilesError::Unreadable {
                volume: name.to_owned(),
                reason: reason.0.clone(),
            }
            .into());
        }
        if !volume.content.is_readable() {
            let content = match volume.content {
                Content::Refused(what) => what.to_owned(),
                Content::Empty => "nothing".to_owned(),
                Content::Unknown => "nothing that is known".to_owned(),
                other => other.name().to_owned(),
            };
            return Err(GuestFilesError::NoReader {
                volume: name.to_owned(),
                content,
            }
            .into());
        }
        let process = (self.launch)().map_err(GuestFilesError::Launch)?;
        let device = Arc::new(volume.device(&self.disks));
        let opened = RemoteFileSystem::open(Box::new(GuestReader(process)), device, volume.content);
        Ok(Box::new(opened.map_err(|error| read_error(name, error))?))
    }
}

fn ambiguous(what: &str, candidates: Vec<String>) -> Error {
    GuestFilesError::Ambiguous {
        what: what.to_owned(),
        candidates,
    }
    .into()
}

/// Whether an error says that a readable volume does not have the path.
fn is_absence(error: &GuestFilesError) -> bool {
    use holdfast_guest_files::Error as ReadError;
    let GuestFilesError::Read { source, .. } = error else {
        return false;
    };
    matches!(source, ReadError::NotFound | ReadError::NotADirectory)
}

fn why_unread(volume: &Volume, error: &Error) -> String {
    match &volume.unreadable {
        Some(reason) => reason.0.clone(),
        None if volume.content.is_readable() => holdfast_block::error_text(error),
        None => volume.content.name().to_owned(),
    }
}

/// The process that reads a file system.
struct GuestReader(ConfinedReader);

impl io::Read for GuestReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl io::Write for GuestReader {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl ReaderProcess for GuestReader {
    fn end(&mut self, error: &io::Error) -> String {
        match (error.kind(), self.0.end()) {
            (io::ErrorKind::TimedOut, _) => "does not answer".to_owned(),
            (_, Some(ended)) => ended,
            (_, None) => format!("ended: {error}"),
        }
    }
}
