//! Crashes, failures and a full store at every operation of a repository's life, and the state afterwards.
//!
//! The sequence is the same each time: backups of a changing disk and of a stream, forgets, gc with repacking. At the
//! n-th operation on the store, for every n, the process dies, or the operation fails, or the store is full once or
//! from then on. For every n, committed snapshots are readable, the next backup and gc succeed, and no space is lost
//! permanently.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

use holdfast_block::{BlockDevice, MemoryDevice, SeededRandom, to_usize};
use holdfast_repo::store::{Fault, FaultPlan, FaultSpan, FaultStore, MemoryStore, ObjectKind, Store};
use holdfast_repo::{
    Environment, Error, GcRequest, Liveness, Parent, ProcessIdentity, Processes, Repository, SnapshotId, SourceData,
};

use crate::common::{PASSWORD, SeededBytes, Watch, init_request, names_of, request, source};

const GC: GcRequest = GcRequest {
    repack_below_percent: 70,
    thread_count: 0,
};

/// A process that considers all others dead, which they are in these tests.
struct OnlyProcess(u32);

impl Processes for OnlyProcess {
    fn this(&self) -> ProcessIdentity {
        ProcessIdentity {
            host: "host".into(),
            boot: "boot".into(),
            namespace: "namespace".into(),
            process: self.0,
            started: 0,
        }
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        if process.process == self.0 {
            Liveness::Alive
        } else {
            Liveness::Dead
        }
    }
}

fn open(store: Arc<dyn Store>, process: u32) -> Result<Repository, Error> {
    let time = Arc::new(AtomicI64::new(1_700_000_000_000 + i64::from(process) * 1_000_000));
    let environment = Environment {
        randomness: Arc::new(SeededBytes::new(process.into())),
        processes: Arc::new(OnlyProcess(process)),
        now_ms: Arc::new(move || time.fetch_add(1000, Ordering::Relaxed)),
    };
    Repository::open(store, PASSWORD, environment).map(|opened| opened.repository)
}

/// A store with an empty repository.
fn empty() -> MemoryStore {
    let store = MemoryStore::new();
    let environment = crate::common::environment(9);
    Repository::init(Arc::new(store.clone()), &init_request(), environment).unwrap();
    store
}

/// The disk and the stream of a day. They are needed a thousand times.
fn contents(day: u64) -> &'static [Vec<u8>; 2] {
    static DAYS: [OnceLock<[Vec<u8>; 2]>; 7] = [const { OnceLock::new() }; 7];
    DAYS[to_usize(day)].get_or_init(|| create_contents(day))
}

fn create_contents(day: u64) -> [Vec<u8>; 2] {
    let mut disk = SeededRandom::new(5).bytes(96 << 10);
    for part in 0..4 {
        // Some parts change every day, some every other day, and some never.
        let seed = (day / (part + 1)) << 8 | part;
        let at = holdfast_block::to_usize(part) * 6 * 4096;
        disk[at..at + 8192].copy_from_slice(&SeededRandom::new(seed).bytes(8192));
    }
    disk[80 << 10..].fill(0);
    let stream = [
        SeededRandom::new(day / 2).bytes(40_000),
        SeededRandom::new(day).bytes(30_001),
    ]
    .concat();
    [disk, stream]
}

fn back_up(repository: &Repository, day: u64) -> Result<SnapshotId, Error> {
    let [disk, stream] = contents(day);
    let device = MemoryDevice::from_bytes(disk);
    let mut reader = &stream[..];
    let sources = vec![
        source("disk", SourceData::Disk(&device)),
        source("memory", SourceData::Stream(&mut reader)),
    ];
    let time_ms = i64::try_from(day).unwrap();
    let request = request("machine", time_ms, sources, Parent::Newest, 0);
    Ok(repository.backup(request, &Watch::default())?.snapshot.id)
}

/// The committed snapshots with their days. A snapshot whose removal has begun may exist or not.
#[derive(Default)]
struct Committed {
    days: BTreeMap<SnapshotId, u64>,
    doubtful: Option<SnapshotId>,
}

/// Five days, two of which are forgotten, and two runs of gc; stops at the first error.
fn run_sequence(repository: &Repository, committed: &mut Committed) -> Result<(), Error> {
    let mut ids = Vec::new();
    for day in 1..=5 {
        let id = back_up(repository, day)?;
        committed.days.insert(id, day);
        ids.push(id);
        if day == 3 || day == 5 {
            let old = ids.remove(0);
            committed.days.remove(&old);
            committed.doubtful = Some(old);
            repository.forget(old, "old")?;
            repository.gc(GC)?;
            committed.doubtful = None;
        }
    }
    Ok(())
}

fn read(repository: &Repository, id: SnapshotId, disk: &str) -> Vec<u8> {
    let device = repository.open_disk(id, Some(disk)).unwrap();
    let mut bytes = vec![1; holdfast_block::to_usize(device.size_bytes())];
    device.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// All committed snapshots exist with their content, and the repository is fully usable.
fn assert_sound(repository: &Repository, store: &dyn Store, committed: &Committed, case: &str) {
    let (manifests, errors) = repository.snapshots().unwrap();
    assert!(errors.is_empty(), "{case}: {errors:?}");
    for id in committed.days.keys() {
        assert!(
            manifests.iter().any(|manifest| manifest.id == *id),
            "{case}: {id} is missing"
        );
    }
    let check = |repository: &Repository| {
        for manifest in repository.snapshots().unwrap().0 {
            // A listed snapshot that was not reported comes from a commit that was complete and returned an error.
            let day = u64::try_from(manifest.time_ms).unwrap();
            let known = committed.days.get(&manifest.id);
            assert!(known.is_none_or(|known| *known == day), "{case}");
            let [disk, stream] = contents(day);
            assert!(
                read(repository, manifest.id, "disk") == *disk,
                "{case}: the disk differs"
            );
            assert!(
                read(repository, manifest.id, "memory") == *stream,
                "{case}: the stream differs"
            );
        }
    };
    check(repository);
    back_up(repository, 6).unwrap();
    crate::common::assert_gc_is_thorough(repository, GC, case);
    assert_eq!(names_of(store, ObjectKind::Condemned).len(), 0, "{case}");
    check(repository);
    let statistics = repository.statistics().unwrap();
    assert_eq!(
        to_usize(statistics.snapshot_count),
        repository.snapshots().unwrap().0.len()
    );
    // When all snapshots are forgotten, all space is freed.
    for manifest in repository.snapshots().unwrap().0 {
        repository.forget(manifest.id, "all").unwrap();
    }
    repository.gc(GC).unwrap();
    assert_eq!(names_of(store, ObjectKind::Pack).len(), 0, "{case}: packs are left");
    assert_eq!(
        names_of(store, ObjectKind::Relocation).len(),
        0,
        "{case}: relocations are left"
    );
    assert_eq!(
        names_of(store, ObjectKind::Protected).len(),
        0,
        "{case}: announcements are left"
    );
}

/// Runs the sequence with a fault at one operation; false if the sequence has fewer operations.
fn with_fault(base: &MemoryStore, plan: FaultPlan, seed: u64) -> bool {
    let case = format!("{plan:?}, seed {seed}");
    let store = base.duplicate();
    let faulty = FaultStore::new(Arc::new(store.clone()), Some(plan), seed);
    let mut committed = Committed::default();
    let survivor = match open(Arc::new(faulty.clone()), 1) {
        Ok(repository) => {
            let result = run_sequence(&repository, &mut committed);
            if !faulty.has_failed() {
                result.unwrap();
                return false;
            }
            (plan.fault != Fault::Crash && plan.span == FaultSpan::Once).then_some(repository)
        }
        Err(_) => None,
    };
    if let Some(repository) = survivor {
        // The process is still running, and has released its leases.
        let writers = names_of(&store, ObjectKind::Writer).len();
        assert_eq!(writers, 0, "{case}: a lease was not released");
        assert_sound(&repository, &store, &committed, &case);
    } else {
        let repository = open(Arc::new(store.clone()), 2).unwrap();
        assert_sound(&repository, &store, &committed, &case);
    }
    true
}

fn at_every_operation(fault: Fault, span: FaultSpan, seeds: std::ops::Range<u64>) {
    let base = empty();
    let mut operation = 1;
    // Every seed is tried at every operation, independent of the results at the operation before.
    let reached_count = |operation| {
        seeds
            .clone()
            .filter(|seed| with_fault(&base, FaultPlan { operation, fault, span }, *seed))
            .count()
    };
    while reached_count(operation) > 0 {
        operation += 1;
    }
    assert!(operation > 300, "the sequence has only {operation} operations");
}

/// The seed decides whether the interrupted change was applied: for each operation, some seeds apply it and others do
/// not.
#[test]
fn a_crash_at_any_operation_loses_no_committed_snapshot() {
    at_every_operation(Fault::Crash, FaultSpan::Forever, 0..3);
}

#[test]
fn a_failed_operation_loses_no_committed_snapshot() {
    at_every_operation(Fault::Io, FaultSpan::Once, 0..3);
}

#[test]
fn a_permanently_failing_store_loses_no_committed_snapshot() {
    at_every_operation(Fault::Io, FaultSpan::Forever, 0..1);
}

#[test]
fn a_temporarily_full_store_loses_no_committed_snapshot() {
    at_every_operation(Fault::NoSpace, FaultSpan::Once, 0..1);
}

#[test]
fn a_permanently_full_store_loses_no_committed_snapshot() {
    at_every_operation(Fault::NoSpace, FaultSpan::Forever, 0..1);
}
