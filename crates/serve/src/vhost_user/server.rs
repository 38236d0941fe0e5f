//! The server: a socket for each disk, and a thread for each front end, which handles its messages.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use vhost::vhost_user::{BackendReqHandler, Error as MessageError};

use super::event::{FrontEndGone, VhostUserEvent, VhostUserEventSink};
use super::export::VhostUserExport;
use super::inflight::ServerNumber;
use super::load::Load;
use super::memory::SharedMemory;
use super::ring::RingContext;
use super::session::{SessionFailure, VhostSession};
use crate::Result;
use crate::registry::{ClientEnding, ClientEntry, ClientHandle, ClientProtocol};
use crate::server::client::{ConnectedClient, ServerCore};
use crate::server::connections::{Connections, Protocol, ReachedLimit, StopReceiving, StopReport, ThreadNames};
use crate::server::dispatch::DispatchPolicy;
use crate::server::listen::Listener;
use crate::server::peer::Peer;
use crate::server::resources::ServerResources;
use crate::stream::{Arrived, Socket};

/// Bytes of the header of a message.
const MESSAGE_HEADER_BYTES: usize = 12;

/// Options of a vhost-user server.
#[derive(Clone)]
pub struct VhostUserServerOptions {
    /// The limits on front ends, and what they share; may be shared with other servers. A disk that can be written has
    /// one front end at a time.
    pub resources: ServerResources,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The receiver of events.
    pub events: Arc<dyn VhostUserEventSink>,
    /// A random number. Front ends that continue with a later server show it the number of the earlier one, whose writes
    /// may be lost.
    pub server_number: u64,
}

/// A server of disks for virtual machines. Disks are added and withdrawn while front ends use others.
///
/// Dropping it stops it at once; [`stop`](Self::stop) completes the requests in progress first.
pub struct VhostUserServer {
    options: VhostUserServerOptions,
    disks: Mutex<DiskTable>,
}

/// A disk of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DiskNumber(u64);

#[derive(Default)]
struct DiskTable {
    added_count: u64,
    disks: BTreeMap<DiskNumber, Connections<ServedDisk>>,
}

impl DiskTable {
    /// # Panics
    /// If the disk was withdrawn.
    fn disk(&mut self, number: DiskNumber) -> &mut Connections<ServedDisk> {
        self.disks.get_mut(&number).expect("the disk was not withdrawn")
    }
}

/// State that all connections of a disk share.
struct ServedDisk {
    core: ServerCore,
    export: Arc<VhostUserExport>,
    events: Arc<dyn VhostUserEventSink>,
    number: ServerNumber,
}

impl VhostUserServer {
    /// A server without disks.
    pub fn new(options: VhostUserServerOptions) -> Self {
        Self {
            options,
            disks: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, DiskTable> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a disk.
    pub fn add(&self, export: VhostUserExport) -> DiskNumber {
        let mut table = self.lock();
        table.added_count += 1;
        let disk = ServedDisk {
            core: ServerCore::new(self.options.resources.clone(), Arc::clone(&self.options.clock)),
            export: Arc::new(export),
            events: Arc::clone(&self.options.events),
            // A disk that is added again may lack writes: it is another one. The lowest bit is not used.
            number: ServerNumber::new(self.options.server_number ^ table.added_count << 1),
        };
        let number = DiskNumber(table.added_count);
        table.disks.insert(number, Connections::new(Arc::new(disk)));
        number
    }

    /// Serves all front ends that connect to `listener`, with a disk.
    ///
    /// # Panics
    /// If the disk was withdrawn.
    pub fn listen(&self, disk: DiskNumber, listener: Listener) -> Result<()> {
        self.lock().disk(disk).listen(listener)
    }

    /// Serves one connected front end.
    ///
    /// # Panics
    /// If the disk was withdrawn.
    pub fn serve(&self, disk: DiskNumber, socket: Socket) -> Result<()> {
        self.lock().disk(disk).serve(socket)
    }

    /// Number of connected front ends.
    pub fn connection_count(&self) -> usize {
        self.lock().disks.values().map(Connections::count).sum()
    }

    /// Accepts no more front ends for a disk, and removes its sockets. Connected ones continue.
    pub fn withdraw(&self, disk: DiskNumber) {
        let removed = self.lock().disks.remove(&disk);
        if let Some(connections) = removed {
            connections.withdraw();
        }
    }

    /// Stops the server: accepts no more front ends, and completes the requests in progress, for at most `patience`.
    pub fn stop(&self, patience: Duration) -> StopReport {
        let deadline = self.options.clock.now() + patience;
        let mut disks = std::mem::take(&mut self.lock().disks);
        // All end at the same time: a disk that hangs leaves no time for the others.
        disks.values_mut().for_each(Connections::begin_stop);
        let mut abandoned_connection_count = 0;
        for mut disk in disks.into_values() {
            let left = deadline.saturating_sub(self.options.clock.now());
            abandoned_connection_count += disk.stop(left).abandoned_connection_count;
        }
        StopReport {
            abandoned_connection_count,
        }
    }
}

/// A front end; vhost-user has no replies of the server's own threads.
type FrontEnd = ConnectedClient<Vec<u8>>;

impl Protocol for ServedDisk {
    type Reply = Vec<u8>;
    const THREAD_NAMES: ThreadNames = ThreadNames {
        listener: "serve-vhost-in",
        connection: "serve-vhost",
    };
    // A guest submits requests through its memory, perhaps without a pause.
    const STOP_RECEIVING: StopReceiving = StopReceiving::AtOnce;

    fn core(&self) -> &ServerCore {
        &self.core
    }

    fn connection_count_max(&self) -> usize {
        // Two guests that write to one disk would destroy its file systems.
        if self.export.device.writer().is_some() {
            1
        } else {
            usize::MAX
        }
    }

    fn serve(self: &Arc<Self>, client: &FrontEnd) {
        let (export, peer) = (self.export.name.as_str(), &*client.peer);
        self.report(&VhostUserEvent::Connected { export, peer });
        let ending = Arc::new(ClientEnding::new(Arc::clone(&client.stream)));
        let reason = match self.enter(client, &ending) {
            Ok(entered) => {
                let reason = self.converse(client);
                drop(entered);
                reason
            }
            Err(reason) => reason,
        };
        let reason = match reason {
            FrontEndGone::ByFrontEnd if ending.is_ending() => FrontEndGone::ByServer,
            reason => reason,
        };
        self.report(&VhostUserEvent::Disconnected {
            export,
            peer,
            reason: &reason,
        });
    }

    fn too_many(&self, peer: &Peer, limit: ReachedLimit) {
        let export = self.export.name.as_str();
        self.report(&VhostUserEvent::TooMany { export, peer, limit });
    }

    fn accept_failed(&self, error: &std::io::Error) {
        let export = self.export.name.as_str();
        self.report(&VhostUserEvent::AcceptFailed { export, error });
    }
}

impl ServedDisk {
    fn report(&self, event: &VhostUserEvent<'_>) {
        self.events.vhost_user_event(event);
    }

    /// Enters a front end in the registry.
    fn enter(
        &self,
        client: &FrontEnd,
        ending: &Arc<ClientEnding>,
    ) -> std::result::Result<Option<ClientHandle>, FrontEndGone> {
        let Some(registered) = &self.export.registered else {
            return Ok(None);
        };
        let entry = ClientEntry {
            protocol: ClientProtocol::VhostUser,
            peer: client.peer.name.clone(),
            name: None,
            since: self.core.clock.now(),
        };
        let entered = registered.enter(entry, Arc::clone(ending) as _);
        entered.map(Some).ok_or(FrontEndGone::ByServer)
    }

    fn context(&self, client: &FrontEnd) -> RingContext {
        let queue_count = usize::from(self.export.disk.queue_count);
        let busy_count = Arc::clone(&client.unanswered_count);
        RingContext {
            export: Arc::clone(&self.export),
            key: client.key,
            peer: Arc::clone(&client.peer),
            memory: SharedMemory::default(),
            workers: self.core.workers().clone(),
            clock: Arc::clone(&self.core.clock),
            events: Arc::clone(&self.events),
            server: self.number,
            policy: DispatchPolicy::new(),
            is_write_through: AtomicBool::new(false),
            load: Load::new(queue_count, self.core.limits().request_count_max, busy_count),
        }
    }

    /// Handles the messages of a front end until it is gone, and completes its requests.
    fn converse(&self, client: &FrontEnd) -> FrontEndGone {
        let session = Arc::new(Mutex::new(VhostSession::new(Arc::new(self.context(client)))));
        let reason = match client.stream.duplicate() {
            Err(error) => FrontEndGone::Io(error),
            Ok(socket) => self.handle_messages(client, &session, UnixStream::from(socket)),
        };
        let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = session.end() {
            self.report(&VhostUserEvent::RequestFailed {
                export: &self.export.name,
                peer: &client.peer,
                action: "flush",
                error: &error,
            });
        }
        reason
    }

    fn handle_messages(
        &self,
        client: &FrontEnd,
        session: &Arc<Mutex<VhostSession>>,
        socket: UnixStream,
    ) -> FrontEndGone {
        let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(session));
        let handshake_end = self.core.clock.now() + self.core.limits().handshake;
        loop {
            let deadline = (!client.has_entered()).then_some(handshake_end);
            if let Err(reason) = self.wait_for_message(client, deadline) {
                return reason;
            }
            let handled = handler.handle_request();
            let state = session.lock().unwrap_or_else(PoisonError::into_inner);
            if state.has_entered {
                client.enter();
            }
            if let Err(error) = handled {
                return self.reason_of(error, state.failure);
            }
        }
    }

    /// Waits until the header of a message has arrived: later the server would have to wait for the rest of it.
    fn wait_for_message(&self, client: &FrontEnd, deadline: Option<Duration>) -> std::result::Result<(), FrontEndGone> {
        let clock = &*self.core.clock;
        let mut deadline = deadline;
        loop {
            match client.stream.peek(MESSAGE_HEADER_BYTES) {
                Ok(Arrived::All) => return Ok(()),
                Ok(Arrived::End) if self.core.is_stopping() => return Err(FrontEndGone::ByServer),
                Ok(Arrived::End) => return Err(FrontEndGone::ByFrontEnd),
                Ok(Arrived::Part) => {
                    let end = clock.now() + self.core.limits().stall;
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
                if self.core.is_stopping() {
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
