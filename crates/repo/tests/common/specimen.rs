//! A small repository with an object of every kind, as a source of hostile bytes.

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use holdfast_block::MemoryDevice;
use holdfast_repo::hostile::{Plaintext, plaintexts};
use holdfast_repo::key::{Credential, KdfParameters, Randomness};
use holdfast_repo::store::{MemoryStore, ObjectKind, ObjectName, Store};
use holdfast_repo::{
    Environment, GcRequest, InitRequest, Liveness, Parent, ProcessIdentity, Processes, Repository, ScrubRequest,
    SnapshotId, Source, SourceData,
};

use super::{Disk, SeededBytes, Watch, environment, init_request, names_of, request};

const KIB: u64 = 1024;

/// A repository, and the content of its snapshots.
pub(crate) struct Specimen {
    pub(crate) store: MemoryStore,
    pub(crate) repository: Repository,
    pub(crate) snapshots: Vec<Contents>,
}

/// The content of a snapshot: a disk and a stream.
#[derive(Clone)]
pub(crate) struct Contents {
    pub(crate) snapshot: SnapshotId,
    pub(crate) disk: Vec<u8>,
    pub(crate) memory: Vec<u8>,
}

/// The first random bytes are the master secret; they have a well-known value.
struct KnownSecret {
    drawn: AtomicBool,
    rest: SeededBytes,
}

impl Randomness for KnownSecret {
    fn fill(&self, bytes: &mut [u8]) -> holdfast_repo::key::Result<()> {
        if self.drawn.swap(true, Ordering::Relaxed) {
            return self.rest.fill(bytes);
        }
        bytes.fill(0x48);
        Ok(())
    }
}

/// The same process on every machine, so that seeds contain nothing about the machine that generated them; it never
/// ends.
struct KnownProcess;

impl Processes for KnownProcess {
    fn this(&self) -> ProcessIdentity {
        ProcessIdentity {
            host: "host".to_owned(),
            boot: "boot".to_owned(),
            namespace: "namespace".to_owned(),
            process: 1,
            started: 1,
        }
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        assert_eq!(*process, self.this(), "there is no other process");
        Liveness::Alive
    }
}

/// An environment for tests, with the known secret.
pub(crate) fn known_environment() -> Environment {
    Environment {
        randomness: Arc::new(KnownSecret {
            drawn: AtomicBool::new(false),
            rest: SeededBytes::new(7),
        }),
        processes: Arc::new(KnownProcess),
        ..environment(1)
    }
}

/// A stream that copies the marker of its own writer.
pub(crate) struct MarkerCopier {
    store: MemoryStore,
    inner: Cursor<Vec<u8>>,
    pub(crate) copied: Option<(ObjectName, Vec<u8>)>,
}

impl MarkerCopier {
    pub(crate) fn new(store: &MemoryStore, bytes: &[u8]) -> Self {
        Self {
            store: store.clone(),
            inner: Cursor::new(bytes.to_vec()),
            copied: None,
        }
    }
}

impl Read for MarkerCopier {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(name) = names_of(&self.store, ObjectKind::Writer).pop() {
            let bytes = self.store.get(&name, u64::MAX).unwrap();
            self.copied = Some((name, bytes));
        }
        self.inner.read(buffer)
    }
}

fn back_up(repository: &Repository, disk: &Disk, memory: &mut dyn Read, time_ms: i64) -> SnapshotId {
    let device = MemoryDevice::from_bytes(&disk.bytes);
    let source = |name: &str, data| Source {
        name: name.to_owned(),
        data,
        notes: BTreeMap::from([("format".to_owned(), "raw".to_owned())]),
    };
    let sources = vec![
        source("vda", SourceData::Disk(&device)),
        source("memory", SourceData::Stream(memory)),
    ];
    let mut request = request("machine", time_ms, sources, Parent::Newest, 1);
    request.tags = vec!["weekly".to_owned()];
    repository.backup(request, &Watch::default()).unwrap().snapshot.id
}

impl Specimen {
    /// Runs backups, a removal, a gc that rewrites packs, another one that has to wait for a writer, a scrub, and one
    /// that finds damage.
    pub(crate) fn new() -> Self {
        let store = MemoryStore::new();
        let repository = Repository::init(Arc::new(store.clone()), &init_request(), known_environment()).unwrap();
        add_slots(&repository);
        let mut disk = Disk::new(150 * KIB + 77, 3);
        disk.fill(0, 40 * KIB);
        disk.fill(90 * KIB, 8 * KIB);
        let mut memory = Disk::new(24 * KIB, 4);
        memory.fill(0, 18 * KIB);
        let mut marker = MarkerCopier::new(&store, &memory.bytes);
        let first = back_up(&repository, &disk, &mut marker, 1_800_000_000_000);
        disk.fill(0, 20 * KIB);
        let second = back_up(&repository, &disk, &mut &memory.bytes[..], 1_800_000_001_000);
        let contents = |snapshot, disk: &Disk, memory: &Disk| Contents {
            snapshot,
            disk: disk.bytes.clone(),
            memory: memory.bytes.clone(),
        };
        let kept = contents(second, &disk, &memory);
        let repack = GcRequest {
            repack_below_percent: 99,
            thread_count: 1,
        };
        repository.forget(first, "for the specimen").unwrap();
        repository.gc(repack).unwrap();
        disk.fill(60 * KIB, 12 * KIB);
        // Call instructions, as machine code has them.
        for call in disk.bytes[60 << 10..72 << 10].chunks_exact_mut(100) {
            (call[0], call[4]) = (0xE8, 0);
        }
        let third = back_up(&repository, &disk, &mut &memory.bytes[..], 1_800_000_002_000);
        disk.fill(100 * KIB, 8 * KIB);
        let last = contents(
            back_up(&repository, &disk, &mut &memory.bytes[..], 1_800_000_003_000),
            &disk,
            &memory,
        );
        repository.forget(third, "for the specimen").unwrap();
        // A writer that never ends: what gc condemns from now on stays condemned.
        let (name, bytes) = marker.copied.unwrap();
        store.put(&name, &bytes).unwrap();
        repository.gc(repack).unwrap();
        repository.protect(last.snapshot).unwrap();
        find_damage(&store, &repository);
        Self {
            store,
            repository,
            snapshots: vec![kept, last],
        }
    }

    /// The decrypted input of every parser in this repository.
    pub(crate) fn plaintexts(&self) -> Vec<Plaintext> {
        plaintexts(&self.repository).unwrap()
    }
}

/// Adds a slot of each kind other than the key file of the first slot.
fn add_slots(repository: &Repository) {
    let parameters = KdfParameters {
        memory_kib: 8,
        iterations: 1,
        lanes: 1,
    };
    for credential in [Credential::Open, Credential::Password(b"known")] {
        let slot = InitRequest {
            credential,
            label: "another",
            parameters,
            ..init_request()
        };
        repository.add_key(&slot).unwrap();
    }
}

/// Scrubs everything, and again with a damaged pack, which is restored afterwards: so there are records of both.
fn find_damage(store: &MemoryStore, repository: &Repository) {
    let full = ScrubRequest {
        percent: 100,
        thread_count: 1,
    };
    repository.scrub(full, &Watch::default()).unwrap();
    let pack = names_of(store, ObjectKind::Pack).remove(0);
    let whole = store.get(&pack, u64::MAX).unwrap();
    let mut damaged = whole.clone();
    damaged[100] ^= 1;
    store.damage(&pack, &damaged);
    assert!(repository.scrub(full, &Watch::default()).unwrap().has_damage());
    store.damage(&pack, &whole);
}
