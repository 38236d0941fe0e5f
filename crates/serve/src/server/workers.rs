//! Threads for slow requests, shared by all connections of a server.
//!
//! Connections take turns: a connection with many requests delays the others by at most one of its requests per worker.
//! The quota of each connection bounds the number of requests that it may queue.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A unit of work.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// A pool of threads. They start on demand, and end when the last handle is dropped.
#[derive(Clone)]
pub(crate) struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<TurnQueue>,
    work: Condvar,
    thread_count_max: usize,
}

#[derive(Default)]
struct TurnQueue {
    /// The queue of each connection.
    queues: BTreeMap<u64, VecDeque<Task>>,
    /// Connections with queued tasks, each once, in the order of their turns.
    turns: VecDeque<u64>,
    thread_count: usize,
    idle_count: usize,
    is_closed: bool,
}

impl TurnQueue {
    fn next(&mut self) -> Option<Task> {
        let connection = self.turns.pop_front()?;
        let queue = self.queues.get_mut(&connection)?;
        let task = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&connection);
        } else {
            self.turns.push_back(connection);
        }
        task
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, TurnQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.next() {
                drop(state);
                // A panic was already reported; a thread that waits for the task notices that it was dropped.
                drop(catch_unwind(AssertUnwindSafe(task)));
                state = self.lock();
            } else if state.is_closed {
                state.thread_count -= 1;
                return;
            } else {
                state.idle_count += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle_count -= 1;
            }
        }
    }
}

impl Workers {
    /// A pool of at most `thread_count_max` threads, and at least one.
    pub(crate) fn new(thread_count_max: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                work: Condvar::new(),
                thread_count_max: thread_count_max.max(1),
            }),
        }
    }

    /// Queues `task` for `connection`; the tasks of one connection start in order.
    ///
    /// If no thread can be started, the caller runs the task.
    pub(crate) fn submit(&self, connection: u64, task: Task) {
        let mut state = self.shared.lock();
        let queue = state.queues.entry(connection).or_default();
        queue.push_back(task);
        if queue.len() == 1 {
            state.turns.push_back(connection);
        }
        let waiting = state.turns.len();
        if state.idle_count < waiting && state.thread_count < self.shared.thread_count_max {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("serve-worker".to_owned());
            if thread.spawn(move || shared.run()).is_ok() {
                state.thread_count += 1;
            } else if state.thread_count == 0 {
                let task = state.next();
                drop(state);
                if let Some(task) = task {
                    task();
                }
                return;
            }
        }
        drop(state);
        self.shared.work.notify_one();
    }

    /// Makes the threads end when all tasks are done.
    pub(crate) fn close(&self) {
        self.shared.lock().is_closed = true;
        self.shared.work.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::Workers;

    #[test]
    fn connections_take_turns() {
        let workers = Workers::new(1);
        let (begin, wait) = mpsc::channel::<()>();
        let (done, order) = mpsc::channel();
        let first = done.clone();
        workers.submit(
            0,
            Box::new(move || {
                wait.recv().unwrap();
                first.send((0, 0)).unwrap();
            }),
        );
        for (connection, count) in [(1, 3), (2, 2)] {
            for number in 0..count {
                let done = done.clone();
                workers.submit(connection, Box::new(move || done.send((connection, number)).unwrap()));
            }
        }
        begin.send(()).unwrap();
        let order: Vec<_> = order.iter().take(6).collect();
        assert_eq!(order, [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]);
        workers.close();
    }

    #[test]
    fn a_task_that_waits_does_not_stop_the_others() {
        let workers = Workers::new(2);
        let (begin, wait) = mpsc::channel::<()>();
        let (done, finished) = mpsc::channel();
        let slow = done.clone();
        workers.submit(
            0,
            Box::new(move || {
                wait.recv().unwrap();
                slow.send("slow").unwrap();
            }),
        );
        workers.submit(0, Box::new(move || done.send("quick").unwrap()));
        assert_eq!(finished.recv().unwrap(), "quick");
        begin.send(()).unwrap();
        assert_eq!(finished.recv().unwrap(), "slow");
        workers.close();
    }
}
