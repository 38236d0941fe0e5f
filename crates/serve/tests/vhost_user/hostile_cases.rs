//! Descriptors and rings of a hostile guest: they harm only the guest itself.

use crate::front_end::{Guest, INDIRECT, MEMORY_BYTES, NEXT, REQUESTS, TestServer, WRITE, device, header};

const END_OF_MEMORY: u64 = MEMORY_BYTES as u64;
const STATUS: u64 = REQUESTS + 0x2000;

type Row = (u64, u32, u16, u16);

/// Chains that have no valid place for a status. They are returned with length 0.
#[test]
fn chains_without_a_status_are_returned_unanswered() {
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    guest.write(REQUESTS, &header(0, 0));
    let rows: &[(&str, &[Row])] = &[
        ("no status", &[(REQUESTS, 16, 0, 0)]),
        (
            "only data to the device",
            &[(REQUESTS, 16, NEXT, 1), (REQUESTS, 512, 0, 0)],
        ),
        ("empty status", &[(REQUESTS, 16, NEXT, 1), (STATUS, 0, WRITE, 0)]),
        ("loop of one", &[(REQUESTS, 16, NEXT, 0)]),
        ("loop of two", &[(REQUESTS, 16, NEXT, 1), (STATUS, 1, NEXT | WRITE, 0)]),
        (
            "long loop",
            &[
                (REQUESTS, 16, NEXT, 1),
                (STATUS, 1, NEXT | WRITE, 2),
                (STATUS, 1, NEXT | WRITE, 1),
            ],
        ),
        ("next outside the ring", &[(REQUESTS, 16, NEXT, 128)]),
        ("next far outside the ring", &[(REQUESTS, 16, NEXT, u16::MAX)]),
        (
            "readable after writable",
            &[(STATUS, 1, NEXT | WRITE, 1), (REQUESTS, 16, 0, 0)],
        ),
        ("empty table", &[(REQUESTS, 0, INDIRECT, 0)]),
        ("table of a part", &[(REQUESTS, 24, INDIRECT, 0)]),
        ("table too long", &[(0, 1025 * 16, INDIRECT, 0)]),
        ("huge table", &[(0, 0xffff_fff0, INDIRECT, 0)]),
        ("table outside the memory", &[(END_OF_MEMORY, 16, INDIRECT, 0)]),
        ("table across the end", &[(END_OF_MEMORY - 8, 16, INDIRECT, 0)]),
        ("table at the end of all addresses", &[(u64::MAX - 7, 16, INDIRECT, 0)]),
        (
            "table with a next one",
            &[(REQUESTS, 16, INDIRECT | NEXT, 1), (STATUS, 1, WRITE, 0)],
        ),
        ("nested table", &[(0, 16, INDIRECT, 0)]),
        (
            "status outside the memory",
            &[(REQUESTS, 16, NEXT, 1), (END_OF_MEMORY, 1, WRITE, 0)],
        ),
        (
            "status at the end of all addresses",
            &[(REQUESTS, 16, NEXT, 1), (u64::MAX, 1, WRITE, 0)],
        ),
    ];
    for (name, rows) in rows {
        for (index, row) in rows.iter().enumerate() {
            guest.describe(0, u16::try_from(index).unwrap(), *row);
        }
        guest.offer(0, 0);
        assert_eq!(guest.wait(0), (0, 0), "{name}");
    }
    assert_eq!(guest.request(0, 0, &[], 512).status, 0, "the queue still works");
}

/// Requests whose data is not valid get an error.
#[test]
fn segments_outside_the_memory_and_huge_ones_are_errors() {
    let disk = device();
    let before = disk.to_bytes();
    let server = TestServer::writable(disk.clone());
    let mut guest = server.guest();
    let header_at = |kind: u32| REQUESTS + u64::from(kind) * 64;
    for kind in [0, 1, 4, 8, 11, 13] {
        guest.write(header_at(kind), &header(kind, 0));
    }
    let status = (STATUS, 1, WRITE, 0);
    let cases: &[(&str, &[Row])] = &[
        (
            "header that only the device can write",
            &[(REQUESTS, 16, NEXT | WRITE, 1), status],
        ),
        ("no header", &[status]),
        ("header outside the memory", &[(END_OF_MEMORY, 16, NEXT, 1), status]),
        (
            "header across the end of memory",
            &[(END_OF_MEMORY - 8, 16, NEXT, 1), status],
        ),
        (
            "header at the end of all addresses",
            &[(u64::MAX - 4, 16, NEXT, 1), status],
        ),
        ("15 bytes of a header", &[(REQUESTS, 15, NEXT, 1), status]),
        (
            "read to outside the memory",
            &[
                (header_at(0), 16, NEXT, 1),
                (END_OF_MEMORY, 512, NEXT | WRITE, 2),
                status,
            ],
        ),
        (
            "read across the end",
            &[
                (header_at(0), 16, NEXT, 1),
                (END_OF_MEMORY - 1, 512, NEXT | WRITE, 2),
                status,
            ],
        ),
        (
            "read to the end of all addresses",
            &[(header_at(0), 16, NEXT, 1), (u64::MAX, 512, NEXT | WRITE, 2), status],
        ),
        (
            "read of 4 GiB",
            &[(header_at(0), 16, NEXT, 1), (0, u32::MAX, NEXT | WRITE, 2), status],
        ),
        (
            "read of more than the disk",
            &[(header_at(0), 16, NEXT, 1), (0, 1 << 30, NEXT | WRITE, 2), status],
        ),
        (
            "write from outside the memory",
            &[(header_at(1), 16, NEXT, 1), (END_OF_MEMORY, 512, NEXT, 2), status],
        ),
        (
            "write across the end",
            &[(header_at(1), 16, NEXT, 1), (END_OF_MEMORY - 511, 512, NEXT, 2), status],
        ),
        (
            "write of 4 GiB",
            &[(header_at(1), 16, NEXT, 1), (0, 0xffff_fe00, NEXT, 2), status],
        ),
        (
            "ranges outside the memory",
            &[(header_at(11), 16, NEXT, 1), (END_OF_MEMORY, 16, NEXT, 2), status],
        ),
        (
            "zeroes outside the memory",
            &[(header_at(13), 16, NEXT, 1), (END_OF_MEMORY, 16, NEXT, 2), status],
        ),
        (
            "4 GiB of ranges",
            &[(header_at(13), 16, NEXT, 1), (0, u32::MAX, NEXT, 2), status],
        ),
        (
            "serial number outside the memory",
            &[
                (header_at(8), 16, NEXT, 1),
                (END_OF_MEMORY, 20, NEXT | WRITE, 2),
                status,
            ],
        ),
    ];
    for (name, rows) in cases {
        guest.write(STATUS, &[0xff]);
        for (index, row) in rows.iter().enumerate() {
            let next = u16::try_from(index + 1).unwrap();
            guest.describe(0, next - 1, (row.0, row.1, row.2, next));
        }
        guest.offer(0, 0);
        assert_eq!(guest.wait(0).0, 0, "{name}");
        assert_eq!(guest.read(STATUS, 1), [1], "{name}");
    }
    assert!(disk.to_bytes() == before);
}

/// Many segments of 4 GiB at the same place are refused without memory for them.
#[test]
fn the_sum_of_segments_is_bounded() {
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    guest.write(REQUESTS, &header(0, 0));
    guest.describe(0, 0, (REQUESTS, 16, NEXT, 1));
    for index in 1..127 {
        guest.describe(0, index, (0, u32::MAX, NEXT | WRITE, index + 1));
    }
    guest.describe(0, 127, (STATUS, 1, WRITE, 0));
    guest.offer(0, 0);
    assert_eq!(guest.wait(0).0, 0);
    assert_eq!(guest.read(STATUS, 1), [1]);
}

/// A ring whose index jumps, or whose heads are not in it, stops; another queue continues.
#[test]
fn a_wrong_ring_stops_alone() {
    for is_head in [false, true] {
        let server = TestServer::writable(device());
        let mut guest = server.guest();
        if is_head {
            guest.offer(0, 128);
        } else {
            // An index that jumps by more than the size of the ring.
            guest.rings[0].next = 1000;
            guest.offer(0, 0);
        }
        server.wait_for_event("QueueFailed");
        assert_eq!(guest.request_on(1, &header(0, 0), &[], 512).status, 0);
        // A reset of the device starts the queue again.
        guest.rings.clear();
        guest.write(0x4002, &[0; 2]);
        guest.write(0x8002, &[0; 2]);
        guest.start_ring(0, 0);
        assert_eq!(guest.request(0, 0, &[], 512).status, 0);
    }
}

/// The same descriptors are offered again while they are in use.
#[test]
fn requests_that_are_offered_twice_are_answered_twice() {
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    guest.write(REQUESTS, &header(0, 0));
    guest.describe(0, 0, (REQUESTS, 16, NEXT, 1));
    guest.describe(0, 1, (REQUESTS + 4096, 4096, NEXT | WRITE, 2));
    guest.describe(0, 2, (STATUS, 1, WRITE, 0));
    for _ in 0..100 {
        guest.offer(0, 0);
    }
    for _ in 0..100 {
        assert_eq!(guest.wait(0).0, 0);
    }
}

/// The memory disappears while a queue runs.
#[test]
fn memory_that_is_taken_away_stops_the_queue() {
    use crate::front_end::region;
    use vhost::vhost_user::VhostUserFrontend as _;
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    let region = region(&guest.file);
    guest.front_end.remove_mem_region(&region).unwrap();
    guest.offer(0, 0);
    server.wait_for_event("QueueFailed");
    drop::<Guest>(guest);
    server.wait_until_gone();
}
