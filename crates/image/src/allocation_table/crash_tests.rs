//! Tests the order of writes of all formats with allocation tables: after a crash at any point the image is
//! consistent, and has every flushed byte.
//!
//! A random workload runs on a file that records every write and sync. From every prefix of that record the test
//! builds a file in which unsynced writes are complete, torn or missing, depending on a seed. A check must find no
//! corruption (leaks are allowed), and every byte must be that of the last flush, or of a later write.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, MemoryDevice, to_usize};

use super::TableLayer;
use super::writer::TableMut;
use crate::file::ImageFile;
use crate::file::flush_tests::{FlushCase, check_allocating_flushes, check_flushes};
use crate::file::memory::{MemoryFile, Random, RecordingFile};
use crate::model::layered::{BackingUse, Layered as _};
use crate::model::mapped_extent::MappedKind;
use crate::{CheckReport, Result};

/// Opens an image with its backing device.
type Open = fn(Arc<dyn ImageFile>, Option<Arc<dyn BlockDevice>>) -> Result<TableLayer>;

/// An image to start with.
pub(crate) struct TableCrashCase {
    pub(crate) name: &'static str,
    pub(crate) start: Vec<u8>,
    /// Whether it has a parent that is filled with letters.
    pub(crate) has_parent: bool,
    pub(crate) open: Open,
    pub(crate) check: fn(Arc<dyn ImageFile>) -> Result<CheckReport>,
}

/// The content of the parent, which is shorter than the disk.
fn parent(disk_bytes: u64) -> Vec<u8> {
    let mut random = Random(7);
    (0..disk_bytes * 3 / 4)
        .map(|_| b'a' + u8::try_from(random.below(26)).unwrap())
        .collect()
}

/// A recorded step of the workload.
struct LoggedWork {
    /// Number of file operations before it.
    from: usize,
    what: WorkKind,
}

enum WorkKind {
    Write(Range<usize>, Vec<u8>),
    /// The content of the disk that is durable, and the number of file operations when the flush returned.
    Flushed(Vec<u8>, usize),
}

fn work(device: &TableMut, file: &RecordingFile, disk: &mut [u8], seed: u64) -> Vec<LoggedWork> {
    let mut random = Random(seed);
    let mut done = vec![LoggedWork {
        from: 0,
        what: WorkKind::Flushed(disk.to_vec(), 0),
    }];
    for number in 0..40_u8 {
        let from = file.operation_count();
        let start = random.below(disk.len() as u64);
        let longest = [600, 5000, 20_000][to_usize(random.below(3))];
        let mut range = start..(start + 1 + random.below(longest)).min(disk.len() as u64);
        if random.below(2) == 0 {
            range = start / 512 * 512..range.end.next_multiple_of(512).min(disk.len() as u64);
        }
        let place = to_usize(range.start)..to_usize(range.end);
        let what = match random.below(8) {
            0..4 => {
                disk[place.clone()].fill(number + 1);
                device.write_at(&disk[place.clone()], range.start).unwrap();
                WorkKind::Write(place.clone(), disk[place].to_vec())
            }
            4 | 5 => {
                disk[place.clone()].fill(0);
                device.write_zeroes(range).unwrap();
                WorkKind::Write(place.clone(), vec![0; place.len()])
            }
            _ => {
                device.flush().unwrap();
                WorkKind::Flushed(disk.to_vec(), file.operation_count())
            }
        };
        done.push(LoggedWork { from, what });
        let mut found = vec![0xee; disk.len()];
        device.read_at(&mut found, 0).unwrap();
        assert!(found == disk, "operation {number} of seed {seed}");
    }
    done
}

/// Simulates crashes in a random workload on each image.
pub(crate) fn survive_crashes(cases: Vec<TableCrashCase>) {
    for case in cases {
        for seed in 0..6 {
            crash_everywhere(&case, seed);
        }
    }
}

/// Tests flushes of each image while it is read and written. At least one image must have unallocated blocks.
pub(crate) fn survive_busy_flushes(cases: Vec<TableCrashCase>) {
    let mut sparse_count = 0;
    for case in cases {
        let below = |disk_bytes: u64| -> Option<Arc<dyn BlockDevice>> {
            case.has_parent
                .then(|| Arc::new(MemoryDevice::from_bytes(&parent(disk_bytes))) as Arc<dyn BlockDevice>)
        };
        let open = |file: Arc<dyn ImageFile>| {
            let disk_bytes = (case.open)(Arc::clone(&file), None).unwrap().disk_bytes();
            (case.open)(file, below(disk_bytes)).unwrap()
        };
        let flush_case = FlushCase {
            name: case.name,
            start: case.start.clone(),
            open: &|file| Arc::new(TableMut::new(open(file))),
            read: &|file, what| {
                let report = (case.check)(Arc::clone(&file)).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(report.corruption_count, 0, "{what}: {:?}", report.problems);
                let layer = open(file);
                let mut found = vec![0xee; to_usize(layer.disk_bytes())];
                layer
                    .read(&mut found, 0, BackingUse::Backing)
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                found
            },
        };
        let layer = open(Arc::new(MemoryFile::new(case.start.clone())));
        let last = layer.run(layer.disk_bytes() - 1, 1).unwrap();
        if !matches!(last.kind, MappedKind::Data { .. }) {
            check_allocating_flushes(&flush_case);
            sparse_count += 1;
        }
        check_flushes(&flush_case);
    }
    assert!(sparse_count > 0, "no image has unallocated blocks");
}

fn crash_everywhere(case: &TableCrashCase, seed: u64) {
    let file = Arc::new(RecordingFile::new(case.start.clone(), None).with_zero_holes());
    let below = |disk_bytes: u64| -> Option<Arc<dyn BlockDevice>> {
        case.has_parent
            .then(|| Arc::new(MemoryDevice::from_bytes(&parent(disk_bytes))) as Arc<dyn BlockDevice>)
    };
    let disk_bytes = (case.open)(file.clone(), None).unwrap().disk_bytes();
    let layer = (case.open)(file.clone(), below(disk_bytes)).unwrap();
    let mut disk = vec![0; to_usize(disk_bytes)];
    layer.read(&mut disk, 0, BackingUse::Backing).unwrap();
    let device = TableMut::new(layer);
    let done = work(&device, &file, &mut disk, seed);
    let mut random = Random(seed + 100);
    for count in 0..=file.operation_count() {
        let crashed = file.crashed_after(count, |bound| random.below(bound));
        let what = format!("{}, seed {seed}, after {count} operations", case.name);
        let crashed: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(crashed));
        let report = (case.check)(Arc::clone(&crashed)).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(report.corruption_count, 0, "{what}: {:?}", report.problems);
        let layer = (case.open)(crashed, below(disk_bytes)).unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut found = vec![0xee; disk.len()];
        layer
            .read(&mut found, 0, BackingUse::Backing)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_permitted(&found, &done, count, &what);
    }
}

/// Every byte must be that of the last completed flush, or of a write after that flush began.
fn assert_permitted(found: &[u8], done: &[LoggedWork], count: usize, what: &str) {
    let is_over = |done: &LoggedWork| matches!(&done.what, WorkKind::Flushed(_, operations) if *operations <= count);
    let last = done.iter().rposition(is_over).expect("the first state is durable");
    let WorkKind::Flushed(durable, _) = &done[last].what else {
        unreachable!()
    };
    let since = || done[last + 1..].iter().filter(|done| done.from <= count);
    for (at, byte) in found.iter().enumerate() {
        let is_written = || {
            since().any(|done| match &done.what {
                WorkKind::Write(range, data) => range.contains(&at) && data[at - range.start] == *byte,
                WorkKind::Flushed(..) => false,
            })
        };
        assert!(
            durable[at] == *byte || is_written(),
            "{what}: byte {at} is {byte}, was {}",
            durable[at]
        );
    }
}
