//! `serve nbd`: disks of snapshots as block devices over NBD, until the job is interrupted.

mod layered;

use std::fs::File;
use std::net::SocketAddr;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{
    BackingId, BlockDevice, BlockDeviceMut, Clock, FileDeviceMut, IoMode, OverlayDevice, OverlayOptions,
};
use holdfast_repo::{DiskContent, DiskRecord, GcPause, Manifest, Repository};
use holdfast_serve::nbd::{
    Absent, EventSink, Export, ExportDevice, FixedExports, Limits, Listener, Server, ServerOptions, TlsPolicy,
};
use jiff::tz::TimeZone;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use self::layered::OverlayLayer;
use crate::SnapshotName;
use crate::job::{DiskName, Error, Job, Result};
use crate::machine::state::scratch::unnamed_file;
use crate::notes::is_memory;
use crate::repository::calendar::time_of;
use crate::repository::open::find_snapshot;
use crate::repository::removed::keep_readable;

/// How long pending requests may take after a request to stop.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interval between two checks for a request to stop.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What to serve, and at which addresses.
pub struct ServeRequest {
    /// Snapshots, or single disks of them.
    pub names: Vec<SnapshotName>,
    /// The time zone of times in these names.
    pub zone: TimeZone,
    /// The addresses at which clients connect.
    pub doors: Vec<ServeAddress>,
    /// How writes of clients are treated.
    pub writes: ClientWrites,
    /// Whether connections are encrypted.
    pub tls: TlsPolicy,
    /// The maximum number of simultaneous connections; none for the server's default.
    pub connection_count_max: Option<NonZero<usize>>,
    /// Receives events about clients.
    pub events: Arc<dyn EventSink>,
    /// The clock, shared with the server's threads.
    pub clock: Arc<dyn Clock>,
}

/// The server's limits for this number of connections. Clients of one address get at most half of them, so that the
/// rest is left for others.
fn limits(connection_count_max: Option<NonZero<usize>>) -> Limits {
    let default = Limits::default();
    match connection_count_max.map(NonZero::get) {
        None => default,
        Some(count) => Limits {
            connection_count_max: count,
            address_connection_count_max: count.div_ceil(2),
            handshake_count_max: default.handshake_count_max.min(count),
            ..default
        },
    }
}

/// An address at which clients connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServeAddress {
    /// A Unix socket, accessible only to the current user.
    Unix(PathBuf),
    /// An address and a port.
    Tcp(SocketAddr),
}

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

/// A served disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// Its export name.
    pub export: String,
    /// A description for users.
    pub description: String,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// Serves disks of snapshots until the job is interrupted, which is the normal end. `ready` is called when clients can
/// connect.
///
/// Garbage collection is paused meanwhile, so that clients can still read a snapshot that is removed while it is
/// served.
pub fn serve(
    repository: &Repository,
    request: ServeRequest,
    job: Job<'_>,
    ready: &mut dyn FnMut(&[Served]),
) -> Result<()> {
    let pause = keep_readable(repository, job.progress);
    let disks = open_disks(repository, &request, job)?;
    let mut server = Server::new(ServerOptions {
        exports: Arc::new(FixedExports::new(disks.exports)),
        limits: limits(request.connection_count_max),
        tls: request.tls,
        clock: Arc::clone(&request.clock),
        events: request.events,
    });
    for door in &request.doors {
        let listener = match door {
            ServeAddress::Unix(path) => Listener::unix(path, &*request.clock),
            ServeAddress::Tcp(address) => Listener::tcp(*address),
        };
        server.listen(listener.map_err(Error::Serve)?).map_err(Error::Serve)?;
    }
    ready(&disks.served);
    while job.interrupt.check().is_ok() {
        job.clock.sleep(LOOK_INTERVAL);
        pause.iter().for_each(GcPause::renew);
    }
    let report = server.stop(PATIENCE);
    if report.abandoned_connection_count > 0 {
        job.progress.warning(&format!(
            "{} connections had requests that did not end in time",
            report.abandoned_connection_count
        ));
    }
    Ok(())
}

/// The opened disks of a request.
struct OpenDisks {
    served: Vec<Served>,
    exports: Vec<Export>,
    /// Locks of overlays, held while they are served.
    _locks: Vec<File>,
}

fn open_disks(repository: &Repository, request: &ServeRequest, job: Job<'_>) -> Result<OpenDisks> {
    let mut manifests: Vec<(Manifest, Option<DiskName>)> = Vec::new();
    for name in &request.names {
        let manifest = find_snapshot(repository, &name.snapshot, &request.zone, job.progress)?;
        manifests.push((manifest, name.disk.clone()));
    }
    let mut served = Vec::new();
    let mut exports = Vec::new();
    let mut locks = Vec::new();
    for (manifest, disk) in &manifests {
        let disks: Vec<&DiskRecord> = match disk {
            Some(name) => vec![manifest.disk(Some(name.as_str()))?],
            // Memory, configuration and keys of a machine are served only if they are named.
            None => manifest
                .disks
                .iter()
                .filter(|record| is_disk(record, manifest))
                .collect(),
        };
        for disk in disks {
            let entry = Served {
                export: export_name(manifest, disk, &manifests),
                description: format!("{} of {} at {}", disk.name, manifest.machine, time_of(manifest)),
                size_bytes: disk.size_bytes,
            };
            if served.contains(&entry) {
                continue;
            }
            let device = device(repository, manifest, disk, &request.writes, &mut locks)?;
            exports.push(
                Export::new(entry.export.clone(), device)
                    .with_description(entry.description.clone())
                    .with_absent(Absent::ReadsAsZero),
            );
            served.push(entry);
        }
    }
    Ok(OpenDisks {
        served,
        exports,
        _locks: locks,
    })
}

/// Whether a record is a disk; if a snapshot has no disks, every record counts as one.
fn is_disk(record: &DiskRecord, manifest: &Manifest) -> bool {
    let is_one = |record: &DiskRecord| record.content == DiskContent::Blocks && !is_memory(record);
    is_one(record) || !manifest.disks.iter().any(is_one)
}

/// `MACHINE/DISK`, or `MACHINE@ID/DISK` if several snapshots of a machine are served.
fn export_name(manifest: &Manifest, disk: &DiskRecord, all: &[(Manifest, Option<DiskName>)]) -> String {
    let same_machine = |other: &Manifest| other.machine == manifest.machine && other.id != manifest.id;
    if all.iter().any(|(other, _)| same_machine(other)) {
        format!("{}@{}/{}", manifest.machine, manifest.id.short(), disk.name)
    } else {
        format!("{}/{}", manifest.machine, disk.name)
    }
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
