//! Processes that are killed, and their successors.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::{LoggedDevice, WriteLog};
use crate::conformance::test_seed;
use crate::{
    BlockDevice, BlockDeviceMut, Clock as _, Error, ExtentList, MemoryDevice, Result, SeededRandom, SystemClock,
    to_usize,
};

const SIZE: usize = 4 << 20;

/// A device that loses any of its writes since the last flush when its process is killed.
struct Volatile {
    durable: Mutex<Vec<u8>>,
    current: MemoryDevice,
    unflushed: Mutex<Vec<(u64, Vec<u8>)>>,
    flush_count: AtomicUsize,
    fails_to_flush: AtomicBool,
    is_flushing: AtomicBool,
}

impl Volatile {
    fn new(bytes: &[u8]) -> Arc<Self> {
        Arc::new(Self {
            durable: Mutex::new(bytes.to_vec()),
            current: MemoryDevice::from_bytes(bytes),
            unflushed: Mutex::default(),
            flush_count: AtomicUsize::new(0),
            fails_to_flush: AtomicBool::new(false),
            is_flushing: AtomicBool::new(false),
        })
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE];
        self.current.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// What a successor finds.
    fn after_kill(&self, random: &mut SeededRandom) -> Vec<u8> {
        let mut bytes = self.durable.lock().unwrap().clone();
        for (offset, data) in self.unflushed.lock().unwrap().iter() {
            if random.below(2) == 0 {
                let start = to_usize(*offset);
                bytes[start..start + data.len()].copy_from_slice(data);
            }
        }
        bytes
    }
}

impl BlockDevice for Volatile {
    fn size_bytes(&self) -> u64 {
        SIZE as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.current.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.current.extents(range, extent_count_max)
    }
}

impl BlockDeviceMut for Volatile {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        // Order in the list and in the memory are the same only if overlapping writes take turns.
        self.current.write_at(data, offset)?;
        std::thread::yield_now();
        self.unflushed.lock().unwrap().push((offset, data.to_vec()));
        Ok(())
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.write_at(&vec![0; to_usize(range.end - range.start)], range.start)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.write_zeroes(range)
    }

    fn flush(&self) -> Result<()> {
        self.is_flushing.store(true, Ordering::SeqCst);
        let covered = self.unflushed.lock().unwrap().len();
        std::thread::yield_now();
        if self.fails_to_flush.load(Ordering::SeqCst) {
            return Err(Error::io("flush", 0, std::io::Error::other("bad sector")));
        }
        let mut durable = self.durable.lock().unwrap();
        for (offset, data) in self.unflushed.lock().unwrap().drain(..covered) {
            let start = to_usize(offset);
            durable[start..start + data.len()].copy_from_slice(&data);
        }
        self.flush_count.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

fn log_file() -> File {
    let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(file)
}

/// The content after a successor has replayed the log.
fn recovered(before: &Volatile, log: File, random: &mut SeededRandom) -> Vec<u8> {
    let successor = Volatile::new(&before.after_kill(random));
    let log = WriteLog::open(log).unwrap();
    log.replay(&*successor).unwrap();
    assert!(log.is_empty().unwrap());
    // All is durable, and the log can be used again.
    assert_eq!(*successor.durable.lock().unwrap(), successor.content());
    LoggedDevice::new(Arc::clone(&successor), log).unwrap();
    successor.content()
}

fn act(device: &dyn BlockDeviceMut, random: &mut SeededRandom, length_max: u64) {
    let length = random.below(length_max) + 1;
    let offset = random.below(SIZE as u64 - length + 1);
    let range = offset..offset + length;
    match random.below(10) {
        0 => device.write_zeroes(range).unwrap(),
        1 => device.trim(range).unwrap(),
        2 => device.flush().unwrap(),
        _ => {
            let byte = random.next_u64().to_le_bytes()[0];
            device.write_at(&vec![byte; to_usize(length)], offset).unwrap();
        }
    }
}

/// Whatever the device has lost, the successor has all writes that returned.
#[test]
fn a_successor_has_all_writes_of_a_killed_process() {
    let seed = test_seed();
    for history in 0..150 {
        let mut random = SeededRandom::new(seed.wrapping_add(history));
        let device = Volatile::new(&vec![7; SIZE]);
        let file = log_file();
        let log = WriteLog::create(file.try_clone().unwrap()).unwrap();
        let logged = LoggedDevice::new(Arc::clone(&device), log).unwrap();
        // Long histories of long writes fill both areas.
        let (count, length_max) = if history % 10 == 0 { (60, 1 << 20) } else { (30, 20_000) };
        for _ in 0..random.below(count) {
            act(&logged, &mut random, length_max);
        }
        let expected = device.content();
        drop(logged);
        assert!(
            recovered(&device, file, &mut random) == expected,
            "seed {seed} history {history}"
        );
    }
}

/// Writes of several threads that overlap, while others flush.
#[test]
fn the_log_has_the_order_of_simultaneous_writes() {
    let seed = test_seed();
    for history in 0..8 {
        let device = Volatile::new(&vec![7; SIZE]);
        let file = log_file();
        let log = WriteLog::create(file.try_clone().unwrap()).unwrap();
        let logged = LoggedDevice::new(Arc::clone(&device), log).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let logged = &logged;
                scope.spawn(move || {
                    let mut random = SeededRandom::new(seed.wrapping_add(history * 4 + thread));
                    for _ in 0..60 {
                        act(logged, &mut random, 400_000);
                    }
                });
            }
        });
        let expected = device.content();
        let mut random = SeededRandom::new(seed);
        assert!(
            recovered(&device, file, &mut random) == expected,
            "seed {seed} history {history}"
        );
    }
}

#[test]
fn a_write_that_was_interrupted_leaves_the_log_valid() {
    let device = Volatile::new(&vec![7; SIZE]);
    let file = log_file();
    let log = WriteLog::create(file.try_clone().unwrap()).unwrap();
    let logged = LoggedDevice::new(Arc::clone(&device), log).unwrap();
    logged.write_at(b"first", 100).unwrap();
    logged.write_at(b"second", 200).unwrap();
    // The process is killed after it has appended a part of the second record, before it counts.
    let used = 24 + 5;
    std::os::unix::fs::FileExt::write_all_at(&file, &u64::to_ne_bytes(used), 24).unwrap();
    let mut expected = vec![7; SIZE];
    expected[100..105].copy_from_slice(b"first");
    let successor = Volatile::new(&vec![7; SIZE]);
    let report = WriteLog::open(file).unwrap().replay(&*successor).unwrap();
    assert_eq!((report.record_count, report.data_bytes), (1, 5));
    assert!(successor.content() == expected);
}

/// A full area is flushed by the write that needs room, so the log is bounded.
#[test]
fn writes_without_a_flush_do_not_grow_the_log() {
    let device = Volatile::new(&vec![7; SIZE]);
    let file = log_file();
    let log = WriteLog::create(file.try_clone().unwrap()).unwrap();
    let logged = LoggedDevice::new(Arc::clone(&device), log).unwrap();
    let before = file.metadata().unwrap().len();
    for _ in 0..100 {
        logged.write_at(&vec![1; 2 << 20], 0).unwrap();
    }
    assert_eq!(file.metadata().unwrap().len(), before);
    let flushes = device.flush_count.load(Ordering::SeqCst);
    assert!((10..=20).contains(&flushes), "{flushes}");
}

/// After a failure, the system may report success for data that it has dropped.
#[test]
fn no_flush_succeeds_after_one_has_failed() {
    let device = Volatile::new(&vec![7; SIZE]);
    let file = log_file();
    let log = WriteLog::create(file.try_clone().unwrap()).unwrap();
    let logged = LoggedDevice::new(Arc::clone(&device), log).unwrap();
    logged.write_at(b"before", 0).unwrap();
    device.fails_to_flush.store(true, Ordering::SeqCst);
    assert!(logged.flush().is_err());
    device.fails_to_flush.store(false, Ordering::SeqCst);
    assert!(logged.flush().is_err());
    logged.write_at(b"after", 10).unwrap();
    // The successor has all data, and makes it durable.
    let mut random = SeededRandom::new(1);
    let content = recovered(&device, file, &mut random);
    assert_eq!((&content[..6], &content[10..15]), (&b"before"[..], &b"after"[..]));
}

/// Its record is cleared with the flush, so the flush must cover it.
#[test]
fn a_flush_waits_for_writes_that_have_begun() {
    let device = Volatile::new(&vec![7; SIZE]);
    let log = WriteLog::create(log_file()).unwrap();
    let logged = LoggedDevice::new(Arc::clone(&device), log).unwrap();
    // The device does not finish the write before this is released.
    let blocked = device.unflushed.lock().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| logged.write_at(b"data", 0).unwrap());
        while logged.lock().writing.is_empty() {
            std::thread::yield_now();
        }
        let flush = scope.spawn(|| logged.flush().unwrap());
        // The flush has begun when new writes go to the other area.
        while logged.lock().active == super::AreaId::First {
            std::thread::yield_now();
        }
        SystemClock::new().sleep(std::time::Duration::from_millis(50));
        assert!(!device.is_flushing.load(Ordering::SeqCst) && !flush.is_finished());
        drop(blocked);
        flush.join().unwrap();
    });
    assert_eq!(device.durable.lock().unwrap()[..4], *b"data");
}

#[test]
fn flushes_at_the_same_time_are_shared() {
    let device = Volatile::new(&vec![7; SIZE]);
    let log = WriteLog::create(log_file()).unwrap();
    let logged = LoggedDevice::new(Arc::clone(&device), log).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..50).for_each(|_| logged.flush().unwrap()));
        }
    });
    let count = device.flush_count.load(Ordering::SeqCst);
    assert!((1..400).contains(&count), "{count}");
}

#[test]
fn an_invalid_log_is_refused() {
    let damage = |offset: u64, bytes: &[u8]| {
        let file = log_file();
        let log = WriteLog::create(file.try_clone().unwrap()).unwrap();
        let device = Volatile::new(&vec![7; SIZE]);
        let logged = LoggedDevice::new(Arc::clone(&device), log).unwrap();
        logged.write_at(b"data", 0).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, offset).unwrap();
        WriteLog::open(file).and_then(|log| log.replay(&*device))
    };
    let number = u64::to_ne_bytes;
    assert!(damage(4000, &[1]).is_ok());
    for (what, offset, bytes) in [
        ("another magic", 0, number(1)),
        ("an area longer than the log", 24, number((16 << 20) + 1)),
        ("an unknown kind", 4096, number(9)),
        ("an offset past the end", 4096 + 8, number(u64::MAX - 1)),
        ("data past the end of the area", 4096 + 16, number(5)),
    ] {
        assert!(damage(offset, &bytes).is_err(), "{what}");
    }
    assert!(WriteLog::open(log_file()).is_err());
}
