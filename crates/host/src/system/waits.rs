//! Waits that lower layers cannot interrupt: a call of libvirt's library, a QEMU command, a lock, a program of the
//! system.
//!
//! A job checks for a stop request between its steps. A step that waits for a process that does not answer would
//! delay this check. So each such wait is registered here while it lasts. The program, which receives the stop
//! request, can then exit during such a wait.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

static NEXT: AtomicU64 = AtomicU64::new(0);
static UNDER_WAY: Mutex<BTreeMap<u64, NotedWait>> = Mutex::new(BTreeMap::new());

/// A wait in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotedWait {
    /// The process that does not answer: "libvirt", "QEMU's monitor".
    pub peer: &'static str,
    /// What would be lost by an interruption.
    pub kind: WaitKind,
}

/// What would be lost if a wait is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitKind {
    /// An answer, which usually arrives immediately.
    Answer,
    /// Work that may take some seconds and should be completed.
    Work,
}

/// Registers a wait while it exists.
#[derive(Debug)]
pub struct Wait(u64);

/// The name of a process that holds a lock.
pub const LOCK_HOLDER: &str = "the process that holds a lock";

impl Wait {
    /// Registers a wait for an answer of `peer`.
    pub fn for_answer(peer: &'static str) -> Self {
        Self::begin(NotedWait {
            peer,
            kind: WaitKind::Answer,
        })
    }

    /// Registers a wait for work of `peer`.
    pub fn for_work(peer: &'static str) -> Self {
        Self::begin(NotedWait {
            peer,
            kind: WaitKind::Work,
        })
    }

    fn begin(wait: NotedWait) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.insert(number, wait);
        Self(number)
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let mut under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.remove(&self.0);
    }
}

/// The current waits of this process, by unique numbers.
pub fn waits_under_way() -> Vec<(u64, NotedWait)> {
    let under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    under_way.iter().map(|(number, wait)| (*number, *wait)).collect()
}

#[cfg(test)]
mod tests {
    use super::{Wait, WaitKind, waits_under_way};

    #[test]
    fn a_wait_is_registered_while_it_lasts() {
        let peer = "a test of waits";
        let noted = || waits_under_way().into_iter().filter(move |(_, wait)| wait.peer == peer);
        let first = Wait::for_answer(peer);
        let second = Wait::for_work(peer);
        let kinds: Vec<_> = noted().map(|(_, wait)| wait.kind).collect();
        assert_eq!(kinds, [WaitKind::Answer, WaitKind::Work]);
        drop(first);
        assert_eq!(noted().count(), 1);
        drop(second);
        assert_eq!(noted().count(), 0);
    }
}
