//! What goes wrong, when a test wants it to.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One thing that goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// All sessions end after this many more calls; the call after them gets `SESSION_INVALID`.
    SessionExpiresAfterCalls(u32),
    /// All sessions end when the next transfer has moved this many bytes. An XVA breaks off there, as in XAPI, which touches the
    /// session for each block; a single disk is moved to its end.
    SessionExpiresAfterBytes(u64),
    /// The connection of the next download that has more bytes than these is cut after them.
    CutDownloadAfter(u64),
    /// The connection of the next upload is cut after this many bytes of its body.
    CutUploadAfter(u64),
    /// The next transfer answers 200 and moves its bytes; then its task fails with this code and what it speaks of.
    TransferFails(Vec<String>),
    /// The next download or upload is answered with this status.
    HandlerStatus(u16),
    /// The next call is answered with this status instead of an answer.
    RpcStatus(u16),
    /// The next call of `method` (without `Async.`) fails with this code and what it speaks of.
    CallFails {
        /// `VM.snapshot`, `VDI.destroy`, ...
        method: String,
        /// The code, then its parameters.
        error: Vec<String>,
    },
    /// The task of the next `Async.` call stays pending for this many looks at it, with slow progress, before anything is done.
    /// Cancelled meanwhile, it is never done.
    TaskStuck(u32),
    /// The next call is answered this much later.
    AnswerDelayed(Duration),
    /// The next transfer waits this long before its first byte.
    TransferDelayed(Duration),
    /// The next XVA has a block whose checksum is wrong.
    ChecksumWrong,
}

/// The faults that are armed.
#[derive(Debug, Default)]
pub struct Faults {
    armed: Mutex<VecDeque<(Fault, u32)>>,
}

impl Faults {
    /// `fault` happens once.
    pub fn once(&self, fault: Fault) {
        self.times(fault, 1);
    }

    /// `fault` happens `count` times.
    pub fn times(&self, fault: Fault, count: u32) {
        if count > 0 {
            self.lock().push_back((fault, count));
        }
    }

    /// The next call of `method` fails once with `error`: a code, then its parameters.
    pub fn fail_call(&self, method: &str, error: &[&str]) {
        self.once(Fault::CallFails {
            method: method.to_owned(),
            error: error.iter().map(|&word| word.to_owned()).collect(),
        });
    }

    /// The next `VM.snapshot` fails as it does where the storage is full.
    pub fn fail_snapshot_out_of_space(&self) {
        let error = ["SR_BACKEND_FAILURE_44", "", "There is insufficient space", ""];
        self.fail_call("VM.snapshot", &error);
    }

    /// Nothing goes wrong any more.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// Faults that did not happen yet.
    pub fn armed(&self) -> Vec<Fault> {
        self.lock().iter().map(|(fault, _)| fault.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Fault, u32)>> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the first armed fault that `choose` makes something of.
    pub(crate) fn take<T>(&self, choose: impl Fn(&Fault) -> Option<T>) -> Option<T> {
        let mut armed = self.lock();
        let (index, found) = armed
            .iter()
            .enumerate()
            .find_map(|(index, (fault, _))| Some((index, choose(fault)?)))?;
        let left = armed[index].1 - 1;
        if left == 0 {
            armed.remove(index);
        } else {
            armed[index].1 = left;
        }
        Some(found)
    }

    /// Counts one call; whether sessions end with it.
    pub(crate) fn session_ends_with_this_call(&self) -> bool {
        let mut armed = self.lock();
        let mut ends = false;
        for (fault, _) in armed.iter_mut() {
            if let Fault::SessionExpiresAfterCalls(left) = fault {
                if *left == 0 {
                    ends = true;
                } else {
                    *left -= 1;
                }
            }
        }
        armed.retain(|(fault, _)| !(ends && matches!(fault, Fault::SessionExpiresAfterCalls(0))));
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::{Fault, Faults};

    #[test]
    fn a_fault_happens_as_often_as_it_was_armed() {
        let faults = Faults::default();
        faults.times(Fault::HandlerStatus(500), 2);
        faults.once(Fault::RpcStatus(503));
        let status = |fault: &Fault| match fault {
            Fault::HandlerStatus(status) => Some(*status),
            _ => None,
        };
        assert_eq!(faults.take(status), Some(500));
        assert_eq!(faults.take(status), Some(500));
        assert_eq!(faults.take(status), None);
        assert_eq!(faults.armed(), [Fault::RpcStatus(503)]);
    }

    #[test]
    fn sessions_end_after_as_many_calls_as_were_granted() {
        let faults = Faults::default();
        faults.once(Fault::SessionExpiresAfterCalls(2));
        let ends: Vec<_> = (0..4).map(|_| faults.session_ends_with_this_call()).collect();
        assert_eq!(ends, [false, false, true, false]);
    }
}
