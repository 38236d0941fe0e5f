use super::super::config::QUEUE_SIZE_MAX;
use super::{Chain, ChainError, DescriptorTable, IndirectTables, Segment, byte_count, follow, part};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// The address of the ring's table, and of another table.
const RING: u64 = 0x1000;
const TABLE: u64 = 0x2000;

type Row = (u64, u32, u16, u16);

fn memory(ring: &[Row], table: &[Row]) -> Vec<u8> {
    let mut bytes = vec![0; 0x8000];
    for (start, rows) in [(RING, ring), (TABLE, table)] {
        for (index, (address, length, flags, next)) in rows.iter().enumerate() {
            let row = [
                &address.to_le_bytes()[..],
                &length.to_le_bytes(),
                &flags.to_le_bytes(),
                &next.to_le_bytes(),
            ]
            .concat();
            let place = usize::try_from(start).unwrap() + 16 * index;
            bytes[place..place + 16].copy_from_slice(&row);
        }
    }
    bytes
}

fn followed(ring: &[Row], table: &[Row], head: u16) -> Result<Chain, ChainError> {
    let bytes = memory(ring, table);
    let load = |address: u64| {
        let start = usize::try_from(address).ok()?;
        bytes.get(start..start.checked_add(16)?)?.try_into().ok()
    };
    let place = DescriptorTable {
        address: RING,
        descriptor_count: 8,
    };
    follow(place, head, IndirectTables::Negotiated, &load)
}

fn segments(list: &[(u64, u32)]) -> Vec<Segment> {
    let segment = |(address, length): &(u64, u32)| Segment {
        address: *address,
        length: *length,
    };
    list.iter().map(segment).collect()
}

#[test]
fn legal_chains() {
    let read = [
        (10, 16, NEXT, 3),
        (0, 0, 0, 0),
        (0, 0, 0, 0),
        (20, 512, NEXT | WRITE, 1),
    ];
    let mut ring = read.to_vec();
    ring[1] = (30, 1, WRITE, 0);
    let expected = Chain {
        readable: segments(&[(10, 16)]),
        writable: segments(&[(20, 512), (30, 1)]),
    };
    assert_eq!(followed(&ring, &[], 0), Ok(expected));
    // A table, alone and after a descriptor of the ring.
    let table = [(1, 2, NEXT, 1), (3, 4, WRITE, 0)];
    let nested = [(TABLE, 32, INDIRECT, 0), (7, 8, NEXT, 0)];
    let alone = Chain {
        readable: segments(&[(1, 2)]),
        writable: segments(&[(3, 4)]),
    };
    assert_eq!(followed(&nested, &table, 0), Ok(alone));
    let after = followed(&nested, &table, 1).unwrap();
    assert_eq!(after.readable, segments(&[(7, 8), (1, 2)]));
    // All descriptors of the ring, and of the largest table.
    let all: Vec<Row> = (0..8)
        .map(|index| (0, 1, if index < 7 { NEXT } else { 0 }, index + 1))
        .collect();
    assert_eq!(byte_count(&followed(&all, &[], 0).unwrap().readable), 8);
    let count = QUEUE_SIZE_MAX;
    let rows = (0..count).map(|index| (0, 1, if index + 1 < count { NEXT } else { 0 }, index + 1));
    let all: Vec<Row> = rows.collect();
    let whole = followed(&[(TABLE, u32::from(count) * 16, INDIRECT, 0)], &all, 0).unwrap();
    assert_eq!(byte_count(&whole.readable), u64::from(count));
    // A chain without bytes is a chain; a request in it is not valid.
    assert_eq!(followed(&[(0, 0, 0, 0)], &[], 0).unwrap().readable.len(), 1);
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn illegal_chains() {
    let end = (0, 16, 0, 0);
    let table_at = |address, length| (address, length, INDIRECT, 0);
    for (ring, table, head, expected, name) in [
        (vec![end], vec![], 8, ChainError::Index, "head outside the ring"),
        (vec![end], vec![], u16::MAX, ChainError::Index, "largest head"),
        (
            vec![(0, 1, NEXT, 8)],
            vec![],
            0,
            ChainError::Index,
            "next outside the ring",
        ),
        (vec![(0, 1, NEXT, 0)], vec![], 0, ChainError::Loop, "loop of one"),
        (
            vec![(0, 1, NEXT, 1), (0, 1, NEXT, 0)],
            vec![],
            0,
            ChainError::Loop,
            "loop of two",
        ),
        (
            vec![(0, 1, NEXT | WRITE, 1), (0, 1, NEXT | WRITE, 0)],
            vec![],
            0,
            ChainError::Loop,
            "loop of writable ones",
        ),
        (
            vec![(0, 1, NEXT | WRITE, 1), end],
            vec![],
            0,
            ChainError::Order,
            "readable after writable",
        ),
        (
            vec![table_at(TABLE, 16)],
            vec![table_at(TABLE, 16)],
            0,
            ChainError::Table,
            "nested table",
        ),
        (
            vec![table_at(TABLE, 16)],
            vec![(0, 1, NEXT, 0)],
            0,
            ChainError::Loop,
            "loop in a table",
        ),
        (
            vec![table_at(TABLE, 16)],
            vec![(0, 1, NEXT, 1)],
            0,
            ChainError::Index,
            "next outside a table",
        ),
        (vec![table_at(TABLE, 0)], vec![], 0, ChainError::Table, "empty table"),
        (
            vec![table_at(TABLE, 15)],
            vec![],
            0,
            ChainError::Table,
            "part of a descriptor",
        ),
        (
            vec![table_at(TABLE, 17)],
            vec![],
            0,
            ChainError::Table,
            "descriptor and a part",
        ),
        (
            vec![table_at(TABLE, 1025 * 16)],
            vec![],
            0,
            ChainError::Table,
            "table too long",
        ),
        (
            vec![table_at(TABLE, 65536 * 16)],
            vec![],
            0,
            ChainError::Table,
            "length overflows 16 bits",
        ),
        (
            vec![table_at(TABLE, u32::MAX - 15)],
            vec![],
            0,
            ChainError::Table,
            "largest table",
        ),
        (
            vec![(TABLE, 16, INDIRECT | NEXT, 1), end],
            vec![end],
            0,
            ChainError::Table,
            "table with a next descriptor",
        ),
        (
            vec![table_at(0x7ff8, 16)],
            vec![],
            0,
            ChainError::OutsideMemory,
            "table at the end of memory",
        ),
        (
            vec![table_at(u64::MAX, 16)],
            vec![],
            0,
            ChainError::OutsideMemory,
            "table at the end of addresses",
        ),
        (
            vec![(u64::MAX - 8, 32, INDIRECT, 0)],
            vec![],
            0,
            ChainError::OutsideMemory,
            "second descriptor past all addresses",
        ),
    ] {
        assert_eq!(followed(&ring, &table, head), Err(expected), "{name}");
    }
}

#[test]
fn tables_must_be_negotiated() {
    let bytes = memory(&[(TABLE, 16, INDIRECT, 0)], &[(0, 16, 0, 0)]);
    let load = |address: u64| bytes[usize::try_from(address).unwrap()..][..16].try_into().ok();
    let place = DescriptorTable {
        address: RING,
        descriptor_count: 8,
    };
    let refused = follow(place, 0, IndirectTables::NotNegotiated, &load);
    assert_eq!(refused, Err(ChainError::Table));
}

#[test]
fn parts_of_segments() {
    let list = segments(&[(100, 10), (0, 0), (200, 5), (300, 20)]);
    let parts = |start, length| part(&list, start, length).collect::<Vec<_>>();
    assert_eq!(parts(0, 35), segments(&[(100, 10), (200, 5), (300, 20)]));
    assert_eq!(parts(0, 10), segments(&[(100, 10)]));
    assert_eq!(parts(9, 2), segments(&[(109, 1), (200, 1)]));
    assert_eq!(parts(10, 6), segments(&[(200, 5), (300, 1)]));
    assert_eq!(parts(34, 100), segments(&[(319, 1)]));
    assert_eq!(parts(35, 1), []);
    assert_eq!(parts(3, 0), []);
    let far = segments(&[(u64::MAX, u32::MAX)]);
    assert_eq!(part(&far, 7, 1).next().unwrap().address, u64::MAX, "no overflow");
}
