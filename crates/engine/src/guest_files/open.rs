//! From a snapshot to its volumes, and from a path to a file.

use std::sync::Arc;

use holdfast_guest_files::{
    Content, DiskSource, Error as ReadError, FileSystem, ResolvedPath, Volume, find_volumes, resolve_path,
};
use holdfast_repo::{DiskContent, Manifest, Repository};
use jiff::tz::TimeZone;

use super::GuestAddress;
use super::appliance::{ApplianceNeeds, StartedAppliance};
use super::readers::{GuestVolume, ReaderChoice, ReaderKind, ReaderOptions};
use crate::job::error::GuestFilesError;
use crate::job::{Error, Job, Result, Unit};
use crate::notes::is_memory;
use crate::repository::open::find_snapshot;

/// Errors list at most this many volumes.
const LISTED_MAX: usize = 20;

/// The volumes of a snapshot.
pub struct GuestVolumes<'a> {
    snapshot: Manifest,
    disks: Vec<DiskSource>,
    volumes: Vec<GuestVolume>,
    /// The disk whose volumes are meant.
    disk: Option<String>,
    /// The volume that is meant.
    volume: Option<String>,
    readers: &'a ReaderOptions<'a>,
    appliance: Option<Arc<StartedAppliance>>,
}

/// A file or directory of a guest that was found.
pub struct LocatedFiles {
    /// The volume, as a user can name it: `vda:1`.
    pub volume: String,
    /// What reads it.
    pub reader: ReaderKind,
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
    readers: &'a ReaderOptions<'a>,
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
    for note in &found.notes {
        job.progress.warning(note);
    }
    let local = found.volumes.into_iter().map(|volume| GuestVolume {
        volume,
        is_local: true,
        number: None,
        problem: None,
    });
    let mut volumes = GuestVolumes {
        snapshot,
        disks,
        volumes: local.collect(),
        disk: None,
        volume: address.volume.clone(),
        readers,
        appliance: None,
    };
    if readers.choice == ReaderChoice::Appliance {
        volumes.start_appliance(job)?;
    }
    if let Some(name) = &address.name.disk {
        let is_disk = volumes.disks.iter().any(|disk| disk.name == name.as_str());
        let is_volume = || volumes.volumes.iter().any(|volume| volume.volume.name == name.as_str());
        if !is_disk && address.volume.is_none() && (is_volume() || name.as_str().starts_with("md/")) {
            volumes.volume = Some(name.as_str().to_owned());
        } else {
            // A disk that does not exist is an error with the names of the others.
            volumes.snapshot.disk(Some(name.as_str()))?;
            volumes.disk = Some(name.as_str().to_owned());
        }
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

/// A volume as a user can name it: with its disk, unless it belongs to a volume group or an array.
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
    pub fn volumes(&self) -> Vec<&GuestVolume> {
        let volumes = self.volumes.iter();
        let on_disk = |volume: &&GuestVolume| {
            let disks = &volume.volume.disks;
            self.disk.as_ref().is_none_or(|disk| disks.contains(disk))
        };
        let meant = |volume: &&GuestVolume| self.volume.as_ref().is_none_or(|name| volume.volume.name == *name);
        volumes.filter(on_disk).filter(meant).collect()
    }

    /// Whether the address names a volume.
    pub fn has_volume(&self) -> bool {
        self.volume.is_some()
    }

    /// Looks into arrays, which only the appliance can assemble, for a list of volumes. Without an appliance the list
    /// has their members.
    pub fn look_into_arrays(&mut self, job: Job<'_>) -> Result<()> {
        let has_array = self
            .volumes
            .iter()
            .any(|volume| volume.volume.content == Content::MdMember);
        if self.readers.choice != ReaderChoice::Auto || !has_array {
            return Ok(());
        }
        match self.start_appliance(job) {
            Err(error @ Error::GuestFiles(_)) => {
                let reason = holdfast_block::error_text(&error);
                job.progress.warning(&format!("the arrays are not assembled: {reason}"));
                Ok(())
            }
            other => other,
        }
    }

    /// Starts the appliance, unless it runs, and adds what it found.
    fn start_appliance(&mut self, job: Job<'_>) -> Result<()> {
        if self.appliance.is_some() {
            return Ok(());
        }
        let has = |content: Content| self.volumes.iter().any(|volume| volume.volume.content == content);
        let needs = ApplianceNeeds {
            luks: has(Content::Luks),
            lvm: has(Content::LvmMember),
        };
        job.progress.phase("starting the appliance", Unit::Items);
        let started = StartedAppliance::start(&self.disks, needs, &self.readers.appliance)?;
        for note in &started.report.notes {
            job.progress.warning(note);
        }
        for (number, found) in (0..).zip(&started.report.volumes) {
            let known = self
                .volumes
                .iter_mut()
                .find(|volume| full_name(&volume.volume) == found.name);
            if let Some(known) = known {
                known.number = Some(number);
                known.problem.clone_from(&found.problem);
                if !known.volume.content.is_readable() {
                    known.volume.content = found.content;
                    known.volume.label.clone_from(&found.label);
                }
                continue;
            }
            let split = found.name.split_once(':');
            let (disks, name) = match split {
                Some((disk, name)) if !disk.contains('/') => (vec![disk.to_owned()], name.to_owned()),
                _ => (
                    self.disks.iter().map(|disk| disk.name.clone()).collect(),
                    found.name.clone(),
                ),
            };
            self.volumes.push(GuestVolume {
                volume: Volume {
                    disks,
                    name,
                    size_bytes: found.size_bytes,
                    content: found.content,
                    label: found.label.clone(),
                    unreadable: None,
                    segments: Vec::new(),
                },
                is_local: false,
                number: Some(number),
                problem: found.problem.clone(),
            });
        }
        self.appliance = Some(Arc::new(started));
        Ok(())
    }

    /// Whether there is something that only the appliance can look into.
    fn has_containers(&self) -> bool {
        let is_container = |volume: &GuestVolume| {
            let content = volume.volume.content;
            volume.volume.unreadable.is_some()
                || matches!(content, Content::MdMember | Content::Luks | Content::LvmMember)
        };
        self.appliance.is_none() && self.readers.choice == ReaderChoice::Auto && self.volumes.iter().any(is_container)
    }

    /// Opens the volume that has `path`. A note about a file system is passed to `job`.
    ///
    /// # Errors
    /// [`GuestFilesError`]: no volume or several volumes have the path, or the only one cannot be read.
    pub fn locate(&mut self, path: &[u8], job: Job<'_>) -> Result<LocatedFiles> {
        if let Some(name) = self.volume.clone() {
            if self.volumes().is_empty() && self.has_containers() {
                self.start_appliance(job)?;
            }
            let volumes: Vec<GuestVolume> = self.volumes().into_iter().cloned().collect();
            return match volumes.as_slice() {
                [] => Err(GuestFilesError::NoVolume {
                    name,
                    present: self
                        .volumes
                        .iter()
                        .take(LISTED_MAX)
                        .map(|volume| full_name(&volume.volume))
                        .collect(),
                }
                .into()),
                [volume] => self.locate_in(volume, path, job),
                several => Err(ambiguous(
                    &name,
                    several.iter().map(|volume| full_name(&volume.volume)).collect(),
                )),
            };
        }
        let volumes: Vec<GuestVolume> = self.volumes().into_iter().cloned().collect();
        if let [volume] = volumes.as_slice()
            && !matches!(volume.volume.content, Content::MdMember | Content::LvmMember)
        {
            return self.locate_in(volume, path, job);
        }
        self.search(path, job)
    }

    /// Searches all volumes that a process reads, and then those that only the appliance reads.
    fn search(&mut self, path: &[u8], job: Job<'_>) -> Result<LocatedFiles> {
        let mut located: Vec<LocatedFiles> = Vec::new();
        let mut unread = Vec::new();
        for pass in [ReaderKind::Process, ReaderKind::Appliance] {
            if pass == ReaderKind::Appliance {
                let choice = self.readers.choice;
                let is_left = self.volumes().iter().any(|volume| volume.reader(choice) == Some(pass));
                if !located.is_empty() || choice == ReaderChoice::Process || !(is_left || self.has_containers()) {
                    break;
                }
                if let Err(error) = self.start_appliance(job) {
                    let Error::GuestFiles(_) = &error else {
                        return Err(error);
                    };
                    if self.volumes().iter().all(|volume| !volume.is_for_process()) {
                        return Err(error);
                    }
                    unread.push(format!("the appliance: {}", holdfast_block::error_text(&error)));
                    break;
                }
            }
            for volume in self.volumes().into_iter().cloned().collect::<Vec<_>>() {
                job.interrupt.check()?;
                if volume.reader(self.readers.choice) != Some(pass) {
                    continue;
                }
                match self.locate_in(&volume, path, job) {
                    Ok(found) => located.push(found),
                    Err(Error::GuestFiles(error)) if is_absence(&error) => {}
                    Err(error @ Error::GuestFiles(_)) => {
                        let name = full_name(&volume.volume);
                        unread.push(format!("{name}: {}", holdfast_block::error_text(&error)));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        let shown = String::from_utf8_lossy(path).into_owned();
        match (located.pop(), located.len()) {
            (Some(found), 0) => Ok(found),
            (Some(last), _) => {
                let names = located.into_iter().chain([last]).map(|found| found.volume);
                Err(ambiguous(&shown, names.collect()))
            }
            (None, _) => {
                unread.extend(self.unreadable());
                Err(GuestFilesError::NoSuchPath { path: shown, unread }.into())
            }
        }
    }

    /// The volumes with files that nothing reads, with the reason.
    fn unreadable(&self) -> Vec<String> {
        let volumes = self.volumes().into_iter();
        let unread = volumes.filter(|volume| {
            let holds_files = volume.volume.content.holds_files() || volume.volume.unreadable.is_some();
            holds_files && volume.reader(self.readers.choice).is_none()
        });
        let texts = unread.map(|volume| {
            let reason = volume
                .reason()
                .unwrap_or_else(|| volume.volume.content.name().to_owned());
            format!("{}: {reason}", full_name(&volume.volume))
        });
        texts.collect()
    }

    fn locate_in(&mut self, volume: &GuestVolume, path: &[u8], job: Job<'_>) -> Result<LocatedFiles> {
        let name = full_name(&volume.volume);
        let opened = self.open(volume, &name, job)?;
        let (mut file_system, reader) = (opened.file_system, opened.reader);
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
            reader,
            file_system,
            found,
        })
    }

    fn open(&mut self, volume: &GuestVolume, name: &str, job: Job<'_>) -> Result<OpenedVolume> {
        let mut reason = volume.reason().unwrap_or_else(|| content_of(&volume.volume));
        match volume.reader(self.readers.choice) {
            None => return Err(unreadable(volume, name)),
            Some(ReaderKind::Process) => match self.readers.open_in_process(&volume.volume, &self.disks) {
                Ok(file_system) => {
                    return Ok(OpenedVolume {
                        file_system,
                        reader: ReaderKind::Process,
                    });
                }
                Err(error @ ReadError::Unsupported { .. }) if self.readers.choice == ReaderChoice::Auto => {
                    reason = error.to_string();
                }
                Err(error) => return Err(read_error(name, error)),
            },
            Some(ReaderKind::Appliance) => {}
        }
        self.start_appliance(job).map_err(|error| match error {
            Error::GuestFiles(error) => Error::from(GuestFilesError::NeedsAppliance {
                volume: name.to_owned(),
                reason: reason.clone(),
                source: error,
            }),
            other => other,
        })?;
        let known = self.volumes.iter().find(|known| full_name(&known.volume) == name);
        let (Some(known), Some(appliance)) = (known, &self.appliance) else {
            return Err(unreadable(volume, name));
        };
        let Some(number) = known.number.filter(|_| known.problem.is_none()) else {
            return Err(unreadable(known, name));
        };
        if self.readers.choice == ReaderChoice::Auto {
            job.progress.note(&format!(
                "{name}: read by the appliance, a virtual machine, which is slower: {reason}"
            ));
        }
        Ok(OpenedVolume {
            file_system: appliance.mount(number).map_err(|error| read_error(name, error))?,
            reader: ReaderKind::Appliance,
        })
    }
}

struct OpenedVolume {
    file_system: Box<dyn FileSystem>,
    reader: ReaderKind,
}

fn content_of(volume: &Volume) -> String {
    match volume.content {
        Content::Refused(what) => what.to_owned(),
        Content::Empty => "nothing".to_owned(),
        Content::Unknown => "nothing that is known".to_owned(),
        other => other.name().to_owned(),
    }
}

fn unreadable(volume: &GuestVolume, name: &str) -> Error {
    match volume.reason() {
        Some(reason) => GuestFilesError::Unreadable {
            volume: name.to_owned(),
            reason,
        },
        None => GuestFilesError::NoReader {
            volume: name.to_owned(),
            content: content_of(&volume.volume),
        },
    }
    .into()
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
    let GuestFilesError::Read { source, .. } = error else {
        return false;
    };
    matches!(source, ReadError::NotFound | ReadError::NotADirectory)
}
