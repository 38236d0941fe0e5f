//! The server: serves Holdfast's devices to NBD clients.
//!
//! ```text
//! listen ─► connection ─► handshake          pure: bytes in, bytes and a decision out
//!               │     └─► request, execute   pure but for the device: a header is validated and executed, and answered
//!               ├─ receive                   received bytes, and how long to wait for more
//!               ├─ dispatch, workers         in the connection's thread, or in a worker
//!               └─ outbox                    replies to send, batched in one call
//! ```
//! Each connection has one thread. The thread takes all received requests, executes the quick ones, and gives the
//! others to workers, which all connections share. It sends its replies in one call before it receives more. The work
//! of one connection that is queued for workers is limited; beyond that the thread receives nothing, so the client
//! waits.
//!
//! An invalid request is answered with an error, and the connection continues. Only a stream that cannot be parsed
//! closes the connection.

mod budget;
mod connection;
mod dispatch;
mod event;
mod execute;
mod export;
mod handshake;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod limits;
mod listen;
mod outbox;
mod receive;
mod reply;
mod request;
mod tls_policy;
mod workers;

use std::collections::BTreeMap;
use std::net::{IpAddr, Shutdown};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::Clock;

use super::stream::{Socket, SocketStream};
use crate::{Error, Result};
use budget::Budget;
use connection::{Client, ServerShared};
use workers::Workers;

pub use event::{Closed, Event, EventSink, Peer};
pub use export::{Absent, Export, ExportDevice, ExportEntry, Exports, FixedExports, ZeroSpeed};
pub use handshake::HandshakeEnd;
pub use limits::Limits;
pub use listen::Listener;
pub use tls_policy::TlsPolicy;

/// Delay after a connection could not be accepted: the system lacks a resource, and needs time to recover.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit of waiting for connections that are being closed, before a new connection is refused.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which a stopping server checks for connections that have ended.
const STOP_TICK: Duration = Duration::from_millis(5);

/// Options of a server.
#[derive(Clone)]
pub struct ServerOptions {
    /// The exports.
    pub exports: Arc<dyn Exports>,
    /// The limits on clients.
    pub limits: Limits,
    /// Whether connections are encrypted.
    pub tls: TlsPolicy,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The receiver of events.
    pub events: Arc<dyn EventSink>,
}

/// The state after a server has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopReport {
    /// Connections with requests that a device did not complete in time; their threads end when the requests do.
    pub abandoned_connection_count: usize,
}

/// An NBD server. Dropping it stops it at once; [`stop`](Self::stop) completes the requests in progress first.
pub struct Server {
    inner: Arc<Inner>,
    listeners: Vec<ListenerThread>,
}

/// A listener and the thread that accepts its clients.
struct ListenerThread {
    listener: Arc<Listener>,
    thread: JoinHandle<()>,
}

struct Inner {
    shared: Arc<ServerShared>,
    last_connection: AtomicU64,
    connections: Mutex<BTreeMap<u64, Client>>,
    disconnected: Condvar,
}

impl Server {
    /// A server without listeners.
    pub fn new(options: ServerOptions) -> Self {
        let shared = ServerShared {
            exports: options.exports,
            workers: Workers::new(options.limits.worker_count_max),
            budget: Arc::new(Budget::new(options.limits.memory_bytes_max)),
            limits: options.limits,
            tls: options.tls,
            clock: options.clock,
            events: options.events,
            is_stopping: AtomicBool::new(false),
        };
        Self {
            inner: Arc::new(Inner {
                shared: Arc::new(shared),
                last_connection: AtomicU64::new(0),
                connections: Mutex::default(),
                disconnected: Condvar::new(),
            }),
            listeners: Vec::new(),
        }
    }

    /// Serves all clients of `listener`.
    pub fn listen(&mut self, listener: Listener) -> Result<()> {
        let listener = Arc::new(listener);
        let inner = Arc::clone(&self.inner);
        let theirs = Arc::clone(&listener);
        let thread = spawn("nbd-listener", "a listener", move || inner.accept_clients(&theirs))?;
        self.listeners.push(ListenerThread { listener, thread });
        Ok(())
    }

    /// Serves one connected client.
    pub fn serve(&self, socket: Socket) -> Result<()> {
        self.inner.add_connection(socket)
    }

    /// Number of connected clients.
    pub fn connection_count(&self) -> usize {
        self.inner.lock().len()
    }

    /// Stops the server: accepts no more clients, answers new requests with `ESHUTDOWN`, and completes the requests in
    /// progress, for at most `patience`.
    pub fn stop(mut self, patience: Duration) -> StopReport {
        self.stop_within(patience)
    }

    fn stop_within(&mut self, patience: Duration) -> StopReport {
        self.inner.shared.is_stopping.store(true, Ordering::Relaxed);
        for ListenerThread { listener, thread } in self.listeners.drain(..) {
            listener.close();
            // A panic of that thread was already reported, and no code waits for its clients any more.
            drop(thread.join());
        }
        let report = self.inner.wait_for_clients(patience);
        self.inner.shared.workers.close();
        report
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_within(Duration::ZERO);
    }
}

fn spawn(name: &str, purpose: &'static str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(body).map_err(|source| Error::Thread { purpose, source })
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Client>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept_clients(self: &Arc<Self>, listener: &Listener) {
        let shared = &self.shared;
        while !shared.is_stopping.load(Ordering::Relaxed) {
            let error = match listener.accept() {
                Ok(socket) => match self.add_connection(socket) {
                    Ok(()) => continue,
                    Err(Error::Thread { source, .. } | Error::Socket { source }) => source,
                    Err(error) => std::io::Error::other(error),
                },
                Err(_) if shared.is_stopping.load(Ordering::Relaxed) => return,
                Err(error) => error,
            };
            shared.events.event(&Event::AcceptFailed { error: &error });
            shared.clock.sleep(ACCEPT_PAUSE);
        }
    }

    fn add_connection(self: &Arc<Self>, socket: Socket) -> Result<()> {
        let shared = &self.shared;
        let peer = Arc::new(Peer {
            connection: self.last_connection.fetch_add(1, Ordering::Relaxed) + 1,
            name: socket.peer(),
        });
        let address = socket.address();
        let stream = SocketStream::new(socket).map_err(|source| Error::Socket { source })?;
        stream
            .set_time_limits(shared.limits.tick(), shared.limits.stall)
            .map_err(|source| Error::Socket { source })?;
        let stream = Arc::new(stream);
        let outbox = connection::outbox(&shared.limits, &stream);
        let client = Client {
            peer: Arc::clone(&peer),
            stream,
            outbox,
            address,
            has_entered: Arc::default(),
            is_displaced: false,
        };
        {
            let Some(mut connections) = self.make_room(address) else {
                shared.events.event(&Event::TooMany { peer: &peer });
                return Ok(());
            };
            connections.insert(peer.connection, client.clone());
        }
        let slot = ConnectionSlot {
            inner: Arc::clone(self),
            connection: peer.connection,
        };
        let shared = Arc::clone(shared);
        spawn("nbd-connection", "a connection", move || {
            connection::serve(&shared, &client);
            drop(slot);
        })?;
        Ok(())
    }

    /// Returns the connections when another one from `address` is allowed; `None` if it is not. Waits for connections
    /// that were closed to make room: on a busy host their threads end late.
    fn make_room(&self, address: Option<IpAddr>) -> Option<MutexGuard<'_, BTreeMap<u64, Client>>> {
        let (clock, limits) = (&self.shared.clock, &self.shared.limits);
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
        let clock = &self.shared.clock;
        let deadline = clock.now() + patience;
        let mut connections = self.lock();
        while !connections.is_empty() && clock.now() < deadline {
            for connection in connections.values().filter(|it| it.outbox.is_empty()) {
                // Requests that were already sent are still received, and answered with ESHUTDOWN.
                connection.stream.shut_down(Shutdown::Read);
            }
            connections = self.wait(connections);
        }
        for connection in connections.values() {
            connection.stream.shut_down(Shutdown::Both);
        }
        // Wait for connections that only waited for their peer: they end now.
        for _ in 0..20 {
            if connections.values().all(|connection| !connection.outbox.is_empty()) {
                break;
            }
            connections = self.wait(connections);
        }
        StopReport {
            abandoned_connection_count: connections.len(),
        }
    }

    fn wait<'a>(&self, connections: MutexGuard<'a, BTreeMap<u64, Client>>) -> MutexGuard<'a, BTreeMap<u64, Client>> {
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
fn displace_oldest(clients: &mut BTreeMap<u64, Client>, limits: &Limits) -> bool {
    let mut handshaking = clients
        .values_mut()
        .filter(|client| !client.is_displaced && !client.has_entered.load(Ordering::Relaxed));
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
fn room_after_displacing(clients: &BTreeMap<u64, Client>, limits: &Limits, address: Option<IpAddr>) -> Room {
    let staying = || clients.values().filter(|client| !client.is_displaced);
    let of_address = staying().filter(|client| client.address.is_some() && client.address == address);
    let is_full = staying().count() >= limits.connection_count_max;
    if is_full || of_address.count() >= limits.address_connection_count_max {
        Room::Full
    } else {
        Room::Available
    }
}

fn room_for(clients: &BTreeMap<u64, Client>, limits: &Limits, address: Option<IpAddr>) -> Room {
    match room_after_displacing(clients, limits, address) {
        Room::Available if clients.len() >= limits.connection_count_max => Room::AfterClosing,
        room => room,
    }
}

/// A counted connection. The count is decremented on drop, even if the thread panics.
struct ConnectionSlot {
    inner: Arc<Inner>,
    connection: u64,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.inner.lock().remove(&self.connection);
        self.inner.disconnected.notify_all();
    }
}
