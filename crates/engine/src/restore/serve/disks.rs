//! The disks that a server serves: devices on snapshots, with an overlay for what clients write.

use std::any::Any;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BackingId, BlockDevice, BlockDeviceMut, FileDeviceMut, IoMode, OverlayDevice, OverlayOptions};
use holdfast_repo::{DiskContent, DiskRecord, Manifest, Repository};
use holdfast_serve::nbd::ExportDevice;
use holdfast_serve::registry::{CacheProbe, CacheUse};
use holdfast_serve::vhost_user::AcceptedWrites;
use jiff::tz::TimeZone;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::layered::OverlayLayer;
use crate::SnapshotName;
use crate::image::source::OpenSource;
use crate::job::error::ServingError;
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
    /// They are kept in files in this folder, and used again the next time the same disk is served.
    Keep(PathBuf),
    /// They change images; for snapshots, which never change, they are kept in this folder while the server runs.
    InPlace(PathBuf),
}

impl ClientWrites {
    /// What becomes of writes to an overlay.
    pub(super) fn overlay_writes(&self) -> AcceptedWrites {
        match self {
            Self::Keep(_) => AcceptedWrites::NeedFlush,
            Self::ThrowAway(_) | Self::InPlace(_) | Self::Refuse => AcceptedWrites::Discarded,
        }
    }
}

/// Whether an export has a name.
pub(super) type NameInUse<'a> = &'a dyn Fn(&str) -> bool;

/// The disks to open.
pub(super) struct DiskSelection<'a> {
    /// Snapshots, or single disks of them.
    pub(super) names: &'a [SnapshotName],
    /// The time zone of times in these names.
    pub(super) zone: &'a TimeZone,
    /// How writes of clients are treated.
    pub(super) writes: &'a ClientWrites,
    /// Whether an export of this name exists.
    pub(super) is_in_use: NameInUse<'a>,
}

/// An opened disk.
pub(super) struct OpenServedDisk {
    /// The name of its export.
    pub(super) export: String,
    /// The disks of a group are units of one iSCSI target: its machine, or its machine and snapshot.
    pub(super) group: String,
    /// A text that identifies its content.
    pub(super) serial: String,
    /// A description for users.
    pub(super) description: String,
    pub(super) device: ExportDevice,
    /// What becomes of writes when the server ends.
    pub(super) accepted_writes: AcceptedWrites,
    pub(super) cache: Option<CacheProbe>,
    /// Locks of files, to be held while the device is used.
    pub(super) held: Vec<Box<dyn Any + Send + Sync>>,
    /// The image, if it must not change.
    pub(super) watched: Option<Arc<OpenSource>>,
}

/// Opens the disks of a selection, each once.
pub(super) fn open_disks(
    repository: &Repository,
    selection: &DiskSelection<'_>,
    job: Job<'_>,
) -> Result<Vec<OpenServedDisk>> {
    let mut manifests: Vec<(Manifest, Option<DiskName>)> = Vec::new();
    for name in selection.names {
        let manifest = find_snapshot(repository, &name.snapshot, selection.zone, job.progress)?;
        manifests.push((manifest, name.disk.clone()));
    }
    let mut disks = Vec::new();
    let mut opened: Vec<(&Manifest, &str)> = Vec::new();
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
        let siblings = if manifests.iter().any(|(other, _)| is_sibling(other)) {
            Siblings::Some
        } else {
            Siblings::None
        };
        for record in records {
            let is_open = |(other, name): &(&Manifest, &str)| other.id == manifest.id && *name == record.name;
            if opened.iter().any(is_open) {
                continue;
            }
            opened.push((manifest, &record.name));
            let names = ExportNames::choose(manifest, record, siblings, selection.is_in_use)?;
            disks.push(open_disk(repository, manifest, record, names, selection.writes)?);
        }
    }
    Ok(disks)
}

/// Whether disks of another snapshot of a machine are served, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Siblings {
    None,
    Some,
}

/// The names under which a disk of a snapshot is served.
struct ExportNames {
    export: String,
    group: String,
}

impl ExportNames {
    /// `MACHINE/DISK`, or `MACHINE@ID/DISK` if several snapshots of a machine are served.
    fn choose(manifest: &Manifest, disk: &DiskRecord, siblings: Siblings, is_in_use: NameInUse<'_>) -> Result<Self> {
        let (machine, id) = (&manifest.machine, manifest.id.short());
        let short = Self {
            export: format!("{machine}/{}", disk.name),
            group: machine.clone(),
        };
        if siblings == Siblings::None && !is_in_use(&short.export) {
            return Ok(short);
        }
        let long = Self {
            export: format!("{machine}@{id}/{}", disk.name),
            group: format!("{machine}.{id}"),
        };
        if is_in_use(&long.export) {
            return Err(ServingError::NameInUse { name: long.export }.into());
        }
        Ok(long)
    }
}

fn open_disk(
    repository: &Repository,
    manifest: &Manifest,
    disk: &DiskRecord,
    names: ExportNames,
    writes: &ClientWrites,
) -> Result<OpenServedDisk> {
    let frozen = Arc::new(repository.device(disk));
    let probed = Arc::clone(&frozen);
    // The snapshot's writer chose the name: it must not point outside the folder.
    let name = DiskName::new(disk.name.as_str())?;
    let overlay = Overlay {
        backing_id: BackingId(*manifest.id.as_bytes()),
        file: overlay_file(&manifest.id.to_string(), &name),
    };
    let mut held = Vec::new();
    Ok(OpenServedDisk {
        export: names.export,
        group: names.group,
        serial: format!("{}-{}", manifest.id.short(), disk.name),
        description: format!("{} of {} at {}", disk.name, manifest.machine, time_of(manifest)),
        device: overlay.over(frozen, writes, &mut held)?,
        accepted_writes: writes.overlay_writes(),
        cache: Some(Arc::new(move || {
            let found = probed.cache_use();
            CacheUse {
                hit_count: found.hit_count,
                miss_count: found.miss_count,
            }
        })),
        held,
        watched: None,
    })
}

/// Whether a record is a disk; if a snapshot has no disks, every record counts as one.
fn is_disk(record: &DiskRecord, manifest: &Manifest) -> bool {
    let is_one = |record: &DiskRecord| record.content == DiskContent::Blocks && !is_memory(record);
    is_one(record) || !manifest.disks.iter().any(is_one)
}

/// The path of the overlay of a disk.
pub(crate) fn overlay_path(folder: &Path, snapshot: &str, disk: &DiskName) -> PathBuf {
    folder.join(overlay_file(snapshot, disk))
}

fn overlay_file(snapshot: &str, disk: &DiskName) -> String {
    format!("{snapshot}-{disk}.overlay")
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

/// The overlay of a disk whose content does not change.
pub(super) struct Overlay {
    /// Identifies the content.
    pub(super) backing_id: BackingId,
    /// The name of the file for writes that are kept.
    pub(super) file: String,
}

impl Overlay {
    /// The device for clients. `held` receives files that must stay open while it is used.
    pub(super) fn over(
        &self,
        frozen: Arc<dyn BlockDevice>,
        writes: &ClientWrites,
        held: &mut Vec<Box<dyn Any + Send + Sync>>,
    ) -> Result<ExportDevice> {
        let options = OverlayOptions::new(self.backing_id);
        let store_bytes = options.store_size_bytes(frozen.size_bytes())?;
        let overlay: Arc<dyn BlockDeviceMut> = match writes {
            ClientWrites::Refuse => return Ok(ExportDevice::ReadOnly(frozen)),
            ClientWrites::ThrowAway(folder) | ClientWrites::InPlace(folder) => {
                let file = unnamed_file(folder, store_bytes).map_err(|source| Error::File {
                    action: "create an overlay in",
                    path: folder.clone(),
                    source,
                })?;
                let store = FileDeviceMut::of_file(file, folder, IoMode::Buffered)?;
                Arc::new(OverlayLayer(OverlayDevice::create(frozen, store, options)?))
            }
            ClientWrites::Keep(folder) => {
                let path: &Path = &folder.join(&self.file);
                let is_new = !path.exists();
                let store = if is_new {
                    FileDeviceMut::create_new(path, store_bytes, IoMode::Buffered)?
                } else {
                    FileDeviceMut::open(path, IoMode::Buffered)?
                };
                held.push(Box::new(lock_overlay(path)?));
                Arc::new(OverlayLayer(if is_new {
                    OverlayDevice::create(frozen, store, options)?
                } else {
                    OverlayDevice::open(frozen, store, options.backing_id)?
                }))
            }
        };
        Ok(ExportDevice::Writable(overlay))
    }
}
