//! A store with fault injection.

use std::io::{Error as IoError, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::seeded::Seeded;
use crate::store::{ObjectKind, ObjectName, ObjectWriter, Operation, Put, Result, Store, StoreError};

/// How an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The store is full. Only operations that take space can fail; the first of them at or after the planned number
    /// counts as the planned one.
    NoSpace,
    /// An error of the medium; a change that reports it may have happened.
    Io,
    /// The process dies: all further operations fail, and the last change may have happened.
    Crash,
}

/// The duration of a fault; a crash is always permanent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultSpan {
    /// One operation.
    Once,
    /// All operations from the planned one on.
    Forever,
}

/// The operation that fails, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultPlan {
    /// The number of the operation, from 1.
    pub operation: u64,
    /// The fault.
    pub fault: Fault,
    /// Whether later operations fail as well.
    pub span: FaultSpan,
}

/// The actual effect of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultEffect {
    /// It was forwarded, and its result returned.
    Passed,
    /// It did nothing and returned an error.
    Failed,
    /// It was executed but returned an error.
    DoneButFailed,
}

/// A store on top of another that counts and records operations, and fails as planned.
///
/// Each call counts as one operation, including `create`, each `append` and `commit`. A seed decides whether a change
/// that fails with [`Fault::Io`] or [`Fault::Crash`] has happened. After a crash, calls return [`StoreError::Closed`].
///
/// A clone is another handle of the same store.
#[derive(Clone)]
pub struct FaultStore {
    inner: Arc<dyn Store>,
    shared: Arc<Mutex<FaultState>>,
}

struct FaultState {
    plan: Option<FaultPlan>,
    seeded: Seeded,
    has_failed: bool,
    log: Vec<(Operation, FaultEffect)>,
}

impl FaultStore {
    /// A store that forwards everything to `inner`, except as `plan` requires.
    pub fn new(inner: Arc<dyn Store>, plan: Option<FaultPlan>, seed: u64) -> Self {
        Self {
            inner,
            shared: Arc::new(Mutex::new(FaultState {
                plan,
                seeded: Seeded::new(seed),
                has_failed: false,
                log: Vec::new(),
            })),
        }
    }

    /// Number of operations so far.
    pub fn operation_count(&self) -> u64 {
        self.lock().log.len() as u64
    }

    /// Whether the planned operation was reached.
    pub fn has_failed(&self) -> bool {
        self.lock().has_failed
    }

    /// All operations so far, in order, with their actual effects.
    pub fn log(&self) -> Vec<(Operation, FaultEffect)> {
        self.lock().log.clone()
    }

    fn lock(&self) -> MutexGuard<'_, FaultState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call<T>(&self, operation: Operation, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let (effect, fault) = self.lock().decide(&operation);
        let error = fault.map(|fault| self.error(fault, &operation));
        self.lock().log.push((operation, effect));
        match (effect, error) {
            (FaultEffect::Passed, _) | (_, None) => act(),
            (FaultEffect::Failed, Some(error)) => Err(error),
            (FaultEffect::DoneButFailed, Some(error)) => Err(act().err().unwrap_or(error)),
        }
    }

    fn error(&self, fault: Fault, operation: &Operation) -> StoreError {
        let store = self.inner.describe();
        match fault {
            Fault::NoSpace => StoreError::NoSpace { store },
            Fault::Crash => StoreError::Closed { store },
            Fault::Io => StoreError::Io {
                store,
                action: "injected failure",
                subject: operation.to_string(),
                source: IoError::from(ErrorKind::Other),
            },
        }
    }
}

impl FaultState {
    fn decide(&mut self, operation: &Operation) -> (FaultEffect, Option<Fault>) {
        let number = self.log.len() as u64 + 1;
        let Some(plan) = self.plan.filter(|plan| number >= plan.operation) else {
            return (FaultEffect::Passed, None);
        };
        if self.has_failed && plan.fault == Fault::Crash {
            return (FaultEffect::Failed, Some(Fault::Crash));
        }
        let is_over = self.has_failed && plan.span == FaultSpan::Once;
        if is_over || (plan.fault == Fault::NoSpace && !operation.is_growing()) {
            return (FaultEffect::Passed, None);
        }
        self.has_failed = true;
        let may_happen = plan.fault != Fault::NoSpace && operation.is_change();
        let effect = if may_happen && self.seeded.below(2) == 0 {
            FaultEffect::DoneButFailed
        } else {
            FaultEffect::Failed
        };
        (effect, Some(plan.fault))
    }
}

impl Store for FaultStore {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> Result<Put> {
        let operation = Operation::Put(name.clone(), bytes.len() as u64);
        self.call(operation, || self.inner.put(name, bytes))
    }

    fn create(&self, name: &ObjectName) -> Result<Box<dyn ObjectWriter>> {
        let inner = self.call(Operation::Create(name.clone()), || self.inner.create(name))?;
        Ok(Box::new(FaultWriter {
            store: self.clone(),
            name: name.clone(),
            inner,
        }))
    }

    fn get(&self, name: &ObjectName, length_max: u64) -> Result<Vec<u8>> {
        self.call(Operation::Get(name.clone()), || self.inner.get(name, length_max))
    }

    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let operation = Operation::GetRange(name.clone(), offset, buffer.len() as u64);
        self.call(operation, || self.inner.get_range(name, offset, buffer))
    }

    fn length(&self, name: &ObjectName) -> Result<u64> {
        self.call(Operation::Length(name.clone()), || self.inner.length(name))
    }

    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> Result<()>) -> Result<()> {
        self.call(Operation::List(kind), || self.inner.list(kind, visit))
    }

    fn ages(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> Result<()>) -> Result<()> {
        self.call(Operation::List(kind), || self.inner.ages(kind, visit))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.call(Operation::Delete(name.clone()), || self.inner.delete(name))
    }

    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> Result<()>) -> Result<()> {
        self.call(Operation::ForeignFiles, || self.inner.foreign_files(visit))
    }

    fn clean(&self, age: Duration) -> Result<u64> {
        self.call(Operation::Clean, || self.inner.clean(age))
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.inner.free_bytes()
    }
}

struct FaultWriter {
    store: FaultStore,
    name: ObjectName,
    inner: Box<dyn ObjectWriter>,
}

impl ObjectWriter for FaultWriter {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let operation = Operation::Append(self.name.clone(), bytes.len() as u64);
        self.store.call(operation, || self.inner.append(bytes))
    }

    fn commit(self: Box<Self>) -> Result<Put> {
        let Self { store, name, inner } = *self;
        store.call(Operation::Commit(name), || inner.commit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;
    use crate::store::testing::conformance;

    fn name(name: &str) -> ObjectName {
        ObjectName::new(ObjectKind::Index, name).unwrap()
    }

    fn faulty(operation: u64, fault: Fault, span: FaultSpan, seed: u64) -> (MemoryStore, FaultStore) {
        let memory = MemoryStore::new();
        let plan = FaultPlan { operation, fault, span };
        let store = FaultStore::new(Arc::new(memory.clone()), Some(plan), seed);
        (memory, store)
    }

    #[test]
    fn without_a_plan_it_is_the_store_below() {
        conformance::check(&mut || Arc::new(FaultStore::new(Arc::new(MemoryStore::new()), None, 0)));
    }

    #[test]
    fn a_crash_leaves_the_change_done_or_not_and_nothing_after_it() {
        let mut outcomes = [0, 0];
        for seed in 0..64 {
            let (memory, store) = faulty(2, Fault::Crash, FaultSpan::Once, seed);
            assert_eq!(store.put(&name("a"), b"a").unwrap(), Put::Created);
            assert!(matches!(store.put(&name("b"), b"b"), Err(StoreError::Closed { .. })));
            assert!(matches!(store.put(&name("c"), b"c"), Err(StoreError::Closed { .. })));
            assert!(matches!(store.get(&name("a"), 9), Err(StoreError::Closed { .. })));
            assert!(memory.length(&name("a")).is_ok());
            assert!(memory.length(&name("c")).unwrap_err().is_not_found());
            let done = memory.length(&name("b")).is_ok();
            let expected = if done {
                FaultEffect::DoneButFailed
            } else {
                FaultEffect::Failed
            };
            assert_eq!(store.log()[1], (Operation::Put(name("b"), 1), expected));
            assert_eq!(store.operation_count(), 4);
            outcomes[usize::from(done)] += 1;
        }
        assert!(outcomes[0] > 16 && outcomes[1] > 16, "{outcomes:?}");
    }

    #[test]
    fn a_full_store_fails_only_writes() {
        let (memory, store) = faulty(1, Fault::NoSpace, FaultSpan::Forever, 7);
        store.delete(&name("a")).unwrap();
        assert!(!store.has_failed());
        assert!(matches!(store.put(&name("a"), b"a"), Err(StoreError::NoSpace { .. })));
        assert!(store.create(&name("a")).is_err());
        assert!(store.length(&name("a")).unwrap_err().is_not_found());
        assert!(memory.objects().is_empty());

        let (_, store) = faulty(1, Fault::NoSpace, FaultSpan::Once, 7);
        assert!(store.put(&name("a"), b"a").is_err());
        assert_eq!(store.put(&name("a"), b"a").unwrap(), Put::Created);
    }

    #[test]
    fn a_streamed_object_fails_at_each_of_its_steps_whole_or_not_at_all() {
        for operation in 1..=4 {
            for seed in 0..16 {
                let (memory, store) = faulty(operation, Fault::Io, FaultSpan::Once, seed);
                let stream = || -> Result<Put> {
                    let mut writer = store.create(&name("a"))?;
                    writer.append(b"one")?;
                    writer.append(b"two")?;
                    writer.commit()
                };
                assert!(matches!(stream(), Err(StoreError::Io { .. })));
                let objects = memory.objects();
                match objects.get(&name("a")) {
                    Some(bytes) => assert_eq!((operation, &**bytes), (4, &b"onetwo"[..])),
                    None => assert!(objects.is_empty()),
                }
            }
        }
    }
}
