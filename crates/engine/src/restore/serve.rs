//! `serve`: disks of snapshots and images over NBD, iSCSI and vhost-user, until the job is interrupted.
//!
//! ```text
//! serve ─► disks, images     open what is served
//!      ├─► exports           the registry of the process, with the iSCSI units and vhost-user sockets of its exports
//!      └─► control_server    requests of other commands: list, add, remove, stop
//! ```

pub(crate) mod control;
pub(crate) mod control_server;
mod disks;
pub(crate) mod doors;
mod exports;
pub(crate) mod images;
pub(crate) mod iscsi;
mod layered;
pub(crate) mod vhost_user;

use std::num::NonZero;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{Clock, error_messages};
use holdfast_image::{Format, OpenOptions};
use holdfast_repo::{GcPause, Repository};
use holdfast_serve::iscsi::{TargetServer, TargetServerOptions};
use holdfast_serve::nbd::{EventSink, Limits, Server, ServerOptions, ServerResources, StopReport, TlsPolicy};
use holdfast_serve::registry::{RegistryError, Removal};
use jiff::tz::TimeZone;

use self::control::{
    AddedExport, AddedExports, AddedWrites, ControlAnswer, ControlError, ControlErrorKind, ControlRequest, ExportStatus,
};
use self::control_server::{ControlPlace, ControlServer, PendingRequest};
use self::doors::{DoorPlace, ServeAddress};
use self::exports::{ChangeWatch, ExportOpener, NbdDoor, ServedExports};
use self::images::ServedImage;
use self::iscsi::IscsiOptions;
use self::vhost_user::{VhostUserDisks, VhostUserOptions};
use crate::SnapshotName;
use crate::image::source::{DiskOrigin, SourceName};
use crate::job::error::ServingError;
use crate::job::{DiskName, Error, Job, Result};
use crate::repository::removed::keep_readable;

pub use self::disks::ClientWrites;
pub(crate) use self::disks::overlay_path;

/// How long pending requests may take after a request to stop.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interval between two checks for a request to stop.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What to serve, and at which addresses.
pub struct ServeRequest {
    /// The first exports.
    pub choice: SourceChoice,
    /// The time zone of times in names of snapshots.
    pub zone: TimeZone,
    /// How NBD is served, if it is.
    pub nbd: Option<NbdOptions>,
    /// How iSCSI is served, if it is.
    pub iscsi: Option<IscsiOptions>,
    /// How vhost-user is served, if it is.
    pub vhost_user: Option<VhostUserOptions>,
    /// The maximum number of simultaneous connections of all protocols; none for the server's default.
    pub connection_count_max: Option<NonZero<usize>>,
    /// The control socket; `None` if other commands must not change this server.
    pub control: Option<ControlPlace>,
    /// The clock, shared with the server's threads.
    pub clock: Arc<dyn Clock>,
}

/// Exports to open.
#[derive(Debug, Clone)]
pub struct SourceChoice {
    /// What to serve.
    pub sources: Vec<ServeSource>,
    /// How writes of clients are treated.
    pub writes: ClientWrites,
    /// The machine that images belong to.
    pub machine: Option<String>,
}

/// What to serve.
#[derive(Debug, Clone)]
pub enum ServeSource {
    /// The disks of a snapshot, or one of them.
    Snapshot(SnapshotName),
    /// An image.
    Image(Box<ServedImage>),
}

impl ServeSource {
    fn snapshot(&self) -> Option<&SnapshotName> {
        match self {
            Self::Snapshot(name) => Some(name),
            Self::Image(_) => None,
        }
    }

    fn image(&self) -> Option<&ServedImage> {
        match self {
            Self::Snapshot(_) => None,
            Self::Image(image) => Some(image),
        }
    }
}

/// Options of serving over NBD.
pub struct NbdOptions {
    /// The addresses at which clients connect.
    pub doors: Vec<ServeAddress>,
    /// Whether connections are encrypted.
    pub tls: TlsPolicy,
    /// Receives events about clients.
    pub events: Arc<dyn EventSink>,
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

/// Serves disks until the job is interrupted or another command stops the server, which is the normal end. `ready` is
/// called when clients can connect, with the first exports.
///
/// Garbage collection of the repository is paused meanwhile, so that clients can still read a snapshot that is removed
/// while it is served.
pub fn serve(
    repository: Option<&Repository>,
    request: ServeRequest,
    job: Job<'_>,
    ready: &mut dyn FnMut(&[ExportStatus]),
) -> Result<()> {
    let pause = repository.and_then(|repository| keep_readable(repository, job.progress));
    let resources = ServerResources::new(limits(request.connection_count_max));
    let units = request.iscsi.as_ref().map(|options| options.units.clone());
    let clock = &request.clock;
    let disks = request.vhost_user;
    let disks = disks.map(|options| VhostUserDisks::new(options, resources.clone(), Arc::clone(clock)));
    let exports = Arc::new(ServedExports::new(resources, units, disks, Arc::clone(clock)));
    let opener = ExportOpener {
        repository,
        zone: &request.zone,
        job,
    };
    exports.add(&request.choice, opener)?;
    let nbd = request.nbd.map(|options| start_nbd(options, &exports)).transpose()?;
    let iscsi = request
        .iscsi
        .map(|options| start_iscsi(options, &exports))
        .transpose()?;
    let control = request.control.and_then(|place| start_control(place, &exports, job));
    ready(&exports.list());
    let running = RunningServer {
        exports: &exports,
        control,
        opener,
    };
    running.run(pause.as_ref());
    let reports = [
        nbd.map(|server| server.stop(PATIENCE)),
        iscsi.map(|server| server.stop(PATIENCE)),
        exports.disks.as_ref().map(VhostUserDisks::stop),
    ];
    warn_of_abandoned(reports.into_iter().flatten(), job);
    for error in exports.remove_all() {
        job.progress.warning(&error_messages(&error).join(": "));
    }
    Ok(())
}

/// A server that cannot be managed still serves.
fn start_control(place: ControlPlace, exports: &Arc<ServedExports>, job: Job<'_>) -> Option<ControlServer> {
    let started = ControlServer::start(place, exports);
    if let Err(error) = &started {
        let reason = error_messages(error).join(": ");
        job.progress
            .warning(&format!("other commands cannot manage this server: {reason}"));
    }
    started.ok()
}

fn start_nbd(options: NbdOptions, exports: &ServedExports) -> Result<Server> {
    let is_encrypted = !matches!(options.tls, TlsPolicy::Off);
    let mut server = Server::new(ServerOptions {
        exports: Arc::clone(&exports.registry) as _,
        resources: exports.resources.clone(),
        tls: options.tls,
        clock: Arc::clone(&exports.clock),
        events: options.events,
    });
    for door in options.doors {
        let opened = door.open(&*exports.clock)?;
        exports.change_addresses(|addresses| addresses.nbd.push(nbd_door(&opened.place, is_encrypted)));
        server.listen(opened.listener).map_err(Error::Serve)?;
    }
    Ok(server)
}

/// The parts of the URI of an export.
fn nbd_door(place: &DoorPlace, is_encrypted: bool) -> NbdDoor {
    let scheme = if is_encrypted { "nbds" } else { "nbd" };
    match place {
        DoorPlace::Unix(path) => NbdDoor {
            start: format!("{scheme}+unix:///"),
            end: format!("?socket={}", path.display()),
        },
        DoorPlace::Tcp(address) => NbdDoor {
            start: format!("{scheme}://{address}/"),
            end: String::new(),
        },
    }
}

fn start_iscsi(options: IscsiOptions, exports: &ServedExports) -> Result<TargetServer> {
    let mut server = TargetServer::new(TargetServerOptions {
        targets: Arc::clone(&exports.targets),
        authentication: options.authentication,
        resources: exports.resources.clone(),
        clock: Arc::clone(&exports.clock),
        events: options.events,
        randomness: options.randomness,
    });
    for door in options.doors {
        let opened = door.open(&*exports.clock)?;
        if let DoorPlace::Tcp(address) = &opened.place {
            exports.change_addresses(|addresses| addresses.iscsi.push(address.to_string()));
        }
        server.listen(opened.listener).map_err(Error::Serve)?;
    }
    Ok(server)
}

/// A server that waits for requests of other commands.
struct RunningServer<'a> {
    exports: &'a ServedExports,
    control: Option<ControlServer>,
    opener: ExportOpener<'a>,
}

/// Whether the server goes on after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    Stop,
}

impl RunningServer<'_> {
    /// Waits until the job is interrupted or the server is stopped, and keeps garbage collection paused meanwhile.
    fn run(&self, pause: Option<&GcPause>) {
        let job = self.opener.job;
        let mut watch = ChangeWatch::new(job.clock);
        while job.interrupt.check().is_ok() {
            let request = if let Some(control) = &self.control {
                control.receive(LOOK_INTERVAL)
            } else {
                job.clock.sleep(LOOK_INTERVAL);
                None
            };
            if let Some(pending) = request
                && self.answer(pending) == Next::Stop
            {
                return;
            }
            if let Some(pause) = pause {
                pause.renew();
            }
            watch.look(self.exports, job);
        }
    }

    fn answer(&self, pending: PendingRequest) -> Next {
        let (answer, next) = match pending.request {
            ControlRequest::List => return Next::Continue,
            ControlRequest::Add(added) => (self.add(&added, &pending.scratch), Next::Continue),
            ControlRequest::Remove { export, force } => (self.remove(&export, force), Next::Continue),
            ControlRequest::Stop => (Ok(ControlAnswer::Stopping), Next::Stop),
        };
        let answer = answer.unwrap_or_else(|error| ControlAnswer::Error(control_error(&error)));
        // The client may have ended: it does not need the answer.
        pending.reply.send(answer).unwrap_or_default();
        next
    }

    fn add(&self, added: &AddedExports, scratch: &Path) -> Result<ControlAnswer> {
        let sources = added.exports.iter().map(added_source);
        let choice = SourceChoice {
            sources: sources.collect::<Result<_>>()?,
            writes: match &added.writes {
                AddedWrites::Refuse => ClientWrites::Refuse,
                AddedWrites::InPlace => ClientWrites::InPlace(scratch.to_owned()),
                AddedWrites::Discard => ClientWrites::ThrowAway(scratch.to_owned()),
                AddedWrites::Keep(folder) => ClientWrites::Keep(folder.clone()),
            },
            machine: added.machine.clone(),
        };
        self.exports.add(&choice, self.opener).map(ControlAnswer::Added)
    }

    fn remove(&self, name: &str, force: bool) -> Result<ControlAnswer> {
        let report = if force {
            self.exports.remove_by_force(name)?
        } else {
            self.exports.remove(name, Removal::IfUnused)?
        };
        Ok(ControlAnswer::Removed {
            ended_clients: report.ended_client_count,
            busy: report.is_busy,
        })
    }
}

fn added_source(added: &AddedExport) -> Result<ServeSource> {
    match added {
        AddedExport::Snapshot { name } => Ok(ServeSource::Snapshot(name.parse()?)),
        AddedExport::Image {
            path,
            name,
            format,
            allow,
        } => {
            let known = |name: &String| {
                let format = Format::from_name(name);
                format.ok_or_else(|| ServingError::UnknownFormat { name: name.clone() })
            };
            let options = OpenOptions {
                format: format.as_ref().map(known).transpose()?,
                allow: allow.clone(),
                ..OpenOptions::default()
            };
            let source = SourceName {
                disk: name.as_deref().map(DiskName::new).transpose()?,
                origin: DiskOrigin::Path(path.clone()),
            };
            Ok(ServeSource::Image(Box::new(ServedImage { source, options })))
        }
    }
}

/// Parses a request and what it names, without opening anything.
#[cfg(feature = "hostile")]
pub(crate) fn hostile_request(bytes: &[u8]) -> holdfast_block::hostile::Outcome {
    use holdfast_block::hostile::Outcome;
    let Ok(request) = control::parse_request(bytes) else {
        return Outcome::Refused;
    };
    if let ControlRequest::Add(added) = &request {
        // Invalid names are refused.
        drop(added.exports.iter().map(added_source).collect::<Result<Vec<_>>>());
    }
    let line = control::encode_request(&request).expect("it was JSON");
    assert_eq!(
        control::parse_request(&line),
        Ok(request),
        "it reads as another request"
    );
    Outcome::Decoded
}

fn control_error(error: &Error) -> ControlError {
    let kind = match error {
        Error::Serving(ServingError::NameInUse { .. } | ServingError::Registry(RegistryError::NameInUse { .. })) => {
            ControlErrorKind::Exists
        }
        Error::Serving(ServingError::Registry(RegistryError::NotFound { .. })) => ControlErrorKind::NotFound,
        Error::Serving(ServingError::Registry(RegistryError::InUse { .. })) => ControlErrorKind::InUse,
        _ => ControlErrorKind::Failed,
    };
    ControlError {
        kind,
        messages: error_messages(error),
    }
}

fn warn_of_abandoned(reports: impl Iterator<Item = StopReport>, job: Job<'_>) {
    let count: usize = reports.map(|report| report.abandoned_connection_count).sum();
    if count > 0 {
        job.progress
            .warning(&format!("{count} connections had requests that did not end in time"));
    }
}
