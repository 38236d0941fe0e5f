//! `serve nbd`: disks of snapshots as block devices over NBD, until the job is interrupted.

mod disks;
pub(crate) mod iscsi;
mod layered;
pub(crate) mod vhost_user;

use std::net::SocketAddr;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_repo::{GcPause, Repository};
use holdfast_serve::nbd::{
    Absent, EventSink, Export, FixedExports, Limits, Listener, Server, ServerOptions, StopReport, TlsPolicy,
};
use jiff::tz::TimeZone;

use self::disks::{DiskSelection, OpenDisk, open_disks};
use crate::SnapshotName;
use crate::job::{Error, Job, Result};
use crate::repository::removed::keep_readable;

pub use self::disks::ClientWrites;
pub(crate) use self::disks::overlay_path;

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
    let selection = DiskSelection {
        names: &request.names,
        zone: &request.zone,
        writes: &request.writes,
    };
    let opened = open_disks(repository, &selection, job)?;
    let (served, exports): (Vec<Served>, Vec<Export>) = opened.disks.into_iter().map(export).unzip();
    let mut server = Server::new(ServerOptions {
        exports: Arc::new(FixedExports::new(exports)),
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
    ready(&served);
    wait_for_interrupt(job, pause.as_ref());
    warn_of_abandoned(server.stop(PATIENCE), job);
    drop(opened.locks);
    Ok(())
}

/// Waits until the job is interrupted, and keeps garbage collection paused meanwhile.
fn wait_for_interrupt(job: Job<'_>, pause: Option<&GcPause>) {
    while job.interrupt.check().is_ok() {
        job.clock.sleep(LOOK_INTERVAL);
        if let Some(pause) = pause {
            pause.renew();
        }
    }
}

fn warn_of_abandoned(report: StopReport, job: Job<'_>) {
    if report.abandoned_connection_count > 0 {
        job.progress.warning(&format!(
            "{} connections had requests that did not end in time",
            report.abandoned_connection_count
        ));
    }
}

/// The export of a disk: `MACHINE/DISK`, or `MACHINE@ID/DISK` if several snapshots of a machine are served.
fn export(disk: OpenDisk) -> (Served, Export) {
    let name = if disk.has_siblings {
        format!("{}@{}/{}", disk.machine, disk.snapshot, disk.disk)
    } else {
        format!("{}/{}", disk.machine, disk.disk)
    };
    let export = Export::new(name.clone(), disk.device)
        .with_description(disk.description.clone())
        .with_absent(Absent::ReadsAsZero);
    let served = Served {
        export: name,
        description: disk.description,
        size_bytes: disk.size_bytes,
    };
    (served, export)
}
