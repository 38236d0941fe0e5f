//! `serve`: disks of snapshots and images over NBD, iSCSI and vhost-user, until the job is interrupted.
//!
//! ```text
//! serve ─► disks, images     open what is served
//!      ├─► exports           the registry of the process, with the iSCSI units and vhost-user sockets of its exports
//!      └─► control_server    requests of other commands: list, add, remove, stop
//! ```

pub(crate) mod control;
mod control_error;
pub(crate) mod control_server;
mod disks;
pub(crate) mod doors;
mod exports;
pub(crate) mod images;
pub(crate) mod iscsi;
mod layered;
mod uri;
pub(crate) mod vhost_user;

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{Clock, error_messages};
use holdfast_image::{Format, OpenOptions};
use holdfast_repo::{GcPause, Repository};
use holdfast_serve::iscsi::{TargetServer, TargetServerOptions};
use holdfast_serve::nbd::{EventSink, Limits, Server, ServerOptions, ServerResources, StopReport, TlsPolicy};
use holdfast_serve::registry::{RegistryError, Removal, RemovalReport};
use jiff::tz::TimeZone;

use self::control::{AddedExport, AddedExports, AddedWrites, ControlAnswer, ControlRequest, ExportStatus};
use self::control_error::control_error;
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
/// How long the last flushes may take afterwards. Both together are shorter than `TimeoutStopSec=` of the systemd unit,
/// after which systemd kills the server.
const LAST_FLUSH_PATIENCE: Duration = Duration::from_secs(40);
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
///
/// # Errors
/// The server cannot start, or the last writes to an export may be lost.
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
    let server = ServerStart {
        nbd: request.nbd,
        iscsi: request.iscsi,
        control: request.control,
        exports: &exports,
        opener: ExportOpener {
            repository,
            zone: &request.zone,
            job,
        },
        pause: pause.as_ref(),
    };
    let served = server.run(&request.choice, ready);
    outcome(served, exports.remove_all(), job)
}

/// Lost writes are an error. After another error, they are warnings.
fn outcome(served: Result<()>, lost: Vec<RegistryError>, job: Job<'_>) -> Result<()> {
    let mut lost = lost.into_iter().map(Error::from);
    let first = if served.is_ok() { lost.next() } else { None };
    lost.for_each(|error| job.progress.warning(&error_messages(&error).join(": ")));
    first.map_or(served, Err)
}

/// A server that starts.
struct ServerStart<'a> {
    nbd: Option<NbdOptions>,
    iscsi: Option<IscsiOptions>,
    control: Option<ControlPlace>,
    exports: &'a Arc<ServedExports>,
    opener: ExportOpener<'a>,
    pause: Option<&'a GcPause<'a>>,
}

impl ServerStart<'_> {
    /// Opens the exports, starts the servers, waits for the end, and stops the servers. After an error, the servers that
    /// have started are stopped, too.
    fn run(self, choice: &SourceChoice, ready: &mut dyn FnMut(&[ExportStatus])) -> Result<()> {
        let (exports, job) = (self.exports, self.opener.job);
        exports.add(choice, self.opener)?;
        let nbd = self.nbd.map(|options| start_nbd(options, exports)).transpose()?;
        let iscsi = self.iscsi.map(|options| start_iscsi(options, exports)).transpose()?;
        let scratch = self.control.as_ref().map(|place| place.scratch.clone());
        let control = self.control.and_then(|place| start_control(place, exports, job));
        ready(&exports.list());
        let running = RunningServer {
            exports,
            control,
            scratch: scratch.unwrap_or_default(),
            opener: self.opener,
            pause: self.pause,
        };
        running.run();
        stop(nbd, iscsi, exports, job);
        Ok(())
    }
}

/// Stops the servers of all protocols within [`PATIENCE`].
fn stop(nbd: Option<Server>, iscsi: Option<TargetServer>, exports: &ServedExports, job: Job<'_>) {
    let (mut nbd, mut iscsi) = (nbd, iscsi);
    let deadline = exports.clock.now() + PATIENCE;
    let left = || deadline.saturating_sub(exports.clock.now());
    // All end at the same time: a device that hangs leaves no time for the others.
    nbd.iter_mut().for_each(Server::begin_stop);
    iscsi.iter_mut().for_each(TargetServer::begin_stop);
    let reports = [
        exports.disks.as_ref().map(|disks| disks.stop(left())),
        nbd.map(|server| server.stop(left())),
        iscsi.map(|server| server.stop(left())),
    ];
    warn_of_abandoned(reports.into_iter().flatten(), job);
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
    let scheme = match &options.tls {
        TlsPolicy::Off => "nbd",
        _ => "nbds",
    };
    let mut server = Server::new(ServerOptions {
        exports: Arc::clone(&exports.registry) as _,
        resources: exports.resources.clone(),
        tls: options.tls,
        clock: Arc::clone(&exports.clock),
        events: options.events,
    });
    for door in options.doors {
        let opened = door.open(&*exports.clock)?;
        exports.change_addresses(|addresses| addresses.nbd.push(NbdDoor::of(&opened.place, scheme)));
        server.listen(opened.listener).map_err(Error::Serve)?;
    }
    Ok(server)
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
    /// The folder for overlays that are discarded at the end.
    scratch: PathBuf,
    opener: ExportOpener<'a>,
    pause: Option<&'a GcPause<'a>>,
}

/// What the server does after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    Stop,
}

impl RunningServer<'_> {
    /// Waits until the job is interrupted or the server is stopped, and keeps garbage collection paused meanwhile.
    fn run(&self) {
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
            if let Some(pause) = self.pause {
                pause.renew();
            }
            watch.look(self.exports, job);
        }
    }

    fn answer(&self, pending: PendingRequest) -> Next {
        let (answer, next) = match pending.request {
            ControlRequest::List => return Next::Continue,
            ControlRequest::Add(added) => (self.add(&added), Next::Continue),
            ControlRequest::Remove { export, force: false } => (self.remove(&export), Next::Continue),
            ControlRequest::Remove { export, force: true } => (self.remove_by_force(&export), Next::Continue),
            ControlRequest::Stop => (Ok(ControlAnswer::Stopping), Next::Stop),
        };
        let answer = answer.unwrap_or_else(|error| ControlAnswer::Error(control_error(&error)));
        // The client may have ended: it does not need the answer.
        pending.reply.send(answer).unwrap_or_default();
        next
    }

    fn add(&self, added: &AddedExports) -> Result<ControlAnswer> {
        let scratch = &self.scratch;
        let sources = added.exports.iter().map(added_source);
        let choice = SourceChoice {
            sources: sources.collect::<Result<_>>()?,
            writes: match &added.writes {
                AddedWrites::Refuse => ClientWrites::Refuse,
                AddedWrites::InPlace => ClientWrites::InPlace(scratch.clone()),
                AddedWrites::Discard => ClientWrites::ThrowAway(scratch.clone()),
                AddedWrites::Keep(folder) => ClientWrites::Keep(folder.clone()),
            },
            machine: added.machine.clone(),
        };
        self.exports.add(&choice, self.opener).map(ControlAnswer::Added)
    }

    fn remove(&self, name: &str) -> Result<ControlAnswer> {
        Ok(removed(self.exports.remove(name, Removal::IfUnused)?))
    }

    fn remove_by_force(&self, name: &str) -> Result<ControlAnswer> {
        Ok(removed(self.exports.remove_by_force(name)?))
    }
}

fn removed(report: RemovalReport) -> ControlAnswer {
    ControlAnswer::Removed {
        ended_clients: report.ended_client_count,
        busy: report.is_busy,
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

fn warn_of_abandoned(reports: impl Iterator<Item = StopReport>, job: Job<'_>) {
    let connections = match reports.map(|report| report.abandoned_connection_count).sum() {
        0_usize => return,
        1 => "1 connection".to_owned(),
        count => format!("{count} connections"),
    };
    job.progress
        .warning(&format!("{connections} had requests that did not end in time"));
}

#[cfg(test)]
mod tests {
    use holdfast_block::SystemClock;
    use holdfast_serve::registry::RegistryError;

    use super::outcome;
    use crate::job::error::ServingError;
    use crate::job::{Error, Interrupt, Job, NoProgress, Result};

    /// Lost writes were only a warning, and the command succeeded.
    #[test]
    fn lost_writes_are_an_error_unless_there_is_another() {
        let (interrupt, clock) = (Interrupt::new(), SystemClock::new());
        let job = Job {
            progress: &NoProgress,
            interrupt: &interrupt,
            clock: &clock,
            thread_count: 1,
        };
        let lost = || ["a", "b"].map(|name| RegistryError::Busy { name: name.to_owned() });
        let ended = |served: Result<()>| outcome(served, lost().into(), job).unwrap_err();
        assert!(matches!(
            ended(Ok(())),
            Error::Serving(ServingError::Registry(RegistryError::Busy { name })) if name == "a"
        ));
        assert!(matches!(ended(Err(Error::NoMachineName)), Error::NoMachineName));
        outcome(Ok(()), Vec::new(), job).unwrap();
    }
}
