//! The sessions of a server, by their handles.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;

use super::super::nexus::InitiatorPort;
use crate::stream::SocketStream;

/// How long a new session waits for the end of the one that it replaces.
const REPLACE_PATIENCE: Duration = Duration::from_secs(5);
const REPLACE_TICK: Duration = Duration::from_millis(50);

/// The sessions of a server.
#[derive(Debug, Default)]
pub(super) struct SessionDirectory {
    state: Mutex<KnownSessions>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct KnownSessions {
    last_handle: u16,
    /// Sessions by their handles; `None` while the login is not complete.
    sessions: BTreeMap<u16, Option<RegisteredSession>>,
}

/// A session, as others see it.
#[derive(Debug, Clone)]
pub(super) struct RegisteredSession {
    pub(super) port: InitiatorPort,
    /// `None` for a discovery session.
    pub(super) target: Option<String>,
    pub(super) stream: Arc<SocketStream>,
}

impl SessionDirectory {
    fn lock(&self) -> MutexGuard<'_, KnownSessions> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn contains(&self, handle: u16) -> bool {
        self.lock().sessions.contains_key(&handle)
    }

    /// Reserves a handle, which is not 0; `None` if all are in use.
    pub(super) fn reserve(&self) -> Option<u16> {
        let mut state = self.lock();
        for _ in 0..=u16::MAX {
            state.last_handle = state.last_handle.wrapping_add(1).max(1);
            let handle = state.last_handle;
            if let std::collections::btree_map::Entry::Vacant(entry) = state.sessions.entry(handle) {
                entry.insert(None);
                return Some(handle);
            }
        }
        None
    }

    /// Enters a session, closes older sessions of the same port with the same target, and waits for their end: "session
    /// reinstatement" (RFC 7143 section 6.3.5).
    pub(super) fn enter(&self, handle: u16, session: RegisteredSession, clock: &dyn Clock) {
        let is_older = |(other, known): &(&u16, &Option<RegisteredSession>)| {
            let is_same = |known: &RegisteredSession| known.port == session.port && known.target == session.target;
            **other != handle && known.as_ref().is_some_and(is_same)
        };
        let deadline = clock.now() + REPLACE_PATIENCE;
        let mut state = self.lock();
        if session.target.is_some() {
            while state.sessions.iter().any(|entry| is_older(&entry)) && clock.now() < deadline {
                let older = state.sessions.iter().filter(is_older);
                for known in older.filter_map(|(_, known)| known.as_ref()) {
                    known.stream.shut_down(Shutdown::Both);
                }
                let waited = self.ended.wait_timeout(state, REPLACE_TICK);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state.sessions.insert(handle, Some(session));
    }

    /// Closes all sessions with a target.
    pub(super) fn close_target(&self, target: &str) {
        let state = self.lock();
        let known = state.sessions.values().flatten();
        for session in known.filter(|session| session.target.as_deref() == Some(target)) {
            session.stream.shut_down(Shutdown::Both);
        }
    }

    /// Removes a session that has ended.
    pub(super) fn remove(&self, handle: u16) {
        self.lock().sessions.remove(&handle);
        self.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::SessionDirectory;

    #[test]
    fn handles_are_unique_and_never_zero() {
        let directory = SessionDirectory::default();
        let handles: Vec<u16> = (0..u16::MAX).map(|_| directory.reserve().unwrap()).collect();
        assert!(!handles.contains(&0));
        assert_eq!(directory.reserve(), None, "all are in use");
        directory.remove(777);
        assert_eq!(directory.reserve(), Some(777));
        assert!(directory.contains(777) && !directory.contains(0));
    }
}
