//! Runs tasks on several threads and returns their results in the order of the tasks.

use std::io;
use std::num::NonZero;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Scope;
use std::time::Duration;

use crate::{Clock as _, SystemClock};

/// Results that may be queued per thread, so that fast threads need not wait for a slow one.
const WAITING_PER_THREAD: usize = 2;
/// How often a paused thread checks the load average.
const LOAD_INTERVAL: Duration = Duration::from_millis(500);

/// The number of threads, and when they pause.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threads {
    /// Threads that compute at the same time.
    pub count: NonZero<usize>,
    /// All threads but the first pause while the host's load average of the last minute is above this.
    pub load_max: Option<f64>,
}

/// The results in the order of the tasks.
pub struct OrderedResults<R> {
    results: Receiver<PendingResult<R>>,
}

enum PendingResult<R> {
    /// Receives the result from its worker.
    Result(Receiver<R>),
    End,
}

struct Task<T, R> {
    what: T,
    result: Sender<R>,
}

impl<R: Send> OrderedResults<R> {
    /// Starts the threads: one distributes the tasks of `feed` until it returns `None`, the others run workers of
    /// `make_worker`.
    ///
    /// All of them end when this is dropped, the first as soon as `feed` returns.
    pub fn start<T, W>(
        threads: Threads,
        feed: impl FnMut() -> Option<T> + Send + 'static,
        make_worker: impl Fn() -> W,
    ) -> Self
    where
        T: Send + 'static,
        W: FnMut(T) -> R + Send + 'static,
        R: 'static,
    {
        Self::spawn(threads, feed, make_worker, &|thread| drop(std::thread::spawn(thread)))
    }

    /// Like [`start`](Self::start), with threads of `scope`, which may borrow from its environment.
    pub fn start_within<'scope, T, W>(
        scope: &'scope Scope<'scope, '_>,
        threads: Threads,
        feed: impl FnMut() -> Option<T> + Send + 'scope,
        make_worker: impl Fn() -> W,
    ) -> Self
    where
        T: Send + 'scope,
        W: FnMut(T) -> R + Send + 'scope,
        R: 'scope,
    {
        Self::spawn(threads, feed, make_worker, &|thread| drop(scope.spawn(thread)))
    }

    fn spawn<'t, T, W>(
        threads: Threads,
        mut feed: impl FnMut() -> Option<T> + Send + 't,
        make_worker: impl Fn() -> W,
        spawn: &dyn Fn(Box<dyn FnOnce() + Send + 't>),
    ) -> Self
    where
        T: Send + 't,
        W: FnMut(T) -> R + Send + 't,
        R: 't,
    {
        let (orders, taken) = channel::<Task<T, R>>();
        let (ahead, results) = sync_channel(threads.count.get() * WAITING_PER_THREAD);
        let taken = Arc::new(Mutex::new(taken));
        for number in 0..threads.count.get() {
            let (mut worker, taken) = (make_worker(), Arc::clone(&taken));
            let load_max = threads.load_max.filter(|_| number > 0);
            spawn(Box::new(move || {
                loop {
                    if let Some(load_max) = load_max {
                        wait_for_load_below(load_max);
                    }
                    let order = taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Task { what, result }) = order else { return };
                    // The receiver may have been dropped.
                    result.send(worker(what)).ok();
                }
            }));
        }
        spawn(Box::new(move || hand_out(&mut feed, &orders, &ahead)));
        Self { results }
    }

    /// The next result, or none after the last.
    ///
    /// # Errors
    /// A thread has panicked.
    pub fn next(&self) -> io::Result<Option<R>> {
        let ended = || io::Error::other("a thread of this program has failed");
        match self.results.recv() {
            Ok(PendingResult::Result(result)) => result.recv().map(Some).map_err(|_| ended()),
            Ok(PendingResult::End) => Ok(None),
            Err(_) => Err(ended()),
        }
    }
}

fn hand_out<T, R>(
    feed: &mut dyn FnMut() -> Option<T>,
    orders: &Sender<Task<T, R>>,
    ahead: &SyncSender<PendingResult<R>>,
) {
    while let Some(what) = feed() {
        let (result, receiver) = channel();
        if ahead.send(PendingResult::Result(receiver)).is_err() || orders.send(Task { what, result }).is_err() {
            return;
        }
    }
    ahead.send(PendingResult::End).ok();
}

/// Waits while the load average is above `load_max`.
fn wait_for_load_below(load_max: f64) {
    let load = || {
        let text = std::fs::read_to_string("/proc/loadavg").ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    };
    let clock = SystemClock::new();
    while load().is_some_and(|load| load > load_max) {
        clock.sleep(LOAD_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;
    use std::time::Duration;

    use super::{OrderedResults, Threads};
    use crate::{Clock as _, SystemClock};

    fn threads(count: usize) -> Threads {
        Threads {
            count: NonZero::new(count).unwrap(),
            load_max: None,
        }
    }

    #[test]
    fn results_come_in_order_although_some_threads_are_faster() {
        let mut numbers = 0..200_u64;
        let results = OrderedResults::start(
            threads(7),
            move || numbers.next(),
            || {
                |number: u64| {
                    SystemClock::new().sleep(Duration::from_micros(number % 7 * 100));
                    number * 2
                }
            },
        );
        for number in 0..200 {
            assert_eq!(results.next().unwrap(), Some(number * 2));
        }
        assert_eq!(results.next().unwrap(), None);
    }

    #[test]
    fn a_thread_that_panics_is_an_error_and_not_the_end() {
        let mut numbers = 0..3;
        let results = OrderedResults::start(
            threads(1),
            move || numbers.next(),
            || {
                |number: u64| {
                    assert!(number != 1, "fails on purpose");
                    number
                }
            },
        );
        assert_eq!(results.next().unwrap(), Some(0));
        results.next().unwrap_err();

        let fails = || -> Option<u64> { panic!("fails on purpose") };
        let results = OrderedResults::start(threads(1), fails, || |number: u64| number);
        results.next().unwrap_err();
    }

    #[test]
    fn an_unreachable_load_limit_leaves_one_thread() {
        let mut numbers = 0..20_u64;
        let held = Threads {
            load_max: Some(-1.0),
            ..threads(3)
        };
        let results = OrderedResults::start(held, move || numbers.next(), || |_: u64| std::thread::current().id());
        let mut threads = Vec::new();
        while let Some(thread) = results.next().unwrap() {
            threads.push(thread);
        }
        assert_eq!(threads.len(), 20);
        threads.dedup();
        assert_eq!(threads.len(), 1);
    }
}
