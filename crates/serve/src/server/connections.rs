//! The connections of a server: accepts clients within the limits, gives each a thread, and closes them when the server
//! stops.

use std::collections::BTreeMap;
use std::net::{IpAddr, Shutdown};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::Clock;

use super::limits::Limits;
use super::listen::Listener;
use super::peer::Peer;
use crate::stream::{Socket, SocketStream};
use crate::{Error, Result};

/// Delay after a connection could not be accepted: the system lacks a resource, and needs time to recover.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit of waiting for connections that are being closed, before a new connection is refused.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which a stopping server checks for connections that have ended.
const STOP_TICK: Duration = Duration::from_millis(5);

/// A protocol: how a server serves one client.
pub(crate) trait Protocol: Send + Sync + 'static {
    /// The state of one connection that the server needs to know.
    type Client: ConnectedClient;
    /// Names of the threads that accept clients and serve them.
    const THREAD_NAMES: ThreadNames;

    /// The limits on clients.
    fn limits(&self) -> &Limits;
    /// The clock.
    fn clock(&self) -> &dyn Clock;
    /// Set when the server stops.
    fn stop_flag(&self) -> &AtomicBool;
    /// The state of a new connection.
    fn client(&self, peer: Arc<Peer>, stream: Arc<SocketStream>) -> Self::Client;
    /// Serves a client until the connection ends.
    fn serve(self: &Arc<Self>, client: &Self::Client);
    /// Reports a client that was refused because there are too many.
    fn too_many(&self, peer: &Peer);
    /// Reports a connection that could not be accepted.
    fn accept_failed(&self, error: &std::io::Error);
}

/// Names of threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadNames {
    pub(crate) listener: &'static str,
    pub(crate) connection: &'static str,
}

/// The state of a client that the table of connections depends on.
pub(crate) trait ConnectedClient: Clone + Send + 'static {
    /// Whether the handshake is complete.
    fn has_entered(&self) -> bool;
    /// Whether requests are in progress.
    fn is_busy(&self) -> bool;
}

/// The state after a server has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopReport {
    /// Connections with requests that a device did not complete in time; their threads end when the requests do.
    pub abandoned_connection_count: usize,
}

/// The listeners and connections of a server.
pub(crate) struct Connections<P: Protocol> {
    table: Arc<ConnectionTable<P>>,
    listeners: Vec<ListenerThread>,
}

/// A listener and the thread that accepts its clients.
struct ListenerThread {
    listener: Arc<Listener>,
    thread: JoinHandle<()>,
}

struct ConnectionTable<P: Protocol> {
    protocol: Arc<P>,
    last_connection: AtomicU64,
    connections: Mutex<ConnectionMap<P>>,
    disconnected: Condvar,
}

type ConnectionMap<P> = BTreeMap<u64, OpenConnection<<P as Protocol>::Client>>;

/// A connection in the table.
struct OpenConnection<C> {
    client: C,
    stream: Arc<SocketStream>,
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
                last_connection: AtomicU64::new(0),
                connections: Mutex::new(BTreeMap::new()),
                disconnected: Condvar::new(),
            }),
            listeners: Vec::new(),
        }
    }

    pub(crate) fn protocol(&self) -> &P {
        &self.table.protocol
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

    /// Accepts no more clients, and completes the requests in progress, for at most `patience`.
    pub(crate) fn stop(&mut self, patience: Duration) -> StopReport {
        self.table.protocol.stop_flag().store(true, Ordering::Relaxed);
        for ListenerThread { listener, thread } in self.listeners.drain(..) {
            listener.close();
            // A panic of that thread was already reported, and no code waits for its clients any more.
            drop(thread.join());
        }
        self.table.wait_for_clients(patience)
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
        self.protocol.stop_flag().load(Ordering::Relaxed)
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
                Err(error) => error,
            };
            self.protocol.accept_failed(&error);
            self.protocol.clock().sleep(ACCEPT_PAUSE);
        }
    }

    fn add_connection(self: &Arc<Self>, socket: Socket) -> Result<()> {
        let protocol = &self.protocol;
        let peer = Arc::new(Peer {
            connection: self.last_connection.fetch_add(1, Ordering::Relaxed) + 1,
            name: socket.peer(),
        });
        let address = socket.address();
        let stream = SocketStream::new(socket).map_err(|source| Error::Socket { source })?;
        stream
            .set_time_limits(protocol.limits().tick(), protocol.limits().stall)
            .map_err(|source| Error::Socket { source })?;
        let stream = Arc::new(stream);
        let client = protocol.client(Arc::clone(&peer), Arc::clone(&stream));
        let connection = OpenConnection {
            client: client.clone(),
            stream,
            address,
            is_displaced: false,
        };
        {
            let Some(mut connections) = self.make_room(address) else {
                protocol.too_many(&peer);
                return Ok(());
            };
            connections.insert(peer.connection, connection);
        }
        let slot = ConnectionSlot {
            table: Arc::clone(self),
            connection: peer.connection,
        };
        let protocol = Arc::clone(protocol);
        spawn(P::THREAD_NAMES.connection, "a connection", move || {
            protocol.serve(&client);
            drop(slot);
        })?;
        Ok(())
    }

    /// Returns the connections when another one from `address` is allowed; `None` if it is not. Waits for connections
    /// that were closed to make room: on a busy host their threads end late.
    fn make_room(&self, address: Option<IpAddr>) -> Option<MutexGuard<'_, ConnectionMap<P>>> {
        let (clock, limits) = (self.protocol.clock(), self.protocol.limits());
        let deadline = clock.now() + CLOSE_PATIENCE;
        let mut connections = self.lock();
        let mut room = if displace_oldest(&mut connections, limits) {
            room_after_displacing(&connections, limits, address)
        } else {
            room_for(&connections, limits, address)
        };
        while room == Room::AfterClosing && clock.now() < deadline {
            connections = self.wait(connections);
            room = room_for(&connections, limits, address);
        }
        (room == Room::Available).then_some(connections)
    }

    fn wait_for_clients(&self, patience: Duration) -> StopReport {
        let clock = self.protocol.clock();
        let deadline = clock.now() + patience;
        let mut connections = self.lock();
        while !connections.is_empty() && clock.now() < deadline {
            for connection in connections.values().filter(|it| !it.client.is_busy()) {
                // Requests that were already sent are still received, and answered with an error.
                connection.stream.shut_down(Shutdown::Read);
            }
            connections = self.wait(connections);
        }
        for connection in connections.values() {
            connection.stream.shut_down(Shutdown::Both);
        }
        // Wait for connections that only waited for their peer: they end now.
        for _ in 0..20 {
            if connections.values().all(|connection| connection.client.is_busy()) {
                break;
            }
            connections = self.wait(connections);
        }
        StopReport {
            abandoned_connection_count: connections.len(),
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
    AfterClosing,
    Full,
}

/// Closes the oldest connection in the handshake if there are too many: a legitimate client completes the handshake
/// quickly, and idle connections must not exclude other clients.
fn displace_oldest<C: ConnectedClient>(connections: &mut BTreeMap<u64, OpenConnection<C>>, limits: &Limits) -> bool {
    let mut handshaking = connections
        .values_mut()
        .filter(|connection| !connection.is_displaced && !connection.client.has_entered());
    match handshaking.next() {
        Some(oldest) if 1 + handshaking.count() >= limits.handshake_count_max => {
            oldest.is_displaced = true;
            oldest.stream.shut_down(Shutdown::Both);
            true
        }
        _ => false,
    }
}

/// Ignores displaced connections, which may still exist for a moment.
fn room_after_displacing<C>(
    connections: &BTreeMap<u64, OpenConnection<C>>,
    limits: &Limits,
    address: Option<IpAddr>,
) -> Room {
    let staying = || connections.values().filter(|connection| !connection.is_displaced);
    let of_address = staying().filter(|connection| connection.address.is_some() && connection.address == address);
    let is_full = staying().count() >= limits.connection_count_max;
    if is_full || of_address.count() >= limits.address_connection_count_max {
        Room::Full
    } else {
        Room::Available
    }
}

fn room_for<C>(connections: &BTreeMap<u64, OpenConnection<C>>, limits: &Limits, address: Option<IpAddr>) -> Room {
    match room_after_displacing(connections, limits, address) {
        Room::Available if connections.len() >= limits.connection_count_max => Room::AfterClosing,
        room => room,
    }
}

/// A counted connection. The count is decremented on drop, even if the thread panics.
struct ConnectionSlot<P: Protocol> {
    table: Arc<ConnectionTable<P>>,
    connection: u64,
}

impl<P: Protocol> Drop for ConnectionSlot<P> {
    fn drop(&mut self) {
        self.table.lock().remove(&self.connection);
        self.table.disconnected.notify_all();
    }
}
