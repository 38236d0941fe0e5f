//! The disks that a server serves: devices on snapshots, with an overlay for what clients write.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BackingId, BlockDevice, BlockDeviceMut, FileDeviceMut, IoMode, OverlayDevice, OverlayOptions};
use holdfast_repo::{DiskContent, DiskRecord, Manifest, Repository};
use holdfast_serve::nbd::ExportDevice;
use jiff::tz::TimeZone;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::layered::OverlayLayer;
use crate::SnapshotName;
use crate::job::{DiskName, Error, Job, Result};
use crate::machine::state::scratch::unnamed_file;
use crate::notes::is_memory;
use crate::repository::calendar::time_of;
use crate::repository::open::find_snapshot;

/// How writes of clients are treated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientWrites {
    /// They are refused.
    Refuse,
    /// They are kept in files in this folder while the server runs, and deleted when it ends.
    ThrowAway(PathBuf),
    /// They are kept in files in this folder, and used again the next time the same snapshot is served.
    Keep(PathBuf),
}

/// The disks to open.
pub(super) struct DiskSelection<'a> {
    /// Snapshots, or single disks of them.
    pub(super) names: &'a [SnapshotName],
    /// The time zone of times in these names.
    pub(super) zone: &'a TimeZone,
    /// How writes of clients are treated.
    pub(super) writes: &'a ClientWrites,
}

/// An opened disk.
pub(super) struct OpenDisk {
    pub(super) machine: String,
    /// The short id of the snapshot.
    pub(super) snapshot: String,
    pub(super) disk: String,
    /// Whether disks of another snapshot of this machine are served, too.
    pub(super) has_siblings: bool,
    /// A description for users.
    pub(super) description: String,
    pub(super) size_bytes: u64,
    pub(super) device: ExportDevice,
}

/// Opened disks.
pub(super) struct OpenDisks {
    pub(super) disks: Vec<OpenDisk>,
    /// Locks of overlays, to be held while they are served.
    pub(super) locks: Vec<File>,
}

/// Opens the disks of a selection, each once.
pub(super) fn open_disks(repository: &Repository, selection: &DiskSelection<'_>, job: Job<'_>) -> Result<OpenDisks> {
    let mut manifests: Vec<(Manifest, Option<DiskName>)> = Vec::new();
    for name in selection.names {
        let manifest = find_snapshot(repository, &name.snapshot, selection.zone, job.progress)?;
        manifests.push((manifest, name.disk.clone()));
    }
    let mut disks = Vec::new();
    let mut opened: Vec<(&Manifest, &str)> = Vec::new();
    let mut locks = Vec::new();
    for (manifest, disk) in &manifests {
        let records: Vec<&DiskRecord> = match disk {
            Some(name) => vec![manifest.disk(Some(name.as_str()))?],
            // Memory, configuration and keys of a machine are served only if they are named.
            None => manifest
                .disks
                .iter()
                .filter(|record| is_disk(record, manifest))
                .collect(),
        };
        let is_sibling = |other: &Manifest| other.machine == manifest.machine && other.id != manifest.id;
        let has_siblings = manifests.iter().any(|(other, _)| is_sibling(other));
        for record in records {
            let is_open = |(other, name): &(&Manifest, &str)| other.id == manifest.id && *name == record.name;
            if opened.iter().any(is_open) {
                continue;
            }
            opened.push((manifest, &record.name));
            disks.push(OpenDisk {
                machine: manifest.machine.clone(),
                snapshot: manifest.id.short(),
                disk: record.name.clone(),
                has_siblings,
                description: format!("{} of {} at {}", record.name, manifest.machine, time_of(manifest)),
                size_bytes: record.size_bytes,
                device: device(repository, manifest, record, selection.writes, &mut locks)?,
            });
        }
    }
    Ok(OpenDisks { disks, locks })
}

/// Whether a record is a disk; if a snapshot has no disks, every record counts as one.
fn is_disk(record: &DiskRecord, manifest: &Manifest) -> bool {
    let is_one = |record: &DiskRecord| record.content == DiskContent::Blocks && !is_memory(record);
    is_one(record) || !manifest.disks.iter().any(is_one)
}

/// The path of the overlay of a disk.
pub(crate) fn overlay_path(folder: &Path, snapshot: &str, disk: &DiskName) -> PathBuf {
    folder.join(format!("{snapshot}-{disk}.overlay"))
}

/// Locks an overlay: two servers that write to one would destroy it.
fn lock_overlay(path: &Path) -> Result<File> {
    let failed = |source: std::io::Error| Error::File {
        action: "lock",
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(Error::OverlayInUse { path: path.to_owned() }),
        // A file system without locks cannot protect the overlay.
        Ok(()) | Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(file),
        Err(errno) => Err(failed(errno.into())),
    }
}

/// Opens a disk. `locks` receives files that must stay open while the device is used.
fn device(
    repository: &Repository,
    manifest: &Manifest,
    disk: &DiskRecord,
    writes: &ClientWrites,
    locks: &mut Vec<File>,
) -> Result<ExportDevice> {
    let frozen = repository.device(disk);
    let size_bytes = disk.size_bytes;
    let options = OverlayOptions::new(BackingId(*manifest.id.as_bytes()));
    let store_bytes = options.store_size_bytes(size_bytes)?;
    let overlay: Arc<dyn BlockDeviceMut> = match writes {
        ClientWrites::Refuse => return Ok(ExportDevice::ReadOnly(Arc::new(frozen) as Arc<dyn BlockDevice>)),
        ClientWrites::ThrowAway(folder) => {
            let file = unnamed_file(folder, store_bytes).map_err(|source| Error::File {
                action: "create an overlay in",
                path: folder.clone(),
                source,
            })?;
            let store = FileDeviceMut::of_file(file, folder, IoMode::Buffered)?;
            Arc::new(OverlayLayer(OverlayDevice::create(frozen, store, options)?))
        }
        ClientWrites::Keep(folder) => {
            // The snapshot's writer chose the name: it must not point outside the folder.
            let name = DiskName::new(disk.name.as_str())?;
            let path: &Path = &overlay_path(folder, &manifest.id.to_string(), &name);
            let is_new = !path.exists();
            let store = if is_new {
                FileDeviceMut::create_new(path, store_bytes, IoMode::Buffered)?
            } else {
                FileDeviceMut::open(path, IoMode::Buffered)?
            };
            locks.push(lock_overlay(path)?);
            Arc::new(OverlayLayer(if is_new {
                OverlayDevice::create(frozen, store, options)?
            } else {
                OverlayDevice::open(frozen, store, options.backing_id)?
            }))
        }
    };
    Ok(ExportDevice::Writable(overlay))
}
