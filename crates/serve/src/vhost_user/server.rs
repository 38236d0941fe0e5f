//! The server: a socket for each disk, and a thread for each front end, which handles its messages.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use vhost::vhost_user::{BackendReqHandler, Error as MessageError};

use super::event::{FrontEndGone, VhostUserEvent, VhostUserEventSink};
use super::export::VhostUserExport;
use super::inflight::ServerNumber;
use super::load::Load;
use super::memory::SharedMemory;
use super::ring::RingContext;
use super::session::{Session, SessionFailure};
use crate::Result;
use crate::server::connections::{ConnectedClient, Connections, Protocol, StopReport, ThreadNames};
use crate::server::dispatch::DispatchPolicy;
use crate::server::limits::Limits;
use crate::server::listen::Listener;
use crate::server::peer::Peer;
use crate::server::workers::Workers;
use crate::stream::{Arrived, Socket, SocketStream};

/// Bytes of the header of a message.
const MESSAGE_HEADER_BYTES: usize = 12;

/// Options of a vhost-user server.
#[derive(Clone)]
pub struct VhostUserServerOptions {
    /// The limits on front ends. A disk that can be written has one front end at a time.
    pub limits: Limits,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The receiver of events.
    pub events: Arc<dyn VhostUserEventSink>,
}

/// A server of disks for virtual machines. Dropping it stops it at once; [`stop`](Self::stop) completes the requests in
/// progress first.
pub struct VhostUserServer {
    options: VhostUserServerOptions,
    number: ServerNumber,
    workers: Workers,
    disks: Vec<Connections<ServedDisk>>,
}

/// State that all connections of a disk share.
struct ServedDisk {
    export: Arc<VhostUserExport>,
    /// The number of the disk, in the order in which they were added.
    index: u64,
    options: VhostUserServerOptions,
    number: ServerNumber,
    workers: Workers,
    is_stopping: AtomicBool,
}

impl VhostUserServer {
    /// A server without disks.
    pub fn new(options: VhostUserServerOptions) -> Self {
        let now = u64::try_from(options.clock.now().as_nanos()).unwrap_or(u64::MAX);
        Self {
            number: ServerNumber::new(now.rotate_left(32) ^ u64::from(std::process::id())),
            workers: Workers::new(options.limits.worker_count_max),
            options,
            disks: Vec::new(),
        }
    }

    /// Adds a disk, and returns its index.
    pub fn add(&mut self, export: VhostUserExport) -> usize {
        let mut options = self.options.clone();
        if export.device.writer().is_some() {
            // Two guests that write to one disk would destroy its file systems.
            options.limits.connection_count_max = 1;
            options.limits.handshake_count_max = 1;
        }
        let disk = ServedDisk {
            export: Arc::new(export),
            index: self.disks.len() as u64,
            options,
            number: self.number,
            workers: self.workers.clone(),
            is_stopping: AtomicBool::new(false),
        };
        self.disks.push(Connections::new(Arc::new(disk)));
        self.disks.len() - 1
    }

    /// Serves all front ends that connect to `listener`, with the disk of this index.
    pub fn listen(&mut self, disk: usize, listener: Listener) -> Result<()> {
        self.disk_mut(disk).listen(listener)
    }

    /// Serves one connected front end.
    pub fn serve(&self, disk: usize, socket: Socket) -> Result<()> {
        let disk = self.disks.get(disk);
        disk.expect("the index was returned by `add`").serve(socket)
    }

    /// Number of connected front ends.
    pub fn connection_count(&self) -> usize {
        self.disks.iter().map(Connections::count).sum()
    }

    fn disk_mut(&mut self, disk: usize) -> &mut Connections<ServedDisk> {
        self.disks.get_mut(disk).expect("the index was returned by `add`")
    }

    /// Stops the server: accepts no more front ends, and completes the requests in progress, for at most `patience`.
    pub fn stop(mut self, patience: Duration) -> StopReport {
        self.stop_within(patience)
    }

    fn stop_within(&mut self, patience: Duration) -> StopReport {
        let deadline = self.options.clock.now() + patience;
        let mut abandoned_connection_count = 0;
        for disk in &mut self.disks {
            let left = deadline.saturating_sub(self.options.clock.now());
            abandoned_connection_count += disk.stop(left).abandoned_connection_count;
        }
        self.workers.close();
        StopReport {
            abandoned_connection_count,
        }
    }
}

impl Drop for VhostUserServer {
    fn drop(&mut self) {
        self.stop_within(Duration::ZERO);
    }
}

/// The state of a front end that the table of connections depends on.
#[derive(Clone)]
struct FrontEnd {
    stream: Arc<SocketStream>,
    context: Arc<RingContext>,
    has_entered: Arc<AtomicBool>,
}

impl ConnectedClient for FrontEnd {
    fn has_entered(&self) -> bool {
        self.has_entered.load(Ordering::Relaxed)
    }

    fn is_busy(&self) -> bool {
        self.context.load.is_busy()
    }
}

impl Protocol for ServedDisk {
    type Client = FrontEnd;
    const THREAD_NAMES: ThreadNames = ThreadNames {
        listener: "serve-vhost-in",
        connection: "serve-vhost",
    };

    fn limits(&self) -> &Limits {
        &self.options.limits
    }

    fn clock(&self) -> &dyn Clock {
        &*self.options.clock
    }

    fn stop_flag(&self) -> &AtomicBool {
        &self.is_stopping
    }

    fn client(&self, peer: Arc<Peer>, stream: Arc<SocketStream>) -> FrontEnd {
        let queue_count = usize::from(self.export.disk.queue_count);
        FrontEnd {
            stream,
            has_entered: Arc::default(),
            context: Arc::new(RingContext {
                export: Arc::clone(&self.export),
                worker_turn: self.index << 32 | peer.connection,
                peer,
                memory: SharedMemory::default(),
                workers: self.workers.clone(),
                clock: Arc::clone(&self.options.clock),
                events: Arc::clone(&self.options.events),
                server: self.number,
                policy: DispatchPolicy::new(),
                is_write_through: AtomicBool::new(false),
                load: Load::new(queue_count, self.options.limits.request_count_max),
            }),
        }
    }

    fn serve(self: &Arc<Self>, client: &FrontEnd) {
        let (export, peer) = (self.export.name.as_str(), &*client.context.peer);
        self.report(&VhostUserEvent::Connected { export, peer });
        let reason = self.converse(client);
        self.report(&VhostUserEvent::Disconnected {
            export,
            peer,
            reason: &reason,
        });
    }

    fn too_many(&self, peer: &Peer) {
        let export = self.export.name.as_str();
        self.report(&VhostUserEvent::TooMany { export, peer });
    }

    fn accept_failed(&self, error: &std::io::Error) {
        let export = self.export.name.as_str();
        self.report(&VhostUserEvent::AcceptFailed { export, error });
    }
}

impl ServedDisk {
    fn report(&self, event: &VhostUserEvent<'_>) {
        self.options.events.vhost_user_event(event);
    }

    /// Handles the messages of a front end until it is gone, and completes its requests.
    fn converse(&self, client: &FrontEnd) -> FrontEndGone {
        let session = Arc::new(Mutex::new(Session::new(Arc::clone(&client.context))));
        let reason = match client.stream.duplicate() {
            Err(error) => FrontEndGone::Io(error),
            Ok(socket) => self.handle_messages(client, &session, UnixStream::from(socket)),
        };
        let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = session.end() {
            self.report(&VhostUserEvent::RequestFailed {
                export: &self.export.name,
                peer: &client.context.peer,
                action: "flush",
                error: &error,
            });
        }
        reason
    }

    fn handle_messages(&self, client: &FrontEnd, session: &Arc<Mutex<Session>>, socket: UnixStream) -> FrontEndGone {
        let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(session));
        let handshake_end = self.options.clock.now() + self.options.limits.handshake;
        loop {
            let deadline = (!client.has_entered()).then_some(handshake_end);
            if let Err(reason) = self.wait_for_message(client, deadline) {
                return reason;
            }
            let handled = handler.handle_request();
            let state = session.lock().unwrap_or_else(PoisonError::into_inner);
            client.has_entered.store(state.has_entered, Ordering::Relaxed);
            if let Err(error) = handled {
                return self.reason_of(error, state.failure);
            }
        }
    }

    /// Waits until the header of a message has arrived: later the server would have to wait for the rest of it.
    fn wait_for_message(&self, client: &FrontEnd, deadline: Option<Duration>) -> std::result::Result<(), FrontEndGone> {
        let clock = &*self.options.clock;
        let mut deadline = deadline;
        loop {
            match client.stream.peek(MESSAGE_HEADER_BYTES) {
                Ok(Arrived::All) => return Ok(()),
                Ok(Arrived::End) if self.is_stopping.load(Ordering::Relaxed) => return Err(FrontEndGone::ByServer),
                Ok(Arrived::End) => return Err(FrontEndGone::ByFrontEnd),
                Ok(Arrived::Part) => {
                    let end = clock.now() + self.options.limits.stall;
                    deadline = Some(deadline.map_or(end, |deadline| deadline.min(end)));
                    clock.sleep(PART_PAUSE);
                }
                Ok(Arrived::Nothing) => {}
                Err(error) => return Err(FrontEndGone::Io(error)),
            }
            if deadline.is_some_and(|deadline| clock.now() >= deadline) {
                return Err(FrontEndGone::Abandoned(
                    "the front end sent no complete message in time",
                ));
            }
        }
    }

    fn reason_of(&self, error: MessageError, failure: Option<SessionFailure>) -> FrontEndGone {
        match (error, failure) {
            (_, Some(SessionFailure::WritesLost)) => FrontEndGone::WritesLost,
            (_, Some(SessionFailure::Invalid(reason))) => FrontEndGone::Malformed(reason.to_owned()),
            (MessageError::Disconnected | MessageError::SocketBroken(_), None) => {
                if self.is_stopping.load(Ordering::Relaxed) {
                    FrontEndGone::ByServer
                } else {
                    FrontEndGone::ByFrontEnd
                }
            }
            (MessageError::SocketRetry(_), None) => FrontEndGone::Abandoned("the front end sent half a message"),
            (MessageError::SocketError(error), None) => FrontEndGone::Io(error),
            (error, None) => FrontEndGone::Malformed(error.to_string()),
        }
    }
}

/// Pause before the rest of a header is looked for again.
const PART_PAUSE: Duration = Duration::from_millis(5);
