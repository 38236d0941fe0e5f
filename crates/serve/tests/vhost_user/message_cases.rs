//! Messages of front ends: what the server announces, and messages that end the connection.

use std::fs::File;
use std::io::{IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;

use holdfast_serve::vhost_user::ExportDevice;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::VhostUserFrontend as _;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo};

use crate::front_end::{FLUSH, Guest, MEMORY_BYTES, RING_SIZE, TestServer, USER_ADDRESS, device, region, shared_file};

const NEEDS_REPLY: u32 = 8;

fn message(code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap();
    [
        &code.to_le_bytes()[..],
        &flags.to_le_bytes(),
        &length.to_le_bytes(),
        body,
    ]
    .concat()
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn state(index: u32, number: u32) -> Vec<u8> {
    [index.to_le_bytes(), number.to_le_bytes()].concat()
}

/// Sends a message with files.
fn send(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(files)));
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL);
    assert_eq!(sent.unwrap(), bytes.len());
}

/// Whether the server closes the connection. Replies are skipped.
fn is_closed(mut socket: UnixStream) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match socket.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// A message that the server must not accept, and the number of files with it.
struct BadMessage {
    name: &'static str,
    bytes: Vec<u8>,
    file_count: usize,
}

fn bad(name: &'static str, code: u32, body: impl AsRef<[u8]>, file_count: usize) -> BadMessage {
    BadMessage {
        name,
        bytes: message(code, 1, body.as_ref()),
        file_count,
    }
}

/// A table of one region.
fn table(guest: u64, size: u64, user: u64, offset: u64) -> Vec<u8> {
    [state(1, 0), words(&[guest, size, user, offset])].concat()
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn bad_messages() -> Vec<BadMessage> {
    let memory = MEMORY_BYTES as u64;
    let mut list = vec![
        BadMessage {
            name: "version 0",
            bytes: message(1, 0, &[]),
            file_count: 0,
        },
        BadMessage {
            name: "version 2",
            bytes: message(1, 2, &[]),
            file_count: 0,
        },
        BadMessage {
            name: "a reply",
            bytes: message(1, 5, &[]),
            file_count: 0,
        },
        BadMessage {
            name: "unknown flags",
            bytes: message(1, 0x101, &[]),
            file_count: 0,
        },
        BadMessage {
            name: "too long",
            bytes: [message(1, 1, &[])[..8].to_vec(), vec![1, 16, 0, 0]].concat(),
            file_count: 0,
        },
        BadMessage {
            name: "length overflows",
            bytes: [message(1, 1, &[])[..8].to_vec(), vec![255; 4]].concat(),
            file_count: 0,
        },
        BadMessage {
            name: "garbage",
            bytes: b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            file_count: 0,
        },
        bad("code 0", 0, vec![], 0),
        bad("unknown code", 77, vec![], 0),
        bad("largest code", u32::MAX, vec![], 0),
        bad("features with a body", 1, words(&[1]), 0),
        bad("files that are not expected", 1, vec![], 1),
        bad("features without a body", 2, vec![], 0),
        bad("half of features", 2, vec![0; 4], 0),
        bad("features that were not offered", 2, words(&[1 << 40]), 0),
        bad("all features", 2, words(&[u64::MAX]), 0),
        bad("the reset of an owner with a body", 4, words(&[0]), 0),
        bad("memory without files", 5, table(0, memory, USER_ADDRESS, 0), 0),
        bad("memory with two files", 5, table(0, memory, USER_ADDRESS, 0), 2),
        bad("no regions", 5, state(0, 0), 1),
        bad(
            "more regions than described",
            5,
            [state(2, 0), words(&[0, memory, USER_ADDRESS, 0])].concat(),
            2,
        ),
        bad("a million regions", 5, state(1 << 20, 0), 1),
        bad(
            "padding in a table",
            5,
            [state(1, 1), words(&[0, memory, USER_ADDRESS, 0])].concat(),
            1,
        ),
        bad("empty region", 5, table(0, 0, USER_ADDRESS, 0), 1),
        bad("region past its file", 5, table(0, memory + 4096, USER_ADDRESS, 0), 1),
        bad(
            "region that begins at the end of its file",
            5,
            table(0, 4096, USER_ADDRESS, memory),
            1,
        ),
        bad(
            "offset far outside the file",
            5,
            table(0, 4096, USER_ADDRESS, 1 << 50),
            1,
        ),
        bad("offset inside a page", 5, table(0, 4096, USER_ADDRESS, 100), 1),
        bad("region of all addresses", 5, table(0, u64::MAX, 0, 0), 1),
        bad(
            "guest address overflows",
            5,
            table(u64::MAX, memory, USER_ADDRESS, 0),
            1,
        ),
        bad("user address overflows", 5, table(0, memory, u64::MAX, 0), 1),
        bad(
            "regions overlap",
            5,
            [state(2, 0), words(&[0, 8192, 0, 0, 4096, 8192, 1 << 20, 0])].concat(),
            2,
        ),
        bad("a log", 6, words(&[4096, 0]), 1),
        bad("ring of no size", 8, state(0, 0), 0),
        bad("ring of 3", 8, state(0, 3), 0),
        bad("ring of 2048", 8, state(0, 2048), 0),
        bad("ring of 65536", 8, state(0, 65536), 0),
        bad("size of ring 4", 8, state(4, 128), 0),
        bad("size of the last ring", 8, state(u32::MAX, 128), 0),
        bad("half of a size", 8, vec![0; 4], 0),
        bad(
            "ring without memory",
            9,
            [state(0, 0), words(&[USER_ADDRESS, USER_ADDRESS, USER_ADDRESS, 0])].concat(),
            0,
        ),
        bad(
            "unknown flags of a ring",
            9,
            [state(0, 2), words(&[0, 0, 0, 0])].concat(),
            0,
        ),
        bad(
            "ring at an odd address",
            9,
            [state(0, 0), words(&[1, 1, 1, 0])].concat(),
            0,
        ),
        bad("index of 65536", 10, state(0, 65536), 0),
        bad("index of ring 99", 10, state(99, 0), 0),
        bad("state of ring 4", 11, state(4, 0), 0),
        bad("kick before a place", 12, words(&[0]), 1),
        bad("kick of ring 4", 12, words(&[4]), 1),
        bad("kick without a file", 12, words(&[0x100]), 0),
        bad("kick with a file that is missing", 12, words(&[0]), 0),
        bad("call of ring 200", 13, words(&[200]), 1),
        bad("call without its file", 13, words(&[0]), 0),
        bad("call with two files", 13, words(&[0]), 2),
        bad("errors of ring 9", 14, words(&[9]), 1),
        bad("protocol features that were not offered", 16, words(&[1 << 1]), 0),
        bad("number of queues before it is negotiated", 17, vec![], 0),
        bad("enable before it is negotiated", 18, state(0, 1), 0),
        bad("backend channel", 21, vec![], 1),
        bad(
            "configuration before it is negotiated",
            24,
            [state(0, 8), vec![0; 12]].concat(),
            0,
        ),
        bad("inflight before it is negotiated", 31, words(&[0, 0, 0]), 0),
        bad("reset of the device", 34, vec![], 0),
        bad("memory slots before they are negotiated", 36, vec![], 0),
        bad(
            "region before slots are negotiated",
            37,
            words(&[0, 0, memory, USER_ADDRESS, 0]),
            1,
        ),
    ];
    // The same with a request for a reply: the reply may be an error, and the connection still ends.
    let asking = list.iter().filter(|bad| bad.bytes[4] == 1).map(|bad| {
        let mut bytes = bad.bytes.clone();
        bytes[4] |= u8::try_from(NEEDS_REPLY).unwrap();
        BadMessage { bytes, ..*bad }
    });
    let asking: Vec<BadMessage> = asking.collect();
    list.extend(asking);
    list
}

#[test]
fn illegal_messages_end_their_connection_only() {
    let server = TestServer::start(ExportDevice::ReadOnly(device()));
    let file = shared_file(MEMORY_BYTES);
    let list = bad_messages();
    assert!(list.len() >= 100, "{}", list.len());
    let mut witness = server.guest();
    for bad in list {
        let socket = server.connect();
        let files: Vec<BorrowedFd<'_>> = (0..bad.file_count).map(|_| file.as_fd()).collect();
        send(&socket, &bad.bytes, &files);
        assert!(is_closed(socket), "{}", bad.name);
    }
    assert_eq!(witness.request(0, 0, &[], 512).status, 0);
}

/// Files that are no memory, or no counters.
#[test]
fn files_of_the_wrong_kind_are_refused() {
    let server = TestServer::writable(device());
    for file in [
        File::open("/dev/null").unwrap(),
        File::open(".").unwrap(),
        File::open("/proc/self/maps").unwrap(),
    ] {
        let socket = server.connect();
        send(
            &socket,
            &message(5, 1, &table(0, 4096, USER_ADDRESS, 0)),
            &[file.as_fd()],
        );
        assert!(is_closed(socket));
        server.wait_until_gone();
    }
    // A regular file is always readable, and has no counter: the queue stops instead of turning endlessly.
    let guest = server.guest();
    let file = shared_file(4096);
    send(&guest.socket, &message(12, 1, &words(&[0])), &[file.as_fd()]);
    server.wait_for_event("QueueFailed");
    drop(guest);
}

#[test]
fn the_server_announces_what_it_has() {
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    let front_end = &mut guest.front_end;
    assert_eq!(front_end.get_queue_num().unwrap(), 4);
    assert_eq!(front_end.get_max_mem_slots().unwrap(), 256);
    let (_, space) = front_end
        .get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60])
        .unwrap();
    assert_eq!(space[..8], (8_u64 << 11).to_le_bytes(), "the capacity");
    assert_eq!(space[32], 1, "a write cache");
}

/// A driver that has switched the cache off, or knows no flush, finds every write durable.
#[test]
fn writes_are_durable_without_a_cache() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, MemoryDevice, Result};

    struct Counting(Arc<MemoryDevice>, AtomicUsize);
    impl BlockDevice for Counting {
        fn size_bytes(&self) -> u64 {
            self.0.size_bytes()
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
            self.0.read_at(buffer, offset)
        }
        fn extents(&self, range: std::ops::Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
            self.0.extents(range, extent_count_max)
        }
    }
    impl BlockDeviceMut for Counting {
        fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
            self.0.write_at(data, offset)
        }
        fn write_zeroes(&self, range: std::ops::Range<u64>) -> Result<()> {
            self.0.write_zeroes(range)
        }
        fn trim(&self, range: std::ops::Range<u64>) -> Result<()> {
            self.0.trim(range)
        }
        fn flush(&self) -> Result<()> {
            self.1.fetch_add(1, Ordering::SeqCst);
            self.0.flush()
        }
    }

    let disk = Arc::new(Counting(device(), AtomicUsize::new(0)));
    let flushes = || disk.1.swap(0, Ordering::SeqCst);
    let server = TestServer::writable(disk.clone());
    let mut guest = server.guest();
    assert_eq!(guest.request(1, 0, &[1; 512], 0).status, 0);
    assert_eq!(flushes(), 0);
    assert_eq!(guest.request(4, 0, &[], 0).status, 0);
    assert_eq!(flushes(), 1);
    guest
        .front_end
        .set_config(32, VhostUserConfigFlags::WRITABLE, &[0])
        .unwrap();
    assert_eq!(guest.request(1, 0, &[2; 512], 0).status, 0);
    assert_eq!(flushes(), 1);
    guest
        .front_end
        .set_config(32, VhostUserConfigFlags::WRITABLE, &[1])
        .unwrap();
    assert_eq!(guest.request(1, 0, &[3; 512], 0).status, 0);
    assert_eq!(flushes(), 0);
    drop(guest);
    server.wait_until_gone();
    assert_eq!(flushes(), 1, "the end of a connection");
    let mut old = Guest::start(server.connect(), !FLUSH);
    assert_eq!(old.request(1, 0, &[4; 512], 0).status, 0);
    assert_eq!(flushes(), 1);
    // Only the cache can be written.
    assert!(
        old.front_end
            .set_config(0, VhostUserConfigFlags::WRITABLE, &[0; 8])
            .is_err()
    );
}

/// Memory is added and removed while queues run.
#[test]
fn memory_can_be_plugged() {
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    let module = shared_file(1 << 20);
    let place = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 32,
        memory_size: 1 << 20,
        userspace_addr: USER_ADDRESS + (1 << 32),
        mmap_offset: 0,
        mmap_handle: std::os::fd::AsRawFd::as_raw_fd(&module),
    };
    for _ in 0..3 {
        guest.front_end.add_mem_region(&place).unwrap();
        assert_eq!(guest.request(0, 0, &[], 4096).status, 0);
        guest.front_end.remove_mem_region(&place).unwrap();
        assert_eq!(guest.request(0, 0, &[], 4096).status, 0);
    }
    guest.front_end.set_mem_table(&[region(&guest.file), place]).unwrap();
    assert_eq!(guest.request(0, 0, &[], 4096).status, 0);
    assert!(
        guest
            .front_end
            .remove_mem_region(&VhostUserMemoryRegionInfo {
                memory_size: 4096,
                ..place
            })
            .is_err()
    );
}

/// Queues stop and continue where they were, as when a machine is paused.
#[test]
fn queues_stop_and_continue() {
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    let mut count = 0;
    for round in 0..5 {
        for _ in 0..100 {
            assert_eq!(guest.request(0, 8, &[], 512).status, 0);
            count += 1;
        }
        let base = guest.front_end.get_vring_base(0).unwrap();
        assert_eq!(base, count, "round {round}");
        guest.rings.remove(0);
        guest.start_ring(0, u16::try_from(base).unwrap());
        guest.rings.rotate_right(1);
        // Disabled queues wait.
        guest.front_end.set_vring_enable(1, false).unwrap();
        guest.front_end.set_vring_enable(1, true).unwrap();
        assert_eq!(guest.request_on(1, &crate::front_end::header(0, 0), &[], 512).status, 0);
    }
}

#[test]
fn regions_of_requests_in_progress_are_checked() {
    let server = TestServer::start(ExportDevice::ReadOnly(device()));
    for (queues, size, mmap_size, offset) in [
        (0, RING_SIZE, 1 << 20, 0),
        (5, RING_SIZE, 1 << 20, 0),
        (u16::MAX, RING_SIZE, 1 << 40, 0),
        (1, 0, 1 << 20, 0),
        (1, 1025, 1 << 20, 0),
        (1, RING_SIZE, 16, 0),
        (1, RING_SIZE, 1 << 20, 4096),
        (1, RING_SIZE, 1 << 20, u64::MAX - 4095),
    ] {
        let mut guest = server.guest();
        let file = shared_file(4096);
        let described = VhostUserInflight::new(mmap_size, offset, queues, size);
        let passed = guest
            .front_end
            .set_inflight_fd(&described, std::os::fd::AsRawFd::as_raw_fd(&file));
        assert!(passed.is_err(), "{queues} {size} {mmap_size} {offset}");
        let mut guest = server.guest();
        let is_valid = (1..=4).contains(&queues) && (1..=1024).contains(&size);
        assert_eq!(
            guest.front_end.get_inflight_fd(&described).is_ok(),
            is_valid,
            "{queues} {size}"
        );
    }
}
