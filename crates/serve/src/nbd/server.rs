//! The server: serves Holdfast's devices to NBD clients.
//!
//! ```text
//! listen ─► connection ─► handshake          pure: bytes in, bytes and a decision out
//!               │     └─► request, execute   pure but for the device: a header is validated and executed, and answered
//!               └─ work                      how long requests may take in the connection's thread
//! ```
//! Listeners, the table of connections, dispatch, workers and the outbox are in `crate::server`: all protocols share them.
//!
//! Each connection has one thread. The thread takes all received requests, executes the quick ones, and gives the
//! others to workers, which all connections share. It sends its replies in one call before it receives more. The work
//! of one connection that is queued for workers is limited; beyond that the thread receives nothing, so the client
//! waits.
//!
//! An invalid request is answered with an error, and the connection continues. Only a stream that cannot be parsed
//! closes the connection.

mod connection;
mod event;
mod execute;
mod export;
mod handshake;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod reply;
mod request;
mod request_context;
mod tls_policy;
mod work;

use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;

use crate::Result;
use crate::server::client::ServerCore;
use crate::server::connections::{Connections, StopReport};
use crate::server::listen::Listener;
use crate::server::resources::ServerResources;
use crate::stream::Socket;
use connection::ServerShared;

pub use event::{Closed, Event, EventSink};
pub use export::{Export, ExportEntry, Exports, FixedExports, ZeroSpeed};
pub use handshake::HandshakeEnd;
pub use tls_policy::TlsPolicy;

/// Options of a server.
#[derive(Clone)]
pub struct ServerOptions {
    /// The exports.
    pub exports: Arc<dyn Exports>,
    /// The limits on clients, and what clients share; may be shared with other servers.
    pub resources: ServerResources,
    /// Whether connections are encrypted.
    pub tls: TlsPolicy,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The receiver of events.
    pub events: Arc<dyn EventSink>,
}

/// An NBD server. Dropping it stops it at once; [`stop`](Self::stop) completes the requests in progress first.
pub struct Server {
    connections: Connections<ServerShared>,
}

impl Server {
    /// A server without listeners.
    pub fn new(options: ServerOptions) -> Self {
        let shared = ServerShared {
            core: ServerCore::new(options.resources, options.clock),
            exports: options.exports,
            tls: options.tls,
            events: options.events,
        };
        Self {
            connections: Connections::new(Arc::new(shared)),
        }
    }

    /// Serves all clients of `listener`.
    pub fn listen(&mut self, listener: Listener) -> Result<()> {
        self.connections.listen(listener)
    }

    /// Serves one connected client.
    pub fn serve(&self, socket: Socket) -> Result<()> {
        self.connections.serve(socket)
    }

    /// Number of connected clients.
    pub fn connection_count(&self) -> usize {
        self.connections.count()
    }

    /// Accepts no more clients, and asks idle ones to end. [`stop`](Self::stop) waits for them.
    pub fn begin_stop(&mut self) {
        self.connections.begin_stop();
    }

    /// Stops the server: accepts no more clients, answers new requests with `ESHUTDOWN`, and completes the requests in
    /// progress, for at most `patience`.
    pub fn stop(mut self, patience: Duration) -> StopReport {
        self.connections.stop(patience)
    }
}
