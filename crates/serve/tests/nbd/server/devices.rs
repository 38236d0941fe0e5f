//! The whole server: slow devices, misbehaving or vanishing clients, and stopping.

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::raw::{Raw, Style, context_query, info_query, string, u32_at, u64_at};
use crate::servers::{Ours, wait_for};
use holdfast_block::{
    BlockDevice, BlockDeviceMut as _, Clock, DirtyBitmap, ExtentKind, ExtentList, Fault, FaultRule, FaultyDevice,
    ManualClock, MemoryDevice, RequestKind, Result, SeededRandom, to_usize,
};
use holdfast_serve::nbd::{Export, ExportDevice, ExportEntry, Exports, FixedExports, Limits, Listener};
use rustix::net::{AddressFamily, SocketType};

const SIZE: u64 = 1_000_003;
const EIO: u32 = 5;
const ESHUTDOWN: u32 = 108;

fn writable(device: impl holdfast_block::BlockDeviceMut + 'static) -> Export {
    Export::new("disk", ExportDevice::Writable(Arc::new(device)))
}

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

fn gated() -> (Arc<Gate>, Ours) {
    let gate = Arc::new(Gate::default());
    let device = Gated {
        gate: Arc::clone(&gate),
        slow: 0..4096,
    };
    let export = Export::new("disk", ExportDevice::ReadOnly(Arc::new(device)));
    (gate, Ours::start(FixedExports::new([export])))
}

#[test]
fn slow_reads_stop_neither_their_own_connection_nor_others() {
    let (gate, ours) = gated();
    let mut first = Raw::enter(&ours.socket(), "disk", Style::Structured, &[]).unwrap();
    for cookie in 1..=3 {
        let slow = first.header(0, 0, cookie, 0, 512);
        first.say(&slow);
    }
    assert_eq!(first.read(8192, 4096), vec![0x5a; 4096]);
    let mut second = Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap();
    assert_eq!(second.read(8192, 4096), vec![0x5a; 4096]);
    gate.open();
    let mut cookies = vec![1, 2, 3];
    for _ in 0..3 {
        // Replies may be out of order, but each arrives.
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
    let (gate, mut ours) = gated();
    let mut raw = Raw::enter(&ours.socket(), "disk", Style::Structured, &[]).unwrap();
    let mut idle = Raw::connect(&ours.socket());
    let slow = raw.header(0, 0, 7, 0, 512);
    raw.say(&slow);
    // A reply to a later request proves that the slow one was received.
    raw.read(8192, 512);
    let server = ours.server.take().unwrap();
    let stopping = std::thread::spawn(move || server.stop(Duration::from_secs(30)));
    assert_eq!(idle.take(1), None, "a client in the handshake is disconnected");
    let refused = raw.ask(0, 0, 8192, 512, &[]).unwrap();
    assert_eq!(refused.error, ESHUTDOWN);
    gate.open();
    let answer = raw.answer(7, 0, 512).unwrap();
    assert_eq!(answer.error, 0);
    assert_eq!(answer.data(0, 512), vec![0x5a; 512]);
    assert_eq!(raw.take(1), None);
    assert_eq!(stopping.join().unwrap().abandoned_connection_count, 0);
    assert!(!ours.socket().exists());
}

#[test]
fn a_server_does_not_wait_for_ever_for_a_device() {
    let (gate, mut ours) = gated();
    let mut raw = Raw::enter(&ours.socket(), "disk", Style::Structured, &[]).unwrap();
    let slow = raw.header(0, 0, 7, 0, 512);
    raw.say(&slow);
    raw.read(8192, 512);
    let report = ours.server.take().unwrap().stop(Duration::from_millis(20));
    assert_eq!(report.abandoned_connection_count, 1);
    assert_eq!(raw.take(1), None);
    gate.open();
}

#[test]
fn a_client_that_vanishes_leaves_nothing_behind() {
    let (gate, ours) = gated();
    for _ in 0..20 {
        let mut raw = Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap();
        let half = raw.header(0, 1, 1, 0, 4096);
        raw.say(&half);
    }
    let mut raw = Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap();
    let slow = raw.header(0, 0, 7, 0, 512);
    raw.say(&slow);
    raw.read(8192, 512);
    drop(raw);
    gate.open();
    let server = ours.server.as_ref().unwrap();
    wait_for("all connections to end", || server.connection_count() == 0);
}

fn impatient() -> Limits {
    Limits {
        connection_count_max: 2,
        handshake: Duration::from_millis(80),
        idle: Some(Duration::from_millis(80)),
        stall: Duration::from_millis(80),
        ..Limits::default()
    }
}

#[test]
fn clients_that_dawdle_are_sent_away() {
    let ours = Ours::start_with(FixedExports::new([writable(MemoryDevice::new(64 << 20))]), impatient());
    let mut silent = Raw::connect(&ours.socket());
    assert_eq!(silent.take(1), None);
    ours.wait_for_event(&["Disconnected", "the handshake took too long"]);
    let mut idle = Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap();
    assert_eq!(idle.take(1), None);
    ours.wait_for_event(&["Disconnected", "idle for too long"]);
    let mut half = Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap();
    let header = half.header(0, 1, 1, 0, 4096);
    half.say(&header);
    assert_eq!(half.take(1), None);
    ours.wait_for_event(&["Disconnected", "the rest of a request"]);
    // Reads nothing of its replies: more than any socket buffers.
    let mut greedy = Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap();
    let header = greedy.header(0, 0, 1, 0, 32 << 20);
    greedy.say(&header);
    let server = ours.server.as_ref().unwrap();
    wait_for("the greedy client to be disconnected", || {
        server.connection_count() == 0
    });
}

#[test]
fn there_are_only_so_many_connections() {
    let limits = Limits {
        connection_count_max: 2,
        ..Limits::default()
    };
    let ours = Ours::start_with(FixedExports::new([writable(MemoryDevice::new(SIZE))]), limits);
    let first = Raw::connect(&ours.socket());
    let _second = Raw::connect(&ours.socket());
    let mut third = std::os::unix::net::UnixStream::connect(ours.socket()).unwrap();
    let read = std::io::Read::read(&mut third, &mut [0; 1]);
    assert!(matches!(read, Ok(0)), "closed without a word: {read:?}");
    ours.wait_for_event(&["TooMany"]);
    drop(first);
    let server = ours.server.as_ref().unwrap();
    wait_for("a place", || server.connection_count() < 2);
    Raw::connect(&ours.socket());
}

/// Idle clients in the handshake must not keep out a legitimate one.
#[test]
fn silent_clients_lose_their_place_to_new_ones() {
    let limits = Limits {
        connection_count_max: 8,
        handshake_count_max: 4,
        ..Limits::default()
    };
    let ours = Ours::start_with(FixedExports::new([writable(MemoryDevice::new(SIZE))]), limits);
    let silent: Vec<_> = (0..20)
        .map(|_| std::os::unix::net::UnixStream::connect(ours.socket()).unwrap())
        .collect();
    let _honest: Vec<_> = (0..4)
        .map(|_| Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap())
        .collect();
    drop(silent);
}

/// A connection over the network from this address of the loopback.
fn connect_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((from, 0))).unwrap();
    rustix::net::connect(&socket, &to).unwrap();
    TcpStream::from(socket)
}

/// One address cannot use up the connections of others, and local clients count for no address.
#[test]
fn one_address_gets_its_share_of_the_places_and_no_more() {
    const GREETING_BYTES: usize = 18;
    let limits = Limits {
        connection_count_max: 6,
        address_connection_count_max: 2,
        ..Limits::default()
    };
    let mut ours = Ours::start_with(FixedExports::new([writable(MemoryDevice::new(SIZE))]), limits);
    let listener = Listener::tcp(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let place = listener.tcp_address().unwrap();
    ours.server.as_mut().unwrap().listen(listener).unwrap();
    let greet = |from| {
        let mut client = connect_from(from, place);
        let greeted = client.read_exact(&mut [0; GREETING_BYTES]);
        greeted.is_ok().then_some(client)
    };
    let (greedy, other) = ([127, 0, 0, 1], [127, 0, 0, 2]);
    let first: Vec<_> = (0..2).map(|_| greet(greedy).unwrap()).collect();
    assert!(greet(greedy).is_none());
    ours.wait_for_event(&["TooMany"]);
    let _others: Vec<_> = (0..2).map(|_| greet(other).unwrap()).collect();
    Raw::connect(&ours.socket());
    drop(first);
    let server = ours.server.as_ref().unwrap();
    wait_for("a place", || server.connection_count() <= 2);
    assert!(greet(greedy).is_some());
}

/// The memory for replies that clients do not read is bounded, and other clients continue.
#[test]
fn the_memory_of_all_clients_together_is_bounded() {
    let limits = Limits {
        memory_bytes_max: 4 << 20,
        ..Limits::default()
    };
    let size = 64 << 20;
    let ours = Ours::start_with(FixedExports::new([writable(MemoryDevice::new(size))]), limits);
    let _greedy: Vec<_> = (0..8)
        .map(|_| {
            let mut greedy = Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap();
            for cookie in 0..8 {
                let header = greedy.header(0, 0, cookie, 0, 4 << 20);
                greedy.say(&header);
            }
            greedy
        })
        .collect();
    // A small request does not depend on the shared budget.
    let mut modest = Raw::enter(&ours.socket(), "disk", Style::Simple, &[]).unwrap();
    assert_eq!(modest.read(0, 4096).len(), 4096);
}

#[test]
fn errors_of_the_device_reach_the_client_and_the_owner() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let device = FaultyDevice::new(MemoryDevice::from_bytes(&vec![1; to_usize(SIZE)]));
        for kind in [RequestKind::Read, RequestKind::Write, RequestKind::Flush] {
            device.add(FaultRule::every(kind, Fault::Io));
        }
        let ours = Ours::start(FixedExports::new([writable(device)]));
        let mut raw = Raw::enter(&ours.socket(), "disk", style, &[]).unwrap();
        let with_payload = if style == Style::Extended { 32 } else { 0 };
        assert_eq!(raw.ask(0, 0, 0, 900_000, &[]).unwrap().error, EIO);
        assert_eq!(raw.ask(with_payload, 1, 512, 512, &[1; 512]).unwrap().error, EIO);
        assert_eq!(raw.ask(0, 3, 0, 0, &[]).unwrap().error, EIO);
        for action in ["read", "write", "flush"] {
            ours.wait_for_event(&["RequestFailed", "disk", &format!("action: \"{action}\"")]);
        }
        assert_eq!(raw.ask(0, 4, 0, 512, &[]).unwrap().error, 0, "the connection goes on");
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
fn a_device_that_panics_costs_a_request_and_no_more() {
    let ours = Ours::start(FixedExports::new([Export::new(
        "disk",
        ExportDevice::ReadOnly(Arc::new(Broken)),
    )]));
    let mut raw = Raw::enter(&ours.socket(), "disk", Style::Structured, &["base:allocation"]).unwrap();
    for _ in 0..40 {
        assert_eq!(raw.ask(0, 0, 0, 512, &[]).unwrap().error, EIO);
    }
    assert_eq!(
        raw.ask(0, 7, 0, 512, &[]).unwrap().error,
        EIO,
        "extents that make no progress"
    );
    ours.wait_for_event(&["RequestFailed", "panicked"]);
}

/// A long read is sent in parts once the device proved quick; the error comes after the parts that were sent.
#[test]
fn an_error_in_the_middle_of_a_long_read_ends_its_reply_and_nothing_else() {
    const QUICK_READS: u64 = 64;
    for style in [Style::Structured, Style::Extended] {
        let device = FaultyDevice::new(MemoryDevice::from_bytes(&vec![1; to_usize(SIZE)]));
        device.add(FaultRule::nth(RequestKind::Read, QUICK_READS + 3, Fault::Io));
        // With a stopped clock every read is fast.
        let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
        let ours = Ours::start_at(FixedExports::new([writable(device)]), Limits::default(), &clock);
        let mut raw = Raw::enter(&ours.socket(), "disk", style, &[]).unwrap();
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

/// Opens exports on demand, and counts that.
#[derive(Clone, Default)]
struct Lazy(Arc<Mutex<Vec<String>>>);

impl Exports for Lazy {
    fn list(&self) -> Vec<ExportEntry> {
        let entry = |name: &str| ExportEntry {
            name: name.to_owned(),
            description: "a snapshot".to_owned(),
        };
        vec![entry("monday/disk"), entry("broken")]
    }

    fn open(&self, name: &str) -> Result<Option<Arc<Export>>> {
        self.0.lock().unwrap().push(name.to_owned());
        match name {
            "monday/disk" => {
                let device = Arc::new(MemoryDevice::from_bytes(&[7; 1000]));
                Ok(Some(Arc::new(Export::new(name, ExportDevice::ReadOnly(device)))))
            }
            "broken" => Err(holdfast_block::Error::io("read", 0, std::io::Error::other("lost"))),
            _ => Ok(None),
        }
    }
}

#[test]
fn an_export_is_opened_when_it_is_asked_for_and_once_for_each_client() {
    let lazy = Lazy::default();
    let ours = Ours::start(lazy.clone());
    let mut raw = Raw::connect(&ours.socket());
    raw.say(&3_u32.to_be_bytes());
    let list = raw.option(3, &[]).unwrap();
    assert_eq!(list[0], (2, [string("monday/disk"), b"a snapshot".to_vec()].concat()));
    assert_eq!(list.len(), 3);
    assert!(lazy.0.lock().unwrap().is_empty(), "a list opens nothing");
    assert_eq!(raw.option(6, &info_query("broken", &[])).unwrap()[0].0, 0x8000_0006);
    ours.wait_for_event(&["OpenFailed", "broken", "lost"]);
    raw.agree_on(Style::Structured).unwrap();
    for option in [6, 10, 7] {
        let data = match option {
            10 => context_query("monday/disk", &["base:allocation"]),
            _ => info_query("monday/disk", &[0]),
        };
        assert_eq!(raw.option(option, &data).unwrap().last().unwrap().0, 1);
    }
    assert_eq!(*lazy.0.lock().unwrap(), ["broken", "monday/disk"]);
    assert_eq!(raw.read(0, 1000), [7; 1000]);
    for kind in [1, 4, 6] {
        let payload: &[u8] = if kind == 1 { &[0; 512] } else { &[] };
        assert_eq!(raw.ask(0, kind, 0, 512, payload).unwrap().error, 1, "it is read-only");
    }
}

#[test]
fn holes_and_changes_are_reported() {
    let device = MemoryDevice::new(1 << 20);
    device.write_at(&vec![1; 65_536], 131_072).unwrap();
    let mut bitmap = DirtyBitmap::new(1 << 20, 65_536).unwrap();
    bitmap.set(0..1);
    bitmap.set(200_000..200_001);
    let export = writable(device).with_bitmap("since-monday", Arc::new(bitmap));
    let ours = Ours::start(FixedExports::new([export]));
    let contexts = ["base:allocation", "qemu:dirty-bitmap:since-monday"];
    for style in [Style::Structured, Style::Extended] {
        let mut raw = Raw::enter(&ours.socket(), "disk", style, &contexts).unwrap();
        let answer = raw.ask(0, 0, 0, 1 << 20, &[]).unwrap();
        let kinds: Vec<u16> = answer.chunks.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [2, 1, 2], "hole, data, hole");
        let answer = raw.ask(0, 7, 0, 1 << 20, &[]).unwrap();
        let extents = |number: usize| -> Vec<(u64, u64)> {
            let payload = &answer.chunks[number].1;
            if style == Style::Extended {
                let extents = payload[8..].chunks(16);
                return extents.map(|it| (u64_at(it, 0), u64_at(it, 8))).collect();
            }
            let extents = payload[4..].chunks(8);
            extents.map(|it| (u32_at(it, 0).into(), u32_at(it, 4).into())).collect()
        };
        assert_eq!(extents(0), [(131_072, 3), (65_536, 0), (851_968, 3)]);
        assert_eq!(extents(1), [(65_536, 1), (131_072, 0), (65_536, 1), (786_432, 0)]);
        assert_eq!(answer.chunks.len(), 2);
    }
    let mut raw = Raw::enter(&ours.socket(), "disk", Style::Extended, &contexts).unwrap();
    let only_second = [(1_u64 << 20).to_be_bytes().as_slice(), &1_u32.to_be_bytes()].concat();
    let answer = raw.ask(32, 7, 0, 12, &only_second).unwrap();
    assert_eq!(
        (answer.error, answer.chunks.len(), u32_at(&answer.chunks[0].1, 0)),
        (0, 1, 1)
    );
    let twice = [only_second.as_slice(), &1_u32.to_be_bytes()].concat();
    assert_eq!(raw.ask(32, 7, 0, 16, &twice).unwrap().error, 22);
}

/// Random requests over several connections, one region each, against a plain vector; with and without workers, because
/// the first requests go to workers and later ones do not.
#[test]
fn behaves_like_a_vector_of_bytes() {
    let seed = holdfast_block::conformance::test_seed();
    let ours = Ours::start(FixedExports::new([writable(MemoryDevice::new(SIZE))]));
    let socket = ours.socket();
    let styles = [Style::Simple, Style::Structured, Style::Extended];
    let part = SIZE / 3;
    let threads: Vec<_> = (0_u64..)
        .zip(styles)
        .map(|(number, style)| {
            let socket = socket.clone();
            std::thread::spawn(move || {
                let raw = Raw::enter(&socket, "disk", style, &[]).unwrap();
                exercise(
                    raw,
                    SeededRandom::new(seed ^ number),
                    number * part..(number + 1) * part,
                )
            })
        })
        .collect();
    let mut expected: Vec<u8> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    expected.resize(to_usize(SIZE), 0);
    let mut raw = Raw::enter(&socket, "disk", Style::Structured, &[]).unwrap();
    assert!(raw.read(0, to_usize(SIZE)) == expected, "after all of it");
}

fn exercise(mut raw: Raw, mut random: SeededRandom, region: Range<u64>) -> Vec<u8> {
    let size = region.end - region.start;
    let mut model = vec![0; to_usize(size)];
    let with_payload = if raw.style == Style::Extended { 32 } else { 0 };
    for _ in 0..400 {
        let length_max = if random.one_in(8) { size } else { 5000 };
        let range = random.range_within(size, length_max);
        let (offset, length) = (region.start + range.start, range.end - range.start);
        let place = to_usize(range.start)..to_usize(range.end);
        let durable = u16::from(random.one_in(4));
        match random.below(4) {
            0 => {
                let data = random.bytes(place.len());
                let answer = raw.ask(durable | with_payload, 1, offset, length, &data).unwrap();
                assert_eq!(answer.error, 0);
                model[place].copy_from_slice(&data);
            }
            1 => {
                let no_hole = if random.one_in(2) { 2 } else { 0 };
                assert_eq!(raw.ask(durable | no_hole, 6, offset, length, &[]).unwrap().error, 0);
                model[place].fill(0);
            }
            _ => assert!(
                raw.read(offset, place.len()) == model[place],
                "{length} bytes at {offset}"
            ),
        }
    }
    model
}
