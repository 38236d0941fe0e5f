//! The connections of a server: accepts clients within the limits, gives each a thread, and closes them when the server
//! stops.

use std::collections::BTreeMap;
use std::net::{IpAddr, Shutdown};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::client::{ConnectedClient, ServerCore};
use super::limits::Limits;
use super::listen::Listener;
use super::peer::Peer;
use super::resources::ConnectionCounts;
use crate::stream::{Socket, SocketStream};
use crate::{Error, Result};

/// Delay after a connection could not be accepted: the system lacks a resource, and needs time to recover.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit of waiting for connections that are being closed, before a new connection is refused.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which a stopping server checks for connections that have ended.
const STOP_TICK: Duration = Duration::from_millis(5);
/// How long a stopping server waits for the threads of connections that it has closed.
const CUT_PATIENCE: Duration = Duration::from_millis(100);

/// A protocol: how a server serves one client.
pub(crate) trait Protocol: Send + Sync + 'static {
    /// Encoded replies.
    type Reply: AsRef<[u8]> + Default + Send + 'static;
    /// Names of the threads that accept clients and serve them.
    const THREAD_NAMES: ThreadNames;
    /// When a stopping server stops receiving from a client.
    const STOP_RECEIVING: StopReceiving = StopReceiving::WhenIdle;

    /// The state that all protocols have.
    fn core(&self) -> &ServerCore;
    /// The maximum number of connections of this server alone.
    fn connection_count_max(&self) -> usize {
        usize::MAX
    }
    /// Serves a client until the connection ends.
    fn serve(self: &Arc<Self>, client: &ConnectedClient<Self::Reply>);
    /// Reports a client that was refused because there are too many.
    fn too_many(&self, peer: &Peer, limit: ReachedLimit);
    /// Reports a connection that could not be accepted.
    fn accept_failed(&self, error: &std::io::Error);
}

/// Names of threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadNames {
    pub(crate) listener: &'static str,
    pub(crate) connection: &'static str,
}

/// When a stopping server stops receiving from a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReceiving {
    /// When no request of the client is in progress: until then, it may send more.
    WhenIdle,
    /// At once: requests do not come through the connection, and its end completes them.
    AtOnce,
}

/// The limit on connections that excludes a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReachedLimit {
    /// The one on all connections of the process, or of an address.
    Process,
    /// The one of this server alone.
    Server,
}

/// The state after a server has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopReport {
    /// Connections with requests that a device did not complete in time; their threads end when the requests do.
    pub abandoned_connection_count: usize,
}

/// The listeners and connections of a server. Dropping it stops the server at once.
pub(crate) struct Connections<P: Protocol> {
    table: Arc<ConnectionTable<P>>,
    listeners: Vec<ListenerThread>,
    is_withdrawn: bool,
}

/// A listener and the thread that accepts its clients.
struct ListenerThread {
    listener: Arc<Listener>,
    thread: JoinHandle<()>,
}

struct ConnectionTable<P: Protocol> {
    protocol: Arc<P>,
    connections: Mutex<ConnectionMap<P>>,
    disconnected: Condvar,
}

type ConnectionMap<P> = BTreeMap<u64, OpenConnection<<P as Protocol>::Reply>>;

/// A connection in the table.
struct OpenConnection<B> {
    client: ConnectedClient<B>,
    /// The client's network address.
    address: Option<IpAddr>,
    /// Whether the connection was closed in favour of another client.
    is_displaced: bool,
}

impl<P: Protocol> Connections<P> {
    pub(crate) fn new(protocol: Arc<P>) -> Self {
        Self {
            table: Arc::new(ConnectionTable {
                protocol,
                connections: Mutex::new(BTreeMap::new()),
                disconnected: Condvar::new(),
            }),
            listeners: Vec::new(),
            is_withdrawn: false,
        }
    }

    /// Serves all clients of `listener`.
    pub(crate) fn listen(&mut self, listener: Listener) -> Result<()> {
        let listener = Arc::new(listener);
        let table = Arc::clone(&self.table);
        let theirs = Arc::clone(&listener);
        let thread = spawn(P::THREAD_NAMES.listener, "a listener", move || {
            table.accept_clients(&theirs);
        })?;
        self.listeners.push(ListenerThread { listener, thread });
        Ok(())
    }

    /// Serves one connected client.
    pub(crate) fn serve(&self, socket: Socket) -> Result<()> {
        self.table.add_connection(socket)
    }

    /// Number of connected clients.
    pub(crate) fn count(&self) -> usize {
        self.table.lock().len()
    }

    /// Accepts no more clients, and asks the connected ones to end. [`stop`](Self::stop) waits for them.
    pub(crate) fn begin_stop(&mut self) {
        self.close_listeners();
        ConnectionTable::<P>::stop_receiving(&self.table.lock());
    }

    /// Accepts no more clients, and completes the requests in progress, for at most `patience`.
    pub(crate) fn stop(&mut self, patience: Duration) -> StopReport {
        self.close_listeners();
        self.table.wait_for_clients(patience)
    }

    /// Accepts no more clients. Connected ones are served until they or the registry end their sessions.
    pub(crate) fn withdraw(mut self) {
        self.close_listeners();
        self.is_withdrawn = true;
    }

    fn close_listeners(&mut self) {
        self.table.protocol.core().begin_stop();
        for ListenerThread { listener, thread } in self.listeners.drain(..) {
            listener.close();
            // A panic of that thread was already reported, and no code waits for its clients any more.
            drop(thread.join());
        }
    }
}

impl<P: Protocol> Drop for Connections<P> {
    fn drop(&mut self) {
        if !self.is_withdrawn {
            self.stop(Duration::ZERO);
        }
    }
}

fn spawn(name: &str, purpose: &'static str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(body).map_err(|source| Error::Thread { purpose, source })
}

impl<P: Protocol> ConnectionTable<P> {
    fn lock(&self) -> MutexGuard<'_, ConnectionMap<P>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        self.protocol.core().is_stopping()
    }

    fn accept_clients(self: &Arc<Self>, listener: &Listener) {
        while !self.is_stopping() {
            let error = match listener.accept() {
                Ok(socket) => match self.add_connection(socket) {
                    Ok(()) => continue,
                    Err(Error::Thread { source, .. } | Error::Socket { source }) => source,
                    Err(error) => std::io::Error::other(error),
                },
                Err(_) if self.is_stopping() => return,
                // An inherited socket: a look whether the server stops.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(error) => error,
            };
            self.protocol.accept_failed(&error);
            self.protocol.core().clock.sleep(ACCEPT_PAUSE);
        }
    }

    fn add_connection(self: &Arc<Self>, socket: Socket) -> Result<()> {
        let core = self.protocol.core();
        let peer = Arc::new(Peer {
            connection: core.resources.next_connection(),
            name: socket.peer(),
        });
        let (address, origin) = (socket.address(), socket.origin());
        let stream = SocketStream::new(socket).map_err(|source| Error::Socket { source })?;
        stream
            .set_time_limits(core.limits().tick(), core.limits().stall)
            .map_err(|source| Error::Socket { source })?;
        let client = ConnectedClient::new(Arc::clone(&peer), origin, Arc::new(stream), core.limits());
        let connection = OpenConnection {
            client: client.clone(),
            address,
            is_displaced: false,
        };
        if let Err(limit) = self.insert_within_limits(peer.connection, connection) {
            self.protocol.too_many(&peer, limit);
            return Ok(());
        }
        let slot = ConnectionSlot {
            table: Arc::clone(self),
            connection: peer.connection,
        };
        let protocol = Arc::clone(&self.protocol);
        spawn(P::THREAD_NAMES.connection, "a connection", move || {
            protocol.serve(&client);
            drop(slot);
        })?;
        Ok(())
    }

    /// Adds a connection if the limits allow it. Waits for connections that were closed to make room: on a busy host
    /// their threads end late.
    fn insert_within_limits(
        &self,
        number: u64,
        connection: OpenConnection<P::Reply>,
    ) -> std::result::Result<(), ReachedLimit> {
        let core = self.protocol.core();
        let address = connection.address;
        let deadline = core.clock.now() + CLOSE_PATIENCE;
        let mut connections = self.lock();
        let own_count_max = self.protocol.connection_count_max();
        let limits = TableLimits {
            shared: core.limits(),
            own_count_max,
        };
        let handshake_count_max = limits.shared.handshake_count_max.min(own_count_max);
        let mut has_displaced = displace_oldest(&mut connections, handshake_count_max);
        loop {
            {
                let mut counts = core.resources.counts();
                let room = match room_for(&connections, &counts, limits, address) {
                    // One that was just closed may still exist for a moment.
                    Room::AfterClosing(_) if has_displaced => Room::Available,
                    room => room,
                };
                match room {
                    Room::Available => {
                        counts.add(address);
                        connections.insert(number, connection);
                        return Ok(());
                    }
                    Room::Full(limit) => return Err(limit),
                    Room::AfterClosing(limit) if core.clock.now() >= deadline => return Err(limit),
                    Room::AfterClosing(_) => {}
                }
            }
            has_displaced = false;
            connections = self.wait(connections);
        }
    }

    fn wait_for_clients(&self, patience: Duration) -> StopReport {
        let clock = &*self.protocol.core().clock;
        let deadline = clock.now() + patience;
        let mut connections = self.lock();
        while !connections.is_empty() && clock.now() < deadline {
            Self::stop_receiving(&connections);
            connections = self.wait(connections);
        }
        for connection in connections.values() {
            connection.client.stream.shut_down(Shutdown::Both);
        }
        // Connections that only waited for their peer end now.
        let deadline = clock.now() + CUT_PATIENCE;
        while !connections.is_empty() && clock.now() < deadline {
            connections = self.wait(connections);
        }
        StopReport {
            abandoned_connection_count: connections.len(),
        }
    }

    fn stop_receiving(connections: &ConnectionMap<P>) {
        let is_due = |client: &ConnectedClient<P::Reply>| match P::STOP_RECEIVING {
            StopReceiving::WhenIdle => !client.is_busy(),
            StopReceiving::AtOnce => true,
        };
        for connection in connections.values().filter(|it| is_due(&it.client)) {
            // Requests that were already sent are still received, and answered with an error.
            connection.client.stream.shut_down(Shutdown::Read);
        }
    }

    fn wait<'a>(&self, connections: MutexGuard<'a, ConnectionMap<P>>) -> MutexGuard<'a, ConnectionMap<P>> {
        let waited = self.disconnected.wait_timeout(connections, STOP_TICK);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Whether there is room for another client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Available,
    /// There is room after connections that are being closed have ended.
    AfterClosing(ReachedLimit),
    Full(ReachedLimit),
}

/// The limits on the connections of one server.
#[derive(Debug, Clone, Copy)]
struct TableLimits<'a> {
    /// Those on all servers together.
    shared: &'a Limits,
    own_count_max: usize,
}

/// Closes the oldest connection in the handshake if there are too many: a legitimate client completes the handshake
/// quickly, and idle connections must not exclude other clients.
fn displace_oldest<B: AsRef<[u8]> + Default + Send + 'static>(
    connections: &mut BTreeMap<u64, OpenConnection<B>>,
    handshake_count_max: usize,
) -> bool {
    let mut handshaking = connections
        .values_mut()
        .filter(|connection| !connection.is_displaced && !connection.client.has_entered());
    match handshaking.next() {
        Some(oldest) if 1 + handshaking.count() >= handshake_count_max => {
            oldest.is_displaced = true;
            oldest.client.stream.shut_down(Shutdown::Both);
            true
        }
        _ => false,
    }
}

/// Whether there is room for a client from `address`.
fn room_for<B>(
    connections: &BTreeMap<u64, OpenConnection<B>>,
    counts: &ConnectionCounts,
    limits: TableLimits<'_>,
    address: Option<IpAddr>,
) -> Room {
    let TableLimits { shared, own_count_max } = limits;
    let displaced = || connections.values().filter(|connection| connection.is_displaced);
    let displaced_of_address = displaced().filter(|connection| connection.address == address).count();
    let of_address = address.map_or(0, |address| counts.of(address).saturating_sub(displaced_of_address));
    let staying = counts.total.saturating_sub(displaced().count());
    let own_staying = connections.len() - displaced().count();
    if own_staying >= own_count_max {
        Room::Full(ReachedLimit::Server)
    } else if staying >= shared.connection_count_max || of_address >= shared.address_connection_count_max {
        Room::Full(ReachedLimit::Process)
    } else if connections.len() >= own_count_max {
        Room::AfterClosing(ReachedLimit::Server)
    } else if counts.total >= shared.connection_count_max {
        Room::AfterClosing(ReachedLimit::Process)
    } else {
        Room::Available
    }
}

/// A counted connection. The count is decremented on drop, even if the thread panics.
struct ConnectionSlot<P: Protocol> {
    table: Arc<ConnectionTable<P>>,
    connection: u64,
}

impl<P: Protocol> Drop for ConnectionSlot<P> {
    fn drop(&mut self) {
        let removed = self.table.lock().remove(&self.connection);
        if let Some(connection) = removed {
            self.table.protocol.core().resources.counts().remove(connection.address);
        }
        self.table.disconnected.notify_all();
    }
}
