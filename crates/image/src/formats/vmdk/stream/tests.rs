//! Tests streams with grains that are out of order, repeated, too long or missing.

use std::io::Read;
use std::num::NonZero;

use holdfast_block::to_usize;

use super::specimen::{GRAIN_BYTES, SpecimenItem, TablePlacement, compressed, grain, progress, stream};
use super::{SECTOR_BYTES, StreamReader, marker};
use crate::{Error, Result};

const DISK_BYTES: u64 = 20 * GRAIN_BYTES - SECTOR_BYTES;
const BOTH: [TablePlacement; 2] = [TablePlacement::InFront, TablePlacement::AtEnd];

/// The disk, which must be the same, or fail in the same way, for any number of threads.
fn read(bytes: &[u8]) -> Result<Vec<u8>> {
    let found = read_on(bytes, 1);
    for threads in [2, 3, 40] {
        match (&found, read_on(bytes, threads)) {
            (Ok(disk), Ok(again)) => assert!(*disk == again, "{threads} threads"),
            (Err(error), Err(again)) => assert_eq!(error.to_string(), again.to_string(), "{threads} threads"),
            _ => panic!("{threads} threads give another result"),
        }
    }
    found
}

fn read_on(bytes: &[u8], threads: usize) -> Result<Vec<u8>> {
    let threads = NonZero::new(threads).unwrap();
    let mut reader = StreamReader::open(bytes, "stream")?.with_threads(threads);
    let found = read_disk(&mut reader);
    for _ in 0..2 {
        let again = reader.next_grain();
        assert!(if found.is_ok() {
            matches!(again, Ok(None))
        } else {
            again.is_err()
        });
    }
    found
}

fn read_disk(reader: &mut StreamReader<&[u8]>) -> Result<Vec<u8>> {
    let mut disk = vec![0; to_usize(reader.size_bytes())];
    while let Some(grain) = reader.next_grain()? {
        disk[to_usize(grain.offset)..][..grain.bytes.len()].copy_from_slice(grain.bytes);
    }
    Ok(disk)
}

fn good() -> Vec<SpecimenItem> {
    vec![
        grain(0, 1),
        grain(2 * GRAIN_BYTES, 2),
        grain(9 * GRAIN_BYTES, 3),
        grain(19 * GRAIN_BYTES, 4),
    ]
}

fn good_disk() -> Vec<u8> {
    let mut disk = vec![0; to_usize(20 * GRAIN_BYTES)];
    for (number, byte) in [(0, 1), (2, 2), (9, 3), (19, 4)] {
        disk[to_usize(number * GRAIN_BYTES)..][..to_usize(GRAIN_BYTES)].fill(byte);
    }
    disk.truncate(to_usize(DISK_BYTES));
    disk
}

#[test]
fn stream_reader_skips_other_structures() {
    for tables in BOTH {
        assert!(
            read(&stream(tables, DISK_BYTES, &good())).unwrap() == good_disk(),
            "{tables:?}"
        );
        // Unknown kinds of markers are skipped.
        let mut items = good();
        items.insert(1, progress());
        items.insert(
            3,
            SpecimenItem::Bytes([marker(9, 2), [0xff; 512], [0xff; 512]].concat()),
        );
        assert!(
            read(&stream(tables, DISK_BYTES, &items)).unwrap() == good_disk(),
            "{tables:?}"
        );
        // The last grain ends with the disk.
        *items.last_mut().unwrap() = SpecimenItem::Grain {
            offset: 19 * GRAIN_BYTES,
            byte: 4,
            length: GRAIN_BYTES - SECTOR_BYTES,
        };
        let bytes = stream(tables, DISK_BYTES, &items);
        assert!(read(&bytes).unwrap() == good_disk(), "{tables:?}");
        let padded = [bytes, vec![0; 5000]].concat();
        assert!(read(&padded).unwrap() == good_disk(), "{tables:?}");
    }
}

#[test]
fn grains_out_of_order_are_refused() {
    for tables in BOTH {
        let mut items = good();
        items.swap(1, 2);
        let error = read(&stream(tables, DISK_BYTES, &items)).unwrap_err();
        assert!(matches!(error, Error::NotInOrder { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("the grain for disk offset 8192 follows the one for 36864"),
            "{error}"
        );
    }
}

#[test]
fn invalid_grains_are_damage() {
    let with = |at: usize, item: SpecimenItem| {
        let mut items = good();
        items.insert(at, item);
        items
    };
    let past = grain(20 * GRAIN_BYTES, 9);
    let between = SpecimenItem::Bytes(compressed(GRAIN_BYTES + SECTOR_BYTES, &[1; 4096]));
    let far = SpecimenItem::Bytes([&u64::MAX.to_le_bytes()[..], &[1; 504]].concat());
    let short = SpecimenItem::Grain {
        offset: GRAIN_BYTES,
        byte: 1,
        length: GRAIN_BYTES - 1,
    };
    let long = SpecimenItem::Grain {
        offset: GRAIN_BYTES,
        byte: 1,
        length: GRAIN_BYTES + 1,
    };
    let oversized = SpecimenItem::Bytes([&[8, 0, 0, 0, 0, 0, 0, 0, 1, 32, 0, 0][..], &[0; 500]].concat());
    let noise = SpecimenItem::Bytes([&[8, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0][..], &[0x55; 500]].concat());
    for tables in BOTH {
        for (what, items) in [
            ("past the end", with(4, past.clone())),
            ("twice", with(1, grain(0, 1))),
            ("between two", with(1, between.clone())),
            ("far away", with(1, far.clone())),
            ("short", with(1, short.clone())),
            ("long", with(1, long.clone())),
            ("oversized", with(1, oversized.clone())),
            ("noise", with(1, noise.clone())),
            (
                "many sectors",
                with(1, SpecimenItem::Bytes(marker(1, u64::MAX).to_vec())),
            ),
            (
                "an end that is none",
                with(1, SpecimenItem::Bytes(marker(0, 1).to_vec())),
            ),
            (
                "an end in the middle",
                with(1, SpecimenItem::Bytes(marker(0, 0).to_vec())),
            ),
            ("no footer", with(4, SpecimenItem::Bytes(marker(3, 1).to_vec()))),
        ] {
            let error = read(&stream(tables, DISK_BYTES, &items)).expect_err(what);
            assert!(error.is_corrupt(), "{what}: {error}");
        }
        let mut with_trailing_data = stream(tables, DISK_BYTES, &good());
        with_trailing_data.extend([0; 512]);
        with_trailing_data.extend(*b"more");
        assert!(read(&with_trailing_data).unwrap_err().is_corrupt());
    }
    // A grain that is in the tables, but not in the stream.
    let bytes = stream(TablePlacement::InFront, DISK_BYTES, &good());
    let last = bytes.len() - 512;
    let shown = read(&bytes[..last]).unwrap_err().to_string();
    assert!(
        shown.contains("it has 3 grains, but 4 according to its tables"),
        "{shown}"
    );
}

#[test]
fn footer_of_another_disk_is_damage() {
    let bytes = stream(TablePlacement::AtEnd, DISK_BYTES, &good());
    let footer = bytes.len() - 1024;
    assert_eq!(&bytes[footer..footer + 4], b"KDMV");
    for (what, at, value) in [
        ("size", 12, 7),
        ("grain", 20, 16),
        ("entries", 44, 9),
        ("not compressed", 10, 0),
        ("magic", 0, 0),
    ] {
        let mut bytes = bytes.clone();
        bytes[footer + at] = value;
        assert!(read(&bytes).expect_err(what).is_corrupt(), "{what}");
    }
    // An end without a marker is an error, too.
    let mut bytes = bytes.clone();
    bytes.drain(footer - 512..footer + 512);
    assert!(read(&bytes).unwrap_err().is_corrupt());
}

#[test]
fn images_that_need_seeking_are_refused() {
    let bytes = stream(TablePlacement::InFront, DISK_BYTES, &good());
    let changed = |at: usize, value: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        read(&bytes).unwrap_err()
    };
    for (what, error) in [
        ("not compressed", changed(8, &[1, 0, 0])),
        ("directory after the grains", changed(56, &[60])),
        ("directory in the descriptor", changed(56, &[2])),
        ("a table after the grains", changed(3 * 512 + 4, &[60])),
        ("a table in the directory", changed(3 * 512 + 4, &[3])),
        ("tables over each other", changed(3 * 512 + 4, &[4])),
        ("descriptor after the grains", changed(28, &[60])),
    ] {
        assert!(matches!(error, Error::NotInOrder { .. }), "{what}: {error}");
    }
    // 2^45 sectors.
    let error = changed(12, &[0, 0, 0, 0, 0, 0x20, 0, 0]);
    assert!(matches!(error, Error::UnsupportedFeature { .. }), "{error}");
    let parent = bytes.windows(8).position(|word| word == b"ffffffff").unwrap();
    let error = changed(parent, b"0");
    assert!(error.to_string().contains("a parent"), "{error}");
}

/// A read error must not be treated as the end.
#[test]
fn read_error_is_reported() {
    struct Failing<'a>(&'a [u8]);
    impl Read for Failing<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            match self.0.read(buffer)? {
                0 => Err(std::io::ErrorKind::ConnectionReset.into()),
                count => Ok(count),
            }
        }
    }
    let bytes = stream(TablePlacement::InFront, DISK_BYTES, &good());
    let mut reader = StreamReader::open(Failing(&bytes), "stream").unwrap();
    for _ in 0..4 {
        assert!(reader.next_grain().unwrap().is_some());
    }
    let error = reader.next_grain().unwrap_err();
    assert!(matches!(error, Error::Device(_)) && !error.is_corrupt(), "{error}");
}
