use super::super::config::{DiskProperties, GuestAccess, TRANSFER_BYTES_MAX, VhostSectorSize};
use super::{Action, FreedSpace, RequestParts, RequestStatus, ZeroedRange, action_of};

const MIB: u64 = 1 << 20;
/// Sectors of the disk.
const END: u64 = 8 * 2048;

fn disk(access: GuestAccess, sector_size: VhostSectorSize) -> DiskProperties {
    DiskProperties {
        size_bytes: 8 * MIB,
        sector_size,
        block_size_bytes: 4096,
        access,
        queue_count: 1,
    }
}

fn header(kind: u32, sector: u64) -> [u8; 16] {
    let bytes = [&kind.to_le_bytes()[..], &[0xff; 4], &sector.to_le_bytes()].concat();
    bytes.try_into().unwrap()
}

fn asked(
    kind: u32,
    sector: u64,
    sent_bytes: u64,
    expected_bytes: u64,
    disk: &DiskProperties,
) -> Result<Action, RequestStatus> {
    let parts = RequestParts {
        header: header(kind, sector),
        sent_bytes,
        expected_bytes,
        payload: &[],
    };
    action_of(&parts, disk)
}

fn ranged(kind: u32, ranges: &[(u64, u32, u32)], disk: &DiskProperties) -> Result<Action, RequestStatus> {
    let bytes = ranges.iter().flat_map(|(sector, count, flags)| {
        [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
    });
    let payload: Vec<u8> = bytes.collect();
    let parts = RequestParts {
        header: header(kind, 77),
        sent_bytes: payload.len() as u64,
        expected_bytes: 0,
        payload: &payload,
    };
    action_of(&parts, disk)
}

#[test]
fn reads_and_writes() {
    let writable = disk(GuestAccess::Writable, VhostSectorSize::Bytes512);
    let readable = disk(GuestAccess::ReadOnly, VhostSectorSize::Bytes512);
    let large = disk(GuestAccess::Writable, VhostSectorSize::Bytes4096);
    for (sector, length, legal, legal_4096) in [
        (0, 0, true, true),
        (0, 512, true, false),
        (0, 4096, true, true),
        (1, 512, true, false),
        (1, 4096, true, false),
        (8, 4096, true, true),
        (8, 4608, true, false),
        (END - 1, 512, true, false),
        (END - 8, 4096, true, true),
        (END, 0, true, true),
        (0, 8 * MIB, true, true),
        (0, 1, false, false),
        (0, 511, false, false),
        (0, 513, false, false),
        (0, 8 * MIB + 512, false, false),
        (END, 512, false, false),
        (END - 1, 1024, false, false),
        (END + 1, 0, false, false),
        (u64::MAX, 512, false, false),
        (u64::MAX / 512, 512, false, false),
        (u64::MAX / 512 + 1, 512, false, false),
        (1 << 55, 0, false, false),
        (0, TRANSFER_BYTES_MAX + 512, false, false),
        (0, u64::MAX, false, false),
        (0, u64::MAX - 511, false, false),
    ] {
        let range = || sector * 512..sector * 512 + length;
        for (disk, is_legal) in [(&writable, legal), (&large, legal_4096)] {
            let read = asked(0, sector, 0, length, disk);
            let write = asked(1, sector, length, 0, disk);
            if is_legal {
                assert_eq!(
                    (read, write),
                    (Ok(Action::Read(range())), Ok(Action::Write(range()))),
                    "{sector} {length}"
                );
            } else {
                assert_eq!(
                    (read, write),
                    (Err(RequestStatus::Failed), Err(RequestStatus::Failed)),
                    "{sector} {length}"
                );
            }
        }
        assert_eq!(asked(0, sector, 0, length, &readable).is_ok(), legal);
        assert_eq!(asked(1, sector, length, 0, &readable), Err(RequestStatus::Failed));
        // Data in the wrong direction.
        assert_eq!(asked(0, sector, 512, length, &writable), Err(RequestStatus::Failed));
        assert_eq!(asked(1, sector, length, 512, &writable), Err(RequestStatus::Failed));
    }
}

#[test]
fn other_types() {
    for access in [GuestAccess::Writable, GuestAccess::ReadOnly] {
        let disk = disk(access, VhostSectorSize::Bytes512);
        for sector in [0, 7, u64::MAX] {
            assert_eq!(asked(4, sector, 0, 0, &disk), Ok(Action::Flush));
            assert_eq!(asked(8, sector, 0, 20, &disk), Ok(Action::Identify));
            assert_eq!(asked(8, sector, 0, 0, &disk), Ok(Action::Identify));
        }
        // SCSI commands, barriers, life time, secure erase, zones, and numbers without a meaning.
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
            18,
            20,
            24,
            26,
            99,
            0x8000_0000,
            0x8000_0001,
            u32::MAX,
        ] {
            for bytes in [0, 16, 512] {
                assert_eq!(
                    asked(kind, 0, bytes, 0, &disk),
                    Err(RequestStatus::Unsupported),
                    "{kind}"
                );
                assert_eq!(
                    asked(kind, 0, 0, bytes, &disk),
                    Err(RequestStatus::Unsupported),
                    "{kind}"
                );
            }
        }
    }
}

#[test]
fn ranges_to_discard_and_to_zero() {
    let writable = disk(GuestAccess::Writable, VhostSectorSize::Bytes512);
    let readable = disk(GuestAccess::ReadOnly, VhostSectorSize::Bytes512);
    let large = disk(GuestAccess::Writable, VhostSectorSize::Bytes4096);
    assert_eq!(
        ranged(11, &[(8, 8, 0), (END - 1, 1, 0)], &writable),
        Ok(Action::Discard(vec![4096..8192, (END - 1) * 512..END * 512]))
    );
    let zeroed = |range, space| ZeroedRange { range, space };
    assert_eq!(
        ranged(13, &[(8, 8, 1), (0, 0, 0)], &writable),
        Ok(Action::WriteZeroes(vec![
            zeroed(4096..8192, FreedSpace::MayBeReleased),
            zeroed(0..0, FreedSpace::StaysAllocated)
        ]))
    );
    let many = vec![(0, 1, 0); 32];
    for kind in [11, 13] {
        assert!(ranged(kind, &many, &writable).is_ok(), "the maximum");
        assert!(ranged(kind, &[(0, 8, 0)], &large).is_ok());
        for (ranges, name) in [
            (vec![], "no range"),
            ([many.clone(), vec![(0, 1, 0)]].concat(), "one range too many"),
            (vec![(END, 1, 0)], "behind the end"),
            (vec![(END - 1, 2, 0)], "across the end"),
            (vec![(0, 1, 0), (END, 1, 0)], "the second one behind the end"),
            (vec![(u64::MAX, 1, 0)], "the position overflows"),
            (vec![(u64::MAX / 512, u32::MAX, 0)], "the end overflows"),
            (vec![(0, (1 << 21) + 1, 0)], "more than the limit"),
            (vec![(0, u32::MAX, 0)], "the largest count"),
        ] {
            assert_eq!(ranged(kind, &ranges, &writable), Err(RequestStatus::Failed), "{name}");
        }
        for flags in [2, 3, 0x8000_0000, u32::MAX] {
            assert_eq!(
                ranged(kind, &[(0, 1, flags)], &writable),
                Err(RequestStatus::Unsupported),
                "{flags}"
            );
            assert_eq!(
                ranged(kind, &[(0, 1, 0), (0, 1, flags)], &writable),
                Err(RequestStatus::Unsupported)
            );
        }
        for (sector, count) in [(1, 8), (0, 1), (8, 9), (7, 1)] {
            assert_eq!(
                ranged(kind, &[(sector, count, 0)], &large),
                Err(RequestStatus::Failed),
                "not aligned"
            );
        }
        assert_eq!(ranged(kind, &[(0, 1, 0)], &readable), Err(RequestStatus::Failed));
        // Lengths that are not whole ranges, data in the wrong direction, and a payload that was not read.
        for (sent_bytes, expected_bytes, payload) in [
            (15, 0, &[0; 15][..]),
            (17, 0, &[0; 17]),
            (16, 512, &[0; 16]),
            (0, 16, &[]),
            (1 << 40, 0, &[]),
            (16, 0, &[]),
        ] {
            let parts = RequestParts {
                header: header(kind, 0),
                sent_bytes,
                expected_bytes,
                payload,
            };
            assert_eq!(action_of(&parts, &writable), Err(RequestStatus::Failed), "{sent_bytes}");
        }
    }
    assert_eq!(
        ranged(11, &[(0, 1, 1)], &writable),
        Err(RequestStatus::Unsupported),
        "discard with unmap"
    );
}
