//! The operations of an actor on the store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use holdfast_block::{BlockDevice, MemoryDevice};
use holdfast_repo::store::{
    InterleavedStore, MemoryStore, ObjectKind, ObjectName, ObjectWriter, Put, Result as StoreResult, Store, StoreError,
};
use holdfast_repo::{
    Error, Finding, GcRequest, Liveness, Manifest, RepairRequest, Repository, RestoreRequest, ScrubRequest, Selection,
    SnapshotId, Source, SourceData, TargetState, VerifyRequest,
};

use super::roles::{self, Act, Actor, ActorFault, Check, Form, MACHINES, Moment, ProcessTable, ReadMethod, Role};
use crate::common::{PASSWORD, Watch, request};

/// Longer than the work of any other actor.
const SLEEP_PAUSES_MAX: u32 = 20_000;
/// Longer than gc waits for an unseen writer, and than any mark or record is kept.
pub(super) const LONG: Duration = Duration::from_secs(40 * 24 * 3600);
/// Duration of an operation, by the clock of the store.
const OPERATION: Duration = Duration::from_secs(1);

/// The context in which an actor runs.
pub(super) struct ActorContext {
    pub(super) store: Arc<InterleavedStore>,
    pub(super) process_table: Arc<ProcessTable>,
    /// The store whose clock is advanced.
    pub(super) memory: MemoryStore,
    pub(super) time: Arc<AtomicI64>,
    /// Number of actors that have not ended and do not sleep.
    pub(super) running: Arc<AtomicUsize>,
    pub(super) seed: u64,
}

/// The result of an actor.
pub(super) enum Outcome {
    Backup(Result<Manifest, Error>, Vec<String>),
    Read(Result<Vec<u8>, Error>),
    Check(Result<Vec<Finding>, Error>),
    Done(Result<(), Error>),
}

impl Outcome {
    pub(super) fn summary(&self) -> String {
        match self {
            Self::Backup(Ok(manifest), _) => format!("made {}", manifest.id),
            Self::Read(Ok(_)) | Self::Check(Ok(_)) | Self::Done(Ok(())) => "done".to_owned(),
            Self::Backup(Err(error), _) | Self::Read(Err(error)) | Self::Check(Err(error)) | Self::Done(Err(error)) => {
                super::chain(error)
            }
        }
    }
}

impl Actor {
    /// Opens the repository, performs the role, and marks the process as dead.
    #[expect(clippy::needless_pass_by_value, reason = "a stage is played once")]
    pub(super) fn run(&self, context: ActorContext) -> Outcome {
        let store: Arc<dyn Store> = Arc::new(ActorStore {
            planned_fault: self.planned_fault,
            operations: AtomicU64::new(0),
            matches: AtomicU64::new(0),
            is_dead: AtomicBool::new(false),
            process: self.process,
            process_table: Arc::clone(&context.process_table),
            memory: context.memory.clone(),
            time: Arc::clone(&context.time),
            running: Arc::clone(&context.running),
            inner: Arc::clone(&context.store),
        });
        let environment = roles::environment(&context.process_table, &context.time, self.process, context.seed);
        let outcome = match Repository::open(store, PASSWORD, environment) {
            Ok(opened) => self.work(&opened.repository, &context.store),
            Err(error) => self.failed(error),
        };
        context.process_table.set(self.process, Liveness::Dead);
        context.running.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    fn failed(&self, error: Error) -> Outcome {
        match self.role {
            Role::Backup { .. } => Outcome::Backup(Err(error), Vec::new()),
            Role::Read(..) => Outcome::Read(Err(error)),
            Role::Check(_) => Outcome::Check(Err(error)),
            _ => Outcome::Done(Err(error)),
        }
    }

    fn work(&self, repository: &Repository, turns: &InterleavedStore) -> Outcome {
        match &self.role {
            Role::Backup {
                machine,
                bytes,
                parent,
                form,
            } => {
                let device = MemoryDevice::from_bytes(bytes);
                let mut stream = &bytes[..];
                let source = match form {
                    Form::Disk => roles::disk_source(&device),
                    Form::Stream => Source {
                        name: "vda".into(),
                        data: SourceData::Stream(&mut stream),
                        notes: BTreeMap::new(),
                    },
                };
                let watch = Watch::default();
                let request = request(MACHINES[*machine], self.process.into(), vec![source], *parent, 0);
                let result = repository.backup(request, &watch);
                Outcome::Backup(
                    result.map(|report| report.snapshot),
                    watch.warnings.into_inner().unwrap(),
                )
            }
            Role::Forget(snapshot) => Outcome::Done(repository.forget(*snapshot, "test")),
            Role::Protect(snapshot) => Outcome::Done(repository.protect(*snapshot)),
            Role::Gc(percent, times) => Outcome::Done(collect(repository, (*percent, *times), turns)),
            Role::Check(check) => run_check(repository, *check),
            Role::Repair => Outcome::Done(repair(repository)),
            Role::Read(snapshot, method) => Outcome::Read(read(repository, *snapshot, *method)),
            Role::List => Outcome::Done(list(repository)),
        }
    }
}

/// Runs gc `times` times; while another gc is running, waits and tries again a limited number of times.
fn collect(repository: &Repository, (percent, times): (u8, u32), turns: &InterleavedStore) -> Result<(), Error> {
    const ATTEMPT_COUNT_MAX: u32 = 20;
    const PAUSES: u32 = 40;
    let request = GcRequest {
        repack_below_percent: percent,
        thread_count: 0,
    };
    for time in 0..times {
        let mut attempts = 1;
        while let Err(error) = repository.gc(request) {
            let is_locked = matches!(error, Error::Locked { .. });
            if !is_locked || times == 1 || time + attempts >= ATTEMPT_COUNT_MAX {
                return Err(error);
            }
            attempts += 1;
            (0..PAUSES).for_each(|_| turns.pause());
        }
    }
    Ok(())
}

fn run_check(repository: &Repository, check: Check) -> Outcome {
    let found = match check {
        Check::Scrub => {
            let request = ScrubRequest {
                percent: 100,
                thread_count: 0,
            };
            repository
                .scrub(request, &Watch::default())
                .map(|report| report.findings)
        }
        Check::Verify(depth) => {
            let request = VerifyRequest {
                snapshots: Selection::All,
                depth,
                compare: None,
                thread_count: 0,
            };
            repository
                .verify(&request, &Watch::default())
                .map(|report| report.findings)
        }
    };
    Outcome::Check(found)
}

fn repair(repository: &Repository) -> Result<(), Error> {
    let request = RepairRequest {
        percent: 100,
        thread_count: 0,
    };
    let plan = repository.plan_repair(request, &Watch::default())?;
    repository.repair(&plan, 0, &Watch::default()).map(|_| ())
}

fn list(repository: &Repository) -> Result<(), Error> {
    let (_, errors) = repository.snapshots()?;
    assert!(errors.is_empty(), "{errors:?}");
    repository.statistics().map(|_| ())
}

fn read(repository: &Repository, snapshot: SnapshotId, method: ReadMethod) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Device {
        role: "source",
        name: "snapshot".into(),
        source,
    };
    let device = repository.open_disk(snapshot, None)?;
    match method {
        ReadMethod::Device => {
            let mut bytes = vec![1; holdfast_block::to_usize(device.size_bytes())];
            for (part, offset) in bytes.chunks_mut(8192).zip((0..).step_by(8192)) {
                device.read_at(part, offset).map_err(failed)?;
            }
            Ok(bytes)
        }
        ReadMethod::Restore => {
            let target = MemoryDevice::new(device.size_bytes());
            let request = RestoreRequest {
                target: &target,
                target_name: "target".into(),
                state: TargetState::Unknown,
                thread_count: 0,
            };
            repository.restore(&device, &request, &Watch::default())?;
            Ok(target.to_bytes())
        }
    }
}

/// A store that applies the fate of its user: to stall, to sleep until all others have ended, or to crash.
struct ActorStore {
    planned_fault: ActorFault,
    /// Number of operations, and number of those that match the step of the fate.
    operations: AtomicU64,
    matches: AtomicU64,
    is_dead: AtomicBool,
    process: u32,
    process_table: Arc<ProcessTable>,
    memory: MemoryStore,
    time: Arc<AtomicI64>,
    running: Arc<AtomicUsize>,
    inner: Arc<InterleavedStore>,
}

impl ActorStore {
    /// Applies the fate before an operation; an error if the process has crashed.
    fn apply_fault(&self, act: Option<Act>, kind: Option<ObjectKind>) -> StoreResult<&InterleavedStore> {
        self.memory.advance_clock(OPERATION);
        let operation = 1 + self.operations.fetch_add(1, Ordering::Relaxed);
        let is_step = |moment: Moment| {
            act == Some(moment.act)
                && kind == Some(moment.kind)
                && self.matches.fetch_add(1, Ordering::Relaxed) + 1 == moment.number
        };
        match self.planned_fault {
            ActorFault::Sleeps(after, seen) if operation == after => self.sleep(seen),
            ActorFault::SleepsAt(moment, seen) if is_step(moment) => self.sleep(seen),
            ActorFault::Stalls(moment, pauses) if is_step(moment) => (0..pauses).for_each(|_| self.inner.pause()),
            ActorFault::CrashesAt(moment) if is_step(moment) => self.is_dead.store(true, Ordering::Relaxed),
            _ => {}
        }
        if self.is_dead.load(Ordering::Relaxed) {
            let store = self.inner.describe();
            return Err(StoreError::Closed { store });
        }
        Ok(&self.inner)
    }

    fn sleep(&self, seen: Liveness) {
        self.process_table.set(self.process, seen);
        self.time
            .fetch_add(i64::try_from(LONG.as_millis()).unwrap(), Ordering::Relaxed);
        self.memory.advance_clock(LONG);
        self.running.fetch_sub(1, Ordering::Relaxed);
        for _ in 0..SLEEP_PAUSES_MAX {
            if self.running.load(Ordering::Relaxed) == 0 {
                break;
            }
            self.inner.pause();
        }
        self.running.fetch_add(1, Ordering::Relaxed);
    }
}

impl Store for ActorStore {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> StoreResult<Put> {
        self.apply_fault(Some(Act::Put), Some(name.kind()))?.put(name, bytes)
    }
    fn create(&self, name: &ObjectName) -> StoreResult<Box<dyn ObjectWriter>> {
        self.apply_fault(Some(Act::Put), Some(name.kind()))?.create(name)
    }
    fn get(&self, name: &ObjectName, length_max: u64) -> StoreResult<Vec<u8>> {
        self.apply_fault(None, None)?.get(name, length_max)
    }
    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> StoreResult<()> {
        self.apply_fault(None, None)?.get_range(name, offset, buffer)
    }
    fn length(&self, name: &ObjectName) -> StoreResult<u64> {
        self.apply_fault(None, None)?.length(name)
    }
    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> StoreResult<()>) -> StoreResult<()> {
        self.apply_fault(Some(Act::List), Some(kind))?.list(kind, visit)
    }
    fn ages(
        &self,
        kind: ObjectKind,
        visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> StoreResult<()>,
    ) -> StoreResult<()> {
        self.apply_fault(Some(Act::List), Some(kind))?.ages(kind, visit)
    }
    fn delete(&self, name: &ObjectName) -> StoreResult<()> {
        self.apply_fault(Some(Act::Delete), Some(name.kind()))?.delete(name)
    }
    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> StoreResult<()>) -> StoreResult<()> {
        self.apply_fault(None, None)?.foreign_files(visit)
    }
    fn clean(&self, age: Duration) -> StoreResult<u64> {
        self.apply_fault(None, None)?.clean(age)
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn free_bytes(&self) -> Option<u64> {
        None
    }
}
