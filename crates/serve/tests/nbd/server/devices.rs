//! Devices that are slow, fail or panic: other requests and other clients continue, and stopping a server takes a
//! bounded time.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use holdfast_block::{
    BlockDevice, Clock, ExtentKind, ExtentList, Fault, FaultRule, FaultyDevice, ManualClock, MemoryDevice, RequestKind,
    Result, to_usize,
};
use holdfast_serve::nbd::{Export, ExportDevice, FixedExports, Limits};

use super::{SIZE, writable};
use crate::raw::{Raw, Style, u32_at, u64_at};
use crate::servers::{OurServer, wait_for};

const EIO: u32 = 5;
const ESHUTDOWN: u32 = 108;

/// A device of zeroes whose reads at `slow` wait until the gate opens.
struct Gated {
    gate: Arc<Gate>,
    slow: Range<u64>,
}

#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl BlockDevice for Gated {
    fn size_bytes(&self) -> u64 {
        1 << 20
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        if self.slow.contains(&offset) {
            let mut is_open = self.gate.is_open.lock().unwrap();
            while !*is_open {
                is_open = self.gate.opened.wait(is_open).unwrap();
            }
        }
        buffer.fill(0x5a);
        Ok(())
    }
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end - range.start, ExtentKind::Data);
        Ok(list)
    }
}

fn gated() -> (Arc<Gate>, OurServer) {
    let gate = Arc::new(Gate::default());
    let device = Gated {
        gate: Arc::clone(&gate),
        slow: 0..4096,
    };
    let export = Export::new("disk", ExportDevice::ReadOnly(Arc::new(device)));
    (gate, OurServer::start(FixedExports::new([export])))
}

#[test]
fn slow_reads_block_no_other_requests() {
    let (gate, server) = gated();
    let mut first = Raw::enter(&server.socket(), "disk", Style::Structured, &[]).unwrap();
    for cookie in 1..=3 {
        let slow = first.header(0, 0, cookie, 0, 512);
        first.say(&slow);
    }
    assert_eq!(first.read(8192, 4096), vec![0x5a; 4096]);
    let mut second = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
    assert_eq!(second.read(8192, 4096), vec![0x5a; 4096]);
    gate.open();
    let mut cookies = vec![1, 2, 3];
    for _ in 0..3 {
        // Replies may be out of order, but all of them arrive.
        let header = first.take(20).unwrap();
        let cookie = u64_at(&header, 8);
        assert_eq!(u32_at(&header, 16), 520);
        first.take(520).unwrap();
        cookies.retain(|it| *it != cookie);
    }
    assert!(cookies.is_empty());
}

#[test]
fn a_stopping_server_answers_pending_requests_and_refuses_new_ones() {
    let (gate, mut server) = gated();
    let mut raw = Raw::enter(&server.socket(), "disk", Style::Structured, &[]).unwrap();
    let mut idle = Raw::connect(&server.socket());
    let slow = raw.header(0, 0, 7, 0, 512);
    raw.say(&slow);
    // A reply to a later request proves that the slow request was received.
    raw.read(8192, 512);
    let inner = server.inner.take().unwrap();
    let stopping = std::thread::spawn(move || inner.stop(Duration::from_secs(30)));
    assert_eq!(idle.take(1), None, "a client in the handshake is disconnected");
    let refused = raw.ask(0, 0, 8192, 512, &[]).unwrap();
    assert_eq!(refused.error, ESHUTDOWN);
    gate.open();
    let answer = raw.answer(7, 0, 512).unwrap();
    assert_eq!(answer.error, 0);
    assert_eq!(answer.data(0, 512), vec![0x5a; 512]);
    assert_eq!(raw.take(1), None);
    assert_eq!(stopping.join().unwrap().abandoned_connection_count, 0);
    assert!(!server.socket().exists());
}

#[test]
fn a_stopping_server_waits_for_a_device_for_a_bounded_time() {
    let (gate, mut server) = gated();
    let mut raw = Raw::enter(&server.socket(), "disk", Style::Structured, &[]).unwrap();
    let slow = raw.header(0, 0, 7, 0, 512);
    raw.say(&slow);
    raw.read(8192, 512);
    let report = server.inner.take().unwrap().stop(Duration::from_millis(20));
    assert_eq!(report.abandoned_connection_count, 1);
    assert_eq!(raw.take(1), None);
    gate.open();
}

#[test]
fn a_client_that_disconnects_leaves_no_connection() {
    let (gate, server) = gated();
    for _ in 0..20 {
        let mut raw = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
        let half = raw.header(0, 1, 1, 0, 4096);
        raw.say(&half);
    }
    let mut raw = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
    let slow = raw.header(0, 0, 7, 0, 512);
    raw.say(&slow);
    raw.read(8192, 512);
    drop(raw);
    gate.open();
    let inner = server.inner.as_ref().unwrap();
    wait_for("all connections to end", || inner.connection_count() == 0);
}

#[test]
fn errors_of_the_device_reach_the_client_and_the_owner() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let device = FaultyDevice::new(MemoryDevice::from_bytes(&vec![1; to_usize(SIZE)]));
        for kind in [RequestKind::Read, RequestKind::Write, RequestKind::Flush] {
            device.add(FaultRule::every(kind, Fault::Io));
        }
        let server = OurServer::start(FixedExports::new([writable(device)]));
        let mut raw = Raw::enter(&server.socket(), "disk", style, &[]).unwrap();
        let with_payload = if style == Style::Extended { 32 } else { 0 };
        assert_eq!(raw.ask(0, 0, 0, 900_000, &[]).unwrap().error, EIO);
        assert_eq!(raw.ask(with_payload, 1, 512, 512, &[1; 512]).unwrap().error, EIO);
        assert_eq!(raw.ask(0, 3, 0, 0, &[]).unwrap().error, EIO);
        for action in ["read", "write", "flush"] {
            server.wait_for_event(&["RequestFailed", "disk", &format!("action: \"{action}\"")]);
        }
        assert_eq!(raw.ask(0, 4, 0, 512, &[]).unwrap().error, 0, "the connection continues");
    }
}

/// A device that violates its contract.
struct Broken;

impl BlockDevice for Broken {
    fn size_bytes(&self) -> u64 {
        4096
    }
    fn read_at(&self, _: &mut [u8], _: u64) -> Result<()> {
        unreachable!("a device that panics")
    }
    fn extents(&self, range: Range<u64>, _: usize) -> Result<ExtentList> {
        Ok(ExtentList::new(range.start, 1))
    }
}

#[test]
fn a_panic_of_the_device_fails_only_that_request() {
    let server = OurServer::start(FixedExports::new([Export::new(
        "disk",
        ExportDevice::ReadOnly(Arc::new(Broken)),
    )]));
    let mut raw = Raw::enter(&server.socket(), "disk", Style::Structured, &["base:allocation"]).unwrap();
    for _ in 0..40 {
        assert_eq!(raw.ask(0, 0, 0, 512, &[]).unwrap().error, EIO);
    }
    assert_eq!(
        raw.ask(0, 7, 0, 512, &[]).unwrap().error,
        EIO,
        "extents that make no progress"
    );
    server.wait_for_event(&["RequestFailed", "panicked"]);
}

/// A long read is sent in parts if the device is quick; an error follows the parts that were sent.
#[test]
fn an_error_within_a_long_read_ends_only_its_reply() {
    const QUICK_READS: u64 = 64;
    for style in [Style::Structured, Style::Extended] {
        let device = FaultyDevice::new(MemoryDevice::from_bytes(&vec![1; to_usize(SIZE)]));
        device.add(FaultRule::nth(RequestKind::Read, QUICK_READS + 3, Fault::Io));
        // With a stopped clock every read is quick.
        let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
        let server = OurServer::start_at(FixedExports::new([writable(device)]), Limits::default(), &clock);
        let mut raw = Raw::enter(&server.socket(), "disk", style, &[]).unwrap();
        for number in 0..QUICK_READS {
            assert_eq!(raw.read(number * 512, 512), [1; 512]);
        }
        let answer = raw.ask(0, 0, 0, 1_000_000, &[]).unwrap();
        assert_eq!(answer.error, EIO);
        let kinds: Vec<u16> = answer.chunks.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [1, 1, 0x8001], "two parts, and the error");
        assert_eq!(raw.read(0, 1_000_000), vec![1; 1_000_000]);
    }
}
