//! Shared by the tests of the repository: a repository in memory, disks with reproducible content, and a progress that
//! only records warnings.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test uses its part, and a test may fail"
)]

pub(crate) mod ruin;
pub(crate) mod specimen;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use holdfast_block::{BlockDevice, MemoryDevice, SeededRandom, to_usize};
use holdfast_repo::key::{Cipher, Credential, KdfParameters, Randomness};
use holdfast_repo::store::{MemoryStore, ObjectKind, ObjectName, ObjectWriter, Put, Result as StoreResult, Store};
use holdfast_repo::{
    BackupProgress, BackupReport, BackupRequest, Environment, GcRequest, InitRequest, JobProgress, Parent, Repository,
    RestoreRequest, SnapshotId, Source, SourceData, SystemProcesses, TargetState,
};

/// Random bytes from a seed.
pub(crate) struct SeededBytes(std::sync::Mutex<SeededRandom>);

impl SeededBytes {
    pub(crate) fn new(seed: u64) -> Self {
        Self(std::sync::Mutex::new(SeededRandom::new(seed)))
    }
}

impl Randomness for SeededBytes {
    fn fill(&self, bytes: &mut [u8]) -> holdfast_repo::key::Result<()> {
        self.0.lock().unwrap().fill(bytes);
        Ok(())
    }
}

/// A progress that records warnings, and cancels the job on request.
#[derive(Default)]
pub(crate) struct Watch {
    pub(crate) warnings: std::sync::Mutex<Vec<String>>,
    pub(crate) cancelled: AtomicBool,
}

impl BackupProgress for Watch {
    fn advance(&self, _bytes: u64) {}
    fn note(&self, _message: String) {}
    fn warn(&self, message: String) {
        self.warnings.lock().unwrap().push(message);
    }
    fn cancelled(&self) -> &AtomicBool {
        &self.cancelled
    }
}

impl JobProgress for Watch {
    fn advance(&self, _bytes: u64) {}
    fn cancelled(&self) -> &AtomicBool {
        &self.cancelled
    }
}

/// A disk with known content.
#[derive(Clone)]
pub(crate) struct Disk {
    pub(crate) bytes: Vec<u8>,
    random: SeededRandom,
}

impl Disk {
    pub(crate) fn new(size: u64, seed: u64) -> Self {
        Self {
            bytes: vec![0; to_usize(size)],
            random: SeededRandom::new(seed),
        }
    }

    /// Writes bytes that compress by half.
    pub(crate) fn fill(&mut self, offset: u64, length: u64) {
        let start = to_usize(offset);
        let end = (start + to_usize(length)).min(self.bytes.len());
        for pair in self.bytes[start..end].chunks_mut(16) {
            let half = pair.len() / 2;
            self.random.fill(&mut pair[..half]);
        }
    }

    /// Writes at random offsets.
    pub(crate) fn scatter(&mut self, count: u64, length_max: u64) {
        let size = self.bytes.len() as u64;
        for _ in 0..count.min(size) {
            let offset = self.random.below(size);
            let length = 1 + self.random.below(length_max);
            self.fill(offset, length.min(size - offset));
        }
    }
}

/// A repository in memory.
pub(crate) struct Rig {
    pub(crate) store: MemoryStore,
    pub(crate) repository: Repository,
    pub(crate) progress: Watch,
    pub(crate) environment: Environment,
    threads: usize,
}

pub(crate) const PASSWORD: Credential<'static> = Credential::KeyFile(b"a key file of thirty-two bytes!!");

pub(crate) fn init_request() -> InitRequest<'static> {
    InitRequest {
        credential: PASSWORD,
        label: "test",
        parameters: KdfParameters::default(),
        cipher: Cipher::Aes256Gcm,
    }
}

pub(crate) fn environment(seed: u64) -> Environment {
    let time = Arc::new(AtomicI64::new(1_700_000_000_000));
    Environment {
        randomness: Arc::new(SeededBytes::new(seed)),
        processes: Arc::new(SystemProcesses),
        now_ms: Arc::new(move || time.fetch_add(1000, Ordering::Relaxed)),
    }
}

impl Rig {
    pub(crate) fn new(seed: u64) -> Self {
        Self::in_store(MemoryStore::new(), seed)
    }

    /// A repository in a store with a limited capacity.
    pub(crate) fn with_capacity(seed: u64, capacity_bytes: u64) -> Self {
        Self::in_store(MemoryStore::with_capacity(capacity_bytes), seed)
    }

    fn in_store(store: MemoryStore, seed: u64) -> Self {
        let environment = environment(seed);
        let shared: Arc<dyn Store> = Arc::new(store.clone());
        let repository = Repository::init(shared, &init_request(), environment.clone()).unwrap();
        Self {
            store,
            repository,
            progress: Watch::default(),
            environment,
            threads: 2,
        }
    }

    /// A repository with the same keys for recognising chunks as `other`.
    pub(crate) fn with_keys_of(seed: u64, other: &Self) -> Self {
        let (store, environment) = (MemoryStore::new(), environment(seed));
        let shared: Arc<dyn Store> = Arc::new(store.clone());
        let repository =
            Repository::init_like(shared, &init_request(), &other.repository, environment.clone()).unwrap();
        Self {
            store,
            repository,
            progress: Watch::default(),
            environment,
            threads: 2,
        }
    }

    /// Opens the repository again, as another process would; both share the clock.
    pub(crate) fn open(&self, seed: u64) -> Repository {
        self.open_on(self.store.clone(), seed)
    }

    /// The same, through `store`.
    pub(crate) fn open_on(&self, store: impl Store + 'static, seed: u64) -> Repository {
        let mut environment = self.environment.clone();
        environment.randomness = Arc::new(SeededBytes::new(seed));
        Repository::open(Arc::new(store), PASSWORD, environment)
            .unwrap()
            .repository
    }

    pub(crate) fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    pub(crate) fn backup(&self, machine: &str, disk: &Disk, parent: Parent) -> BackupReport {
        self.try_backup(machine, disk, parent).unwrap()
    }

    pub(crate) fn try_backup(&self, machine: &str, disk: &Disk, parent: Parent) -> holdfast_repo::Result<BackupReport> {
        let device = MemoryDevice::from_bytes(&disk.bytes);
        let source = Source {
            name: "vda".into(),
            data: SourceData::Disk(&device),
            notes: BTreeMap::new(),
        };
        let request = request(machine, (self.environment.now_ms)(), vec![source], parent, self.threads);
        self.repository.backup(request, &self.progress)
    }

    /// Asserts that the snapshot reads as `disk`, through the device and by a restore.
    pub(crate) fn assert_restores(&self, snapshot: SnapshotId, disk: &Disk) {
        assert_restores(&self.repository, snapshot, &disk.bytes);
    }
}

/// The names of all objects of a kind.
pub(crate) fn names_of(store: &dyn Store, kind: ObjectKind) -> Vec<ObjectName> {
    let mut names = Vec::new();
    store
        .list(kind, &mut |name, _| {
            names.push(name);
            Ok(())
        })
        .unwrap();
    names
}

/// A disk or stream without notes.
pub(crate) fn source<'a>(name: &str, data: SourceData<'a>) -> Source<'a> {
    Source {
        name: name.to_owned(),
        data,
        notes: BTreeMap::new(),
    }
}

pub(crate) fn request<'a>(
    machine: &str,
    time_ms: i64,
    sources: Vec<Source<'a>>,
    parent: Parent,
    thread_count: usize,
) -> BackupRequest<'a> {
    BackupRequest {
        machine: machine.to_owned(),
        time_ms,
        tags: Vec::new(),
        parent,
        host: "host".to_owned(),
        program: "test".to_owned(),
        notes: BTreeMap::new(),
        sources,
        thread_count,
    }
}

pub(crate) fn assert_restores(repository: &Repository, snapshot: SnapshotId, expected: &[u8]) {
    let device = repository.open_disk(snapshot, None).unwrap();
    assert_eq!(device.size_bytes(), expected.len() as u64);
    let mut bytes = vec![1; expected.len()];
    device.read_at(&mut bytes, 0).unwrap();
    assert!(bytes == expected, "the device returns other data");
    let target = MemoryDevice::new(expected.len() as u64);
    let request = RestoreRequest {
        target: &target,
        target_name: "target".into(),
        state: TargetState::Zeroed,
        thread_count: 2,
    };
    repository.restore(&device, &request, &Watch::default()).unwrap();
    assert!(target.to_bytes() == expected, "the restore wrote other data");
}

type Act = std::sync::Mutex<Option<Box<dyn FnOnce() + Send>>>;

/// A store that calls a function before the first object of a kind is put.
pub(crate) struct HookedStore {
    inner: MemoryStore,
    kind: ObjectKind,
    before: Act,
    after: Act,
}

impl HookedStore {
    pub(crate) fn new(inner: &MemoryStore, kind: ObjectKind, act: impl FnOnce() + Send + 'static) -> Self {
        Self {
            inner: inner.clone(),
            kind,
            before: std::sync::Mutex::new(Some(Box::new(act))),
            after: std::sync::Mutex::default(),
        }
    }

    /// The same store, which also calls `act` after that object was put in one call.
    pub(crate) fn and_after(self, act: impl FnOnce() + Send + 'static) -> Self {
        *self.after.lock().unwrap() = Some(Box::new(act));
        self
    }

    fn act(&self, act: &Act, name: &ObjectName) {
        if name.kind() == self.kind {
            let act = act.lock().unwrap().take();
            if let Some(act) = act {
                act();
            }
        }
    }
}

impl Store for HookedStore {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> StoreResult<Put> {
        self.act(&self.before, name);
        let put = self.inner.put(name, bytes);
        self.act(&self.after, name);
        put
    }
    fn create(&self, name: &ObjectName) -> StoreResult<Box<dyn ObjectWriter>> {
        self.act(&self.before, name);
        self.inner.create(name)
    }
    fn get(&self, name: &ObjectName, length_max: u64) -> StoreResult<Vec<u8>> {
        self.inner.get(name, length_max)
    }
    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> StoreResult<()> {
        self.inner.get_range(name, offset, buffer)
    }
    fn length(&self, name: &ObjectName) -> StoreResult<u64> {
        self.inner.length(name)
    }
    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> StoreResult<()>) -> StoreResult<()> {
        self.inner.list(kind, visit)
    }
    fn ages(
        &self,
        kind: ObjectKind,
        visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> StoreResult<()>,
    ) -> StoreResult<()> {
        self.inner.ages(kind, visit)
    }
    fn delete(&self, name: &ObjectName) -> StoreResult<()> {
        self.inner.delete(name)
    }
    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> StoreResult<()>) -> StoreResult<()> {
        self.inner.foreign_files(visit)
    }
    fn clean(&self, age: Duration) -> StoreResult<u64> {
        self.inner.clean(age)
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn free_bytes(&self) -> Option<u64> {
        self.inner.free_bytes()
    }
}

/// Asserts that one gc leaves nothing for a second one, and waits for no writer.
pub(crate) fn assert_gc_is_thorough(repository: &Repository, request: GcRequest, case: &str) {
    let first = repository.gc(request).unwrap();
    assert!(first.waiting_for.is_empty(), "{case}: {first:?}");
    let second = repository.gc(request).unwrap();
    let done = (second.deleted_pack_count, second.rewritten_bytes);
    assert_eq!(done, (0, 0), "{case}: {second:?}");
    assert!(second.cleared_writers.is_empty(), "{case}: {second:?}");
}
