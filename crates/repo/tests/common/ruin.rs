//! A repository with one ruined object, and all operations of a repository on it.
//!
//! A bad disk, or an attacker without the keys, can damage the stored bytes of an object: then no read may return a
//! wrong byte, and neither gc nor repair may make it worse. An attacker with the keys can change an object before it is
//! encrypted. Such an attacker can write any snapshot, so the content that is read is not checked; but nothing may
//! panic, hang or exhaust memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use holdfast_block::{BlockDevice, MemoryDevice};
use holdfast_repo::hostile::{plaintext, reseal};
use holdfast_repo::store::{MemoryStore, ObjectKind, ObjectName, Put, Store};
use holdfast_repo::{
    GcRequest, RepairRequest, Repository, RestoreRequest, ScrubRequest, Selection, TargetState, VerifyDepth,
    VerifyRequest,
};

use super::specimen::{Contents, Specimen};
use super::{PASSWORD, Watch, environment};

/// Larger disks are not restored: a forged manifest can claim a size that would take years.
const RESTORED_BYTES_MAX: u64 = 4 << 20;

/// Which form of the object the edits change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Stored,
    BehindTheSeal,
}

/// A valid repository, of which each call damages a copy.
pub(crate) struct Victim {
    specimen: Specimen,
    objects: BTreeMap<ObjectName, Arc<[u8]>>,
    names: Vec<ObjectName>,
}

impl Victim {
    pub(crate) fn new() -> Self {
        let specimen = Specimen::new();
        let objects = specimen.store.objects();
        let names = objects.keys().cloned().collect();
        Self {
            specimen,
            objects,
            names,
        }
    }

    /// Damages an object as `input` says: u8 with bit 0: behind the seal, bit 1: no writer is at work, bits 2 to 4: no
    /// verify, no gc, no repair; u8 number of the object; then edits of four bytes each. Then runs all operations, and
    /// panics if a guarantee is violated.
    pub(crate) fn ruin(&self, input: &[u8]) {
        let Some((&[mode, number], edits)) = input.split_first_chunk() else {
            return;
        };
        let name = &self.names[usize::from(number) % self.names.len()];
        let place = if mode & 1 == 0 {
            Place::Stored
        } else {
            Place::BehindTheSeal
        };
        let Some(bytes) = self.ruined(name, place, edits) else {
            return;
        };
        let store = MemoryStore::new();
        for (other, object) in &self.objects {
            if mode & 2 == 0 || other.kind() != ObjectKind::Writer {
                let object = if other == name { &bytes[..] } else { &object[..] };
                assert_eq!(store.put(other, object).unwrap(), Put::Created);
            }
        }
        run_all_operations(&store, &self.specimen.snapshots, place, mode);
    }

    /// The object after `edits`; `None` if an object of this kind is not sealed.
    fn ruined(&self, name: &ObjectName, place: Place, edits: &[u8]) -> Option<Vec<u8>> {
        match place {
            Place::Stored => {
                let mut bytes = self.objects[name].to_vec();
                edit(&mut bytes, edits);
                Some(bytes)
            }
            Place::BehindTheSeal => {
                let mut bytes = plaintext(&self.specimen.repository, name).unwrap()?.bytes;
                edit(&mut bytes, edits);
                reseal(&self.specimen.repository, name, &bytes).unwrap()
            }
        }
    }
}

/// Applies edits of u16 offset, u8 action, u8 argument.
fn edit(bytes: &mut Vec<u8>, edits: &[u8]) {
    for &[low, high, action, value] in edits.as_chunks().0 {
        if bytes.is_empty() {
            return;
        }
        let place = usize::from(u16::from_le_bytes([low, high]));
        // Counted from the start or from the end, because the trailers of packs and segments are at the end.
        let at = if action & 0x80 == 0 {
            place % bytes.len()
        } else {
            bytes.len() - 1 - place % bytes.len()
        };
        let end = (at + usize::from(value)).min(bytes.len());
        match action & 7 {
            0 => bytes[at] ^= value,
            1 => bytes[at] = value,
            2 => bytes.insert(at, value),
            3 => drop(bytes.drain(at..end)),
            4 => bytes.truncate(at),
            5 => bytes[at..end].fill(0),
            6 => bytes[at..end].fill(0xff),
            _ => bytes[at] = bytes[at].wrapping_add(value),
        }
    }
}

fn run_all_operations(store: &MemoryStore, snapshots: &[Contents], place: Place, mode: u8) {
    let Some(repository) = open(store) else { return };
    let first = restored(&repository, snapshots, place);
    if mode & 4 == 0 {
        check(&repository, &first, place);
    }
    if mode & 8 == 0 {
        let gc = GcRequest {
            repack_below_percent: 99,
            thread_count: 1,
        };
        repository.gc(gc).ok();
        let Some(repository) = open(store) else { return };
        assert_no_worse(&first, &restored(&repository, snapshots, place), place, "gc");
    }
    if mode & 16 == 0 {
        let request = RepairRequest {
            percent: 100,
            thread_count: 1,
        };
        if let Ok(plan) = repository.plan_repair(request, &Watch::default()) {
            repository.repair(&plan, 1, &Watch::default()).ok();
        }
        let Some(repository) = open(store) else { return };
        assert_no_worse(&first, &restored(&repository, snapshots, place), place, "repair");
    }
}

/// Lists, measures, verifies and scrubs.
fn check(repository: &Repository, restored: &[bool], place: Place) {
    repository.statistics().ok();
    let verify = VerifyRequest {
        snapshots: Selection::All,
        depth: VerifyDepth::Full,
        compare: None,
        thread_count: 1,
    };
    let verified = repository.verify(&verify, &Watch::default());
    if place == Place::Stored && verified.is_ok_and(|report| report.is_clean()) {
        let listed = repository.snapshots().unwrap().0.len();
        assert!(
            restored.iter().filter(|whole| **whole).count() >= listed,
            "verify missed damage that a restore found"
        );
    }
    let full = ScrubRequest {
        percent: 100,
        thread_count: 1,
    };
    repository.scrub(full, &Watch::default()).ok();
}

fn assert_no_worse(before: &[bool], after: &[bool], place: Place, who: &str) {
    let is_no_worse = before.iter().zip(after).all(|(before, after)| *after || !*before);
    assert!(
        is_no_worse || place == Place::BehindTheSeal,
        "{who} lost a snapshot that could be restored"
    );
}

fn open(store: &MemoryStore) -> Option<Repository> {
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let opened = Repository::open(shared, PASSWORD, environment(9)).ok()?;
    Some(opened.repository)
}

/// Which snapshots can be restored; panics if a restore succeeds with wrong content.
fn restored(repository: &Repository, snapshots: &[Contents], place: Place) -> Vec<bool> {
    let whole = |contents: &Contents| {
        let disk = restores(repository, contents, "vda", &contents.disk, place);
        restores(repository, contents, "memory", &contents.memory, place) && disk
    };
    snapshots.iter().map(whole).collect()
}

fn restores(repository: &Repository, contents: &Contents, disk: &str, expected: &[u8], place: Place) -> bool {
    let Ok(device) = repository.open_disk(contents.snapshot, Some(disk)) else {
        return false;
    };
    let size_bytes = device.size_bytes();
    device.extents(0..size_bytes, 1000).ok();
    if size_bytes > RESTORED_BYTES_MAX {
        assert_eq!(place, Place::BehindTheSeal, "a disk of another size");
        let last = size_bytes - 5000;
        return device.read_at(&mut [0; 5000], last).is_ok();
    }
    let mut bytes = vec![1; usize::try_from(size_bytes).unwrap()];
    let is_read = device.read_at(&mut bytes, 0).is_ok();
    let target = MemoryDevice::new(size_bytes);
    let request = RestoreRequest {
        target: &target,
        target_name: "target".into(),
        state: TargetState::Zeroed,
        thread_count: 0,
    };
    let is_restored = repository.restore(&device, &request, &Watch::default()).is_ok();
    if place == Place::Stored {
        assert!(!is_read || bytes == expected, "the device returns other data");
        assert!(
            !is_restored || target.to_bytes() == expected,
            "the restore wrote other data"
        );
    }
    is_read && is_restored
}
