//! Runs several actors on one store, one step at a time, in an order determined by a seed.
//!
//! A protocol between many writers is correct if it is correct in every order of their operations on the store. The
//! [`Interleaver`] tries such orders at random: each actor is a thread, but only one runs at any time, and before each
//! operation the seed determines which continues. The same seed gives the same run.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::seeded::Seeded;
use crate::store::{ObjectKind, ObjectName, ObjectWriter, Operation, Put, Result, Store};

/// One step of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The actor; the first is 0.
    pub actor: usize,
    /// The operation; `None` for a [`pause`](InterleavedStore::pause).
    pub operation: Option<Operation>,
}

/// A scheduler of actors.
///
/// 1. [`actor`](Self::actor) returns a store for each actor;
/// 2. [`run`](Self::run) runs the actors in the same order and returns when all have ended.
///
/// Actors may share nothing but stores created here, and each uses its store from one thread only: an actor that waits
/// for another by other means than the store waits forever. To let an actor crash, put a
/// [`FaultStore`](crate::store::FaultStore) under its store. Outside of a run the stores work normally, in no
/// determined order.
pub struct Interleaver {
    shared: Arc<SchedulerShared>,
}

struct SchedulerShared {
    state: Mutex<State>,
}

struct State {
    seeded: Seeded,
    /// In how many of 8 choices the running actor continues: some faults need long runs, others frequent
    /// switches.
    stay_of_8: u64,
    wake: Vec<Arc<Condvar>>,
    /// Actors of this run that have not ended.
    alive: Vec<usize>,
    current: Option<usize>,
    steps: Vec<Step>,
}

impl Interleaver {
    /// A scheduler with choices determined by `seed`.
    pub fn new(seed: u64) -> Self {
        let mut seeded = Seeded::new(seed);
        let stay_of_8 = [0, 0, 4, 6, 7][usize::try_from(seeded.below(5)).expect("below 5")];
        Self {
            shared: Arc::new(SchedulerShared {
                state: Mutex::new(State {
                    seeded,
                    stay_of_8,
                    wake: Vec::new(),
                    alive: Vec::new(),
                    current: None,
                    steps: Vec::new(),
                }),
            }),
        }
    }

    /// The store of the next actor, on top of `inner`.
    pub fn actor(&self, inner: Arc<dyn Store>) -> InterleavedStore {
        let wake = Arc::new(Condvar::new());
        let mut state = self.shared.lock();
        state.wake.push(Arc::clone(&wake));
        InterleavedStore {
            inner,
            turns: Turns {
                shared: Arc::clone(&self.shared),
                actor: state.wake.len() - 1,
                wake,
            },
        }
    }

    /// Runs the actors, the first with the first store that [`actor`](Self::actor) returned, and so on, until all have
    /// ended.
    ///
    /// An actor that panics ends, and the others continue; the result contains the panic in the actor's
    /// place.
    pub fn run<'env>(
        &self,
        actors: Vec<Box<dyn FnOnce() + Send + 'env>>,
    ) -> Vec<std::result::Result<(), Box<dyn Any + Send>>> {
        let wakes = {
            let mut state = self.shared.lock();
            assert!(actors.len() <= state.wake.len(), "an actor has no store");
            state.alive = (0..actors.len()).collect();
            state.choose();
            state.wake.clone()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(wakes)
                .zip(actors)
                .map(|((actor, wake), act)| {
                    let turns = Turns {
                        shared: Arc::clone(&self.shared),
                        actor,
                        wake,
                    };
                    scope.spawn(move || {
                        drop(turns.wait(turns.shared.lock()));
                        let outcome = catch_unwind(AssertUnwindSafe(act));
                        turns.end();
                        outcome
                    })
                })
                .collect();
            let outcomes = threads
                .into_iter()
                .map(|thread| thread.join().and_then(|outcome| outcome));
            outcomes.collect()
        })
    }

    /// All steps of the run, in order, for the output of a failed test.
    pub fn steps(&self) -> Vec<Step> {
        self.shared.lock().steps.clone()
    }
}

impl SchedulerShared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Chooses the next actor.
    fn choose(&mut self) {
        let stays =
            self.current.is_some_and(|current| self.alive.contains(&current)) && self.seeded.below(8) < self.stay_of_8;
        if stays {
            return;
        }
        self.current = match self.alive.len() as u64 {
            0 => None,
            count => {
                let at = usize::try_from(self.seeded.below(count)).expect("an index");
                Some(self.alive[at])
            }
        };
    }
}

/// Passes the permission to run between actors.
struct Turns {
    shared: Arc<SchedulerShared>,
    actor: usize,
    wake: Arc<Condvar>,
}

impl Turns {
    /// Waits until it is this actor's turn.
    fn take(&self, operation: Option<&Operation>) {
        let mut state = self.shared.lock();
        if state.alive.is_empty() {
            return;
        }
        assert!(
            state.current == Some(self.actor),
            "actor {} uses its store while it is another's turn: from a second thread, or from another actor",
            self.actor
        );
        state.choose();
        self.hand_over(&state);
        let mut state = self.wait(state);
        let actor = self.actor;
        state.steps.push(Step {
            actor,
            operation: operation.cloned(),
        });
    }

    fn end(&self) {
        let mut state = self.shared.lock();
        state.alive.retain(|actor| *actor != self.actor);
        state.choose();
        self.hand_over(&state);
    }

    fn hand_over(&self, state: &State) {
        if let Some(next) = state.current
            && next != self.actor
        {
            state.wake[next].notify_one();
        }
    }

    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        while state.current != Some(self.actor) {
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }
}

/// The store of an actor: every operation that other actors can observe waits for its turn.
pub struct InterleavedStore {
    inner: Arc<dyn Store>,
    turns: Turns,
}

impl InterleavedStore {
    /// Passes the turn to the others without an operation, which simulates a wait or a slow computation.
    pub fn pause(&self) {
        self.turns.take(None);
    }

    fn turn(&self, operation: &Operation) {
        self.turns.take(Some(operation));
    }

    fn listing(&self, kind: ObjectKind) -> Result<BTreeMap<ObjectName, u64>> {
        let mut objects = BTreeMap::new();
        self.inner.list(kind, &mut |name, length| {
            objects.insert(name, length);
            Ok(())
        })?;
        Ok(objects)
    }
}

impl Store for InterleavedStore {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> Result<Put> {
        self.turn(&Operation::Put(name.clone(), bytes.len() as u64));
        self.inner.put(name, bytes)
    }

    fn create(&self, name: &ObjectName) -> Result<Box<dyn ObjectWriter>> {
        Ok(Box::new(InterleavedWriter {
            turns: Turns {
                shared: Arc::clone(&self.turns.shared),
                actor: self.turns.actor,
                wake: Arc::clone(&self.turns.wake),
            },
            name: name.clone(),
            inner: self.inner.create(name)?,
        }))
    }

    fn get(&self, name: &ObjectName, length_max: u64) -> Result<Vec<u8>> {
        self.turn(&Operation::Get(name.clone()));
        self.inner.get(name, length_max)
    }

    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.turn(&Operation::GetRange(name.clone(), offset, buffer.len() as u64));
        self.inner.get_range(name, offset, buffer)
    }

    fn length(&self, name: &ObjectName) -> Result<u64> {
        self.turn(&Operation::Length(name.clone()));
        self.inner.length(name)
    }

    /// Takes two turns, and lets the seed decide about objects that were added or deleted between them: a listing
    /// is not atomic.
    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> Result<()>) -> Result<()> {
        self.turn(&Operation::List(kind));
        let before = self.listing(kind)?;
        self.turn(&Operation::List(kind));
        let after = self.listing(kind)?;
        let mut all = before.clone();
        all.extend(after.iter().map(|(name, length)| (name.clone(), *length)));
        all.retain(|name, _| {
            let is_certain = before.contains_key(name) && after.contains_key(name);
            is_certain || self.turns.shared.lock().seeded.below(2) == 0
        });
        all.into_iter().try_for_each(|(name, length)| visit(name, length))
    }

    fn ages(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> Result<()>) -> Result<()> {
        let mut listed = Vec::new();
        self.list(kind, &mut |name, _| {
            listed.push(name);
            Ok(())
        })?;
        let mut ages = BTreeMap::new();
        self.inner.ages(kind, &mut |name, age| {
            ages.insert(name, age);
            Ok(())
        })?;
        listed.into_iter().try_for_each(|name| {
            let age = ages.remove(&name).flatten();
            visit(name, age)
        })
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.turn(&Operation::Delete(name.clone()));
        self.inner.delete(name)
    }

    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> Result<()>) -> Result<()> {
        self.turn(&Operation::ForeignFiles);
        self.inner.foreign_files(visit)
    }

    fn clean(&self, age: Duration) -> Result<u64> {
        self.turn(&Operation::Clean);
        self.inner.clean(age)
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.inner.free_bytes()
    }
}

struct InterleavedWriter {
    turns: Turns,
    name: ObjectName,
    inner: Box<dyn ObjectWriter>,
}

impl ObjectWriter for InterleavedWriter {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.append(bytes)
    }

    fn commit(self: Box<Self>) -> Result<Put> {
        let Self { turns, name, inner } = *self;
        turns.take(Some(&Operation::Commit(name)));
        inner.commit()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::store::testing::conformance;
    use crate::store::{Fault, FaultPlan, FaultSpan, FaultStore, MemoryStore};

    fn name(name: &str) -> ObjectName {
        ObjectName::new(ObjectKind::Index, name).unwrap()
    }

    #[test]
    fn outside_of_a_run_it_is_the_store_below() {
        conformance::check(&mut || Arc::new(Interleaver::new(0).actor(Arc::new(MemoryStore::new()))));
    }

    /// Two actors increment a counter, which is one object per value, with the classic lost update: read, then write.
    fn count_twice(seed: u64) -> (usize, Vec<Step>) {
        let memory = MemoryStore::new();
        let interleaver = Interleaver::new(seed);
        let stores: Vec<_> = (0..2).map(|_| interleaver.actor(Arc::new(memory.clone()))).collect();
        let actors = stores
            .iter()
            .map(|store| {
                Box::new(move || {
                    let next = (0..3_u32)
                        .find(|n| store.length(&name(&n.to_string())).is_err())
                        .unwrap();
                    store.put(&name(&next.to_string()), b"").unwrap();
                }) as Box<dyn FnOnce() + Send + '_>
            })
            .collect();
        assert!(interleaver.run(actors).iter().all(std::result::Result::is_ok));
        (memory.objects().len(), interleaver.steps())
    }

    #[test]
    fn a_seed_always_gives_the_same_run_and_seeds_give_all_runs() {
        let mut runs = BTreeSet::new();
        let mut counts = BTreeSet::new();
        for seed in 0..400 {
            let (count, steps) = count_twice(seed);
            assert_eq!(count_twice(seed), (count, steps.clone()), "seed {seed}");
            runs.insert(steps.iter().map(|step| step.actor).collect::<Vec<_>>());
            counts.insert(count);
        }
        assert_eq!(counts, BTreeSet::from([1, 2]), "no run lost an update, or all did");
        // Both read before either writes (2 orders of the reads, 2 of the writes), or one ends before the other begins.
        assert_eq!(runs.len(), 6, "{runs:?}");
    }

    #[test]
    fn an_actor_that_panics_or_crashes_does_not_stop_the_others() {
        for seed in 0..50 {
            let memory = MemoryStore::new();
            let interleaver = Interleaver::new(seed);
            let plan = FaultPlan {
                operation: 2,
                fault: Fault::Crash,
                span: FaultSpan::Forever,
            };
            let crashing = FaultStore::new(Arc::new(memory.clone()), Some(plan), seed);
            let crashing = interleaver.actor(Arc::new(crashing));
            let healthy = interleaver.actor(Arc::new(memory.clone()));
            let panicking = interleaver.actor(Arc::new(memory.clone()));
            let outcomes = interleaver.run(vec![
                Box::new(|| {
                    crashing.put(&name("a"), b"").unwrap();
                    assert!(crashing.put(&name("b"), b"").is_err());
                }),
                Box::new(|| {
                    for n in 0..5 {
                        healthy.put(&name(&format!("h{n}")), b"").unwrap();
                    }
                }),
                Box::new(|| {
                    panicking.pause();
                    std::panic::resume_unwind(Box::new("stop"));
                }),
            ]);
            assert!(outcomes[0].is_ok() && outcomes[1].is_ok());
            assert_eq!(outcomes[2].as_ref().unwrap_err().downcast_ref::<&str>(), Some(&"stop"));
            assert!((0..5).all(|n| memory.length(&name(&format!("h{n}"))).is_ok()));
        }
    }

    #[test]
    fn a_list_may_or_may_not_include_concurrent_objects() {
        let mut seen = BTreeSet::new();
        for seed in 0..200 {
            let memory = MemoryStore::new();
            memory.put(&name("old"), b"").unwrap();
            let interleaver = Interleaver::new(seed);
            let [lister, putter] = [0, 1].map(|_| interleaver.actor(Arc::new(memory.clone())));
            let mut listed = Vec::new();
            let outcomes = interleaver.run(vec![
                Box::new(|| {
                    lister
                        .list(ObjectKind::Index, &mut |name, _| {
                            listed.push(name.name().to_owned());
                            Ok(())
                        })
                        .unwrap();
                }),
                Box::new(|| {
                    putter.put(&name("new"), b"").unwrap();
                    putter.put(&name("newer"), b"").unwrap();
                }),
            ]);
            assert!(outcomes.iter().all(std::result::Result::is_ok));
            assert!(listed.contains(&"old".to_owned()));
            seen.insert(listed);
        }
        // This includes a listing with the newer object but without the older one.
        assert_eq!(seen.len(), 4, "{seen:?}");
    }
}
