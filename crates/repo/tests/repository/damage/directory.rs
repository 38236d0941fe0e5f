//! Directories and trailers of packs: everything that locates data exists twice, so damage to one copy loses no byte.

use std::path::Path;
use std::sync::Arc;

use holdfast_block::BlockDevice as _;
use holdfast_repo::key::Credential;
use holdfast_repo::store::{MemoryStore, ObjectKind, ObjectName, Store};
use holdfast_repo::{FindingKind, GcRequest, Repository, SnapshotId, VerifyDepth};

use super::KIB;
use super::base::{Content, FULL, Objects, back_up, objects_of, open, repair, restores_all, store_of, verify};
use crate::common::{Disk, Watch, environment, init_request};

const TRAILER_BYTES: usize = 80;

/// Damages a pack.
type Ruin<'a> = &'a dyn Fn(&mut Vec<u8>);

fn small_repository() -> (Objects, SnapshotId, Content) {
    let store = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let repository = Repository::init(shared, &init_request(), environment(21)).unwrap();
    let mut disk = Disk::new(600 * KIB, 22);
    disk.fill(0, 200 * KIB);
    let mut memory = Disk::new(90 * KIB, 23);
    memory.fill(0, 80 * KIB);
    let content = Content {
        disk,
        memory: memory.bytes,
    };
    let snapshot = back_up(&repository, &content).unwrap();
    (objects_of(&store), snapshot, content)
}

fn packs(objects: &Objects) -> Vec<ObjectName> {
    let names = objects.keys().filter(|name| name.kind() == ObjectKind::Pack);
    names.cloned().collect()
}

/// The offset of the directory of a pack, from its trailer.
fn directory_start(pack: &[u8]) -> usize {
    let at = pack.len() - TRAILER_BYTES + 24;
    usize::try_from(u64::from_le_bytes(pack[at..at + 8].try_into().unwrap())).unwrap()
}

/// Asserts that nothing is lost, that the damage is reported, and that repair removes it without losing anything.
fn check(
    objects: &Objects,
    name: &ObjectName,
    (snapshot, content): (SnapshotId, &Content),
    seed: u64,
    is_repaired: bool,
) {
    let store = store_of(objects);
    let (repository, _) = open(&store, seed);
    assert!(restores_all(&repository, snapshot, content), "a restore lost something");
    let verified = verify(&repository, VerifyDepth::Full);
    assert_eq!(verified.findings.len(), 1, "{:#?}", verified.findings);
    let finding = &verified.findings[0];
    assert_eq!(
        (&finding.object, finding.kind),
        (&name.to_string(), FindingKind::Damaged)
    );
    assert!(finding.touches.is_empty(), "no byte of a disk is touched: {finding:?}");
    if !is_repaired {
        return;
    }
    assert!(repository.scrub(FULL, &Watch::default()).unwrap().has_damage());
    repair(&repository);
    let (repository, _) = open(&store, seed + 1);
    assert!(restores_all(&repository, snapshot, content), "repair lost something");
    let scrubbed = repository.scrub(FULL, &Watch::default()).unwrap();
    assert!(scrubbed.findings.is_empty(), "{:#?}", scrubbed.findings);
    assert!(verify(&repository, VerifyDepth::Full).is_clean());
    // Chunks that repair stores again keep their identities: a backup of the same data finds them.
    let before = objects_of(&store).len();
    back_up(&repository, content).unwrap();
    let new_packs = packs(&objects_of(&store)).len() - packs(objects).len();
    assert!(new_packs <= 1, "{new_packs} new packs, {before} objects before");
}

#[test]
fn a_changed_byte_of_a_directory_or_trailer_loses_nothing() {
    let (objects, snapshot, content) = small_repository();
    for name in packs(&objects) {
        let length = objects[&name].len();
        for (number, at) in (directory_start(&objects[&name])..length).enumerate() {
            let mut changed = objects.clone();
            changed.get_mut(&name).unwrap()[at] ^= 1 << (at % 8);
            println!("{name} byte {at} of {length}");
            check(
                &changed,
                &name,
                (snapshot, &content),
                3000 + 2 * number as u64,
                number % 61 == 0,
            );
        }
    }
}

#[test]
fn overwritten_truncated_or_extended_ends_lose_nothing() {
    let (objects, snapshot, content) = small_repository();
    for name in packs(&objects) {
        let start = directory_start(&objects[&name]);
        let length = objects[&name].len();
        let damages: [(&str, Ruin<'_>); 7] = [
            ("zeroes from the directory on", &|bytes| bytes[start..].fill(0)),
            ("a trailer of zeroes", &|bytes| bytes[length - TRAILER_BYTES..].fill(0)),
            ("a directory of zeroes", &|bytes| {
                bytes[start..length - TRAILER_BYTES].fill(0);
            }),
            ("no trailer", &|bytes| bytes.truncate(length - TRAILER_BYTES)),
            ("no directory", &|bytes| bytes.truncate(start)),
            ("no last byte", &|bytes| bytes.truncate(length - 1)),
            ("one byte more", &|bytes| bytes.push(7)),
        ];
        for (number, (what, damage)) in (0..).zip(damages) {
            let mut changed = objects.clone();
            damage(changed.get_mut(&name).unwrap());
            println!("{name}: {what}");
            check(&changed, &name, (snapshot, &content), 5000 + 2 * number, true);
        }
    }
}

/// A backup does not reuse a pack whose directory is damaged, whether or not the damage is known.
#[test]
fn nothing_new_refers_to_a_pack_with_a_damaged_directory() {
    let (objects, first, content) = small_repository();
    for name in packs(&objects) {
        let mut changed = objects.clone();
        let bytes = changed.get_mut(&name).unwrap();
        let start = directory_start(bytes);
        bytes[start + 3] ^= 1;
        let store = store_of(&changed);
        let (repository, _) = open(&store, 31);
        let second = back_up(&repository, &content).unwrap();
        store.delete(&name).unwrap();
        let (repository, _) = open(&store, 32);
        assert!(
            restores_all(&repository, second, &content),
            "{name}: the second snapshot depends on the damaged pack"
        );
        assert!(
            !restores_all(&repository, first, &content),
            "{name}: the first snapshot does not need the pack"
        );
    }
}

/// If frames are damaged too, only these are lost.
#[test]
fn a_damaged_directory_does_not_hide_a_damaged_frame() {
    let (objects, snapshot, content) = small_repository();
    let name = packs(&objects)
        .into_iter()
        .find(|name| objects[name][10] == 1 && objects[name].len() > 90_000)
        .unwrap();
    let mut changed = objects.clone();
    let bytes = changed.get_mut(&name).unwrap();
    let start = directory_start(bytes);
    bytes[start + 3] ^= 1;
    bytes[5000] ^= 1;
    let store = store_of(&changed);
    let (repository, _) = open(&store, 41);
    assert!(!restores_all(&repository, snapshot, &content));
    let verified = verify(&repository, VerifyDepth::Full);
    assert_eq!(verified.findings.len(), 2, "{:#?}", verified.findings);
    assert_eq!(
        verified
            .findings
            .iter()
            .filter(|finding| !finding.touches.is_empty())
            .count(),
        1
    );
    // The index still knows the chunks of the frame: when a backup stores the data again, the old snapshot is healed.
    repair(&repository);
    back_up(&repository, &content).unwrap();
    repair(&repository);
    let (repository, _) = open(&store, 42);
    assert!(
        restores_all(&repository, snapshot, &content),
        "the snapshot was not healed"
    );
    assert!(verify(&repository, VerifyDepth::Full).is_clean());
}

/// The objects of a repository of the fixtures.
fn fixture(name: &str) -> Objects {
    fn walk(root: &Path, folder: &Path, objects: &mut Objects) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, objects);
                continue;
            }
            let inside = path.strip_prefix(root).unwrap().to_str().unwrap();
            objects.insert(inside.parse().unwrap(), std::fs::read(&path).unwrap());
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let mut objects = Objects::new();
    walk(&root, &root, &mut objects);
    objects
}

/// The objects of a repository written by the last release without frame tables.
fn old_repository() -> Objects {
    fixture("repository-v1")
}

fn open_old(store: &MemoryStore, seed: u64) -> Repository {
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    Repository::open(shared, Credential::Open, environment(seed))
        .unwrap()
        .repository
}

fn version_of(segment: &[u8]) -> u16 {
    u16::from_le_bytes([segment[8], segment[9]])
}

/// Segments of version 1 stay readable; when a segment is rewritten, its packs get a second copy of their frames.
#[test]
fn repositories_without_frame_tables_open_and_gain_them() {
    let store = store_of(&old_repository());
    let repository = open_old(&store, 51);
    assert!(verify(&repository, VerifyDepth::Full).is_clean());
    assert!(repository.scrub(FULL, &Watch::default()).unwrap().findings.is_empty());
    let (snapshots, _) = repository.snapshots().unwrap();
    let device = repository.open_disk(snapshots[0].id, None).unwrap();
    let mut expected = vec![0; 1 << 20];
    device.read_at(&mut expected, 0).unwrap();
    assert!(expected[..80 << 10] != vec![0; 80 << 10] && expected[80 << 10..].iter().all(|byte| *byte == 0));
    let versions = |store: &MemoryStore| -> Vec<u16> {
        let objects = objects_of(store).into_iter();
        let segments = objects.filter(|(name, _)| name.kind() == ObjectKind::Index);
        segments.map(|(_, bytes)| version_of(&bytes)).collect()
    };
    assert_eq!(versions(&store), [1]);
    // Its entries have other flags than those of later versions.
    let mut disk = Disk::new(1 << 20, 1);
    disk.bytes.clone_from(&expected);
    let content = Content {
        disk,
        memory: vec![7; 100],
    };
    let snapshot = back_up(&repository, &content).unwrap();
    let found = repository.snapshot(snapshot).unwrap().statistics();
    assert_eq!((found.new_bytes, found.known_bytes), (100, 80 << 10));
    // Enough small backups that their segments are merged with the old one.
    for round in 0..12 {
        let mut disk = Disk::new(64 * KIB, 60 + round);
        disk.fill(0, 64 * KIB);
        let content = Content {
            disk,
            memory: vec![7; 100],
        };
        back_up(&repository, &content).unwrap();
    }
    let gc = GcRequest {
        repack_below_percent: 0,
        thread_count: 0,
    };
    repository.gc(gc).unwrap();
    assert!(
        versions(&store).iter().all(|version| *version == 2),
        "{:?}",
        versions(&store)
    );
    let old_packs = packs(&old_repository());
    let mut objects = objects_of(&store);
    for name in &old_packs {
        let bytes = objects.get_mut(name).unwrap();
        let start = directory_start(bytes);
        bytes[start..].fill(0);
    }
    let repository = open_old(&store_of(&objects), 52);
    let device = repository.open_disk(snapshots[0].id, None).unwrap();
    let mut bytes = vec![1; 1 << 20];
    device.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, expected);
}

/// The disk in the fixture of packs of version 2: 5 MiB of call instructions, many with the same targets, and 1 MiB of
/// text lines.
fn disk_of_calls() -> Vec<u8> {
    let mut disk = Vec::with_capacity(6 << 20);
    for number in 0..5_i32 << 16 {
        let distance = number % 61 * 4096 - (number * 16 + 5);
        disk.push(0xE8);
        disk.extend_from_slice(&distance.to_le_bytes());
        disk.extend_from_slice(&[0x90; 11]);
    }
    for line in 0..1 << 16 {
        disk.extend_from_slice(format!("line {line:010}\n").as_bytes());
    }
    disk
}

/// Frames of more than 2 MiB and of machine code, written by the first release with such frames: backups still find
/// their chunks.
#[test]
fn repositories_with_long_frames_and_machine_code_open() {
    let store = store_of(&fixture("repository-v2"));
    let repository = open_old(&store, 52);
    assert!(verify(&repository, VerifyDepth::Full).is_clean());
    assert!(repository.scrub(FULL, &Watch::default()).unwrap().findings.is_empty());
    let (snapshots, _) = repository.snapshots().unwrap();
    let expected = disk_of_calls();
    let mut disk = Disk::new(expected.len() as u64, 1);
    disk.bytes.clone_from(&expected);
    crate::common::assert_restores(&repository, snapshots[0].id, &expected);
    // A read of a few bytes decodes only the start of a frame.
    let device = repository.open_disk(snapshots[0].id, None).unwrap();
    for offset in [3 << 20, 4096, (4 << 20) - 7, (5 << 20) - 3000] {
        let mut bytes = vec![0; 6000];
        device.read_at(&mut bytes, offset as u64).unwrap();
        assert!(bytes == expected[offset..offset + 6000], "at {offset}");
    }
    let content = Content {
        disk,
        memory: vec![7; 100],
    };
    let snapshot = back_up(&repository, &content).unwrap();
    let found = repository.snapshot(snapshot).unwrap().statistics();
    assert_eq!(found.new_bytes, 100, "{found:?}");
    assert_eq!(found.known_bytes, expected.len() as u64, "{found:?}");
}
