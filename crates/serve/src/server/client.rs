//! State that servers of all protocols have: of the whole server, and of each connected client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use holdfast_block::Clock;

use super::budget::Budget;
use super::client_key::ClientKey;
use super::limits::Limits;
use super::outbox::{Outbox, WorkerQuota};
use super::peer::Peer;
use super::resources::ServerResources;
use super::workers::Workers;
use crate::stream::{Origin, SocketStream};

/// State that all connections of a server share.
pub(crate) struct ServerCore {
    pub(crate) resources: ServerResources,
    pub(crate) clock: Arc<dyn Clock>,
    is_stopping: AtomicBool,
}

impl ServerCore {
    pub(crate) fn new(resources: ServerResources, clock: Arc<dyn Clock>) -> Self {
        Self {
            resources,
            clock,
            is_stopping: AtomicBool::new(false),
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        self.resources.limits()
    }

    pub(crate) fn workers(&self) -> &Workers {
        self.resources.workers()
    }

    pub(crate) fn budget(&self) -> &Arc<Budget> {
        self.resources.budget()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        // Relaxed: seeing the change late has the same effect as a request that arrived slightly earlier.
        self.is_stopping.load(Ordering::Relaxed)
    }

    pub(super) fn begin_stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }
}

/// A connected client of a server whose replies are `B`.
pub(crate) struct ConnectedClient<B> {
    pub(crate) peer: Arc<Peer>,
    pub(crate) key: ClientKey,
    pub(crate) stream: Arc<SocketStream>,
    pub(crate) outbox: Arc<Outbox<B>>,
    /// Number of requests in progress that have no reply in the outbox.
    pub(crate) unanswered_count: Arc<AtomicUsize>,
    /// Whether the handshake is complete.
    has_entered: Arc<AtomicBool>,
}

impl<B> Clone for ConnectedClient<B> {
    fn clone(&self) -> Self {
        Self {
            peer: Arc::clone(&self.peer),
            key: self.key,
            stream: Arc::clone(&self.stream),
            outbox: Arc::clone(&self.outbox),
            unanswered_count: Arc::clone(&self.unanswered_count),
            has_entered: Arc::clone(&self.has_entered),
        }
    }
}

impl<B: AsRef<[u8]> + Default + Send + 'static> ConnectedClient<B> {
    pub(super) fn new(peer: Arc<Peer>, origin: Origin, stream: Arc<SocketStream>, limits: &Limits) -> Self {
        let quota = WorkerQuota {
            request_count_max: limits.request_count_max,
            bytes_max: limits.request_bytes_max,
        };
        Self {
            key: ClientKey {
                origin,
                connection: peer.connection,
            },
            peer,
            outbox: Arc::new(Outbox::new(Arc::clone(&stream), quota)),
            stream,
            unanswered_count: Arc::default(),
            has_entered: Arc::default(),
        }
    }

    /// The handshake is complete.
    pub(crate) fn enter(&self) {
        self.has_entered.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_entered(&self) -> bool {
        self.has_entered.load(Ordering::Relaxed)
    }

    /// Whether requests are in progress.
    pub(super) fn is_busy(&self) -> bool {
        !self.outbox.is_empty() || self.unanswered_count.load(Ordering::Relaxed) > 0
    }
}
