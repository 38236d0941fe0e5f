//! What an actor does on the store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use holdfast_block::{BlockDevice, MemoryDevice};
use holdfast_repo::store::{InterleavedStore, ObjectKind, ObjectName, ObjectWriter, Put, Result as StoreResult, Store};
use holdfast_repo::{
    Error, GcRequest, Liveness, Manifest, Repository, RestoreRequest, SnapshotId, Source, SourceData, TargetState,
};

use super::cast::{self, Actor, Fate, Form, MACHINES, Role, Town, Way};
use crate::common::{PASSPHRASE, Watch, request};

/// Longer than any other actor works.
const SLEEP_PAUSES_MAX: u32 = 20_000;
/// Longer than an unseen writer is waited for.
const LONG_MS: i64 = 8 * 24 * 3600 * 1000;

/// What an actor works with.
pub(super) struct Stage {
    pub(super) store: Arc<InterleavedStore>,
    pub(super) town: Arc<Town>,
    pub(super) time: Arc<AtomicI64>,
    /// Actors that have not ended and do not sleep.
    pub(super) running: Arc<AtomicUsize>,
    pub(super) seed: u64,
}

/// What came of it.
pub(super) enum Outcome {
    Backup(Result<Manifest, Error>, Vec<String>),
    Read(Result<Vec<u8>, Error>),
    Done(Result<(), Error>),
}

impl Outcome {
    pub(super) fn summary(&self) -> String {
        match self {
            Self::Backup(Ok(manifest), _) => format!("made {}", manifest.id),
            Self::Read(Ok(_)) | Self::Done(Ok(())) => "done".to_owned(),
            Self::Backup(Err(error), _) | Self::Read(Err(error)) | Self::Done(Err(error)) => super::chain(error),
        }
    }
}

impl Actor {
    /// Opens the repository, does what the role says, and dies.
    #[expect(clippy::needless_pass_by_value, reason = "a stage is played once")]
    pub(super) fn play(&self, stage: Stage) -> Outcome {
        let store: Arc<dyn Store> = match self.fate {
            Fate::Sleeps(after, seen) => Arc::new(SleepyStore {
                awake: AtomicU64::new(after),
                seen,
                process: self.process,
                town: Arc::clone(&stage.town),
                time: Arc::clone(&stage.time),
                running: Arc::clone(&stage.running),
                inner: Arc::clone(&stage.store),
            }),
            Fate::Lives | Fate::Crashes(_) => Arc::<InterleavedStore>::clone(&stage.store),
        };
        let surroundings = cast::surroundings(&stage.town, &stage.time, self.process, stage.seed);
        let outcome = match Repository::open(store, PASSPHRASE, surroundings) {
            Ok(opened) => self.work(&opened.repository),
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
            _ => Outcome::Done(Err(error)),
        }
    }

    fn work(&self, repository: &Repository) -> Outcome {
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
            Role::Gc(percent) => {
                let request = GcRequest {
                    repack_below_percent: *percent,
                    thread_count: 0,
                };
                Outcome::Done(repository.gc(request).map(|_| ()))
            }
            Role::Read(snapshot, way) => Outcome::Read(read(repository, *snapshot, *way)),
            Role::List => Outcome::Done(list(repository)),
        }
    }
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

/// A store whose user falls asleep before an operation, and wakes when all others have ended.
struct SleepyStore {
    /// Operations until it sleeps.
    awake: AtomicU64,
    seen: Liveness,
    process: u32,
    town: Arc<Town>,
    time: Arc<AtomicI64>,
    running: Arc<AtomicUsize>,
    inner: Arc<InterleavedStore>,
}

impl SleepyStore {
    fn nod(&self) -> &InterleavedStore {
        if self.awake.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.town.set(self.process, self.seen);
            self.time.fetch_add(LONG_MS, Ordering::Relaxed);
            self.running.fetch_sub(1, Ordering::Relaxed);
            for _ in 0..SLEEP_PAUSES_MAX {
                if self.running.load(Ordering::Relaxed) == 0 {
                    break;
                }
                self.inner.pause();
            }
            self.running.fetch_add(1, Ordering::Relaxed);
        }
        &self.inner
    }
}

impl Store for SleepyStore {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> StoreResult<Put> {
        self.nod().put(name, bytes)
    }
    fn create(&self, name: &ObjectName) -> StoreResult<Box<dyn ObjectWriter>> {
        self.nod().create(name)
    }
    fn get(&self, name: &ObjectName, length_max: u64) -> StoreResult<Vec<u8>> {
        self.nod().get(name, length_max)
    }
    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> StoreResult<()> {
        self.nod().get_range(name, offset, buffer)
    }
    fn length(&self, name: &ObjectName) -> StoreResult<u64> {
        self.nod().length(name)
    }
    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> StoreResult<()>) -> StoreResult<()> {
        self.nod().list(kind, visit)
    }
    fn delete(&self, name: &ObjectName) -> StoreResult<()> {
        self.nod().delete(name)
    }
    fn strangers(&self, visit: &mut dyn FnMut(String) -> StoreResult<()>) -> StoreResult<()> {
        self.nod().strangers(visit)
    }
    fn clean(&self, age: Duration) -> StoreResult<u64> {
        self.nod().clean(age)
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn free_bytes(&self) -> Option<u64> {
        None
    }
}
