//! Served disks as disks of virtual machines on this host. Each has a vhost-user socket of its own.

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_serve::registry::RegisteredExport;
use holdfast_serve::vhost_user::{
    AcceptedWrites, Listener, ServerResources, StopReport, VhostSectorSize, VhostUserEventSink, VhostUserExport,
    VhostUserExportOptions, VhostUserServer, VhostUserServerOptions,
};

use super::control::DiskSocket;
use super::disks::OpenServedDisk;
use crate::job::{Error, Result};

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

/// Options of serving over vhost-user.
pub struct VhostUserOptions {
    /// Where front ends connect.
    pub sockets: SocketPlace,
    /// The size of logical blocks.
    pub sector_size: VhostSectorSize,
    /// The largest number of queues of a machine.
    pub queue_count: NonZero<u16>,
    /// Receives events about front ends.
    pub events: Arc<dyn VhostUserEventSink>,
    /// A random number that differs between servers.
    pub server_number: u64,
}

/// Properties of a disk that front ends and guests see.
pub(super) struct DiskSource {
    serial: String,
    accepted_writes: AcceptedWrites,
}

impl DiskSource {
    pub(super) fn of(disk: &OpenServedDisk) -> Self {
        Self {
            serial: disk.serial.clone(),
            accepted_writes: disk.accepted_writes,
        }
    }
}

/// The vhost-user server, and how exports get their sockets.
pub(super) struct VhostUserDisks {
    server: Arc<VhostUserServer>,
    sockets: SocketPlace,
    sector_size: VhostSectorSize,
    queue_count: NonZero<u16>,
    clock: Arc<dyn Clock>,
}

impl VhostUserDisks {
    pub(super) fn new(options: VhostUserOptions, resources: ServerResources, clock: Arc<dyn Clock>) -> Self {
        let server = VhostUserServer::new(VhostUserServerOptions {
            resources,
            clock: Arc::clone(&clock),
            events: options.events,
            server_number: options.server_number,
        });
        Self {
            server: Arc::new(server),
            sockets: options.sockets,
            sector_size: options.sector_size,
            queue_count: options.queue_count,
            clock,
        }
    }

    /// Refuses several disks for one socket.
    pub(super) fn check_count(&self, served_count: usize, added_count: usize) -> Result<()> {
        let disks = served_count + added_count;
        match &self.sockets {
            SocketPlace::File(_) if disks != 1 => Err(Error::Serve(holdfast_serve::Error::SocketCount { disks })),
            SocketPlace::File(_) | SocketPlace::Folder(_) => Ok(()),
        }
    }

    /// Opens a socket for an export, which is closed when the export is removed.
    pub(super) fn place(
        &self,
        export: &Arc<RegisteredExport>,
        source: &DiskSource,
        taken: &[PathBuf],
    ) -> Result<DiskSocket> {
        let path = socket_path(&self.sockets, export.name(), taken);
        let listener = Listener::unix(&path, &*self.clock).map_err(Error::Serve)?;
        let options = VhostUserExportOptions {
            name: export.name().to_owned(),
            serial: source.serial.clone(),
            sector_size: self.sector_size,
            queue_count: self.queue_count.get(),
            accepted_writes: source.accepted_writes,
        };
        let disk = self.server.add(VhostUserExport::of(export, options));
        // The disk has its export: a strong reference to the server would be a cycle.
        let server = Arc::downgrade(&self.server);
        export.on_removal(move || {
            if let Some(server) = server.upgrade() {
                server.withdraw(disk);
            }
        });
        self.server.listen(disk, listener).map_err(Error::Serve)?;
        Ok(DiskSocket {
            path,
            reconnect: !export.is_writable() || source.accepted_writes != AcceptedWrites::Discarded,
        })
    }

    /// The size that guests see of a disk.
    pub(super) fn visible_bytes(&self, size_bytes: u64) -> u64 {
        size_bytes - size_bytes % u64::from(self.sector_size.bytes())
    }

    /// The socket, or the folder of sockets.
    pub(super) fn address(&self) -> String {
        let (SocketPlace::File(path) | SocketPlace::Folder(path)) = &self.sockets;
        format!("vhost-user:{}", path.display())
    }

    /// Completes the requests in progress, for at most `patience`, and disconnects the front ends.
    pub(super) fn stop(&self, patience: Duration) -> StopReport {
        self.server.stop(patience)
    }
}

/// The socket of a disk: `MACHINE-DISK.sock` in a folder, with a number if that name is taken.
fn socket_path(place: &SocketPlace, name: &str, taken: &[PathBuf]) -> PathBuf {
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
    let free = paths.find(|path| !taken.contains(path));
    free.expect("there is always another number")
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{SocketPlace, socket_path};

    #[test]
    fn every_disk_has_its_own_socket_in_the_folder() {
        let place = SocketPlace::Folder("/run/disks".into());
        let mut taken: Vec<PathBuf> = Vec::new();
        for (name, expected) in [
            ("web1/vda", "web1-vda.sock"),
            ("web1-vda", "web1-vda-2.sock"),
            ("web1@0a1b/vda", "web1@0a1b-vda.sock"),
            ("../../etc/x", "-..-etc-x.sock"),
            ("wëb 1/vda", "w-b-1-vda.sock"),
        ] {
            let socket = socket_path(&place, name, &taken);
            assert_eq!(socket, Path::new("/run/disks").join(expected));
            taken.push(socket);
        }
        let long = socket_path(&place, &"x".repeat(300), &taken);
        assert!(long.as_os_str().len() < 90);
        let file = SocketPlace::File(PathBuf::from("/run/a.sock"));
        assert_eq!(socket_path(&file, "web1/vda", &[]), Path::new("/run/a.sock"));
    }
}
