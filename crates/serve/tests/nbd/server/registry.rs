//! Exports that change while clients use them, and servers that share their resources.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, MemoryDevice, Result as DeviceResult, SystemClock};
use holdfast_serve::nbd::client::{Endpoint, NbdDevice, NbdOptions};
use holdfast_serve::nbd::{
    Event, Export, ExportDevice, ExportEntry, Exports, Limits, Listener, Server, ServerOptions, ServerResources,
    Socket, TlsPolicy,
};
use holdfast_serve::registry::{ExportOptions, Registry, Removal};

use crate::raw::{Raw, Style};
use crate::servers::{OurServer, wait_for};

const SIZE: u64 = 64 << 20;
const FORCED: Removal = Removal::Forced {
    patience: Duration::from_secs(20),
};

/// A registry that a test and a server share.
#[derive(Clone, Default)]
struct SharedRegistry(Arc<Registry>);

impl Exports for SharedRegistry {
    fn list(&self) -> Vec<ExportEntry> {
        self.0.list()
    }

    fn open(&self, name: &str) -> DeviceResult<Option<Arc<Export>>> {
        self.0.open(name)
    }
}

/// A device whose writes wait until it is opened.
#[derive(Default)]
struct WaitingDevice {
    device: Option<MemoryDevice>,
    state: Mutex<(bool, usize)>,
    changed: Condvar,
    flush_count: Mutex<usize>,
}

impl WaitingDevice {
    fn new() -> Self {
        Self {
            device: Some(MemoryDevice::new(SIZE)),
            ..Self::default()
        }
    }

    fn inner(&self) -> &MemoryDevice {
        self.device.as_ref().unwrap()
    }

    fn waiting_count(&self) -> usize {
        self.state.lock().unwrap().1
    }

    fn open(&self) {
        self.state.lock().unwrap().0 = true;
        self.changed.notify_all();
    }
}

impl BlockDevice for WaitingDevice {
    fn size_bytes(&self) -> u64 {
        SIZE
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> DeviceResult<()> {
        self.inner().read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> DeviceResult<ExtentList> {
        self.inner().extents(range, extent_count_max)
    }
}

impl BlockDeviceMut for WaitingDevice {
    fn write_at(&self, data: &[u8], offset: u64) -> DeviceResult<()> {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        while !state.0 {
            state = self.changed.wait(state).unwrap();
        }
        drop(state);
        self.inner().write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> DeviceResult<()> {
        self.inner().write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> DeviceResult<()> {
        self.inner().trim(range)
    }

    fn flush(&self) -> DeviceResult<()> {
        *self.flush_count.lock().unwrap() += 1;
        self.inner().flush()
    }
}

/// A removal answers the requests in progress, makes them durable, and only then ends.
#[test]
fn a_forced_removal_completes_requests_in_progress() {
    const WRITE: u16 = 1;
    let registry = SharedRegistry::default();
    let device = Arc::new(WaitingDevice::new());
    let export = ExportOptions::new("disk", ExportDevice::Writable(Arc::clone(&device) as _));
    let export = registry.0.add(export).unwrap();
    let server = OurServer::start(registry.clone());
    let mut client = Raw::enter(&server.socket(), "disk", Style::Simple, &[]).unwrap();
    let header = client.header(0, WRITE, 7, 0, 4096);
    client.say(&[&header[..], &[9; 4096]].concat());
    wait_for("the write to begin", || device.waiting_count() == 1);
    assert_eq!(export.clients().len(), 1);
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| registry.0.remove("disk", FORCED, &SystemClock::new()).unwrap());
        wait_for("the removal to begin", || export.is_removed());
        let late = NbdDevice::connect(&Endpoint::Unix(server.socket()), "disk", NbdOptions::default());
        assert!(late.is_err(), "it is gone for others");
        assert_eq!(*device.flush_count.lock().unwrap(), 0);
        device.open();
        let answer = client.take(16).expect("the write is answered");
        assert_eq!(answer[4..8], [0; 4], "without an error");
        assert_eq!(client.take(1), None, "and the client is disconnected");
        let report = removal.join().unwrap();
        assert_eq!((report.ended_client_count, report.is_busy), (1, false));
    });
    assert_eq!(device.inner().to_bytes()[..4096], [9; 4096]);
    assert_eq!(*device.flush_count.lock().unwrap(), 1, "the write is durable");
    assert!(export.clients().is_empty());
}

#[test]
fn the_oldest_export_is_the_default_one() {
    let registry = SharedRegistry::default();
    let server = OurServer::start(registry.clone());
    let clock = SystemClock::new();
    for (name, size_bytes) in [("a", 512), ("b", 1024)] {
        let device = ExportDevice::ReadOnly(Arc::new(MemoryDevice::new(size_bytes)));
        registry.0.add(ExportOptions::new(name, device)).unwrap();
    }
    let size = || {
        let endpoint = Endpoint::Unix(server.socket());
        NbdDevice::connect(&endpoint, "", NbdOptions::default()).map(|device| device.size_bytes())
    };
    assert_eq!(size().unwrap(), 512);
    wait_for("the client to end", || {
        registry.0.remove("a", Removal::IfUnused, &clock).is_ok()
    });
    assert_eq!(size().unwrap(), 1024);
    wait_for("the client to end", || {
        registry.0.remove("b", Removal::IfUnused, &clock).is_ok()
    });
    assert!(size().is_err());
}

fn options(resources: &ServerResources, registry: &SharedRegistry, events: &Arc<Mutex<Vec<String>>>) -> ServerOptions {
    let events = Arc::clone(events);
    ServerOptions {
        exports: Arc::new(registry.clone()),
        resources: resources.clone(),
        tls: TlsPolicy::Off,
        clock: Arc::new(SystemClock::new()),
        events: Arc::new(move |event: &Event<'_>| events.lock().unwrap().push(format!("{event:?}"))),
    }
}

#[test]
fn servers_share_the_limit_of_connections() {
    let limits = Limits {
        connection_count_max: 2,
        ..Limits::default()
    };
    let resources = ServerResources::new(limits);
    let events = Arc::default();
    let servers = [(); 2].map(|()| Server::new(options(&resources, &SharedRegistry::default(), &events)));
    let connect = |server: &Server| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        server.serve(Socket::Unix(theirs)).unwrap();
        ours
    };
    let mut clients = servers.each_ref().map(connect);
    for client in &mut clients {
        client.read_exact(&mut [0; 18]).unwrap();
    }
    assert_eq!(resources.connection_count(), 2);
    assert_eq!(connect(&servers[0]).read(&mut [0; 1]).unwrap(), 0, "there is no room");
    assert!(events.lock().unwrap().iter().any(|event| event.contains("TooMany")));
    drop(clients);
    wait_for("room", || resources.connection_count() == 0);
    connect(&servers[1]).read_exact(&mut [0; 18]).unwrap();
}

/// Connects from this loopback address, and enters the default export by `EXPORT_NAME`.
fn enter_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from((from, 0))).unwrap();
    connect(&socket, &to).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.read_exact(&mut [0; 18]).unwrap();
    let option = [
        &3u32.to_be_bytes()[..],
        b"IHAVEOPT",
        &1u32.to_be_bytes(),
        &0u32.to_be_bytes(),
    ]
    .concat();
    stream.write_all(&option).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

const READ_BYTES: u32 = 16 << 20;

/// A request to read the start of the disk.
fn read_request(cookie: u64) -> Vec<u8> {
    [
        &0x2560_9513_u32.to_be_bytes()[..],
        &0u32.to_be_bytes(),
        &cookie.to_be_bytes(),
        &0u64.to_be_bytes(),
        &READ_BYTES.to_be_bytes(),
    ]
    .concat()
}

/// A client that requests much and takes nothing holds memory until it is disconnected, after a minute. Clients of other
/// addresses do not wait for it.
#[test]
fn a_client_that_takes_no_replies_does_not_delay_others() {
    let limits = Limits {
        memory_bytes_max: 4 * u64::from(READ_BYTES),
        ..Limits::default()
    };
    let registry = SharedRegistry::default();
    let device = ExportDevice::ReadOnly(Arc::new(MemoryDevice::new(SIZE)));
    registry.0.add(ExportOptions::new("disk", device)).unwrap();
    let mut server = Server::new(options(&ServerResources::new(limits), &registry, &Arc::default()));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    server.listen(Listener::inherited(listener.into()).unwrap()).unwrap();
    let mut greedy: Vec<_> = (0..8).map(|_| enter_from([127, 0, 0, 2], address)).collect();
    for stream in &mut greedy {
        stream.write_all(&[read_request(1), read_request(2)].concat()).unwrap();
    }
    wait_for("the greedy client to be read for", || {
        registry.0.find("disk").unwrap().traffic().read_bytes >= u64::from(READ_BYTES)
    });
    let mut honest = enter_from([127, 0, 0, 3], address);
    honest.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    honest.write_all(&read_request(3)).unwrap();
    let mut reply = vec![1; 16 + READ_BYTES as usize];
    honest.read_exact(&mut reply).unwrap();
    assert_eq!(reply[4..8], [0; 4]);
}
