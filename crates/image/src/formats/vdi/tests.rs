//! Tests crashes and invalid headers.

use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use super::create::{NewVdi, write_empty};
use super::header::{VdiHeader, VdiKind};
use super::tables::VdiTables;
use crate::allocation_table::TableLayer;
use crate::allocation_table::crash_tests::{TableCrashCase, survive_busy_flushes, survive_crashes};
use crate::file::ImageFile;
use crate::file::memory::MemoryFile;
use crate::{ImageId, Result};

const DISK_BYTES: u64 = 100_000;

fn empty(kind: VdiKind) -> Vec<u8> {
    let file = MemoryFile::default();
    let parent = if kind == VdiKind::Differencing {
        ImageId([7; 16])
    } else {
        ImageId::NIL
    };
    let new = NewVdi {
        size_bytes: DISK_BYTES,
        block_bytes: 4096,
        sector_bytes: 512,
        kind,
        id: ImageId([1; 16]),
        parent,
        parent_modification: parent,
    };
    write_empty(&file, &new).unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn open(file: Arc<dyn ImageFile>, backing: Option<Arc<dyn BlockDevice>>) -> Result<TableLayer> {
    let header = VdiHeader::load(&*file, "image")?;
    let tables = Box::new(VdiTables::new("image".into(), header, Arc::clone(&file)));
    Ok(TableLayer::new("image".into(), file, tables, backing))
}

fn crash_cases() -> Vec<TableCrashCase> {
    let case = |name, kind| TableCrashCase {
        name,
        start: empty(kind),
        has_parent: kind == VdiKind::Differencing,
        open,
        check: |file| super::check::check(&*file, &VdiHeader::load(&*file, "image")?),
    };
    vec![
        case("dynamic", VdiKind::Dynamic),
        case("fixed", VdiKind::Fixed),
        case("differencing", VdiKind::Differencing),
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

#[test]
fn inconsistent_headers_are_refused() {
    let good = empty(VdiKind::Dynamic);
    let refused = |at: usize, field: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        VdiHeader::load(&MemoryFile::new(bytes), "image").is_err()
    };
    assert!(!refused(0x54, b"a comment"));
    for (what, at, value) in [
        ("signature", 0x40, 1),
        ("version", 0x44, 2),
        ("undo", 0x4c, 3),
        ("type", 0x4c, 9),
        ("differencing without a parent", 0x4c, 4),
        ("map inside the header", 0x154, 256),
        ("map past the end", 0x154, 1 << 30),
        ("data inside the map", 0x158, 4096),
        ("block of nothing", 0x178, 0),
        ("block of three", 0x178, 3),
        ("block of 2 GiB", 0x178, 1 << 31),
        ("more before a block than in it", 0x17c, 8192),
        ("too few blocks", 0x180, 24),
        ("more blocks than fit into the file", 0x180, 0xffff_0000),
    ] {
        assert!(refused(at, &u32::to_le_bytes(value)), "{what}");
    }
    assert!(refused(0x170, &u64::MAX.to_le_bytes()), "a disk of 2^64 - 1 bytes");
    assert!(
        VdiHeader::load(&MemoryFile::new(good[..400].to_vec()), "image").is_err(),
        "a truncated image"
    );
}
