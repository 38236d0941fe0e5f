//! The requests in progress of a connection: their number is bounded, and the end of a queue waits for its own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Requests in progress of a connection.
pub(super) struct Load {
    request_count_max: usize,
    /// Queues whose thread executes requests, and requests of workers.
    busy_count: Arc<AtomicUsize>,
    /// Requests that workers have, of each queue.
    delegated: Mutex<Vec<usize>>,
    changed: Condvar,
}

impl Load {
    pub(super) fn new(queue_count: usize, request_count_max: usize, busy_count: Arc<AtomicUsize>) -> Self {
        Self {
            request_count_max: request_count_max.max(1),
            busy_count,
            delegated: Mutex::new(vec![0; queue_count]),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.delegated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request of a queue; waits while the connection has too many.
    pub(super) fn delegate(&self, queue: usize) {
        let mut counts = self.lock();
        while counts.iter().sum::<usize>() >= self.request_count_max {
            counts = self.changed.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(count) = counts.get_mut(queue) {
            *count += 1;
            self.busy_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn done(&self, queue: usize) {
        if let Some(count) = self.lock().get_mut(queue) {
            *count -= 1;
            self.busy_count.fetch_sub(1, Ordering::Relaxed);
        }
        self.changed.notify_all();
    }

    /// Waits until workers have completed all requests of a queue.
    pub(super) fn drain(&self, queue: usize) {
        let mut counts = self.lock();
        while counts.get(queue).is_some_and(|count| *count > 0) {
            counts = self.changed.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Counts a thread as busy.
pub(super) struct Busy<'a>(&'a Load);

impl<'a> Busy<'a> {
    pub(super) fn new(load: &'a Load) -> Self {
        load.busy_count.fetch_add(1, Ordering::Relaxed);
        Self(load)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy_count.fetch_sub(1, Ordering::Relaxed);
    }
}
