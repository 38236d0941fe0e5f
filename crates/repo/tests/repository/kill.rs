//! A process on a directory is killed at any moment: committed snapshots are readable, and the next process continues.
//!
//! The test starts itself again as a child that backs up, forgets and runs gc on a repository in a directory until it
//! is killed. The time of each snapshot is the seed of its content. The child keeps a durable journal of the snapshots
//! whose commit has returned, and of those that it is about to forget.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a process is started, waited for and killed, and a failure prints its seed"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{BlockDevice, MemoryDevice, SeededRandom, to_usize};
use holdfast_repo::key::SystemRandomness;
use holdfast_repo::store::{DirectoryStore, ObjectKind, Store};
use holdfast_repo::{
    Environment, GcRequest, Parent, Repository, SnapshotId, Source, SourceData, SystemProcesses, VerifyDepth,
    VerifyRequest,
};

use crate::common::{PASSWORD, Watch, init_request, names_of, request};

const FOLDER: &str = "HOLDFAST_KILL_FOLDER";
const GC: GcRequest = GcRequest {
    repack_below_percent: 70,
    thread_count: 1,
};
const SNAPSHOTS_KEPT: usize = 4;

fn environment() -> Environment {
    Environment {
        randomness: Arc::new(SystemRandomness),
        processes: Arc::new(SystemProcesses),
        now_ms: Arc::new(|| 1_700_000_000_000),
    }
}

fn open(root: &Path) -> Repository {
    let store = DirectoryStore::open(&root.join("repository")).unwrap();
    let opened = Repository::open(Arc::new(store), PASSWORD, environment()).unwrap();
    opened.repository
}

/// The content of the disk in a snapshot: some parts are in many snapshots, and some in one.
fn content(number: u64) -> Vec<u8> {
    let mut disk = vec![0; 1 << 20];
    for (part, bytes) in (0u64..).zip(disk.chunks_mut(128 << 10)) {
        let seed = number / (1 << part.min(4)) * 16 + part;
        let length = bytes.len() / 2;
        bytes[..length].copy_from_slice(&SeededRandom::new(seed).bytes(length));
    }
    disk
}

fn back_up(repository: &Repository, number: u64) -> SnapshotId {
    let device = MemoryDevice::from_bytes(&content(number));
    let source = Source {
        name: "vda".into(),
        data: SourceData::Disk(&device),
        notes: BTreeMap::new(),
    };
    let time_ms = i64::try_from(number).unwrap();
    let request = request("m", time_ms, vec![source], Parent::Newest, 1);
    repository.backup(request, &Watch::default()).unwrap().snapshot.id
}

/// The child process, which never returns. It is a test only to be started by name.
#[test]
fn child() {
    let Some(root) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let repository = open(&root);
    let mut journal = OpenOptions::new().append(true).open(root.join("journal")).unwrap();
    let mut note = |line: String| {
        journal.write_all(line.as_bytes()).unwrap();
        journal.sync_data().unwrap();
    };
    let mut number = journal_of(&root).next_number;
    loop {
        let id = back_up(&repository, number);
        note(format!("committed {id} {number}\n"));
        number += 1;
        let (manifests, errors) = repository.snapshots().unwrap();
        assert!(errors.is_empty(), "{errors:?}");
        for manifest in manifests.iter().rev().skip(SNAPSHOTS_KEPT) {
            note(format!("forgets {}\n", manifest.id));
            repository.forget(manifest.id, "old").unwrap();
        }
        if number.is_multiple_of(2) {
            repository.gc(GC).unwrap();
        }
    }
}

#[derive(Default)]
struct Journal {
    committed: BTreeMap<SnapshotId, u64>,
    forgotten: BTreeSet<SnapshotId>,
    next_number: u64,
}

/// Parses the entries of all children; the last line of a child may be truncated.
fn journal_of(root: &Path) -> Journal {
    let text = std::fs::read_to_string(root.join("journal")).unwrap();
    let mut journal = Journal::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["committed", id, number] => {
                journal.committed.insert(id.parse().unwrap(), number.parse().unwrap());
            }
            ["forgets", id] => {
                journal.forgotten.insert(id.parse().unwrap());
            }
            _ => panic!("an unknown line: {line}"),
        }
    }
    journal.next_number = journal.committed.values().max().map_or(1, |last| last + 2);
    journal
}

fn start(root: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["kill::child", "--exact", "--nocapture"])
        .env(FOLDER, root)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// All committed snapshots have their content, and a further backup, gc and verify succeed.
fn check(root: &Path) {
    let repository = open(root);
    let journal = journal_of(root);
    let (manifests, errors) = repository.snapshots().unwrap();
    assert!(errors.is_empty(), "{errors:?}");
    let listed: BTreeSet<SnapshotId> = manifests.iter().map(|manifest| manifest.id).collect();
    for id in journal.committed.keys() {
        assert!(listed.contains(id) || journal.forgotten.contains(id), "{id} is missing");
    }
    let reads_all = |repository: &Repository| {
        for manifest in repository.snapshots().unwrap().0 {
            let number = u64::try_from(manifest.time_ms).unwrap();
            assert!(journal.committed.get(&manifest.id).is_none_or(|known| *known == number));
            let device = repository.device(&manifest.disks[0]);
            let mut bytes = vec![1; to_usize(device.size_bytes())];
            device.read_at(&mut bytes, 0).unwrap();
            assert!(bytes == content(number), "{} has other content", manifest.id);
        }
    };
    reads_all(&repository);
    // A number that no child uses: children skip one.
    back_up(&repository, journal.next_number - 1);
    crate::common::assert_gc_is_thorough(&repository, GC, "after a kill");
    reads_all(&repository);
    let request = VerifyRequest {
        snapshots: holdfast_repo::Selection::All,
        depth: VerifyDepth::Full,
        compare: None,
        thread_count: 1,
    };
    let verified = repository.verify(&request, &Watch::default()).unwrap();
    assert!(verified.is_clean(), "{:?}", verified.findings);
    let store = DirectoryStore::open(&root.join("repository")).unwrap();
    assert_eq!(names_of(&store, ObjectKind::Condemned).len(), 0);
    let mut foreign_files = Vec::new();
    store
        .foreign_files(&mut |path| {
            foreign_files.push(path);
            Ok(())
        })
        .unwrap();
    assert_eq!(foreign_files, Vec::<String>::new());
}

/// Starts and kills `kills` children; returns how many snapshots they had committed.
fn kill_at_random(kills: u64) -> usize {
    let seed = std::env::var("HOLDFAST_SEED").map_or_else(|_| SeededRandom::fresh_seed(), |seed| seed.parse().unwrap());
    println!("HOLDFAST_SEED={seed}");
    let mut random = SeededRandom::new(seed);
    let folder = tempfile::TempDir::new().unwrap();
    let root = folder.path();
    let store = DirectoryStore::create(&root.join("repository")).unwrap();
    Repository::init(Arc::new(store), &init_request(), environment()).unwrap();
    File::create(root.join("journal")).unwrap();
    for _ in 0..kills {
        let mut child = start(root);
        // Half of the children are killed only after their next commit.
        if random.one_in(2) {
            let lines = || std::fs::read_to_string(root.join("journal")).unwrap().lines().count();
            let before = lines();
            let has_come = (0..3000).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                lines() > before
            });
            assert!(has_come, "a child commits nothing in half a minute");
        }
        std::thread::sleep(Duration::from_micros(random.below(120_000)));
        assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        check(root);
    }
    journal_of(root).committed.len()
}

#[test]
fn a_kill_at_any_moment_loses_no_committed_snapshot() {
    let committed = kill_at_random(32);
    assert!(committed >= 8, "the children committed only {committed} snapshots");
}

#[test]
#[ignore = "hundreds of kills take a while: make torture"]
fn hundreds_of_kills_lose_no_committed_snapshot() {
    let kills = std::env::var("HOLDFAST_KILLS").map_or(500, |count| count.parse().unwrap());
    let committed = kill_at_random(kills);
    assert!(
        committed as u64 >= kills / 4,
        "the children committed only {committed} snapshots"
    );
}
