//! Tests the order of writes: after a crash at any point the metadata is consistent, and every flushed byte is there.
//!
//! A random workload runs on a file that records every write and sync. From every prefix of that record the test
//! builds a file in which unsynced writes are complete, torn or missing, depending on a seed. The check of this
//! crate must find no corruption in any of them (leaks are allowed), and qemu-img check none in a sample.

#![expect(clippy::disallowed_methods, reason = "the peer judges too")]

use std::process::Command;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, MemoryDevice, to_usize};

use super::check::check;
use super::codec::ClusterCompressor;
use super::header::load_header;
use super::layer::Qcow2Layer;
use super::layout::{new_header, write_empty};
use super::writer::Qcow2Mut;
use crate::file::ImageFile;
use crate::file::flush_tests::{FlushCase, check_allocating_flushes, check_flushes};
use crate::file::memory::{MemoryFile, Random, RecordingFile};
use crate::model::create_options::{CreateOptions, Qcow2Options};
use crate::model::layered::{BackingUse, Layered as _};
use crate::model::mapped_extent::MappedKind;
use crate::{BulkWriter, Compression};

const DISK_BYTES: u64 = 300_000;

/// An image to start with.
struct Qcow2CrashCase {
    name: &'static str,
    start: Vec<u8>,
    disk: Vec<u8>,
    backing: Option<Arc<dyn BlockDevice>>,
}

fn empty(options: Qcow2Options) -> Vec<u8> {
    let file = MemoryFile::default();
    let options = CreateOptions {
        qcow2: options,
        ..CreateOptions::qcow2(DISK_BYTES)
    };
    write_empty(&file, new_header(&options).unwrap()).unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn letters(seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..DISK_BYTES / 100)
        .flat_map(|_| [b'a' + u8::try_from(random.below(26)).unwrap(); 100])
        .collect()
}

/// A compressed image, written by the bulk writer.
fn compressed(options: Qcow2Options, disk: &[u8]) -> Vec<u8> {
    let file = Arc::new(MemoryFile::default());
    let compression = options.compression;
    let cluster_bytes = to_usize(options.cluster_bytes);
    let options = CreateOptions {
        qcow2: options,
        ..CreateOptions::qcow2(DISK_BYTES)
    };
    let header = new_header(&options).unwrap();
    let mut writer = BulkWriter::new(Arc::clone(&file) as Arc<dyn ImageFile>, None, header, None).unwrap();
    let mut compressor = ClusterCompressor::new(compression, None).unwrap();
    for (number, cluster) in disk.chunks(cluster_bytes).enumerate() {
        let offset = (number * cluster_bytes) as u64;
        match compressor.compress(cluster) {
            Some(packed) if cluster.len() == cluster_bytes => writer.append_compressed(&packed, offset).unwrap(),
            _ => writer.append(cluster, offset).unwrap(),
        }
    }
    writer.finish().unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Tests the order of writes: after a crash at any point the metadata is consistent, and all flushed data is
/// present.
fn with_snapshot(bytes: &[u8]) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    store(&path, bytes);
    let status = Command::new("qemu-img")
        .args(["snapshot", "-c", "kept"])
        .arg(&path)
        .status();
    assert!(
        status
            .expect("these tests need qemu-img (Debian package qemu-utils)")
            .success()
    );
    std::fs::read(path).unwrap()
}

fn store(path: &std::path::Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    std::fs::File::create(path).unwrap().write_all_at(bytes, 0).unwrap();
}

fn cases() -> Vec<Qcow2CrashCase> {
    let small = Qcow2Options {
        cluster_bytes: 512,
        ..Qcow2Options::default()
    };
    let usual = Qcow2Options {
        cluster_bytes: 4096,
        ..Qcow2Options::default()
    };
    let extended = Qcow2Options {
        cluster_bytes: 16_384,
        extended_l2: true,
        ..Qcow2Options::default()
    };
    let zeroes = || vec![0; to_usize(DISK_BYTES)];
    let base: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::from_bytes(&letters(1)[..200_001]));
    let mut over_base = letters(1);
    over_base[200_001..].fill(0);
    let zstd = Qcow2Options {
        compression: Compression::Zstd,
        ..usual.clone()
    };
    vec![
        Qcow2CrashCase {
            name: "small",
            start: empty(small.clone()),
            disk: zeroes(),
            backing: None,
        },
        Qcow2CrashCase {
            name: "the table moves",
            start: empty(Qcow2Options {
                refcount_bits: 64,
                ..small.clone()
            }),
            disk: zeroes(),
            backing: None,
        },
        Qcow2CrashCase {
            name: "overlay",
            start: empty(usual.clone()),
            disk: over_base.clone(),
            backing: Some(Arc::clone(&base)),
        },
        Qcow2CrashCase {
            name: "version 2 overlay",
            start: empty(Qcow2Options {
                version: 2,
                ..usual.clone()
            }),
            disk: over_base.clone(),
            backing: Some(Arc::clone(&base)),
        },
        Qcow2CrashCase {
            name: "extended overlay",
            start: empty(extended.clone()),
            disk: over_base,
            backing: Some(base),
        },
        Qcow2CrashCase {
            name: "compressed",
            start: compressed(usual.clone(), &letters(2)),
            disk: letters(2),
            backing: None,
        },
        Qcow2CrashCase {
            name: "compressed snapshot",
            start: with_snapshot(&compressed(zstd, &letters(3))),
            disk: letters(3),
            backing: None,
        },
        Qcow2CrashCase {
            name: "extended snapshot",
            start: with_snapshot(&compressed(extended, &letters(4))),
            disk: letters(4),
            backing: None,
        },
        Qcow2CrashCase {
            name: "small snapshot",
            start: with_snapshot(&compressed(small, &letters(5))),
            disk: letters(5),
            backing: None,
        },
    ]
}

fn open(file: Arc<dyn ImageFile>, backing: Option<Arc<dyn BlockDevice>>) -> crate::Result<Qcow2Layer> {
    let header = load_header(&*file, "image")?;
    Qcow2Layer::new("image".into(), header, file, None, backing)
}

/// A step of the workload.
struct WorkloadStep {
    /// Number of file operations before it.
    operations: usize,
    kind: WorkloadStepKind,
}

enum WorkloadStepKind {
    /// A change of this range begins.
    Change(std::ops::Range<u64>),
    /// A flush is complete; the content of the disk.
    Flushed(Vec<u8>),
}

/// Makes random changes until one fails; returns the steps.
fn work(file: &Arc<RecordingFile>, case: &Qcow2CrashCase, seed: u64, steps: u32) -> Vec<WorkloadStep> {
    let layer = open(Arc::clone(file) as Arc<dyn ImageFile>, case.backing.clone()).unwrap();
    let device = Qcow2Mut::new(layer).unwrap();
    let mut disk = case.disk.clone();
    let mut random = Random(seed);
    let mut moments = vec![WorkloadStep {
        operations: 0,
        kind: WorkloadStepKind::Flushed(disk.clone()),
    }];
    for step in 0..steps {
        let start = random.below(DISK_BYTES);
        let longest = [600, 5000, 60_000][to_usize(random.below(3))];
        let end = (start + 1 + random.below(longest)).min(DISK_BYTES);
        let place = to_usize(start)..to_usize(end);
        let operations = file.operation_count();
        let kind = WorkloadStepKind::Change(start..end);
        let done = match random.below(10) {
            0..6 => {
                moments.push(WorkloadStep { operations, kind });
                disk[place.clone()].fill(u8::try_from(step % 250).unwrap() + 1);
                device.write_at(&disk[place], start)
            }
            6 | 7 => {
                moments.push(WorkloadStep { operations, kind });
                disk[place].fill(0);
                device.write_zeroes(start..end)
            }
            8 => {
                moments.push(WorkloadStep { operations, kind });
                let trimmed = device.trim(start..end);
                if device.read_at(&mut disk[place], start).is_err() {
                    return moments;
                }
                trimmed
            }
            _ => device.flush().map(|()| {
                let operations = file.operation_count();
                moments.push(WorkloadStep {
                    operations,
                    kind: WorkloadStepKind::Flushed(disk.clone()),
                });
            }),
        };
        if done.is_err() {
            return moments;
        }
    }
    moments
}

/// Asserts that `bytes` is a consistent image with everything that was flushed before `operations`.
fn assert_sound(bytes: Vec<u8>, case: &Qcow2CrashCase, moments: &[WorkloadStep], operations: usize, what: &str) {
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(bytes));
    let header = load_header(&*file, "image").unwrap();
    let report = check(&file, &header, "image", None).unwrap();
    assert_eq!(report.corruption_count, 0, "{what}: {:?}", report.problems);
    let before = |moment: &&WorkloadStep| moment.operations <= operations;
    let (last, expected) = moments
        .iter()
        .enumerate()
        .rev()
        .find_map(|(number, moment)| match &moment.kind {
            WorkloadStepKind::Flushed(disk) if moment.operations <= operations => Some((number, disk)),
            _ => None,
        })
        .unwrap();
    let mut found = vec![0; expected.len()];
    open(file, case.backing.clone())
        .unwrap()
        .read(&mut found, 0, BackingUse::Backing)
        .unwrap();
    for moment in moments[last..].iter().filter(before) {
        if let WorkloadStepKind::Change(range) = &moment.kind {
            let place = to_usize(range.start)..to_usize(range.end);
            found[place.clone()].copy_from_slice(&expected[place]);
        }
    }
    if found != *expected {
        let at = found.iter().zip(expected).position(|(left, right)| left != right);
        panic!("{what}: flushed byte lost at {at:?}");
    }
}

fn assert_peer_finds_no_corruption(bytes: &[u8], what: &str) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    store(&path, bytes);
    let output = Command::new("qemu-img")
        .args(["check", "-f", "qcow2"])
        .arg(&path)
        .output();
    let output = output.expect("these tests need qemu-img (Debian package qemu-utils)");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{what}: {printed}");
}

#[test]
fn crash_keeps_flushed_data() {
    let mut random = Random(1);
    let mut points = 0u64;
    for (seed, case) in (1..).zip(cases()) {
        let file = Arc::new(RecordingFile::new(case.start.clone(), None));
        let moments = work(&file, &case, seed, 100);
        let count = file.operation_count();
        for operations in (0..=count).chain(0..=count) {
            let what = format!("{} seed {seed}, crash after {operations} of {count}", case.name);
            let crashed = file.crashed_after(operations, |bound| random.below(bound));
            points += 1;
            if points.is_multiple_of(25) {
                assert_peer_finds_no_corruption(&crashed, &what);
            }
            assert_sound(crashed, &case, &moments, operations, &what);
        }
        // All operations, without a crash.
        assert_sound(file.bytes(), &case, &moments, count, case.name);
    }
    assert!(points > 4000, "the workload is too small to prove anything: {points}");
}

#[test]
fn failed_write_or_sync_damages_nothing() {
    for (seed, case) in (1..).zip(cases()) {
        let mut fail_at = 1;
        loop {
            let file = Arc::new(RecordingFile::new(case.start.clone(), Some(fail_at)));
            let moments = work(&file, &case, seed, 25);
            let what = format!("{} seed {seed}, operation {fail_at} fails", case.name);
            let count = file.operation_count();
            assert_sound(file.bytes(), &case, &moments, count, &what);
            if count < fail_at {
                break;
            }
            fail_at += 3;
        }
    }
}

/// Flushes of an image that is read and written meanwhile.
#[test]
fn busy_flushes_keep_flushed_data() {
    let mut sparse_count = 0;
    for case in cases() {
        let backing = || case.backing.clone();
        let flush_case = FlushCase {
            name: case.name,
            start: case.start.clone(),
            open: &|file| Arc::new(Qcow2Mut::new(open(file, backing()).unwrap()).unwrap()),
            read: &|file, what| {
                let header = load_header(&*file, "image").unwrap();
                let report = check(&file, &header, "image", None).unwrap();
                assert_eq!(report.corruption_count, 0, "{what}: {:?}", report.problems);
                let mut found = vec![0xee; to_usize(DISK_BYTES)];
                open(file, backing())
                    .unwrap()
                    .read(&mut found, 0, BackingUse::Backing)
                    .unwrap();
                found
            },
        };
        let layer = open(Arc::new(MemoryFile::new(case.start.clone())), None).unwrap();
        let last = layer.run(DISK_BYTES - 1, 1).unwrap();
        if !matches!(last.kind, MappedKind::Data { .. }) {
            check_allocating_flushes(&flush_case);
            sparse_count += 1;
        }
        check_flushes(&flush_case);
    }
    assert!(sparse_count > 3, "no image has unallocated clusters");
}

/// A failed write leaves all changes of a commit pending, also those that were made meanwhile: the next flush stores
/// them. A crash during that flush damages nothing.
#[test]
fn flush_after_a_failed_write_stores_everything() {
    for case in cases() {
        for fail_at in 1.. {
            let file = Arc::new(RecordingFile::new(case.start.clone(), None));
            let device = Arc::new(Qcow2Mut::new(open(file.clone(), case.backing.clone()).unwrap()).unwrap());
            let what = format!("{}, operation {fail_at} of the flush fails", case.name);
            let mut disk = case.disk.clone();
            let mut random = Random(fail_at as u64);
            for (place, fill) in [(0..9000, 1), (100_000..170_000, 2), (290_000..300_000, 3)] {
                disk[place.clone()].fill(fill);
                device.write_at(&disk[place.clone()], place.start as u64).unwrap();
            }
            file.set_during_sync(Some({
                let device = Arc::clone(&device);
                let mut at = 20_000;
                Box::new(move || {
                    // This may be the operation that fails.
                    device.write_at(&[4; 600], at).ok();
                    at += 600;
                })
            }));
            let before = file.operation_count();
            file.fail_at(before + fail_at);
            let failed = device.flush();
            file.set_during_sync(None);
            let is_over = file.operation_count() < before + fail_at;
            file.fail_at(0);
            let failed_at = file.operation_count();
            if device.flush().is_ok() {
                let change = |range| WorkloadStep {
                    operations: 0,
                    kind: WorkloadStepKind::Change(range),
                };
                let before = WorkloadStep {
                    operations: 0,
                    kind: WorkloadStepKind::Flushed(case.disk.clone()),
                };
                let moments = [
                    before,
                    change(0..22_400),
                    change(100_000..170_000),
                    change(290_000..DISK_BYTES),
                ];
                for operations in failed_at..=file.operation_count() {
                    for _ in 0..4 {
                        let crashed = file.crashed_after(operations, |bound| random.below(bound));
                        assert_sound(crashed, &case, &moments, operations, &what);
                    }
                }
                let mut now = vec![0xee; disk.len()];
                device.read_at(&mut now, 0).unwrap();
                disk[20_000..22_400].copy_from_slice(&now[20_000..22_400]);
                assert!(now == disk, "{what}");
                let moments = [WorkloadStep {
                    operations: 0,
                    kind: WorkloadStepKind::Flushed(disk),
                }];
                let synced = file.crashed_after(file.operation_count(), |_| 1);
                assert_sound(synced, &case, &moments, file.operation_count(), &what);
            }
            if is_over {
                failed.unwrap();
                break;
            }
        }
    }
}

/// An image that is filled in bulk is invalid until it is complete; then it is durable.
#[test]
fn crash_during_fill_leaves_complete_or_no_image() {
    let disk = letters(6);
    let options = CreateOptions {
        qcow2: Qcow2Options {
            cluster_bytes: 512,
            ..Qcow2Options::default()
        },
        ..CreateOptions::qcow2(DISK_BYTES)
    };
    let file = Arc::new(RecordingFile::new(Vec::new(), None));
    let header = new_header(&options).unwrap();
    let mut writer = BulkWriter::new(Arc::clone(&file) as Arc<dyn ImageFile>, None, header, None).unwrap();
    for (number, piece) in disk.chunks(512 * 100).enumerate() {
        writer.append(piece, number as u64 * 512 * 100).unwrap();
    }
    writer.finish().unwrap();
    let mut random = Random(8);
    let count = file.operation_count();
    for operations in 0..=count {
        let crashed: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(
            file.crashed_after(operations, |bound| random.below(bound)),
        ));
        match load_header(&*crashed, "image") {
            Err(error) => assert!(operations < count && error.is_corrupt(), "{error}"),
            Ok(header) => {
                assert!(check(&crashed, &header, "image", None).unwrap().is_clean());
                let mut found = vec![0; disk.len()];
                open(crashed, None)
                    .unwrap()
                    .read(&mut found, 0, BackingUse::Backing)
                    .unwrap();
                assert!(found == disk);
            }
        }
    }
}
