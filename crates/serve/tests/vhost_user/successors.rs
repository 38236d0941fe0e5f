//! A server that takes the place of a killed one.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use holdfast_serve::vhost_user::{AcceptedWrites, ExportDevice, Limits};
use vhost::vhost_user::VhostUserFrontend as _;
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};

use crate::front_end::{Guest, NEXT, REQUESTS, TestServer, WRITE, device, header};

fn server(accepted_writes: AcceptedWrites) -> TestServer {
    TestServer::start_with(ExportDevice::Writable(device()), Limits::default(), accepted_writes)
}

/// Makes the region of requests in progress look as after a kill: the request at `head` was taken and not completed.
fn take(guest: &Guest, head: u16) {
    let (described, file) = guest.inflight.as_ref().unwrap();
    let file = std::fs::File::from(file.try_clone().unwrap());
    let size = usize::try_from(described.mmap_size).unwrap();
    let region = MmapRegion::<()>::from_file(FileOffset::new(file, 0), size).unwrap();
    let bytes = region.as_volatile_slice();
    bytes.write_slice(&[1], 16 + 16 * usize::from(head)).unwrap();
    // All servers that used the region are others, and did not end in order.
    for queue in 0..2 {
        bytes.write_slice(&9_u64.to_le_bytes(), size / 2 * queue).unwrap();
    }
}

/// Connects the same guest to another server, as QEMU does.
pub(crate) fn reconnect(mut old: Guest, server: &TestServer) -> vhost::Result<Guest> {
    let (described, file) = old.inflight.take().unwrap();
    let memory = old.file.try_clone().unwrap();
    let seen: Vec<u16> = old.rings.iter().map(|ring| ring.seen).collect();
    let next: Vec<u16> = old.rings.iter().map(|ring| ring.next).collect();
    drop(old);
    let mut guest = Guest::connect(server.connect(), memory, u64::MAX);
    guest.front_end.set_inflight_fd(&described, file.as_raw_fd())?;
    for queue in 0..2 {
        guest.start_ring(queue, seen[queue]);
        guest.rings[queue].next = next[queue];
    }
    guest.inflight = Some((described, file));
    Ok(guest)
}

#[test]
fn requests_that_were_not_completed_are_repeated() {
    let first = server(AcceptedWrites::Stay);
    let mut guest = first.guest();
    assert_eq!(guest.request(1, 0, &[7; 512], 0).status, 0);
    // Written as if the server was killed between taking and completing it.
    guest.front_end.set_vring_enable(0, false).unwrap();
    guest.write(REQUESTS, &header(1, 8));
    guest.write(REQUESTS + 0x1000, &[8; 512]);
    guest.write(REQUESTS + 0x8_0000, &[0xff]);
    guest.describe(0, 5, (REQUESTS, 16, NEXT, 6));
    guest.describe(0, 6, (REQUESTS + 0x1000, 512, NEXT, 7));
    guest.describe(0, 7, (REQUESTS + 0x8_0000, 1, WRITE, 0));
    guest.offer(0, 5);
    let (described, file) = {
        let (described, file) = guest.inflight.as_ref().unwrap();
        (*described, file.try_clone().unwrap())
    };
    let memory = guest.file.try_clone().unwrap();
    let (seen, next) = (guest.rings[0].seen, guest.rings[0].next);
    let second = server(AcceptedWrites::Stay);
    drop(first);
    take(&guest, 5);
    guest.inflight = Some((described, file));
    guest.file = memory;
    assert_eq!((seen, next), (1, 2));
    let mut guest = reconnect(guest, &second).unwrap();
    assert_eq!(guest.wait(0).0, 5);
    assert_eq!(guest.read(REQUESTS + 0x8_0000, 1), [0]);
    assert_eq!(guest.request(0, 8, &[], 512).data, [8; 512]);
    assert_eq!(guest.request_on(1, &header(0, 8), &[], 512).data, [8; 512]);
}

/// A machine must not continue on a disk without its writes.
#[test]
fn machines_with_lost_writes_are_refused() {
    for (accepted_writes, was_killed, is_served) in [
        (AcceptedWrites::Stay, true, true),
        (AcceptedWrites::Stay, false, true),
        (AcceptedWrites::NeedFlush, true, false),
        (AcceptedWrites::NeedFlush, false, true),
        (AcceptedWrites::Discarded, true, false),
        (AcceptedWrites::Discarded, false, false),
    ] {
        let first = server(accepted_writes);
        let mut guest = first.guest();
        assert_eq!(guest.request(1, 0, &[7; 512], 0).status, 0);
        drop(first);
        if was_killed {
            take(&guest, 127);
        }
        let second = server(accepted_writes);
        let again = reconnect(guest, &second);
        assert_eq!(again.is_ok(), is_served, "{accepted_writes:?}, killed: {was_killed}");
        if !is_served {
            second.wait_for_event("WritesLost");
        }
    }
    // The same server has all writes.
    let server = server(AcceptedWrites::Discarded);
    let mut guest = server.guest();
    assert_eq!(guest.request(1, 0, &[7; 512], 0).status, 0);
    let (described, file) = guest.inflight.take().unwrap();
    let memory = guest.file.try_clone().unwrap();
    drop(guest);
    server.wait_until_gone();
    let mut guest = Guest::connect(server.connect(), memory, u64::MAX);
    guest.front_end.set_inflight_fd(&described, file.as_raw_fd()).unwrap();
    // A disk that cannot be written loses nothing.
    let readable = || TestServer::start(ExportDevice::ReadOnly(Arc::clone(&device()) as _));
    let first = readable();
    let mut guest = first.guest();
    assert_eq!(guest.request(0, 0, &[], 512).status, 0);
    drop(first);
    assert!(reconnect(guest, &readable()).is_ok());
}
