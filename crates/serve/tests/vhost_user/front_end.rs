//! A front end and the driver of a guest, and the server that they use.

use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_block::{BlockDeviceMut, MemoryDevice, SystemClock};
use holdfast_serve::vhost_user::{
    AcceptedWrites, DiskNumber, ExportDevice, Limits, ServerResources, Socket, VhostUserEvent, VhostUserExport,
    VhostUserExportOptions, VhostUserServer, VhostUserServerOptions,
};
use rustix::event::Timespec;
use rustix::fs::{MemfdFlags, SealFlags};
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Frontend, VhostUserFrontend as _, VhostUserProtocolFeatures};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};
use vmm_sys_util::eventfd::EventFd;

/// Bytes of the test disks: data up to [`DATA_END`], zeroes from there on.
pub(crate) const SIZE: usize = 8 << 20;
pub(crate) const DATA_END: usize = 1 << 20;
/// The memory of the guest, and its address in the front end.
pub(crate) const MEMORY_BYTES: usize = 4 << 20;
pub(crate) const USER_ADDRESS: u64 = 0x7000_0000_0000;
/// Rings of the test driver.
pub(crate) const RING_SIZE: u16 = 128;
const RING_BYTES: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x8000;
/// Servers of this process: each has a number of its own.
static SERVER_COUNT: AtomicU64 = AtomicU64::new(1);
/// Where requests are put.
pub(crate) const REQUESTS: u64 = 1 << 20;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) const FLUSH: u64 = 1 << 9;
pub(crate) const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;
const PROTOCOL_FEATURES: u64 = 1 << 30;
pub(crate) const INDIRECT_DESC: u64 = 1 << 28;

/// Enough for a server on a busy host.
const PATIENCE_MS: u32 = 60_000;
/// `EFD_NONBLOCK`.
const WITHOUT_WAITING: i32 = 0o4000;

/// Waits; the result is false, to continue a search.
pub(crate) fn pause_ms(count: i64) -> bool {
    let pause = Timespec {
        tv_sec: 0,
        tv_nsec: count * 1_000_000,
    };
    rustix::event::poll(&mut [], Some(&pause)).unwrap();
    false
}

/// The contents of the data at `offset`.
pub(crate) fn pattern(offset: usize) -> u8 {
    u8::try_from((offset / 512 * 7 + offset % 251) % 256).unwrap()
}

/// A device with data at its start.
pub(crate) fn device() -> Arc<MemoryDevice> {
    let device = MemoryDevice::new(SIZE as u64);
    let data: Vec<u8> = (0..DATA_END).map(pattern).collect();
    device.write_at(&data, 0).unwrap();
    Arc::new(device)
}

pub(crate) fn options(accepted_writes: AcceptedWrites) -> VhostUserExportOptions {
    VhostUserExportOptions {
        serial: "serial-of-this-disk-is-long".to_owned(),
        queue_count: 4,
        accepted_writes,
        ..VhostUserExportOptions::new("disk")
    }
}

/// A server with one disk.
pub(crate) struct TestServer {
    pub(crate) server: VhostUserServer,
    pub(crate) disk: DiskNumber,
    pub(crate) events: Arc<Mutex<Vec<String>>>,
}

impl TestServer {
    pub(crate) fn start(device: ExportDevice) -> Self {
        Self::start_with(device, Limits::default(), AcceptedWrites::Stay)
    }

    pub(crate) fn writable(device: Arc<dyn BlockDeviceMut>) -> Self {
        Self::start(ExportDevice::Writable(device))
    }

    pub(crate) fn start_with(device: ExportDevice, limits: Limits, accepted_writes: AcceptedWrites) -> Self {
        Self::serving(VhostUserExport::new(device, options(accepted_writes)), limits)
    }

    pub(crate) fn serving(export: VhostUserExport, limits: Limits) -> Self {
        let events = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&events);
        let server = VhostUserServer::new(VhostUserServerOptions {
            resources: ServerResources::new(limits),
            clock: Arc::new(SystemClock::new()),
            events: Arc::new(move |event: &VhostUserEvent<'_>| log.lock().unwrap().push(format!("{event:?}"))),
            server_number: SERVER_COUNT.fetch_add(1, Ordering::Relaxed) << 32,
        });
        let disk = server.add(export);
        Self { server, disk, events }
    }

    /// A new connection to the server.
    pub(crate) fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.server.serve(self.disk, Socket::Unix(theirs)).unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        ours
    }

    /// A guest that has started its queues.
    pub(crate) fn guest(&self) -> Guest {
        Guest::start(self.connect(), u64::MAX)
    }

    pub(crate) fn wait_for_event(&self, text: &str) {
        for _ in 0..60_000 {
            if self.events.lock().unwrap().iter().any(|line| line.contains(text)) {
                return;
            }
            pause_ms(1);
        }
        panic!("no event {text}: {:?}", self.events.lock().unwrap());
    }

    pub(crate) fn wait_until_gone(&self) {
        while self.server.connection_count() > 0 {
            std::thread::yield_now();
        }
    }
}

/// A file that can be shared as memory.
pub(crate) fn shared_file(size_bytes: usize) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("guest", flags).unwrap());
    file.set_len(size_bytes as u64).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

pub(crate) fn region(file: &File) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: MEMORY_BYTES as u64,
        userspace_addr: USER_ADDRESS,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u8,
    pub(crate) data: Vec<u8>,
    /// The length in the used ring.
    pub(crate) used_bytes: u32,
}

/// A queue of the driver.
pub(crate) struct TestRing {
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    pub(crate) next: u16,
    pub(crate) seen: u16,
}

/// A guest: its memory, its driver, and its front end.
pub(crate) struct Guest {
    pub(crate) front_end: Frontend,
    pub(crate) protocol: VhostUserProtocolFeatures,
    /// The socket of the front end, for messages that it cannot send.
    pub(crate) socket: UnixStream,
    pub(crate) memory: MmapRegion,
    pub(crate) file: File,
    pub(crate) rings: Vec<TestRing>,
    pub(crate) inflight: Option<(VhostUserInflight, OwnedFd)>,
}

impl Guest {
    /// Negotiates all features that are offered and in `mask`, and starts all queues.
    pub(crate) fn start(socket: UnixStream, mask: u64) -> Self {
        let file = shared_file(MEMORY_BYTES);
        let mut guest = Self::connect(socket, file, mask);
        // The storage daemon does not have it.
        if guest.protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            let wanted = VhostUserInflight::new(0, 0, 2, RING_SIZE);
            let (described, passed) = guest.front_end.get_inflight_fd(&wanted).unwrap();
            let passed = OwnedFd::from(passed);
            guest.front_end.set_inflight_fd(&described, passed.as_raw_fd()).unwrap();
            guest.inflight = Some((described, passed));
        }
        for queue in 0..2 {
            guest.start_ring(queue, 0);
        }
        guest
    }

    /// Negotiates, and shares the memory.
    pub(crate) fn connect(socket: UnixStream, file: File, mask: u64) -> Self {
        let mut front_end = Frontend::from_stream(socket.try_clone().unwrap(), 4);
        front_end.set_owner().unwrap();
        let offered = front_end.get_features().unwrap();
        front_end
            .set_features(offered & (mask | PROTOCOL_FEATURES | VERSION_1))
            .unwrap();
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        let protocol = front_end.get_protocol_features().unwrap() & wanted;
        front_end.set_protocol_features(protocol).unwrap();
        front_end.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        front_end.set_mem_table(&[region(&file)]).unwrap();
        let memory = MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), MEMORY_BYTES).unwrap();
        Self {
            front_end,
            protocol,
            socket,
            memory,
            file,
            rings: Vec::new(),
            inflight: None,
        }
    }

    pub(crate) fn place(queue: usize) -> VringConfigData {
        let ring = USER_ADDRESS + RING_BYTES * queue as u64;
        VringConfigData {
            queue_max_size: RING_SIZE,
            queue_size: RING_SIZE,
            flags: 0,
            desc_table_addr: ring,
            used_ring_addr: ring + USED,
            avail_ring_addr: ring + AVAILABLE,
            log_addr: None,
        }
    }

    pub(crate) fn start_ring(&mut self, queue: usize, base: u16) {
        let ring = TestRing {
            kick: EventFd::new(0).unwrap(),
            call: EventFd::new(WITHOUT_WAITING).unwrap(),
            next: base,
            seen: self.read_u16(queue, USED + 2),
        };
        self.front_end.set_vring_num(queue, RING_SIZE).unwrap();
        self.front_end.set_vring_addr(queue, &Self::place(queue)).unwrap();
        self.front_end.set_vring_base(queue, base).unwrap();
        self.front_end.set_vring_call(queue, &ring.call).unwrap();
        self.front_end.set_vring_kick(queue, &ring.kick).unwrap();
        self.front_end.set_vring_enable(queue, true).unwrap();
        self.rings.push(ring);
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        let memory = self.memory.as_volatile_slice();
        memory.write_slice(bytes, usize::try_from(address).unwrap()).unwrap();
    }

    pub(crate) fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let memory = self.memory.as_volatile_slice();
        memory
            .read_slice(&mut bytes, usize::try_from(address).unwrap())
            .unwrap();
        bytes
    }

    fn read_u16(&self, queue: usize, offset: u64) -> u16 {
        let place = usize::try_from(RING_BYTES * queue as u64 + offset).unwrap();
        self.memory.as_volatile_slice().load(place, Ordering::SeqCst).unwrap()
    }

    /// Writes a descriptor of a ring.
    pub(crate) fn describe(&self, queue: usize, index: u16, row: (u64, u32, u16, u16)) {
        self.write(RING_BYTES * queue as u64 + 16 * u64::from(index), &descriptor(row));
    }

    /// Makes the chain at `head` available, and notifies the server.
    pub(crate) fn offer(&mut self, queue: usize, head: u16) {
        let ring = &mut self.rings[queue];
        let slot = AVAILABLE + 4 + 2 * u64::from(ring.next % RING_SIZE);
        ring.next = ring.next.wrapping_add(1);
        let next = ring.next;
        let base = RING_BYTES * queue as u64;
        self.write(base + slot, &head.to_le_bytes());
        let place = usize::try_from(base + AVAILABLE + 2).unwrap();
        self.memory
            .as_volatile_slice()
            .store(next, place, Ordering::SeqCst)
            .unwrap();
        self.rings[queue].kick.write(1).unwrap();
    }

    /// Waits for the next completed request: its head, and the length that was written.
    pub(crate) fn wait(&mut self, queue: usize) -> (u32, u32) {
        let seen = self.rings[queue].seen;
        // With event indexes, the driver asks for a notification of the next request.
        let event = RING_BYTES * queue as u64 + AVAILABLE + 4 + 2 * u64::from(RING_SIZE);
        self.write(event, &seen.to_le_bytes());
        std::sync::atomic::fence(Ordering::SeqCst);
        while self.read_u16(queue, USED + 2) == seen {
            let is_notified = (0..PATIENCE_MS).any(|_| self.rings[queue].call.read().is_ok() || pause_ms(1));
            assert!(is_notified, "the guest is notified");
        }
        self.rings[queue].seen = seen.wrapping_add(1);
        let place = USED + 4 + 8 * u64::from(seen % RING_SIZE);
        let element = self.read(RING_BYTES * queue as u64 + place, 8);
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        (number(&element[..4]), number(&element[4..]))
    }

    /// Sends a request with data in one segment, and waits for its answer.
    pub(crate) fn request(&mut self, kind: u32, sector: u64, sent: &[u8], expected_bytes: usize) -> Answer {
        self.request_on(0, header(kind, sector).as_slice(), sent, expected_bytes)
    }

    pub(crate) fn request_on(&mut self, queue: usize, header: &[u8], sent: &[u8], expected_bytes: usize) -> Answer {
        let base = REQUESTS + (queue as u64) * (1 << 20);
        let (sent_at, expected_at) = (base + 0x1000, base + 0x8_0000);
        let status_at = base + 0x800;
        self.write(base, header);
        self.write(sent_at, sent);
        self.write(expected_at, &vec![0xee; expected_bytes]);
        self.write(status_at, &[0xff]);
        let mut rows = vec![(base, header.len(), 0)];
        if !sent.is_empty() {
            rows.push((sent_at, sent.len(), 0));
        }
        if expected_bytes > 0 {
            rows.push((expected_at, expected_bytes, WRITE));
        }
        rows.push((status_at, 1, WRITE));
        let last = rows.len() - 1;
        for (index, (address, length, flags)) in rows.into_iter().enumerate() {
            let next = if index < last { NEXT } else { 0 };
            let number = u16::try_from(index).unwrap();
            let length = u32::try_from(length).unwrap();
            self.describe(queue, number, (address, length, flags | next, number + 1));
        }
        self.offer(queue, 0);
        let (head, used_bytes) = self.wait(queue);
        assert_eq!(head, 0);
        Answer {
            status: self.read(status_at, 1)[0],
            data: self.read(expected_at, expected_bytes),
            used_bytes,
        }
    }
}

pub(crate) fn descriptor((address, length, flags, next): (u64, u32, u16, u16)) -> Vec<u8> {
    [
        &address.to_le_bytes()[..],
        &length.to_le_bytes(),
        &flags.to_le_bytes(),
        &next.to_le_bytes(),
    ]
    .concat()
}

pub(crate) fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// A range of a request to discard or to write zeroes.
pub(crate) fn range(sector: u64, count: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// All features except these.
pub(crate) fn without(features: u64) -> u64 {
    !features
}
