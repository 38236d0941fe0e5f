//! The server: listens, and serves targets to initiators.
//!
//! Each connection has one thread, like those of the NBD server. It takes all received PDUs, executes the quick
//! commands, gives the others to workers, and sends its responses in one call before it receives more.

mod connection;
mod directory;
mod ending;
mod event;
mod execution;
mod login_phase;
mod shared;

use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;

use super::login::Authentication;
use super::target_set::TargetSet;
use crate::Result;
use crate::server::client::ServerCore;
use crate::server::connections::{Connections, StopReport};
use crate::server::listen::Listener;
use crate::server::resources::ServerResources;
use crate::stream::Socket;
use directory::SessionDirectory;
use shared::TargetShared;

pub use event::{InitiatorGone, TargetEvent, TargetEventSink};

/// Commands of one session that may be in progress.
pub(crate) const COMMAND_WINDOW: u32 = 64;

/// A source of unpredictable bytes, for the challenges of CHAP.
pub trait RandomSource: Send + Sync {
    /// Fills `bytes`.
    fn fill(&self, bytes: &mut [u8]) -> std::io::Result<()>;
}

impl<F: Fn(&mut [u8]) -> std::io::Result<()> + Send + Sync> RandomSource for F {
    fn fill(&self, bytes: &mut [u8]) -> std::io::Result<()> {
        self(bytes)
    }
}

/// Options of a target server.
#[derive(Clone)]
pub struct TargetServerOptions {
    /// The targets, which may change while the server runs.
    pub targets: Arc<TargetSet>,
    /// How initiators are authenticated.
    pub authentication: Authentication,
    /// The limits on initiators, and what they share; may be shared with other servers.
    pub resources: ServerResources,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The receiver of events.
    pub events: Arc<dyn TargetEventSink>,
    /// Random bytes for challenges.
    pub randomness: Arc<dyn RandomSource>,
}

/// An iSCSI server. Dropping it stops it at once; [`stop`](Self::stop) completes the commands in progress first.
pub struct TargetServer {
    connections: Connections<TargetShared>,
}

impl TargetServer {
    /// A server without listeners.
    pub fn new(options: TargetServerOptions) -> Self {
        let shared = TargetShared {
            core: ServerCore::new(options.resources, options.clock),
            targets: options.targets,
            authentication: options.authentication,
            events: options.events,
            randomness: options.randomness,
            sessions: SessionDirectory::default(),
        };
        Self {
            connections: Connections::new(Arc::new(shared)),
        }
    }

    /// Serves all initiators that connect to `listener`.
    pub fn listen(&mut self, listener: Listener) -> Result<()> {
        self.connections.listen(listener)
    }

    /// Serves one connected initiator.
    pub fn serve(&self, socket: Socket) -> Result<()> {
        self.connections.serve(socket)
    }

    /// Number of connected initiators.
    pub fn connection_count(&self) -> usize {
        self.connections.count()
    }

    /// Accepts no more clients, and asks idle ones to end. [`stop`](Self::stop) waits for them.
    pub fn begin_stop(&mut self) {
        self.connections.begin_stop();
    }

    /// Stops the server: accepts no more initiators, and completes the commands in progress, for at most `patience`.
    pub fn stop(mut self, patience: Duration) -> StopReport {
        self.connections.stop(patience)
    }
}
