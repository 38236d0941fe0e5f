//! Waits that nothing below the program can end: a call of libvirt's library, a command of QEMU, a lock, a program of the system.
//!
//! A job looks at the request to stop between its steps. A step that waits for somebody who does not answer would keep the job from looking.
//! So each such wait is noted here while it lasts, and the program, which knows of the request, can end in the middle of one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

static NEXT: AtomicU64 = AtomicU64::new(0);
static UNDER_WAY: Mutex<BTreeMap<u64, NotedWait>> = Mutex::new(BTreeMap::new());

/// A wait that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotedWait {
    /// What does not answer: "libvirt", "QEMU's monitor".
    pub who: &'static str,
    /// What is lost where the wait is cut off.
    pub kind: WaitKind,
}

/// What is lost where a wait is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitKind {
    /// An answer, which comes at once as a rule.
    Answer,
    /// A piece of work, which may take some seconds, and is better finished.
    Work,
}

/// Notes a wait as long as it lives.
#[derive(Debug)]
pub struct Wait(u64);

/// What is waited for where another process has a lock.
pub const LOCK_HOLDER: &str = "the process that holds a lock";

impl Wait {
    /// A wait for an answer of `who`.
    pub fn for_answer(who: &'static str) -> Self {
        Self::begin(NotedWait {
            who,
            kind: WaitKind::Answer,
        })
    }

    /// A wait for a piece of work of `who`.
    pub fn for_work(who: &'static str) -> Self {
        Self::begin(NotedWait {
            who,
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

/// The waits of this process that are under way, by a number that no other one gets.
pub fn waits_under_way() -> Vec<(u64, NotedWait)> {
    let under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    under_way.iter().map(|(number, wait)| (*number, *wait)).collect()
}

#[cfg(test)]
mod tests {
    use super::{Wait, WaitKind, waits_under_way};

    #[test]
    fn a_wait_is_noted_as_long_as_it_lasts() {
        let who = "a test of waits";
        let noted = || waits_under_way().into_iter().filter(move |(_, wait)| wait.who == who);
        let first = Wait::for_answer(who);
        let second = Wait::for_work(who);
        let kinds: Vec<_> = noted().map(|(_, wait)| wait.kind).collect();
        assert_eq!(kinds, [WaitKind::Answer, WaitKind::Work]);
        drop(first);
        assert_eq!(noted().count(), 1);
        drop(second);
        assert_eq!(noted().count(), 0);
    }
}
