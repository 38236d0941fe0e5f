//! Threads for slow requests, shared by all connections of all servers of a process.
//!
//! Origins take turns, and so do the connections of an origin: a connection with many requests delays the others by at
//! most one of its requests per worker, and a client with many connections has no more turns than one with few. One
//! origin gets at most three quarters of the threads, so that requests that take very long do not stop all others. The
//! quota of each connection bounds the number of requests that it may queue.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::client_key::ClientKey;
use crate::stream::Origin;

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
    origins: BTreeMap<Origin, OriginQueue>,
    /// Origins with queued tasks, each once, in the order of their turns.
    turns: VecDeque<Origin>,
    thread_count: usize,
    idle_count: usize,
    is_closed: bool,
}

/// The tasks of one origin.
#[derive(Default)]
struct OriginQueue {
    /// The queue of each connection.
    queues: BTreeMap<u64, VecDeque<Task>>,
    /// Connections with queued tasks, each once, in the order of their turns.
    turns: VecDeque<u64>,
    running_count: usize,
}

impl OriginQueue {
    fn push(&mut self, connection: u64, task: Task) {
        let queue = self.queues.entry(connection).or_default();
        queue.push_back(task);
        if queue.len() == 1 {
            self.turns.push_back(connection);
        }
    }

    fn pop(&mut self) -> Option<Task> {
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

impl TurnQueue {
    fn push(&mut self, key: ClientKey, task: Task) {
        let origin = self.origins.entry(key.origin).or_default();
        if origin.turns.is_empty() {
            self.turns.push_back(key.origin);
        }
        origin.push(key.connection, task);
    }

    /// The next task of an origin that has fewer than `running_count_max` running tasks.
    fn next(&mut self, running_count_max: usize) -> Option<(Origin, Task)> {
        let is_allowed = |origin: &Origin| {
            let running = self.origins.get(origin).map_or(0, |queue| queue.running_count);
            running < running_count_max
        };
        let at = self.turns.iter().position(is_allowed)?;
        let origin = self.turns.remove(at)?;
        let queue = self.origins.get_mut(&origin)?;
        let task = queue.pop()?;
        queue.running_count += 1;
        if !queue.turns.is_empty() {
            self.turns.push_back(origin);
        }
        Some((origin, task))
    }

    fn finish(&mut self, origin: Origin) {
        if let Some(queue) = self.origins.get_mut(&origin) {
            queue.running_count -= 1;
            if queue.running_count == 0 && queue.turns.is_empty() {
                self.origins.remove(&origin);
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, TurnQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running_count_max(&self) -> usize {
        self.thread_count_max - self.thread_count_max / 4
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some((origin, task)) = state.next(self.running_count_max()) {
                drop(state);
                // A panic was already reported; a thread that waits for the task notices that it was dropped.
                drop(catch_unwind(AssertUnwindSafe(task)));
                state = self.lock();
                state.finish(origin);
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

    /// Queues `task` for a connection; the tasks of one connection start in order.
    ///
    /// If no thread can be started, the caller runs the task.
    pub(crate) fn submit(&self, key: ClientKey, task: Task) {
        let mut state = self.shared.lock();
        state.push(key, task);
        let waiting: usize = state.origins.values().map(|origin| origin.turns.len()).sum();
        if state.idle_count < waiting && state.thread_count < self.shared.thread_count_max {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("serve-worker".to_owned());
            if thread.spawn(move || shared.run()).is_ok() {
                state.thread_count += 1;
            } else if state.thread_count == 0 {
                let next = state.next(usize::MAX);
                drop(state);
                if let Some((origin, task)) = next {
                    task();
                    self.shared.lock().finish(origin);
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

    use super::super::client_key::ClientKey;
    use super::Workers;
    use crate::stream::Origin;

    fn key(process: i32, connection: u64) -> ClientKey {
        ClientKey {
            origin: Origin::Process(process),
            connection,
        }
    }

    #[test]
    fn connections_take_turns() {
        let workers = Workers::new(1);
        let (begin, wait) = mpsc::channel::<()>();
        let (done, order) = mpsc::channel();
        let first = done.clone();
        workers.submit(
            key(1, 0),
            Box::new(move || {
                wait.recv().unwrap();
                first.send((0, 0)).unwrap();
            }),
        );
        for (connection, count) in [(1, 3), (2, 2)] {
            for number in 0..count {
                let done = done.clone();
                workers.submit(
                    key(1, connection),
                    Box::new(move || done.send((connection, number)).unwrap()),
                );
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
            key(1, 0),
            Box::new(move || {
                wait.recv().unwrap();
                slow.send("slow").unwrap();
            }),
        );
        workers.submit(key(1, 0), Box::new(move || done.send("quick").unwrap()));
        assert_eq!(finished.recv().unwrap(), "quick");
        begin.send(()).unwrap();
        assert_eq!(finished.recv().unwrap(), "slow");
        workers.close();
    }

    /// A client with slow requests on many connections, and one with a single request.
    #[test]
    fn an_origin_with_many_connections_does_not_delay_another_one() {
        const THREADS: usize = 4;
        let workers = Workers::new(THREADS);
        let (started, starts) = mpsc::channel();
        let mut releases = Vec::new();
        for connection in 0..20 {
            let (release, wait) = mpsc::channel::<()>();
            let started = started.clone();
            let task = move || {
                started.send("greedy").unwrap();
                // The sender may be gone at the end of the test.
                wait.recv().ok();
            };
            workers.submit(key(1, connection), Box::new(task));
            releases.push(release);
        }
        // Three of four threads, and no more.
        for _ in 0..THREADS - 1 {
            assert_eq!(starts.recv().unwrap(), "greedy");
        }
        workers.submit(key(2, 100), Box::new(move || started.send("other").unwrap()));
        assert_eq!(starts.recv().unwrap(), "other");
        drop(releases);
        workers.close();
    }
}
