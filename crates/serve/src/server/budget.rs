//! Memory for requests, shared by all connections of all servers of a process.
//!
//! A limit per connection does not bound the memory of the process, because a client may open many connections. Every
//! request that is not small takes a lease for its bytes before they are received or read, and returns the lease when
//! its reply was sent.
//!
//! Leases are granted in the order of the requests, but the connections of one origin (an address, or a local process)
//! get at most half of the memory: a client that requests data and does not take it delays only itself.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::stream::Origin;

#[derive(Debug)]
pub(crate) struct Budget {
    bytes_max: u64,
    state: Mutex<BudgetUse>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BudgetUse {
    used_bytes: u64,
    /// Bytes of each origin that has leases.
    by_origin: BTreeMap<Origin, u64>,
    waiting: VecDeque<WaitingRequest>,
    last_turn: u64,
}

#[derive(Debug, Clone, Copy)]
struct WaitingRequest {
    turn: u64,
    origin: Origin,
    bytes: u64,
}

/// Bytes of the budget; dropping the lease returns them.
#[derive(Debug)]
pub(crate) struct Lease {
    budget: Arc<Budget>,
    origin: Origin,
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

    /// Whether an origin may have more. A request that is larger than its share is admitted if it has no other lease.
    fn is_within_share(&self, state: &BudgetUse, origin: Origin, bytes: u64) -> bool {
        let used = state.by_origin.get(&origin).copied().unwrap_or(0);
        used == 0 || used.saturating_add(bytes) <= self.bytes_max / 2
    }

    /// A request that is larger than the whole budget is admitted when there is no other lease.
    fn fits(&self, state: &BudgetUse, bytes: u64) -> bool {
        state.used_bytes == 0 || state.used_bytes.saturating_add(bytes) <= self.bytes_max
    }

    /// The next request: the first one whose origin may have more.
    fn next<'a>(&self, state: &'a BudgetUse) -> Option<&'a WaitingRequest> {
        let mut waiting = state.waiting.iter();
        waiting.find(|request| self.is_within_share(state, request.origin, request.bytes))
    }

    /// Takes a lease if there is room and no other request waits for it.
    pub(crate) fn try_take(self: &Arc<Self>, origin: Origin, bytes: u64) -> Option<Lease> {
        let mut state = self.lock();
        let is_free = self.next(&state).is_none() && !state.waiting.iter().any(|request| request.origin == origin);
        let has_room = self.is_within_share(&state, origin, bytes) && self.fits(&state, bytes);
        (is_free && has_room).then(|| self.grant(&mut state, origin, bytes))
    }

    /// Waits for room and takes a lease.
    pub(crate) fn take(self: &Arc<Self>, origin: Origin, bytes: u64) -> Lease {
        let mut state = self.lock();
        state.last_turn += 1;
        let turn = state.last_turn;
        state.waiting.push_back(WaitingRequest { turn, origin, bytes });
        while self.next(&state).is_none_or(|next| next.turn != turn) || !self.fits(&state, bytes) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.retain(|request| request.turn != turn);
        let lease = self.grant(&mut state, origin, bytes);
        // There may be room for the next request, too.
        self.changed.notify_all();
        lease
    }

    fn grant(self: &Arc<Self>, state: &mut BudgetUse, origin: Origin, bytes: u64) -> Lease {
        state.used_bytes = state.used_bytes.saturating_add(bytes);
        let of_origin = state.by_origin.entry(origin).or_default();
        *of_origin = of_origin.saturating_add(bytes);
        Lease {
            budget: Arc::clone(self),
            origin,
            bytes,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.used_bytes = state.used_bytes.saturating_sub(self.bytes);
        if let Some(used) = state.by_origin.get_mut(&self.origin) {
            *used = used.saturating_sub(self.bytes);
            if *used == 0 {
                state.by_origin.remove(&self.origin);
            }
        }
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::{Budget, Lease};
    use crate::stream::Origin;

    const ONE: Origin = Origin::Process(1);
    const TWO: Origin = Origin::Process(2);
    const THREE: Origin = Origin::Process(3);

    /// Waits for a lease in another thread, and returns when the request is in the queue.
    fn wait_for(
        budget: &Arc<Budget>,
        origin: Origin,
        bytes: u64,
        done: &mpsc::Sender<u64>,
    ) -> std::thread::JoinHandle<Lease> {
        let waiting_count = budget.lock().waiting.len();
        let (theirs, done) = (Arc::clone(budget), done.clone());
        let thread = std::thread::spawn(move || {
            let lease = theirs.take(origin, bytes);
            done.send(bytes).unwrap();
            lease
        });
        while budget.lock().waiting.len() <= waiting_count {
            std::thread::yield_now();
        }
        thread
    }

    #[test]
    fn the_budget_is_never_exceeded_and_waiters_are_served_in_order() {
        let budget = Arc::new(Budget::new(100));
        let first = budget.try_take(ONE, 60).unwrap();
        assert!(budget.try_take(TWO, 41).is_none());
        let second = budget.try_take(TWO, 40).unwrap();
        assert!(budget.try_take(THREE, 1).is_none());
        let (done, order) = mpsc::channel();
        let large = wait_for(&budget, THREE, 90, &done);
        let small = wait_for(&budget, Origin::Process(4), 20, &done);
        // There would be room for the small request, but the large one was first.
        drop(second);
        assert!(budget.try_take(TWO, 20).is_none());
        drop(first);
        assert_eq!(order.recv().unwrap(), 90);
        // The small one waits until the large one returns its lease.
        drop(large.join().unwrap());
        assert_eq!(order.recv().unwrap(), 20);
        drop(small.join().unwrap());
        assert!(
            budget.try_take(ONE, 1_000).is_some(),
            "a request larger than the whole budget"
        );
        assert_eq!(budget.lock().used_bytes, 0);
        assert!(budget.lock().by_origin.is_empty());
    }

    /// A client that does not take its replies holds its leases until it is disconnected.
    #[test]
    fn an_origin_gets_half_of_the_budget_and_does_not_delay_others() {
        let budget = Arc::new(Budget::new(100));
        let held = budget.try_take(ONE, 50).unwrap();
        assert!(budget.try_take(ONE, 1).is_none(), "its half is used");
        let (done, order) = mpsc::channel();
        let greedy = wait_for(&budget, ONE, 30, &done);
        let other = budget
            .try_take(TWO, 40)
            .expect("others do not wait for the greedy client");
        assert!(budget.try_take(TWO, 11).is_none(), "its half, too");
        drop(other);
        assert!(budget.try_take(TWO, 10).is_some());
        drop(held);
        assert_eq!(order.recv().unwrap(), 30);
        drop(greedy.join().unwrap());
    }
}
