//! Faults that a test can inject.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// All sessions end after this many more calls; the next call gets `SESSION_INVALID`.
    SessionExpiresAfterCalls(u32),
    /// All sessions end when the next transfer has moved this many bytes. As in XAPI, the transfer of an XVA fails
    /// there, because it uses the session for each block; the transfer of a single disk is completed.
    SessionExpiresAfterBytes(u64),
    /// The connection of the next download with more bytes than this is cut after them.
    CutDownloadAfter(u64),
    /// The connection of the next upload is cut after this many bytes of its body.
    CutUploadAfter(u64),
    /// The next transfer answers 200 and moves its bytes; then its task fails with this code and its parameters.
    TransferFails(Vec<String>),
    /// The next download or upload is answered with this status.
    HandlerStatus(u16),
    /// The next call is answered with this HTTP status instead of a result.
    RpcStatus(u16),
    /// The next call of `method` (without `Async.`) fails.
    CallFails {
        /// `VM.snapshot`, `VDI.destroy`, ...
        method: String,
        /// The code, then its parameters.
        error: Vec<String>,
    },
    /// The task of the next `Async.` call stays pending for this many polls, with slow progress, before the call is
    /// executed. If it is cancelled before, the call is never executed.
    TaskStuck(u32),
    /// The answer to the next call is delayed by this time.
    AnswerDelayed(Duration),
    /// The next transfer waits this long before its first byte.
    TransferDelayed(Duration),
    /// The next XVA has a block with a wrong checksum.
    ChecksumWrong,
}

/// The armed faults.
#[derive(Debug, Default)]
pub struct Faults {
    armed: Mutex<VecDeque<(Fault, u32)>>,
}

impl Faults {
    /// Arms `fault` once.
    pub fn once(&self, fault: Fault) {
        self.times(fault, 1);
    }

    /// Arms `fault` `count` times.
    pub fn times(&self, fault: Fault, count: u32) {
        if count > 0 {
            self.lock().push_back((fault, count));
        }
    }

    /// Lets the next call of `method` fail once with `error`: a code, then its parameters.
    pub fn fail_call(&self, method: &str, error: &[&str]) {
        self.once(Fault::CallFails {
            method: method.to_owned(),
            error: error.iter().map(|&word| word.to_owned()).collect(),
        });
    }

    /// Lets the next `VM.snapshot` fail as on a full storage.
    pub fn fail_snapshot_out_of_space(&self) {
        let error = ["SR_BACKEND_FAILURE_44", "", "There is insufficient space", ""];
        self.fail_call("VM.snapshot", &error);
    }

    /// Disarms all faults.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// The faults that did not occur yet.
    pub fn armed(&self) -> Vec<Fault> {
        self.lock().iter().map(|(fault, _)| fault.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Fault, u32)>> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the first armed fault for which `choose` returns a value; returns that value.
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

    /// Counts one call; returns whether all sessions end with it.
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
