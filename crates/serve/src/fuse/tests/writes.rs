//! Files that can be written.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{
    Directory, INIT, NodeId, NotingDevice, OPEN, READ, TIME_MS, World, Writable, file, offer, range, space, write,
};
use crate::fuse::session::SessionStart;

const WRITE: u32 = 16;
const SETATTR: u32 = 4;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const FALLOCATE: u32 = 43;
const SYNCFS: u32 = 50;

const EPERM: i32 = 1;
const EIO: i32 = 5;
const EBADF: i32 = 9;
const EINVAL: i32 = 22;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

/// A session with one file, its node, an open handle, and its device.
struct Disk {
    world: World,
    node: NodeId,
    handle: u64,
    device: Arc<NotingDevice>,
}

impl Disk {
    fn new() -> Self {
        let content = Writable::default();
        let device = Arc::clone(&content.device);
        let mut root = Directory::new(TIME_MS);
        root.insert("disk", file(content)).unwrap();
        let world = World::with(&root, SessionStart::New);
        let reply = world.ask(INIT, NodeId(0), &offer(7, 45, u32::MAX));
        // Writes of 1 MiB.
        assert_eq!(reply.u32_at(20), 1 << 20);
        let node = world.node("disk");
        let opened = world.ask(OPEN, node, &[0; 8]);
        // Direct, and several writes at a time.
        assert_eq!(opened.u32_at(8), 1 | 1 << 6);
        Self {
            handle: opened.u64_at(0),
            world,
            node,
            device,
        }
    }

    fn error(&self, opcode: u32, fields: &[u8]) -> i32 {
        self.world.ask(opcode, self.node, fields).error
    }

    fn content(&self) -> Vec<u8> {
        self.world.ask(READ, self.node, &range(self.handle, 0, 16384)).body
    }

    fn flush_count(&self) -> usize {
        self.device.flush_count.load(Ordering::SeqCst)
    }
}

#[test]
fn writes_change_the_file_within_its_size() {
    let disk = Disk::new();
    let handle = disk.handle;
    let reply = disk.world.ask(WRITE, disk.node, &write(handle, 4095, b"abc"));
    assert_eq!((reply.error, reply.body.len(), reply.u32_at(0)), (0, 8, 3));
    let mut expected = vec![1; 16384];
    expected[4095..4098].copy_from_slice(b"abc");
    assert!(disk.content() == expected);
    for (offset, length, error) in [(16384, 0, 0), (16383, 1, 0), (16383, 2, ENOSPC), (u64::MAX, 1, ENOSPC)] {
        assert_eq!(
            disk.error(WRITE, &write(handle, offset, &vec![7; length])),
            error,
            "{offset}"
        );
    }
    assert_eq!(disk.error(WRITE, &write(99, 0, b"x")), EBADF);
    // Data that is shorter than its length.
    let mut fields = write(handle, 0, b"abc");
    fields.pop();
    assert_eq!(disk.error(WRITE, &fields), EINVAL);
}

#[test]
fn ranges_become_zero() {
    let disk = Disk::new();
    let (keep, punch, zero) = (1, 2, 16);
    for (offset, length, mode, error) in [
        (0, 4096, punch | keep, 0),
        (8192, 100, zero, 0),
        (9000, 1, zero | keep, 0),
        (16000, 1000, punch | keep, 0),
        (20000, 1000, punch | keep, 0),
        (16000, 1000, zero, ENOSPC),
        (u64::MAX, 2, punch | keep, EFBIG),
        (0, 4096, 0, EOPNOTSUPP),
        (0, 4096, keep, EOPNOTSUPP),
        (0, 4096, 8, EOPNOTSUPP),
        (0, 4096, 32, EOPNOTSUPP),
        (0, 4096, punch | zero, EOPNOTSUPP),
    ] {
        let fields = space(disk.handle, offset, length, mode);
        assert_eq!(disk.error(FALLOCATE, &fields), error, "{offset} {length} {mode}");
    }
    let mut expected = vec![1; 16384];
    expected[..4096].fill(0);
    expected[8192..8292].fill(0);
    expected[9000] = 0;
    expected[16000..].fill(0);
    assert!(disk.content() == expected);
}

#[test]
fn a_sync_flushes_the_device_and_closing_does_not() {
    let disk = Disk::new();
    assert_eq!(
        (disk.error(FLUSH, &range(disk.handle, 0, 0)), disk.flush_count()),
        (0, 0)
    );
    assert_eq!(
        (disk.error(FSYNC, &range(disk.handle, 0, 0)), disk.flush_count()),
        (0, 1)
    );
    // Each file once, although it is open twice.
    disk.world.open(OPEN, disk.node);
    assert_eq!((disk.error(SYNCFS, &[0; 8]), disk.flush_count()), (0, 2));
}

/// A failed flush must not look like a successful one.
#[test]
fn errors_of_the_device_are_errors_of_the_request() {
    let disk = Disk::new();
    let handle = disk.handle;
    for (kind, error) in [
        (std::io::ErrorKind::StorageFull, ENOSPC),
        (std::io::ErrorKind::Other, EIO),
    ] {
        *disk.device.fails.lock().unwrap() = Some(kind);
        assert_eq!(disk.error(WRITE, &write(handle, 0, b"x")), error);
        assert_eq!(disk.error(FALLOCATE, &space(handle, 0, 1, 3)), error);
        assert_eq!(disk.error(FSYNC, &range(handle, 0, 0)), error);
        assert_eq!(disk.error(SYNCFS, &[0; 8]), error);
        assert_eq!(disk.world.take_reports().len(), 4);
    }
}

#[test]
fn the_size_of_a_file_is_fixed() {
    let disk = Disk::new();
    let change = |bits: u32, size_bytes: u64| {
        let mut fields = bits.to_ne_bytes().to_vec();
        fields.extend([0; 12]);
        fields.extend(size_bytes.to_ne_bytes());
        fields.extend([0; 64]);
        fields
    };
    assert_eq!(disk.error(SETATTR, &change(1 << 3, 0)), EPERM);
    assert_eq!(disk.error(SETATTR, &change(1 << 3, 16385)), EPERM);
    assert_eq!(disk.error(SETATTR, &change(1 << 3, 16384)), 0);
    // Only times.
    let reply = disk.world.ask(SETATTR, disk.node, &change(1 << 5, 0));
    assert_eq!((reply.error, reply.u64_at(24)), (0, 16384));
}
