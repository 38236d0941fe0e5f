//! `serve vhost-user`: disks of snapshots, and images, for virtual machines of this host, until the job is interrupted.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BlockDevice, Clock};
use holdfast_image::{Format, OpenOptions, open_mut};
use holdfast_repo::Repository;
use holdfast_serve::vhost_user::{
    AcceptedWrites, ExportDevice, Limits, Listener, SectorSize, VhostUserEventSink, VhostUserExport,
    VhostUserExportOptions, VhostUserServer, VhostUserServerOptions,
};
use jiff::tz::TimeZone;

use super::disks::{ClientWrites, DiskSelection, open_disks};
use super::{PATIENCE, wait_for_interrupt, warn_of_abandoned};
use crate::SnapshotName;
use crate::image::source::OpenSource;
use crate::job::{Error, Job, Result};
use crate::repository::removed::keep_readable;

/// Longest name of a socket in a folder: the path of a Unix socket has at most 107 bytes.
const SOCKET_NAME_BYTES_MAX: usize = 64;

/// Where front ends connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SocketPlace {
    /// One socket, for the only disk.
    File(PathBuf),
    /// A socket for each disk, in this folder.
    Folder(PathBuf),
}

/// The disks to serve to virtual machines.
pub struct ServeVhostUserRequest {
    /// Snapshots, or single disks of them; they need a repository.
    pub names: Vec<SnapshotName>,
    /// Images.
    pub images: Vec<PathBuf>,
    /// How images are opened.
    pub image_options: OpenOptions,
    /// The time zone of times in names of snapshots.
    pub zone: TimeZone,
    /// Where front ends connect.
    pub sockets: SocketPlace,
    /// How writes are treated. Images are written in place, unless writes are refused.
    pub writes: ClientWrites,
    /// The size of logical blocks.
    pub sector_size: SectorSize,
    /// The largest number of queues of a machine.
    pub queue_count: NonZero<u16>,
    /// Receives events about front ends.
    pub events: Arc<dyn VhostUserEventSink>,
    /// The clock, shared with the server's threads.
    pub clock: Arc<dyn Clock>,
}

/// A served disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedDisk {
    /// Its socket.
    pub socket: PathBuf,
    /// A description for users.
    pub description: String,
    /// The size that guests see, in bytes.
    pub size_bytes: u64,
    /// Whether guests can write.
    pub is_writable: bool,
    /// Whether a machine can continue with the next server of the disk.
    pub can_reconnect: bool,
}

/// A disk before its socket exists.
struct DiskDraft {
    /// The name in messages, and of the socket.
    name: String,
    description: String,
    serial: String,
    device: ExportDevice,
    accepted_writes: AcceptedWrites,
}

/// Serves disks to virtual machines until the job is interrupted, which is the normal end. `ready` is called when they
/// can connect.
///
/// Garbage collection of the repository is paused meanwhile, as by [`serve`](super::serve).
///
/// # Panics
/// If snapshots are requested without a repository.
pub fn serve_vhost_user(
    repository: Option<&Repository>,
    request: &ServeVhostUserRequest,
    job: Job<'_>,
    ready: &mut dyn FnMut(&[ServedDisk]),
) -> Result<()> {
    let pause = repository.and_then(|repository| keep_readable(repository, job.progress));
    let mut drafts = Vec::new();
    let mut locks = Vec::new();
    if !request.names.is_empty() {
        let repository = repository.expect("snapshots are in a repository");
        let selection = DiskSelection {
            names: &request.names,
            zone: &request.zone,
            writes: &request.writes,
        };
        let opened = open_disks(repository, &selection, job)?;
        locks = opened.locks;
        for disk in opened.disks {
            let prefix = if disk.has_siblings {
                format!("{}@{}", disk.machine, disk.snapshot)
            } else {
                disk.machine.clone()
            };
            drafts.push(DiskDraft {
                name: format!("{prefix}/{}", disk.disk),
                description: disk.description,
                serial: format!("{}-{}", disk.snapshot, disk.disk),
                device: disk.device,
                accepted_writes: match request.writes {
                    ClientWrites::Keep(_) => AcceptedWrites::NeedFlush,
                    ClientWrites::ThrowAway(_) | ClientWrites::Refuse => AcceptedWrites::Discarded,
                },
            });
        }
    }
    for image in &request.images {
        drafts.push(image_draft(image, request)?);
    }
    if let SocketPlace::File(_) = request.sockets
        && drafts.len() != 1
    {
        let disks = drafts.len();
        return Err(Error::Serve(holdfast_serve::Error::SocketCount { disks }));
    }
    let mut server = VhostUserServer::new(VhostUserServerOptions {
        limits: Limits::default(),
        clock: Arc::clone(&request.clock),
        events: Arc::clone(&request.events),
    });
    let mut served = Vec::new();
    for draft in drafts {
        let socket = socket_path(&request.sockets, &draft.name, &served);
        served.push(add(&mut server, draft, socket, request)?);
    }
    ready(&served);
    wait_for_interrupt(job, pause.as_ref());
    warn_of_abandoned(server.stop(PATIENCE), job);
    drop(locks);
    Ok(())
}

/// Adds a disk to the server, with its socket.
fn add(
    server: &mut VhostUserServer,
    draft: DiskDraft,
    socket: PathBuf,
    request: &ServeVhostUserRequest,
) -> Result<ServedDisk> {
    let is_writable = matches!(draft.device, ExportDevice::Writable(_));
    let can_reconnect = !is_writable || draft.accepted_writes != AcceptedWrites::Discarded;
    let options = VhostUserExportOptions {
        name: draft.name,
        serial: draft.serial,
        sector_size: request.sector_size,
        queue_count: request.queue_count.get(),
        accepted_writes: draft.accepted_writes,
    };
    let export = VhostUserExport::new(draft.device, options);
    let size_bytes = export.size_bytes();
    let index = server.add(export);
    let listener = Listener::unix(&socket, &*request.clock).map_err(Error::Serve)?;
    server.listen(index, listener).map_err(Error::Serve)?;
    Ok(ServedDisk {
        socket,
        description: draft.description,
        size_bytes,
        is_writable,
        can_reconnect,
    })
}

/// Opens an image. It is locked if it is written.
fn image_draft(path: &Path, request: &ServeVhostUserRequest) -> Result<DiskDraft> {
    let on = |error: Error| error.on(path);
    let (device, accepted_writes) = if request.writes == ClientWrites::Refuse {
        let image = OpenSource::open_with(path, &request.image_options).map_err(on)?;
        let device: Arc<dyn BlockDevice> = image.device;
        (ExportDevice::ReadOnly(device), AcceptedWrites::Stay)
    } else {
        let image = open_mut(path, &request.image_options).map_err(|error| on(error.into()))?;
        let is_raw = image.layers().iter().all(|layer| layer.format == Format::Raw);
        let accepted_writes = if is_raw {
            AcceptedWrites::Stay
        } else {
            AcceptedWrites::NeedFlush
        };
        (ExportDevice::Writable(Arc::new(image)), accepted_writes)
    };
    let stem = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
    Ok(DiskDraft {
        name: stem.clone().into_owned(),
        description: path.display().to_string(),
        serial: stem.into_owned(),
        device,
        accepted_writes,
    })
}

/// The socket of a disk: `MACHINE-DISK.sock` in a folder, with a number if that name is taken.
fn socket_path(place: &SocketPlace, name: &str, taken: &[ServedDisk]) -> PathBuf {
    let folder = match place {
        SocketPlace::File(path) => return path.clone(),
        SocketPlace::Folder(folder) => folder,
    };
    let replace = |c: char| {
        if c.is_ascii_alphanumeric() || "-_.@".contains(c) {
            c
        } else {
            '-'
        }
    };
    let mut base: String = name.chars().map(replace).collect();
    base.truncate(SOCKET_NAME_BYTES_MAX);
    let base = base.trim_start_matches('.');
    let names = std::iter::once(format!("{base}.sock")).chain((2_u64..).map(|number| format!("{base}-{number}.sock")));
    let mut paths = names.map(|name| folder.join(name));
    let free = paths.find(|path| taken.iter().all(|disk| disk.socket != *path));
    free.expect("there is always another number")
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{ServedDisk, SocketPlace, socket_path};

    #[test]
    fn every_disk_has_its_own_socket_in_the_folder() {
        let place = SocketPlace::Folder("/run/disks".into());
        let mut taken: Vec<ServedDisk> = Vec::new();
        for (name, expected) in [
            ("web1/vda", "web1-vda.sock"),
            ("web1-vda", "web1-vda-2.sock"),
            ("web1@0a1b/vda", "web1@0a1b-vda.sock"),
            ("../../etc/x", "-..-etc-x.sock"),
            ("wëb 1/vda", "w-b-1-vda.sock"),
        ] {
            let socket = socket_path(&place, name, &taken);
            assert_eq!(socket, Path::new("/run/disks").join(expected));
            taken.push(ServedDisk {
                socket,
                description: String::new(),
                size_bytes: 0,
                is_writable: false,
                can_reconnect: true,
            });
        }
        let long = socket_path(&place, &"x".repeat(300), &taken);
        assert!(long.as_os_str().len() < 90);
        let file = SocketPlace::File(PathBuf::from("/run/a.sock"));
        assert_eq!(socket_path(&file, "web1/vda", &[]), Path::new("/run/a.sock"));
    }
}
