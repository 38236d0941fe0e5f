//! Memory for requests, shared by all connections of a server.
//!
//! A limit per connection does not bound the memory of the process, because a client may open many connections. Every
//! request that is not small takes a lease for its bytes before they are received or read, and returns the lease when
//! its reply was sent. Leases are granted in the order of the requests, so a client with many connections cannot starve
//! the others.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(crate) struct Budget {
    bytes_max: u64,
    state: Mutex<BudgetUse>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BudgetUse {
    used_bytes: u64,
    /// Numbers of the waiting requests.
    turns: VecDeque<u64>,
    last_turn: u64,
}

/// Bytes of the budget; dropping the lease returns them.
#[derive(Debug)]
pub(crate) struct Lease {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BudgetUse> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request that is larger than the whole budget is admitted when there is no other lease.
    fn fits(&self, state: &BudgetUse, bytes: u64) -> bool {
        state.used_bytes == 0 || state.used_bytes.saturating_add(bytes) <= self.bytes_max
    }

    /// Takes a lease if there is room and no other request waits.
    pub(crate) fn try_take(self: &Arc<Self>, bytes: u64) -> Option<Lease> {
        let mut state = self.lock();
        (state.turns.is_empty() && self.fits(&state, bytes)).then(|| self.grant(&mut state, bytes))
    }

    /// Waits for room and takes a lease.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Lease {
        let mut state = self.lock();
        state.last_turn += 1;
        let turn = state.last_turn;
        state.turns.push_back(turn);
        while state.turns.front() != Some(&turn) || !self.fits(&state, bytes) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.turns.pop_front();
        let lease = self.grant(&mut state, bytes);
        // There may be room for the next request, too.
        self.changed.notify_all();
        lease
    }

    fn grant(self: &Arc<Self>, state: &mut BudgetUse, bytes: u64) -> Lease {
        state.used_bytes = state.used_bytes.saturating_add(bytes);
        Lease {
            budget: Arc::clone(self),
            bytes,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.used_bytes = state.used_bytes.saturating_sub(self.bytes);
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::Budget;

    #[test]
    fn the_budget_is_never_exceeded_and_waiters_are_served_in_order() {
        let budget = Arc::new(Budget::new(100));
        let first = budget.try_take(60).unwrap();
        assert!(budget.try_take(41).is_none());
        let second = budget.try_take(40).unwrap();
        assert!(budget.try_take(1).is_none());
        let (done, order) = mpsc::channel();
        let wait = |bytes, waiting_count| {
            let (theirs, done) = (Arc::clone(&budget), done.clone());
            let thread = std::thread::spawn(move || {
                let lease = theirs.take(bytes);
                done.send(bytes).unwrap();
                lease
            });
            while budget.lock().turns.len() < waiting_count {
                std::thread::yield_now();
            }
            thread
        };
        let (large, small) = (wait(90, 1), wait(20, 2));
        // There would be room for the small request, but the large one was first.
        drop(second);
        assert!(budget.try_take(20).is_none());
        drop(first);
        assert_eq!(order.recv().unwrap(), 90);
        // The small one waits until the large one returns its lease.
        drop(large.join().unwrap());
        assert_eq!(order.recv().unwrap(), 20);
        drop(small.join().unwrap());
        assert!(
            budget.try_take(1_000).is_some(),
            "a request larger than the whole budget"
        );
        assert_eq!(budget.lock().used_bytes, 0);
    }
}
