//! Joins concurrent flushes to rounds.
//!
//! A flush makes everything durable that was written before it began. So flushes that wait at the same time need only
//! one round of syncs, if it starts after the last of them began. N simultaneous flushes take at most two rounds: the
//! one that is under way, and the next one, which all of them join.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Executes the rounds of one device, one at a time.
#[derive(Debug, Default)]
pub struct FlushRounds {
    state: Mutex<RoundState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct RoundState {
    /// Number of rounds that were started; the rounds are numbered from 1.
    started: u64,
    /// The last round that succeeded.
    succeeded: u64,
    is_running: bool,
}

/// The first round that is new enough for a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushTicket(u64);

/// Ends a round, also if it panics.
struct RunningRound<'a> {
    rounds: &'a FlushRounds,
    /// The number of the round if it succeeded.
    succeeded: Option<u64>,
}

impl FlushRounds {
    /// No round has been started.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes everything durable that was written before this call: waits for a round that starts now or later, or
    /// executes one. `round` makes everything durable that was written before it is called.
    ///
    /// Each flush that waited for a failed round executes a round itself, so none succeeds because of a failed one, and
    /// each gets an error of its own. A device that cannot repeat a failed sync must fail all later rounds.
    pub fn flush<E>(&self, round: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        self.complete(self.join(), round)
    }

    /// Joins the next round that starts. [`complete`](Self::complete) must follow.
    pub fn join(&self) -> FlushTicket {
        FlushTicket(self.lock().started + 1)
    }

    /// Waits for the round of `ticket`, or executes it; see [`flush`](Self::flush).
    pub fn complete<E>(&self, ticket: FlushTicket, round: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut state = self.lock();
        while state.is_running && state.succeeded < ticket.0 {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.succeeded >= ticket.0 {
            return Ok(());
        }
        state.started += 1;
        state.is_running = true;
        let number = state.started;
        drop(state);
        let mut running = RunningRound {
            rounds: self,
            succeeded: None,
        };
        round()?;
        running.succeeded = Some(number);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, RoundState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RunningRound<'_> {
    fn drop(&mut self) {
        let mut state = self.rounds.lock();
        state.is_running = false;
        if let Some(number) = self.succeeded {
            state.succeeded = number;
        }
        drop(state);
        self.rounds.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;

    use super::{FlushRounds, FlushTicket};

    /// Executes a round that is blocked, and lets `meanwhile` join the next one; then `complete` runs once for each
    /// ticket in a thread of its own.
    fn while_blocked(
        rounds: &FlushRounds,
        count: usize,
        first_result: Result<(), &'static str>,
        complete: impl Fn(FlushTicket) -> Result<(), &'static str> + Sync,
    ) -> Vec<Result<(), &'static str>> {
        let (entered, has_entered) = channel();
        let (release, released) = channel();
        let released = Mutex::new(released);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                rounds.flush(|| {
                    entered.send(()).unwrap();
                    released.lock().unwrap().recv().unwrap();
                    first_result
                })
            });
            has_entered.recv().unwrap();
            let tickets: Vec<_> = (0..count).map(|_| rounds.join()).collect();
            let complete = &complete;
            let others: Vec<_> = tickets
                .into_iter()
                .map(|ticket| scope.spawn(move || complete(ticket)))
                .collect();
            release.send(()).unwrap();
            assert_eq!(first.join().unwrap(), first_result);
            others.into_iter().map(|other| other.join().unwrap()).collect()
        })
    }

    #[test]
    fn flushes_during_a_round_share_the_next_one() {
        let (rounds, executed) = (FlushRounds::new(), AtomicU32::new(0));
        let results = while_blocked(&rounds, 20, Ok(()), |ticket| {
            rounds.complete(ticket, || {
                executed.fetch_add(1, Ordering::Relaxed);
                Ok(())
            })
        });
        assert_eq!(results, vec![Ok(()); 20]);
        assert_eq!(executed.into_inner(), 1, "the round under way began too early for them");
    }

    #[test]
    fn each_flush_of_a_failed_round_fails() {
        let (rounds, executed) = (FlushRounds::new(), AtomicU32::new(0));
        let results = while_blocked(&rounds, 5, Err("first"), |ticket| {
            rounds.complete(ticket, || {
                executed.fetch_add(1, Ordering::Relaxed);
                Err("broken")
            })
        });
        assert_eq!(results, vec![Err("broken"); 5]);
        assert_eq!(executed.into_inner(), 5);
        // A later success is reported as one.
        assert_eq!(rounds.flush(|| Ok::<(), &str>(())), Ok(()));
    }

    #[test]
    fn a_flush_after_a_round_starts_another() {
        let (rounds, executed) = (FlushRounds::new(), AtomicU32::new(0));
        for number in 1..=3 {
            rounds
                .flush(|| {
                    executed.fetch_add(1, Ordering::Relaxed);
                    Ok::<(), ()>(())
                })
                .unwrap();
            assert_eq!(executed.load(Ordering::Relaxed), number);
        }
    }

    #[test]
    fn a_round_that_panics_blocks_no_later_flush() {
        let rounds = FlushRounds::new();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rounds.flush(|| -> Result<(), ()> { panic!("a round that panics") })
        }));
        assert!(panicked.is_err());
        assert_eq!(rounds.flush(|| Err("own")), Err("own"));
    }
}
