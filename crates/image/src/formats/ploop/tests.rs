//! Tests crashes, both versions, and invalid headers.

use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use super::create::write_empty;
use super::header::PloopHeader;
use super::tables::PloopTables;
use crate::Result;
use crate::allocation_table::TableLayer;
use crate::allocation_table::crash_tests::{TableCrashCase, survive_busy_flushes, survive_crashes};
use crate::file::ImageFile;
use crate::file::memory::MemoryFile;

fn empty() -> Vec<u8> {
    let file = MemoryFile::default();
    write_empty(&file, 98_304 + 512, 4096).unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// The same in version 1, with clusters right after the table, at any sector.
fn empty_old() -> Vec<u8> {
    let mut bytes = empty();
    bytes[..16].copy_from_slice(b"WithoutFreeSpace");
    bytes[48..52].fill(0);
    bytes.truncate(512);
    bytes
}

fn open(file: Arc<dyn ImageFile>, backing: Option<Arc<dyn BlockDevice>>) -> Result<TableLayer> {
    let header = PloopHeader::load(&*file, "image")?;
    let tables = Box::new(PloopTables::new("image".into(), header, Arc::clone(&file)));
    Ok(TableLayer::new("image".into(), file, tables, backing))
}

fn crash_cases() -> Vec<TableCrashCase> {
    let case = |name, start, has_parent| TableCrashCase {
        name,
        start,
        has_parent,
        open,
        check: |file| super::check::check(&*file, &PloopHeader::load(&*file, "image")?),
    };
    vec![
        case("version 2", empty(), false),
        case("version 1", empty_old(), false),
        case("a delta", empty(), true),
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
    let good = empty();
    let is_refused = |at: usize, value: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        PloopHeader::load(&MemoryFile::new(bytes), "image").is_err()
    };
    assert!(!is_refused(20, 255), "other heads");
    for (what, at, value) in [
        ("magic", 0, 1),
        ("version", 16, 3),
        ("cluster of nothing", 28, 0),
        ("cluster of three sectors", 28, 3),
        ("cluster of 2 GiB", 28, 1 << 22),
        ("too few entries", 32, 24),
        ("more entries than fit into the file", 32, 0x1000_0000),
        ("a disk without end", 40, 0x8000_0000),
        ("clusters inside of the table", 48, 0),
    ] {
        assert!(is_refused(at, value), "{what}");
    }
}
