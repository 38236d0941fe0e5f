//! Slow, silent and dying front ends, slow devices, and the end of a server.

use std::io::Write as _;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, Error, ExtentList, MemoryDevice, Result};
use holdfast_serve::vhost_user::{AcceptedWrites, ExportDevice, Limits};

use crate::front_end::{NEXT, REQUESTS, TestServer, WRITE, device, header, pause_ms};

/// A device whose requests wait until they are released.
struct Gate {
    disk: Arc<MemoryDevice>,
    open: Mutex<bool>,
    changed: Condvar,
    /// Requests that wait.
    waiting: Mutex<usize>,
}

impl Gate {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            disk: device(),
            open: Mutex::new(false),
            changed: Condvar::new(),
            waiting: Mutex::new(0),
        })
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn pass(&self) {
        *self.waiting.lock().unwrap() += 1;
        let mut open = self.open.lock().unwrap();
        while !*open {
            open = self.changed.wait(open).unwrap();
        }
        *self.waiting.lock().unwrap() -= 1;
    }
}

impl BlockDevice for Gate {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.pass();
        self.disk.read_at(buffer, offset)
    }
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.disk.extents(range, extent_count_max)
    }
}

impl BlockDeviceMut for Gate {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.pass();
        self.disk.write_at(data, offset)
    }
    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.disk.write_zeroes(range)
    }
    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.disk.trim(range)
    }
    fn flush(&self) -> Result<()> {
        self.disk.flush()
    }
}

fn short() -> Limits {
    Limits {
        handshake: Duration::from_millis(100),
        stall: Duration::from_millis(100),
        ..Limits::default()
    }
}

#[test]
fn silent_and_slow_front_ends_are_disconnected() {
    let server = TestServer::start_with(ExportDevice::Writable(device()), short(), AcceptedWrites::Stay);
    let silent = server.connect();
    server.wait_for_event("Abandoned");
    server.wait_until_gone();
    drop(silent);
    server.events.lock().unwrap().clear();
    // Half of a header.
    let mut slow = server.connect();
    slow.write_all(&[1, 0, 0, 0, 1, 0]).unwrap();
    server.wait_for_event("Abandoned");
    server.wait_until_gone();
    server.events.lock().unwrap().clear();
    // A header without its body, after a valid message.
    let mut slow = server.connect();
    slow.write_all(&[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    slow.write_all(&[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0]).unwrap();
    server.wait_for_event("Abandoned");
    server.wait_until_gone();
    // A machine that is idle for longer stays.
    let mut guest = server.guest();
    assert_eq!(guest.request(0, 0, &[], 512).status, 0);
    pause_ms(300);
    assert_eq!(guest.request(0, 0, &[], 512).status, 0);
}

#[test]
fn a_disk_that_can_be_written_has_one_guest() {
    let server = TestServer::writable(device());
    let mut first = server.guest();
    let mut second = server.connect();
    assert_eq!(std::io::Read::read(&mut second, &mut [0; 16]).unwrap(), 0);
    server.wait_for_event("TooMany");
    assert_eq!(first.request(0, 0, &[], 512).status, 0);
    drop(first);
    server.wait_until_gone();
    assert_eq!(server.guest().request(0, 0, &[], 512).status, 0);
    let shared = TestServer::start(ExportDevice::ReadOnly(device()));
    let (mut first, mut second) = (shared.guest(), shared.guest());
    assert_eq!(first.request(0, 0, &[], 512).status, 0);
    assert_eq!(second.request(0, 0, &[], 512).status, 0);
}

/// A connection that never says anything must not exclude the machine.
#[test]
fn a_silent_connection_makes_room() {
    let server = TestServer::writable(device());
    let _silent = server.connect();
    assert_eq!(server.guest().request(0, 0, &[], 512).status, 0);
}

/// Requests on a slow device are executed together, and their number is bounded.
#[test]
fn slow_requests_wait_together_within_the_limit() {
    let gate = Gate::new();
    let limits = Limits {
        request_count_max: 5,
        worker_count_max: 3,
        ..Limits::default()
    };
    let server = TestServer::start_with(ExportDevice::Writable(gate.clone()), limits, AcceptedWrites::Stay);
    let mut guest = server.guest();
    guest.write(REQUESTS, &header(0, 8));
    for index in (0..60_u16).step_by(3) {
        let data = REQUESTS + 0x1000 + u64::from(index) * 4096;
        guest.describe(0, index, (REQUESTS, 16, NEXT, index + 1));
        guest.describe(0, index + 1, (data, 4096, NEXT | WRITE, index + 2));
        guest.describe(0, index + 2, (REQUESTS + 0x8_0000 + u64::from(index), 1, WRITE, 0));
        guest.offer(0, index);
    }
    while *gate.waiting.lock().unwrap() < 3 {
        std::thread::yield_now();
    }
    assert!(*gate.waiting.lock().unwrap() <= 3, "as many as there are workers");
    gate.open();
    let mut heads: Vec<u32> = (0..20).map(|_| guest.wait(0).0).collect();
    heads.sort_unstable();
    assert_eq!(heads, (0..60).step_by(3).collect::<Vec<u32>>());
}

/// The writes of a guest that died end before another guest is served.
#[test]
fn a_guest_that_dies_leaves_no_late_writes() {
    let gate = Gate::new();
    let server = TestServer::writable(gate.clone());
    let mut guest = server.guest();
    guest.write(REQUESTS, &header(1, 0));
    guest.write(REQUESTS + 0x1000, &[5; 512]);
    guest.describe(0, 0, (REQUESTS, 16, NEXT, 1));
    guest.describe(0, 1, (REQUESTS + 0x1000, 512, NEXT, 2));
    guest.describe(0, 2, (REQUESTS + 0x8_0000, 1, WRITE, 0));
    guest.offer(0, 0);
    while *gate.waiting.lock().unwrap() == 0 {
        std::thread::yield_now();
    }
    drop(guest);
    let mut refused = server.connect();
    assert_eq!(
        std::io::Read::read(&mut refused, &mut [0; 16]).unwrap(),
        0,
        "it still writes"
    );
    gate.open();
    server.wait_until_gone();
    assert_eq!(gate.disk.to_bytes()[..512], [5; 512]);
    assert_eq!(server.guest().request(0, 0, &[], 512).data, [5; 512]);
}

#[test]
fn a_server_stops_after_requests_in_progress() {
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    assert_eq!(guest.request(1, 0, &[7; 512], 0).status, 0);
    let events = Arc::clone(&server.events);
    let report = server.server.stop(Duration::from_secs(60));
    assert_eq!(report.abandoned_connection_count, 0);
    assert!(events.lock().unwrap().join("\n").contains("ByServer"));
    // A device that never answers is given up.
    let gate = Gate::new();
    let server = TestServer::writable(gate.clone());
    let mut guest = server.guest();
    guest.write(REQUESTS, &header(0, 0));
    guest.describe(0, 0, (REQUESTS, 16, NEXT, 1));
    guest.describe(0, 1, (REQUESTS + 0x1000, 512, NEXT | WRITE, 2));
    guest.describe(0, 2, (REQUESTS + 0x8_0000, 1, WRITE, 0));
    guest.offer(0, 0);
    while *gate.waiting.lock().unwrap() == 0 {
        std::thread::yield_now();
    }
    let report = server.server.stop(Duration::from_millis(50));
    assert_eq!(report.abandoned_connection_count, 1);
    gate.open();
}

/// Errors and panics of the device are errors of the request.
#[test]
fn devices_that_fail_and_panic() {
    struct Failing;
    impl BlockDevice for Failing {
        fn size_bytes(&self) -> u64 {
            1 << 20
        }
        fn read_at(&self, _: &mut [u8], offset: u64) -> Result<()> {
            assert_ne!(offset, 0, "a defect of the device");
            Err(Error::layer(std::io::Error::other("broken")))
        }
        fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
            Ok(ExtentList::new(range.start, extent_count_max))
        }
    }
    let server = TestServer::start(ExportDevice::ReadOnly(Arc::new(Failing)));
    let mut guest = server.guest();
    for _ in 0..50 {
        assert_eq!(guest.request(0, 0, &[], 512).status, 1);
        assert_eq!(guest.request(0, 8, &[], 512).status, 1);
    }
    let events = server.events.lock().unwrap().join("\n");
    assert!(events.contains("panicked") && events.contains("broken"), "{events}");
}

/// Memory that its owner can shorten is reported, because an access would end the process.
#[test]
fn unsealed_memory_is_reported() {
    use crate::front_end::{Guest, MEMORY_BYTES};
    let server = TestServer::writable(device());
    let file = tempfile::tempfile().unwrap();
    file.set_len(MEMORY_BYTES as u64).unwrap();
    let _guest = Guest::connect(server.connect(), file, u64::MAX);
    server.wait_for_event("UnsealedMemory");
}
