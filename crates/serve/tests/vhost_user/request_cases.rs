//! Requests: legal ones compared with a model of the disk, and illegal ones, which must change nothing.

use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_serve::vhost_user::ExportDevice;

use crate::front_end::{
    Answer, EVENT_IDX, FLUSH, Guest, INDIRECT_DESC, NEXT, REQUESTS, SIZE, TestServer, WRITE, descriptor, device,
    header, pattern, range, without,
};

const IN: u32 = 0;
const OUT: u32 = 1;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
/// Sectors of the disk.
const END: u64 = (SIZE / 512) as u64;

/// A request and its required status.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) header: Vec<u8>,
    pub(crate) sent: Vec<u8>,
    pub(crate) expected_bytes: usize,
    pub(crate) status: u8,
}

fn case(name: &'static str, kind: u32, sector: u64, sent: Vec<u8>, expected_bytes: usize, status: u8) -> Case {
    Case {
        name,
        header: header(kind, sector),
        sent,
        expected_bytes,
        status,
    }
}

/// 104 legal requests.
pub(crate) fn legal_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for length in [512, 1024, 4096, 4608, 65536, 131_072, 131_584, 393_216] {
        let sectors = (length / 512) as u64;
        for sector in [0, 1, 7, 2048 - sectors / 2, END - sectors] {
            cases.push(case("read", IN, sector, vec![], length, 0));
            let data = (0..length).map(|index| pattern(index + 77)).collect();
            cases.push(case("write", OUT, sector, data, 0, 0));
        }
    }
    for (sector, count) in [(0, 8), (16, 1), (100, 2000), (END - 1, 1)] {
        for flags in [0, 1] {
            cases.push(case("write zeroes", WRITE_ZEROES, 0, range(sector, count, flags), 0, 0));
        }
        cases.push(case("discard", DISCARD, 0, range(sector, count, 0), 0, 0));
    }
    cases.push(case(
        "many ranges of zeroes",
        WRITE_ZEROES,
        9,
        range(64, 8, 1).repeat(32),
        0,
        0,
    ));
    cases.push(case(
        "many ranges to discard",
        DISCARD,
        9,
        range(64, 8, 0).repeat(32),
        0,
        0,
    ));
    for sector in [0, 5, u64::MAX] {
        cases.push(case("flush", 4, sector, vec![], 0, 0));
        cases.push(case("serial number", GET_ID, sector, vec![], 20, 0));
    }
    cases.push(case("part of the serial number", GET_ID, 0, vec![], 5, 0));
    cases.push(case("place for more than the serial number", GET_ID, 0, vec![], 64, 0));
    cases.push(case("read of nothing", IN, 3, vec![], 0, 0));
    cases.push(case("write of nothing", OUT, 3, vec![], 0, 0));
    cases
}

/// 105 illegal requests: status 1 is an error, 2 means not supported.
pub(crate) fn illegal_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, name) in [(IN, "read"), (OUT, "write")] {
        for (sector, length) in [
            (END, 512),
            (END - 1, 1024),
            (END - 7, 4096),
            (END + 1, 512),
            (u64::MAX, 512),
            (u64::MAX / 512, 512),
            (u64::MAX / 512 + 1, 512),
            (1 << 55, 512),
            (1 << 63, 4096),
            (0, 1),
            (0, 511),
            (0, 513),
            (0, 4095),
            (7, 100),
            (END - 1, 511),
        ] {
            let (sent, expected_bytes) = if kind == IN {
                (vec![], length)
            } else {
                (vec![9; length], 0)
            };
            cases.push(case(name, kind, sector, sent, expected_bytes, 1));
        }
    }
    // The bit of an obsolete feature, which is not offered.
    for (kind, expected_bytes) in [(1 << 31, 512), (1 << 31 | 1, 0)] {
        let sent = vec![1; 512 - expected_bytes];
        cases.push(case("obsolete barrier", kind, 0, sent, expected_bytes, 2));
        cases.push(case("obsolete barrier at the end", kind, END - 1, vec![], 512, 2));
    }
    for kind in [
        2,
        3,
        5,
        6,
        7,
        9,
        10,
        12,
        14,
        15,
        16,
        17,
        18,
        20,
        22,
        24,
        26,
        28,
        99,
        u32::MAX,
    ] {
        cases.push(case("unknown type", kind, 0, vec![], 512, 2));
        cases.push(case("unknown type with data", kind, 0, vec![1; 512], 0, 2));
    }
    for kind in [DISCARD, WRITE_ZEROES] {
        for (name, sent, status) in [
            ("no range", vec![], 1),
            ("part of a range", vec![0; 15], 1),
            ("range and a byte", vec![0; 17], 1),
            ("33 ranges", range(0, 1, 0).repeat(33), 1),
            ("behind the end", range(END, 1, 0), 1),
            ("across the end", range(END - 1, 2, 0), 1),
            ("position overflows", range(u64::MAX, 1, 0), 1),
            ("end overflows", range(u64::MAX / 512, 1, 0), 1),
            ("too many sectors", range(0, u32::MAX, 0), 1),
            ("one sector too many", range(0, (1 << 21) + 1, 0), 1),
            (
                "second range behind the end",
                [range(0, 1, 0), range(END, 1, 0)].concat(),
                1,
            ),
            ("unknown flag", range(0, 1, 2), 2),
            ("all flags", range(0, 1, u32::MAX), 2),
            (
                "second range with an unknown flag",
                [range(0, 1, 0), range(0, 1, 4)].concat(),
                2,
            ),
        ] {
            cases.push(case(name, kind, 0, sent, 0, status));
        }
    }
    cases.push(case("discard with unmap", DISCARD, 0, range(0, 1, 1), 0, 2));
    for length in [1, 15] {
        cases.push(Case {
            header: vec![0; length],
            ..case("part of a header", IN, 0, vec![], 512, 1)
        });
    }
    cases
}

/// The disk after a legal request.
fn apply(model: &mut [u8], case: &Case) {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    let (kind, sector) = (case.header[0], number(&case.header[8..16]));
    if u32::from(kind) == OUT {
        let start = usize::try_from(sector).unwrap() * 512;
        model[start..start + case.sent.len()].copy_from_slice(&case.sent);
    }
    if [WRITE_ZEROES, DISCARD].contains(&u32::from(kind)) {
        for range in case.sent.chunks(16) {
            let start = usize::try_from(number(&range[..8])).unwrap() * 512;
            let length = usize::try_from(number(&range[8..12])).unwrap() * 512;
            model[start..start + length].fill(0);
        }
    }
}

/// The answer to a legal request.
fn expected(model: &[u8], case: &Case) -> Vec<u8> {
    let sector: u64 = case.header[8..16]
        .iter()
        .rev()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    match u32::from(case.header[0]) {
        IN => {
            let start = usize::try_from(sector).unwrap() * 512;
            model[start..start + case.expected_bytes].to_vec()
        }
        GET_ID => {
            let mut serial = b"serial-of-this-disk-is-long"[..20].to_vec();
            serial.resize(case.expected_bytes.max(20), 0xee);
            serial.truncate(case.expected_bytes);
            serial
        }
        _ => Vec::new(),
    }
}

#[test]
fn legal_requests_do_what_they_say() {
    for features in [u64::MAX, without(EVENT_IDX | INDIRECT_DESC), without(FLUSH)] {
        let disk = device();
        let server = TestServer::writable(disk.clone());
        let mut guest = Guest::start(server.connect(), features);
        let mut model = disk.to_bytes();
        let cases = legal_cases();
        assert!(cases.len() >= 100, "{}", cases.len());
        for case in &cases {
            let answer = guest.request_on(0, &case.header, &case.sent, case.expected_bytes);
            apply(&mut model, case);
            let data = expected(&model, case);
            let read_bytes = data.len().min(if case.header[0] == 8 { 20 } else { usize::MAX });
            let used_bytes = u32::try_from(read_bytes).unwrap() + 1;
            assert!(
                answer
                    == Answer {
                        status: 0,
                        data,
                        used_bytes
                    },
                "{}: status {}, {} bytes",
                case.name,
                answer.status,
                answer.used_bytes
            );
        }
        assert!(disk.to_bytes() == model);
        let events = server.events.lock().unwrap().join("\n");
        assert!(!events.contains("Failed") && !events.contains("Invalid"), "{events}");
    }
}

#[test]
fn illegal_requests_are_refused_and_change_nothing() {
    let disk = device();
    let server = TestServer::writable(disk.clone());
    let mut guest = server.guest();
    let before = disk.to_bytes();
    let cases = illegal_cases();
    assert!(cases.len() >= 100, "{}", cases.len());
    for case in &cases {
        let answer = guest.request_on(0, &case.header, &case.sent, case.expected_bytes);
        assert_eq!((answer.status, answer.used_bytes), (case.status, 1), "{}", case.name);
        assert!(answer.data.iter().all(|byte| *byte == 0xee), "{}: no data", case.name);
    }
    assert!(disk.to_bytes() == before);
    assert_eq!(guest.request(IN, 0, &[], 512).status, 0, "the queue still works");
}

#[test]
fn a_disk_that_cannot_be_written_refuses_changes() {
    let disk = device();
    let before = disk.to_bytes();
    let server = TestServer::start(ExportDevice::ReadOnly(disk.clone()));
    let mut guest = server.guest();
    for case in legal_cases() {
        let changes = [OUT, DISCARD, WRITE_ZEROES].contains(&u32::from(case.header[0]));
        let answer = guest.request_on(0, &case.header, &case.sent, case.expected_bytes);
        assert_eq!(answer.status, u8::from(changes), "{}", case.name);
    }
    assert!(disk.to_bytes() == before);
}

/// A driver may divide a request into descriptors as it likes (section 2.7.4).
#[test]
fn any_division_into_segments_is_the_same_request() {
    let seed = test_seed();
    let mut random = SeededRandom::new(seed);
    let disk = device();
    let server = TestServer::writable(disk.clone());
    let mut guest = server.guest();
    let mut model = disk.to_bytes();
    for round in 0..200_u64 {
        let is_read = random.one_in(2);
        let length = usize::try_from(random.below(40) + 1).unwrap() * 512;
        let sector = random.below(END - length as u64 / 512);
        let start = usize::try_from(sector).unwrap() * 512;
        let data = random.bytes(length);
        let (readable, writable) = if is_read {
            (header(IN, sector), length + 1)
        } else {
            ([header(OUT, sector), data.clone()].concat(), 1)
        };
        let (readable_at, writable_at) = (REQUESTS, REQUESTS + (1 << 20));
        guest.write(readable_at, &readable);
        guest.write(writable_at, &vec![0xee; writable]);
        let mut rows = Vec::new();
        for (address, total, flags) in [(readable_at, readable.len(), 0), (writable_at, writable, WRITE)] {
            let mut done = 0;
            while done < total {
                let most = (total - done).min(1 + total / 20);
                let part = if rows.len() > 100 {
                    total - done
                } else {
                    usize::try_from(random.below(most as u64 + 1)).unwrap()
                };
                rows.push((address + done as u64, u32::try_from(part).unwrap(), flags));
                done += part;
            }
        }
        let last = rows.len() - 1;
        let table = REQUESTS + 0x8_0000;
        for (index, (address, length, flags)) in rows.iter().enumerate() {
            let number = u16::try_from(index).unwrap();
            let row = (
                *address,
                *length,
                flags | if index < last { NEXT } else { 0 },
                number + 1,
            );
            guest.describe(0, number, row);
            guest.write(table + 16 * index as u64, &descriptor(row));
        }
        // Every second request is in a table.
        if round % 2 == 0 {
            guest.describe(0, 0, (table, u32::try_from(rows.len() * 16).unwrap(), 4, 0));
        }
        guest.offer(0, 0);
        guest.wait(0);
        let answer = guest.read(writable_at, writable);
        assert_eq!(answer.last(), Some(&0), "seed {seed}, round {round}");
        if is_read {
            assert!(
                answer[..length] == model[start..start + length],
                "seed {seed}, round {round}"
            );
        } else {
            model[start..start + length].copy_from_slice(&data);
        }
    }
    assert!(disk.to_bytes() == model, "seed {seed}");
}

#[test]
fn queues_work_at_the_same_time() {
    let disk = device();
    let server = TestServer::writable(disk.clone());
    let mut guest = server.guest();
    for round in 0..100_u64 {
        let data = vec![u8::try_from(round).unwrap(); 4096];
        for queue in 0..2 {
            let sector = round * 16 + queue as u64 * 8;
            assert_eq!(guest.request_on(queue, &header(OUT, sector), &data, 0).status, 0);
            let other = guest.request_on(1 - queue, &header(IN, sector), &[], 4096);
            assert!(other.data == data);
        }
    }
}

/// All requests of a full ring are answered, in any order.
#[test]
fn a_full_ring_is_completed() {
    let server = TestServer::writable(device());
    let mut guest = server.guest();
    guest.write(REQUESTS, &header(IN, 8));
    for round in 0..20 {
        for index in (0..126_u16).step_by(3) {
            let status = REQUESTS + 0x8_0000 + u64::from(index);
            let data = REQUESTS + 0x1000 + u64::from(index) * 4096;
            guest.write(status, &[0xff]);
            guest.describe(0, index, (REQUESTS, 16, NEXT, index + 1));
            guest.describe(0, index + 1, (data, 4096, NEXT | WRITE, index + 2));
            guest.describe(0, index + 2, (status, 1, WRITE, 0));
            guest.offer(0, index);
        }
        let mut heads: Vec<u32> = (0..42).map(|_| guest.wait(0).0).collect();
        heads.sort_unstable();
        assert_eq!(heads, (0..126).step_by(3).collect::<Vec<u32>>(), "round {round}");
        for index in (0..126_u64).step_by(3) {
            let data = guest.read(REQUESTS + 0x1000 + index * 4096, 4096);
            assert!(data.iter().enumerate().all(|(at, byte)| *byte == pattern(4096 + at)));
            assert_eq!(guest.read(REQUESTS + 0x8_0000 + index, 1), [0]);
        }
    }
}
