//! What an actor does on the store.

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

use super::cast::{self, Act, Actor, Fate, Form, Look, MACHINES, Moment, Role, Town, Way};
use crate::common::{PASSWORD, Watch, request};

/// Longer than any other actor works.
const SLEEP_PAUSES_MAX: u32 = 20_000;
/// Longer than an unseen writer is waited for, and than any mark or record stays.
const LONG: Duration = Duration::from_secs(40 * 24 * 3600);
/// What an operation takes, by the clock of the store.
const OPERATION: Duration = Duration::from_secs(1);

/// What an actor works with.
pub(super) struct Stage {
    pub(super) store: Arc<InterleavedStore>,
    pub(super) town: Arc<Town>,
    /// What has the clock of the store.
    pub(super) memory: MemoryStore,
    pub(super) time: Arc<AtomicI64>,
    /// Actors that have not ended and do not sleep.
    pub(super) running: Arc<AtomicUsize>,
    pub(super) seed: u64,
}

/// What came of it.
pub(super) enum Outcome {
    Backup(Result<Manifest, Error>, Vec<String>),
    Read(Result<Vec<u8>, Error>),
    Look(Result<Vec<Finding>, Error>),
    Done(Result<(), Error>),
}

impl Outcome {
    pub(super) fn summary(&self) -> String {
        match self {
            Self::Backup(Ok(manifest), _) => format!("made {}", manifest.id),
            Self::Read(Ok(_)) | Self::Look(Ok(_)) | Self::Done(Ok(())) => "done".to_owned(),
            Self::Backup(Err(error), _) | Self::Read(Err(error)) | Self::Look(Err(error)) | Self::Done(Err(error)) => {
                super::chain(error)
            }
        }
    }
}

impl Actor {
    /// Opens the repository, does what the role says, and dies.
    #[expect(clippy::needless_pass_by_value, reason = "a stage is played once")]
    pub(super) fn play(&self, stage: Stage) -> Outcome {
        let store: Arc<dyn Store> = Arc::new(FatefulStore {
            fate: self.fate,
            operations: AtomicU64::new(0),
            matches: AtomicU64::new(0),
            is_dead: AtomicBool::new(false),
            process: self.process,
            town: Arc::clone(&stage.town),
            memory: stage.memory.clone(),
            time: Arc::clone(&stage.time),
            running: Arc::clone(&stage.running),
            inner: Arc::clone(&stage.store),
        });
        let environment = cast::environment(&stage.town, &stage.time, self.process, stage.seed);
        let outcome = match Repository::open(store, PASSWORD, environment) {
            Ok(opened) => self.work(&opened.repository, &stage.store),
            Err(error) => self.failed(error),
        };
        stage.town.set(self.process, Liveness::Dead);
        stage.running.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    fn failed(&self, error: Error) -> Outcome {
        match self.role {
            Role::Backup { .. } => Outcome::Backup(Err(error), Vec::new()),
            Role::Read(..) => Outcome::Read(Err(error)),
            Role::Look(_) => Outcome::Look(Err(error)),
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
                    Form::Disk => cast::disk_source(&device),
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
            Role::Look(look) => look_through(repository, *look),
            Role::Repair => Outcome::Done(repair(repository)),
            Role::Read(snapshot, way) => Outcome::Read(read(repository, *snapshot, *way)),
            Role::List => Outcome::Done(list(repository)),
        }
    }
}

/// Runs gc some times; where another is at work it waits a little, and tries again, but not for ever.
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

fn look_through(repository: &Repository, look: Look) -> Outcome {
    let found = match look {
        Look::Scrub => {
            let request = ScrubRequest {
                percent: 100,
                thread_count: 0,
            };
            repository
                .scrub(request, &Watch::default())
                .map(|report| report.findings)
        }
        Look::Verify(depth) => {
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
    Outcome::Look(found)
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

fn read(repository: &Repository, snapshot: SnapshotId, way: Way) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Device {
        role: "source",
        name: "snapshot".into(),
        source,
    };
    let device = repository.open_disk(snapshot, None)?;
    match way {
        Way::Device => {
            let mut bytes = vec![1; holdfast_block::to_usize(device.size_bytes())];
            for (part, offset) in bytes.chunks_mut(8192).zip((0..).step_by(8192)) {
                device.read_at(part, offset).map_err(failed)?;
            }
            Ok(bytes)
        }
        Way::Restore => {
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

/// A store by which its user meets its fate: it stalls, falls asleep until all others have ended, or dies.
struct FatefulStore {
    fate: Fate,
    /// Operations so far, and how many of them were such as the fate waits for.
    operations: AtomicU64,
    matches: AtomicU64,
    is_dead: AtomicBool,
    process: u32,
    town: Arc<Town>,
    memory: MemoryStore,
    time: Arc<AtomicI64>,
    running: Arc<AtomicUsize>,
    inner: Arc<InterleavedStore>,
}

impl FatefulStore {
    /// Lets fate come before an operation; an error when it is death.
    fn meet(&self, act: Option<Act>, kind: Option<ObjectKind>) -> StoreResult<&InterleavedStore> {
        self.memory.advance_clock(OPERATION);
        let operation = 1 + self.operations.fetch_add(1, Ordering::Relaxed);
        let is_it = |moment: Moment| {
            act == Some(moment.act)
                && kind == Some(moment.kind)
                && self.matches.fetch_add(1, Ordering::Relaxed) + 1 == moment.number
        };
        match self.fate {
            Fate::Sleeps(after, seen) if operation == after => self.sleep(seen),
            Fate::SleepsAt(moment, seen) if is_it(moment) => self.sleep(seen),
            Fate::Stalls(moment, pauses) if is_it(moment) => (0..pauses).for_each(|_| self.inner.pause()),
            Fate::CrashesAt(moment) if is_it(moment) => self.is_dead.store(true, Ordering::Relaxed),
            _ => {}
        }
        if self.is_dead.load(Ordering::Relaxed) {
            let store = self.inner.describe();
            return Err(StoreError::Closed { store });
        }
        Ok(&self.inner)
    }

    fn sleep(&self, seen: Liveness) {
        self.town.set(self.process, seen);
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

impl Store for FatefulStore {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> StoreResult<Put> {
        self.meet(Some(Act::Put), Some(name.kind()))?.put(name, bytes)
    }
    fn create(&self, name: &ObjectName) -> StoreResult<Box<dyn ObjectWriter>> {
        self.meet(Some(Act::Put), Some(name.kind()))?.create(name)
    }
    fn get(&self, name: &ObjectName, length_max: u64) -> StoreResult<Vec<u8>> {
        self.meet(None, None)?.get(name, length_max)
    }
    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> StoreResult<()> {
        self.meet(None, None)?.get_range(name, offset, buffer)
    }
    fn length(&self, name: &ObjectName) -> StoreResult<u64> {
        self.meet(None, None)?.length(name)
    }
    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> StoreResult<()>) -> StoreResult<()> {
        self.meet(Some(Act::List), Some(kind))?.list(kind, visit)
    }
    fn ages(
        &self,
        kind: ObjectKind,
        visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> StoreResult<()>,
    ) -> StoreResult<()> {
        self.meet(Some(Act::List), Some(kind))?.ages(kind, visit)
    }
    fn delete(&self, name: &ObjectName) -> StoreResult<()> {
        self.meet(Some(Act::Delete), Some(name.kind()))?.delete(name)
    }
    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> StoreResult<()>) -> StoreResult<()> {
        self.meet(None, None)?.foreign_files(visit)
    }
    fn clean(&self, age: Duration) -> StoreResult<u64> {
        self.meet(None, None)?.clean(age)
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn free_bytes(&self) -> Option<u64> {
        None
    }
}
