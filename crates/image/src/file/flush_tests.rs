//! Tests of flushes while the image is read and written, for all formats with a writer.
//!
//! - Reads and writes complete while a flush is blocked in any of its syncs.
//! - After a crash at any moment, also during a flush with writes between its steps, the image is consistent and has
//!   everything that was flushed.
//! - What is written during a flush becomes durable with the next one.
//! - If an operation of the file fails, no flush reports success for data that is not durable. A failed sync fails all
//!   flushes that wait for it, and all later ones.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_block::{BlockDeviceMut, FlushRounds, to_usize};

use crate::file::ImageFile;
use crate::file::memory::{MemoryFile, Random, RecordingFile};

/// An image, and how it is used.
pub(crate) struct FlushCase<'a> {
    pub(crate) name: &'a str,
    pub(crate) start: Vec<u8>,
    /// Opens it for writing.
    pub(crate) open: &'a dyn Fn(Arc<RecordingFile>) -> Arc<dyn BlockDeviceMut>,
    /// Checks that it is consistent, and reads the disk.
    pub(crate) read: &'a ReadDisk<'a>,
}

type ReadDisk<'a> = dyn Fn(Arc<dyn ImageFile>, &str) -> Vec<u8> + 'a;

/// Limit for requests that must not wait. A test that exceeds it fails.
const PATIENCE: Duration = Duration::from_secs(100);

fn content(device: &dyn BlockDeviceMut) -> Vec<u8> {
    let mut found = vec![0xee; to_usize(device.size_bytes())];
    device.read_at(&mut found, 0).unwrap();
    found
}

/// What happened to the disk.
struct DiskLog {
    disk: Vec<u8>,
    events: Vec<DiskEvent>,
    random: Random,
}

enum DiskEvent {
    Write {
        /// Number of file operations before it.
        from: usize,
        range: Range<usize>,
        data: Vec<u8>,
    },
    Flushed {
        /// The content of the disk when the flush began.
        disk: Vec<u8>,
        /// Number of events when it began.
        from_event: usize,
        /// Number of file operations when it ended.
        until: usize,
    },
}

impl DiskLog {
    /// Writes or zeroes a random range.
    fn write(&mut self, device: &dyn BlockDeviceMut, file: &RecordingFile) {
        let from = file.operation_count();
        let size = self.disk.len() as u64;
        let start = self.random.below(size);
        let longest = [600, 5000, 20_000][to_usize(self.random.below(3))];
        let mut range = start..(start + 1 + self.random.below(longest)).min(size);
        if self.random.below(2) == 0 {
            range = start / 512 * 512..range.end.next_multiple_of(512).min(size);
        }
        let place = to_usize(range.start)..to_usize(range.end);
        let fill = match self.random.below(3) {
            0 => 0,
            _ => u8::try_from(self.events.len() % 250).unwrap() + 1,
        };
        self.disk[place.clone()].fill(fill);
        if fill == 0 {
            device.write_zeroes(range).unwrap();
        } else {
            device.write_at(&self.disk[place.clone()], range.start).unwrap();
        }
        let data = self.disk[place.clone()].to_vec();
        self.events.push(DiskEvent::Write {
            from,
            range: place,
            data,
        });
    }
}

/// Works on the image, with writes in the middle of every sync of a flush, and simulates a crash at every operation.
fn survive_crashes_in_busy_flushes(case: &FlushCase<'_>, seed: u64) {
    let file = Arc::new(RecordingFile::new(case.start.clone(), None).with_zero_holes());
    let device = (case.open)(Arc::clone(&file));
    let disk = content(&*device);
    let log = Arc::new(Mutex::new(DiskLog {
        events: vec![DiskEvent::Flushed {
            disk: disk.clone(),
            from_event: 0,
            until: 0,
        }],
        disk,
        random: Random(seed),
    }));
    let is_flushing = Arc::new(AtomicBool::new(false));
    file.set_during_sync(Some({
        let (log, device, file) = (Arc::clone(&log), Arc::clone(&device), Arc::clone(&file));
        let is_flushing = Arc::clone(&is_flushing);
        Box::new(move || {
            if is_flushing.load(Ordering::Relaxed) {
                let mut log = log.lock().unwrap();
                log.write(&*device, &file);
                assert!(content(&*device) == log.disk, "during a flush");
            }
        })
    }));
    for number in 0..30 {
        let mut now = log.lock().unwrap();
        if now.random.below(3) > 0 {
            now.write(&*device, &file);
        } else {
            let (disk, from_event) = (now.disk.clone(), now.events.len());
            drop(now);
            is_flushing.store(true, Ordering::Relaxed);
            device.flush().unwrap();
            is_flushing.store(false, Ordering::Relaxed);
            now = log.lock().unwrap();
            let until = file.operation_count();
            now.events.push(DiskEvent::Flushed {
                disk,
                from_event,
                until,
            });
        }
        assert!(
            content(&*device) == now.disk,
            "{}, seed {seed}, step {number}",
            case.name
        );
    }
    // The file holds the work, which holds the file.
    file.set_during_sync(None);
    let log = log.lock().unwrap();
    let mut random = Random(seed + 100);
    for count in 0..=file.operation_count() {
        let what = format!("{}, seed {seed}, after {count} operations", case.name);
        let crashed = Arc::new(MemoryFile::new(file.crashed_after(count, |bound| random.below(bound))));
        let found = (case.read)(crashed, &what);
        assert_permitted(&found, &log.events, count, &what);
    }
}

/// Every byte must be that of the last completed flush, or of a write after that flush began.
fn assert_permitted(found: &[u8], events: &[DiskEvent], count: usize, what: &str) {
    let last = events.iter().rev().find_map(|event| match event {
        DiskEvent::Flushed {
            disk,
            from_event,
            until,
        } if *until <= count => Some((disk, *from_event)),
        _ => None,
    });
    let (durable, from_event) = last.expect("the first state is durable");
    for (at, byte) in found.iter().enumerate() {
        let is_written = || {
            events[from_event..].iter().any(|event| match event {
                DiskEvent::Write { from, range, data } => {
                    *from <= count && range.contains(&at) && data[at - range.start] == *byte
                }
                DiskEvent::Flushed { .. } => false,
            })
        };
        assert!(
            durable[at] == *byte || is_written(),
            "{what}: byte {at} is {byte}, was {}",
            durable[at]
        );
    }
}

/// A flush in a thread of its own, which stops in each of its syncs.
struct BlockedFlush {
    progress: Receiver<FlushProgress>,
    release: Sender<()>,
    thread: std::thread::JoinHandle<holdfast_block::Result<()>>,
}

enum FlushProgress {
    InSync,
    Ended,
}

impl BlockedFlush {
    fn start(device: &Arc<dyn BlockDeviceMut>, file: &RecordingFile) -> Self {
        let (report, progress) = channel();
        let (release, released) = channel();
        file.set_during_sync(Some({
            let report = report.clone();
            Box::new(move || {
                // After the test failed, nothing is blocked.
                if report.send(FlushProgress::InSync).is_ok() {
                    released.recv().ok();
                }
            })
        }));
        let device = Arc::clone(device);
        Self {
            progress,
            release,
            thread: std::thread::spawn(move || {
                let result = device.flush();
                report.send(FlushProgress::Ended).ok();
                result
            }),
        }
    }

    /// Calls `work` in each sync of the flush; returns the number of syncs.
    fn in_each_sync(self, work: impl Fn(usize) + Send + Sync + 'static) -> usize {
        let work = Arc::new(work);
        let mut count = 0;
        while let Ok(FlushProgress::InSync) = self.progress.recv() {
            let (done, is_done) = channel();
            let work = Arc::clone(&work);
            let thread = std::thread::spawn(move || {
                work(count);
                done.send(()).unwrap();
            });
            let result = is_done.recv_timeout(PATIENCE);
            assert_ne!(
                result,
                Err(RecvTimeoutError::Timeout),
                "a request waits for the flush, in sync {count}"
            );
            thread.join().unwrap();
            count += 1;
            self.release.send(()).unwrap();
        }
        self.thread.join().unwrap().unwrap();
        count
    }
}

/// The last sector of the disk.
fn last_sector(device: &dyn BlockDeviceMut) -> u64 {
    (device.size_bytes() - 1) / 512 * 512
}

/// Requests complete while a flush is blocked in each of its syncs: reads, writes in place, and writes that change
/// tables. The next flush makes them durable. The last block of the image must not be allocated.
fn requests_do_not_wait_for_a_flush(case: &FlushCase<'_>) {
    let file = Arc::new(RecordingFile::new(case.start.clone(), None).with_zero_holes());
    let device = (case.open)(Arc::clone(&file));
    let third = device.size_bytes() / 3 / 512 * 512;
    // Prepares the first change of the image, which has syncs of its own.
    device.write_at(&[1; 512], 0).unwrap();
    device.flush().unwrap();
    device.write_at(b"2", last_sector(&*device)).unwrap();
    let before = content(&*device);
    let flush = BlockedFlush::start(&device, &file);
    let sync_count = flush.in_each_sync({
        let device = Arc::clone(&device);
        move |number| {
            let mark = u8::try_from(number).unwrap() + 3;
            let mut expected = before.clone();
            expected[..512].fill(mark);
            device.write_at(&[mark; 512], 0).unwrap();
            let new = to_usize(2 * third) + number * 512;
            expected[to_usize(2 * third)..new + 512].fill(9);
            device.write_at(&[9; 512], new as u64).unwrap();
            expected[to_usize(third)..to_usize(third) + 512].fill(0);
            device.write_zeroes(third..third + 512).unwrap();
            assert!(content(&*device) == expected);
        }
    });
    file.set_during_sync(None);
    assert!(sync_count >= 2, "{}: data, then tables", case.name);
    device.flush().unwrap();
    let synced = Arc::new(MemoryFile::new(file.crashed_after(file.operation_count(), |_| 1)));
    assert!(
        (case.read)(synced, case.name) == content(&*device),
        "{}: the next flush",
        case.name
    );
}

/// If a sync fails, so does every flush that waits for it and every later one: the operating system may have dropped
/// what it could not write, and would report success for the next sync.
fn each_flush_reports_a_failed_sync(case: &FlushCase<'_>) {
    let file = Arc::new(RecordingFile::new(case.start.clone(), None).with_zero_holes());
    let device = (case.open)(Arc::clone(&file));
    device.write_at(&[1; 512], 0).unwrap();
    device.flush().unwrap();
    device.write_at(&[2; 512], 0).unwrap();
    let (enter, entered) = channel();
    let (release, released) = channel();
    let is_first = AtomicBool::new(true);
    file.set_during_sync(Some({
        let file = Arc::downgrade(&file);
        Box::new(move || {
            if is_first.swap(false, Ordering::Relaxed) {
                enter.send(()).unwrap();
                released.recv().unwrap();
                file.upgrade().unwrap().fail_next();
            }
        })
    }));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| device.flush());
        entered.recv().unwrap();
        let others: Vec<_> = (0..8).map(|_| scope.spawn(|| device.flush())).collect();
        release.send(()).unwrap();
        first.join().unwrap().unwrap_err();
        for other in others {
            other.join().unwrap().unwrap_err();
        }
    });
    file.set_during_sync(None);
    device.flush().unwrap_err();
    device.write_at(&[3; 512], 0).unwrap_err();
    assert_eq!(content(&*device)[0], 2, "{}: it can be read", case.name);
}

/// Each sync of a flush with table changes fails once: later flushes and writes fail, too.
fn no_flush_succeeds_after_a_failed_sync(case: &FlushCase<'_>) {
    for number in 0.. {
        let file = Arc::new(RecordingFile::new(case.start.clone(), None).with_zero_holes());
        let device = (case.open)(Arc::clone(&file));
        device.write_at(&[1; 512], 0).unwrap();
        device.flush().unwrap();
        device.write_at(b"2", last_sector(&*device)).unwrap();
        let sync_count = Arc::new(AtomicUsize::new(0));
        file.set_during_sync(Some({
            let (file, sync_count) = (Arc::downgrade(&file), Arc::clone(&sync_count));
            Box::new(move || {
                if sync_count.fetch_add(1, Ordering::Relaxed) == number {
                    file.upgrade().unwrap().fail_next();
                }
            })
        }));
        let flushed = device.flush();
        file.set_during_sync(None);
        if sync_count.load(Ordering::Relaxed) <= number {
            flushed.unwrap();
            break;
        }
        let what = format!("{}, sync {number} failed", case.name);
        assert!(flushed.is_err(), "{what}");
        assert!(device.flush().is_err(), "{what}: the next flush");
        assert!(device.write_at(&[3; 512], 0).is_err(), "{what}: a write");
    }
}

/// A block that is allocated while a flush syncs is not part of this flush: the stored tables do not have it. The last
/// block of the image must not be allocated.
fn an_allocation_during_a_flush_is_durable_with_the_next_one(case: &FlushCase<'_>) {
    let file = Arc::new(RecordingFile::new(case.start.clone(), None).with_zero_holes());
    let device = (case.open)(Arc::clone(&file));
    let last = last_sector(&*device);
    let old = content(&*device)[to_usize(last)];
    device.write_at(&[b'1'; 512], 0).unwrap();
    let is_first = AtomicBool::new(true);
    file.set_during_sync(Some({
        let device = Arc::clone(&device);
        Box::new(move || {
            if is_first.swap(false, Ordering::Relaxed) {
                device.write_at(b"2", last).unwrap();
            }
        })
    }));
    device.flush().unwrap();
    file.set_during_sync(None);
    assert_eq!(content(&*device)[to_usize(last)], b'2');
    let synced = || {
        let file = file.crashed_after(file.operation_count(), |_| 1);
        let disk = (case.read)(Arc::new(MemoryFile::new(file)), case.name);
        [disk[0], disk[to_usize(last)]]
    };
    assert_eq!(synced(), [b'1', old], "{}: the flush", case.name);
    device.flush().unwrap();
    assert_eq!(synced(), *b"12", "{}: the next flush", case.name);
}

/// Each operation of the file fails once. Whenever a flush returns successfully, everything that was written before is
/// durable.
fn no_flush_succeeds_for_lost_data(case: &FlushCase<'_>) {
    for fail_at in 1.. {
        let file = Arc::new(RecordingFile::new(case.start.clone(), Some(fail_at)).with_zero_holes());
        let device = (case.open)(Arc::clone(&file));
        let what = format!("{}, operation {fail_at} fails", case.name);
        let mut disk = content(&*device);
        let mut random = Random(3);
        let mut has_failed = false;
        for step in 0..12_u8 {
            let start = to_usize(random.below(disk.len() as u64 - 700)) / 512 * 512;
            if device.write_at(&[step + 1; 600], start as u64).is_err() {
                break;
            }
            disk[start..start + 600].fill(step + 1);
            if step % 3 < 2 {
                continue;
            }
            let result = device.flush();
            let synced = file.crashed_after(file.operation_count(), |_| 1);
            let found = (case.read)(Arc::new(MemoryFile::new(synced)), &what);
            match result {
                Ok(()) => assert!(found == disk, "{what}: step {step} lost flushed data"),
                Err(_) => has_failed = true,
            }
        }
        if file.operation_count() < fail_at {
            assert!(!has_failed, "{what}");
            break;
        }
    }
}

/// Starts a flush, and 20 more while it is blocked in its first sync, after a write that changes the tables; returns the
/// number of syncs of all. `round` executes a round of `rounds`.
pub(crate) fn syncs_of_joined_flushes(
    file: &RecordingFile,
    device: &dyn BlockDeviceMut,
    rounds: &FlushRounds,
    round: &(dyn Fn() -> crate::Result<()> + Sync),
) -> usize {
    // Prepares the first change of the image, which has syncs of its own.
    device.write_at(&[1; 512], 0).unwrap();
    device.flush().unwrap();
    device.write_at(b"2", last_sector(device)).unwrap();
    let before = file.sync_count();
    let (enter, entered) = channel();
    let (release, released) = channel::<()>();
    file.set_during_sync(Some(Box::new(move || {
        enter.send(()).ok();
        released.recv().ok();
    })));
    std::thread::scope(|scope| {
        scope.spawn(|| device.flush().unwrap());
        entered.recv().unwrap();
        device.write_at(b"3", device.size_bytes() / 2).unwrap();
        for _ in 0..20 {
            let ticket = rounds.join();
            scope.spawn(move || rounds.complete(ticket, round).unwrap());
        }
        drop(release);
    });
    file.set_during_sync(None);
    file.sync_count() - before
}

/// Runs all tests of this module that work on any image.
pub(crate) fn check_flushes(case: &FlushCase<'_>) {
    each_flush_reports_a_failed_sync(case);
    no_flush_succeeds_after_a_failed_sync(case);
    no_flush_succeeds_for_lost_data(case);
    for seed in 0..3 {
        survive_crashes_in_busy_flushes(case, seed);
    }
}

/// Runs those that need an image whose last block is not allocated.
pub(crate) fn check_allocating_flushes(case: &FlushCase<'_>) {
    requests_do_not_wait_for_a_flush(case);
    an_allocation_during_a_flush_is_durable_with_the_next_one(case);
}
