//! The clients of an export, and how their sessions are ended.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use holdfast_block::Clock;

/// Interval at which a removal checks the clock.
const WAIT_TICK: Duration = Duration::from_millis(10);

/// The protocol of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClientProtocol {
    /// NBD.
    Nbd,
    /// iSCSI.
    Iscsi,
    /// vhost-user-blk.
    VhostUser,
}

impl ClientProtocol {
    /// The name in lists and documents.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::Iscsi => "iscsi",
            Self::VhostUser => "vhost-user",
        }
    }
}

/// A connected client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientEntry {
    /// Its protocol.
    pub protocol: ClientProtocol,
    /// Its address, or user and process.
    pub peer: String,
    /// The name by which it has introduced itself, if the protocol has such names.
    pub name: Option<String>,
    /// When it connected, by the clock of the servers.
    pub since: Duration,
}

/// Whether clients prevent that an export is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closing {
    IfUnused,
    Forced,
}

/// The session of a client, which a forced removal ends.
pub trait ClientSession: Send + Sync {
    /// Ends the session as the protocol provides: requests in progress are completed and answered. Returns at once, and
    /// may be called several times.
    fn ask_to_end(&self);

    /// Closes the connection.
    fn cut(&self);
}

#[derive(Default)]
pub(super) struct Clients {
    state: Mutex<ClientTable>,
    changed: Condvar,
}

#[derive(Default)]
struct ClientTable {
    last: u64,
    /// No further client may enter.
    is_closed: bool,
    entries: BTreeMap<u64, ConnectedEntry>,
}

struct ConnectedEntry {
    entry: ClientEntry,
    session: Arc<dyn ClientSession>,
}

/// A client of an export, until it is dropped.
pub struct ClientHandle {
    clients: Weak<Clients>,
    number: u64,
}

impl fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientHandle")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

impl Drop for ClientHandle {
    fn drop(&mut self) {
        if let Some(clients) = self.clients.upgrade() {
            clients.lock().entries.remove(&self.number);
            clients.changed.notify_all();
        }
    }
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, ClientTable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a client; `None` if the export is being removed.
    pub(super) fn enter(self: &Arc<Self>, entry: ClientEntry, session: Arc<dyn ClientSession>) -> Option<ClientHandle> {
        let mut table = self.lock();
        if table.is_closed {
            return None;
        }
        table.last += 1;
        let number = table.last;
        table.entries.insert(number, ConnectedEntry { entry, session });
        Some(ClientHandle {
            clients: Arc::downgrade(self),
            number,
        })
    }

    pub(super) fn list(&self) -> Vec<ClientEntry> {
        self.lock()
            .entries
            .values()
            .map(|client| client.entry.clone())
            .collect()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Lets no further client enter. Returns the number of clients that prevent it.
    pub(super) fn close(&self, closing: Closing) -> Result<(), usize> {
        let mut table = self.lock();
        if closing == Closing::IfUnused && !table.entries.is_empty() {
            return Err(table.entries.len());
        }
        table.is_closed = true;
        Ok(())
    }

    fn sessions(&self) -> Vec<Arc<dyn ClientSession>> {
        let table = self.lock();
        table
            .entries
            .values()
            .map(|client| Arc::clone(&client.session))
            .collect()
    }

    /// Asks all clients to end, and waits for at most `patience`; then cuts them, and waits for the same time. Returns
    /// the number of clients that were asked.
    pub(super) fn end_all(&self, patience: Duration, clock: &dyn Clock) -> usize {
        let sessions = self.sessions();
        for session in &sessions {
            session.ask_to_end();
        }
        if self.wait_until_empty(patience, clock) > 0 {
            self.cut_all();
            self.wait_until_empty(patience, clock);
        }
        sessions.len()
    }

    /// Closes the connections of all clients.
    pub(super) fn cut_all(&self) {
        self.sessions().iter().for_each(|session| session.cut());
    }

    fn wait_until_empty(&self, patience: Duration, clock: &dyn Clock) -> usize {
        let deadline = clock.now() + patience;
        let mut table = self.lock();
        while !table.entries.is_empty() && clock.now() < deadline {
            let waited = self.changed.wait_timeout(table, WAIT_TICK);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        table.entries.len()
    }
}
