//! A repository with an object of every kind, and operations on it.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::sync::Arc;

use holdfast_block::{BlockDevice as _, MemoryDevice};
use holdfast_repo::key::Credential;
use holdfast_repo::store::{MemoryStore, ObjectName, Put, Store};
use holdfast_repo::{
    GcRequest, InitRequest, Parent, RepairRequest, Repository, RestoreRequest, ScrubRequest, Selection, SnapshotId,
    SourceData, TargetState, VerifyDepth, VerifyReport, VerifyRequest,
};

use super::KIB;
use crate::common::specimen::MarkerCopier;
use crate::common::{Disk, PASSWORD, Watch, environment, init_request, request, source};

pub(crate) const SECOND_KEY: Credential<'static> = Credential::KeyFile(b"another key file, for a bad day!");
pub(crate) const FULL: ScrubRequest = ScrubRequest {
    percent: 100,
    thread_count: 2,
};

/// All objects of a store.
pub(crate) type Objects = BTreeMap<ObjectName, Vec<u8>>;

pub(crate) fn objects_of(store: &MemoryStore) -> Objects {
    let objects = store.objects().into_iter();
    objects.map(|(name, bytes)| (name, bytes.to_vec())).collect()
}

pub(crate) fn store_of(objects: &Objects) -> MemoryStore {
    let store = MemoryStore::new();
    for (name, bytes) in objects {
        assert_eq!(store.put(name, bytes).unwrap(), Put::Created);
    }
    store
}

/// The content of a snapshot: a disk and a stream.
#[derive(Clone)]
pub(crate) struct Content {
    pub(crate) disk: Disk,
    pub(crate) memory: Vec<u8>,
}

pub(crate) fn back_up(repository: &Repository, content: &Content) -> Result<SnapshotId, holdfast_repo::Error> {
    back_up_watching(repository, content, &mut Cursor::new(content.memory.clone()))
}

pub(crate) static TIME: std::sync::atomic::AtomicI64 = std::sync::atomic::AtomicI64::new(1_800_000_000_000);

pub(crate) fn back_up_watching(
    repository: &Repository,
    content: &Content,
    stream: &mut dyn std::io::Read,
) -> Result<SnapshotId, holdfast_repo::Error> {
    let device = MemoryDevice::from_bytes(&content.disk.bytes);
    let sources = vec![
        source("vda", SourceData::Disk(&device)),
        source("memory", SourceData::Stream(stream)),
    ];
    let time_ms = TIME.fetch_add(1000, std::sync::atomic::Ordering::Relaxed);
    let request = request("machine", time_ms, sources, Parent::Newest, 1);
    Ok(repository.backup(request, &Watch::default())?.snapshot.id)
}

/// Restores a disk in both ways; panics if a restore succeeds with wrong content.
pub(crate) fn restores(repository: &Repository, snapshot: SnapshotId, disk: &str, expected: &[u8]) -> bool {
    let Ok(device) = repository.open_disk(snapshot, Some(disk)) else {
        return false;
    };
    assert_eq!(device.size_bytes(), expected.len() as u64);
    let mut bytes = vec![1; expected.len()];
    let read = device.read_at(&mut bytes, 0).is_ok();
    assert!(!read || bytes == expected, "the device returns other data");
    let target = MemoryDevice::new(expected.len() as u64);
    let request = RestoreRequest {
        target: &target,
        target_name: "target".into(),
        state: TargetState::Zeroed,
        thread_count: 1,
    };
    let restored = repository.restore(&device, &request, &Watch::default()).is_ok();
    assert!(
        !restored || target.to_bytes() == expected,
        "the restore wrote other data"
    );
    read && restored
}

pub(crate) fn restores_all(repository: &Repository, snapshot: SnapshotId, content: &Content) -> bool {
    let disk = restores(repository, snapshot, "vda", &content.disk.bytes);
    restores(repository, snapshot, "memory", &content.memory) && disk
}

pub(crate) fn verify(repository: &Repository, depth: VerifyDepth) -> VerifyReport {
    let request = VerifyRequest {
        snapshots: Selection::All,
        depth,
        compare: None,
        thread_count: 2,
    };
    repository.verify(&request, &Watch::default()).unwrap()
}

pub(crate) fn repair(repository: &Repository) {
    let request = RepairRequest {
        percent: 100,
        thread_count: 1,
    };
    let plan = repository.plan_repair(request, &Watch::default()).unwrap();
    repository.repair(&plan, 1, &Watch::default()).unwrap();
}

pub(crate) fn open(store: &MemoryStore, seed: u64) -> (Repository, bool) {
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let opened = Repository::open(Arc::clone(&shared), PASSWORD, environment(seed))
        .or_else(|_| Repository::open(shared, SECOND_KEY, environment(seed)));
    let opened = opened.unwrap();
    (opened.repository, !opened.warnings.is_empty())
}

/// A repository with an object of every kind.
pub(crate) struct Base {
    pub(crate) objects: Objects,
    pub(crate) snapshots: Vec<(SnapshotId, Content)>,
}

pub(crate) fn base() -> Base {
    let store = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let repository = Repository::init(shared, &init_request(), environment(1)).unwrap();
    let second = InitRequest {
        credential: SECOND_KEY,
        label: "second",
        ..init_request()
    };
    repository.add_key(&second).unwrap();
    let mut disk = Disk::new(1500 * KIB + 77, 3);
    disk.fill(0, 900 * KIB);
    let mut memory = Disk::new(200 * KIB, 4);
    memory.fill(0, 150 * KIB);
    let mut content = Content {
        disk,
        memory: memory.bytes.clone(),
    };
    let mut marker = MarkerCopier::new(&store, &content.memory);
    let first = back_up_watching(&repository, &content, &mut marker).unwrap();
    content.disk.fill(0, 500 * KIB);
    let second = (back_up(&repository, &content).unwrap(), content.clone());
    repository.forget(first, "test").unwrap();
    let repack = GcRequest {
        repack_below_percent: 99,
        thread_count: 1,
    };
    // The packs of the first snapshot are partly used: used chunks move, and relocations have their new places.
    repository.gc(repack).unwrap();
    content.disk.fill(700 * KIB, 300 * KIB);
    memory.fill(100 * KIB, 30 * KIB);
    content.memory.clone_from(&memory.bytes);
    // With a running writer, gc leaves the condemned packs and the list of writers that it waits for.
    let other = Content {
        disk: Disk::new(0, 5),
        memory: content.memory.iter().map(|byte| byte ^ 0xff).collect(),
    };
    let extra = back_up(&repository, &other).unwrap();
    let mut stream = HookedStream {
        inner: Cursor::new(content.memory.clone()),
        act: Some(Box::new(|| {
            repository.forget(extra, "test").unwrap();
            let report = repository.gc(repack).unwrap();
            assert_eq!(report.waiting_for.len(), 1, "{report:?}");
        })),
    };
    let third = back_up_watching(&repository, &content, &mut stream).unwrap();
    drop(stream);
    let third = (third, content);
    repository.protect(third.0).unwrap();
    assert!(!repository.scrub(FULL, &Watch::default()).unwrap().has_damage());
    let (name, bytes) = marker.copied.unwrap();
    store.put(&name, &bytes).unwrap();
    Base {
        objects: objects_of(&store),
        snapshots: vec![second, third],
    }
}

/// A stream that runs a function in the middle.
pub(crate) struct HookedStream<'a> {
    inner: Cursor<Vec<u8>>,
    act: Option<Box<dyn FnOnce() + 'a>>,
}

impl std::io::Read for HookedStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(act) = self.act.take() {
            act();
        }
        self.inner.read(buffer)
    }
}
