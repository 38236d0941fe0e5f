//! Tests crashes, logs and invalid headers.

use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use super::create::{NewVhdx, write_empty};
use super::metadata::VhdxParent;
use super::opened::OpenedVhdx;
use super::tables::VhdxTables;
use super::{MIB, checksum, seal};
use crate::allocation_table::TableLayer;
use crate::allocation_table::crash_tests::{TableCrashCase, survive_busy_flushes, survive_crashes};
use crate::file::memory::MemoryFile;
use crate::file::{Access, ImageFile};
use crate::model::info::ImageKind;
use crate::{ImageId, Result};

const DISK_BYTES: u64 = 2 * MIB + 512 * 7;

fn bytes_of(file: &dyn ImageFile) -> Vec<u8> {
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn empty(kind: ImageKind) -> Vec<u8> {
    let file = MemoryFile::default();
    let new = NewVhdx {
        size_bytes: DISK_BYTES,
        block_bytes: MIB,
        sector_bytes: 512,
        kind,
        id: ImageId([1; 16]),
        parent: (kind == ImageKind::Differencing).then(|| VhdxParent {
            linkage: ImageId([7; 16]),
            names: vec!["parent.vhdx".to_owned()],
        }),
    };
    write_empty(&file, &new).unwrap();
    bytes_of(&file)
}

fn open(file: Arc<dyn ImageFile>, backing: Option<Arc<dyn BlockDevice>>) -> Result<TableLayer> {
    let opened = OpenedVhdx::load(file, Access::Write, "image")?;
    let file = Arc::clone(&opened.file);
    let tables = Box::new(VhdxTables::new("image".into(), opened));
    Ok(TableLayer::new("image".into(), file, tables, backing))
}

fn crash_cases() -> Vec<TableCrashCase> {
    let case = |name, kind| TableCrashCase {
        name,
        start: empty(kind),
        has_parent: kind == ImageKind::Differencing,
        open,
        check: |file| super::check::check(&OpenedVhdx::load(file, Access::Read, "image")?),
    };
    vec![
        case("dynamic", ImageKind::Dynamic),
        case("differencing", ImageKind::Differencing),
    ]
}

#[test]
fn crash_keeps_flushed_data() {
    survive_crashes(crash_cases());
}

#[test]
fn busy_flushes_keep_flushed_data() {
    survive_busy_flushes(crash_cases());
}

/// Adds a log with these sector changes, each in its own entry; the last `cut` bytes of the last entry are missing.
fn with_log(mut bytes: Vec<u8>, changes: &[(u64, u8)], cut: usize) -> Vec<u8> {
    let log = ImageId([9; 16]);
    let mut at = 0;
    for (index, (target, fill)) in changes.iter().enumerate() {
        let number = 40 + index as u64;
        let mut entry = vec![0; 8192];
        entry[..4].copy_from_slice(b"loge");
        entry[8..12].copy_from_slice(&8192_u32.to_le_bytes());
        entry[16..24].copy_from_slice(&number.to_le_bytes());
        entry[24..28].copy_from_slice(&1_u32.to_le_bytes());
        entry[32..48].copy_from_slice(&log.to_guid());
        entry[48..56].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        entry[56..64].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        entry[64..68].copy_from_slice(b"desc");
        entry[68..72].copy_from_slice(&[*fill; 4]);
        entry[72..80].copy_from_slice(&[*fill; 8]);
        entry[80..88].copy_from_slice(&target.to_le_bytes());
        entry[88..96].copy_from_slice(&number.to_le_bytes());
        entry[4096..8192].fill(*fill);
        entry[4096..4100].copy_from_slice(b"data");
        entry[4100..4104].copy_from_slice(&0_u32.to_le_bytes());
        entry[8188..8192].copy_from_slice(&u32::try_from(number).unwrap().to_le_bytes());
        seal(&mut entry);
        let start = to_usize(MIB) + at;
        let is_last = index + 1 == changes.len();
        let length = if is_last { 8192 - cut } else { 8192 };
        bytes[start..start + length].copy_from_slice(&entry[..length]);
        at += 8192;
    }
    // Set the log GUID in both headers.
    for start in [64 << 10, 128 << 10] {
        let header = &mut bytes[start..start + 4096];
        header[48..64].copy_from_slice(&log.to_guid());
        seal(header);
    }
    bytes
}

#[test]
fn log_replays_in_memory_or_in_the_file() {
    let plain = empty(ImageKind::Dynamic);
    let place = 3 * MIB + 8192;
    let bytes = with_log(plain.clone(), &[(place, 1), (place + 4096, 2), (place, 3)], 0);
    let file = Arc::new(MemoryFile::new(bytes.clone()));
    let opened = OpenedVhdx::load(file.clone(), Access::Read, "image").unwrap();
    let mut found = vec![0; 8192];
    opened.file.read_at(&mut found, place).unwrap();
    assert!(opened.has_log && found[..4096] == [3; 4096] && found[4096..] == [2; 4096]);
    assert!(bytes_of(&*file) == bytes, "the file is unchanged");

    let opened = OpenedVhdx::load(file.clone(), Access::Write, "image").unwrap();
    assert!(opened.header.log.is_nil());
    file.read_at(&mut found, place).unwrap();
    assert!(found[..4096] == [3; 4096] && found[4096..] == [2; 4096]);
    assert!(
        !OpenedVhdx::load(file, Access::Read, "image").unwrap().has_log,
        "the log is empty"
    );

    // A truncated entry is ignored, entries before it are replayed.
    let bytes = with_log(plain.clone(), &[(place, 1), (place, 3)], 100);
    let opened = OpenedVhdx::load(Arc::new(MemoryFile::new(bytes)), Access::Read, "image").unwrap();
    opened.file.read_at(&mut found, place).unwrap();
    assert!(found[..4096] == [1; 4096]);

    let bytes = with_log(plain, &[(place, 1)], 100);
    assert!(
        OpenedVhdx::load(Arc::new(MemoryFile::new(bytes)), Access::Read, "image").is_err(),
        "no entry is complete"
    );
}

#[test]
fn inconsistent_headers_are_refused() {
    let good = empty(ImageKind::Differencing);
    let is_refused =
        |bytes: Vec<u8>| OpenedVhdx::load(Arc::new(MemoryFile::new(bytes)), Access::Read, "image").is_err();
    assert!(!is_refused(good.clone()));
    let with = |at: usize, field: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        bytes
    };
    assert!(is_refused(with(0, b"x")), "no identifier");
    // One header or one region table may be damaged.
    for (first, second) in [(64 << 10, 128 << 10), (192 << 10, 256 << 10)] {
        let mut bytes = good.clone();
        // The byte may be of a random identifier: another value is certain only for a flipped one.
        bytes[first + 20] ^= 1;
        assert!(!is_refused(bytes.clone()));
        bytes[second + 20] ^= 1;
        assert!(is_refused(bytes));
    }
    let metadata = to_usize(2 * MIB);
    let items = metadata + (64 << 10);
    for (what, at, value) in [
        ("no metadata", metadata, 0),
        ("too many items", metadata + 10, 0xffff),
        ("an item in the table", metadata + 48, 100),
        ("an item outside of the region", metadata + 48, 0x1000_0000),
        ("a block of nothing", items, 0),
        ("a block of 3 MiB", items, 3 << 20),
        ("a block of 512 MiB", items, 512 << 20),
        ("a disk that ends inside of a sector", items + 8, 513),
        ("a disk too large for its table", items + 12, 0x1000),
        ("a sector of 1000 bytes", items + 32, 1000),
    ] {
        assert!(is_refused(with(at, &u32::to_le_bytes(value))), "{what}");
    }
    let mut bytes = good;
    let regions = 192 << 10;
    bytes[regions + 16] ^= 1;
    let table = &mut bytes[regions..regions + (64 << 10)];
    let sum = checksum(table);
    table[4..8].copy_from_slice(&sum.to_le_bytes());
    bytes.copy_within(regions..regions + (64 << 10), 256 << 10);
    assert!(is_refused(bytes), "an unknown required region");
}

/// The next header needs a larger sequence number. A number that wrapped to 0 would mark it as the older one,
/// and its information on the log and the last modification would be lost.
#[test]
fn header_sequence_number_does_not_wrap() {
    for sequence in [u64::MAX - 1, u64::MAX] {
        let mut bytes = empty(ImageKind::Dynamic);
        let header = 128 << 10..132 << 10;
        bytes[header.start + 8..header.start + 16].copy_from_slice(&sequence.to_le_bytes());
        seal(&mut bytes[header]);
        let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(bytes.clone()));
        let mut opened = OpenedVhdx::load(Arc::clone(&file), Access::Write, "image").unwrap();
        assert_eq!(opened.header.sequence, sequence);
        let written = super::identity::set(&mut opened, "image", ImageId([9; 16]));
        let again = OpenedVhdx::load(Arc::clone(&file), Access::Read, "image").unwrap();
        assert_eq!(again.header.sequence, u64::MAX);
        if sequence == u64::MAX {
            assert!(matches!(written, Err(crate::Error::NotWritable { .. })), "{written:?}");
            assert_eq!(bytes_of(&*file), bytes, "nothing was written");
        } else {
            written.unwrap();
            assert_eq!(again.metadata.id, ImageId([9; 16]));
        }
    }
}
