//! Builds small streams for tests and fuzzing seeds.

#![allow(clippy::indexing_slicing, reason = "it makes streams for tests, and reads none")]

use holdfast_block::to_usize;
use libdeflater::{CompressionLvl, Compressor};

use super::{DIRECTORY, END_OF_STREAM, FOOTER, GRAIN_MARKER_BYTES, SECTOR_BYTES, TABLE, marker};
use crate::ImageId;
use crate::formats::vmdk::descriptor::Descriptor;
use crate::formats::vmdk::extent::SparseExtent;

pub(crate) const GRAIN_BYTES: u64 = 4096;
const TABLE_ENTRIES: u64 = 8;
const TABLE_BYTES: u64 = TABLE_ENTRIES * 4;
const DESCRIPTOR_SECTORS: u64 = 2;

/// Where the tables are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TablePlacement {
    /// Before the first grain, with nothing after the last one: as QEMU writes them.
    InFront,
    /// After all grains, with an end-of-stream marker.
    AtEnd,
}

/// A structure after the header of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SpecimenItem {
    /// A grain at this offset of the disk, filled with this byte; `length` is its uncompressed size.
    Grain { offset: u64, byte: u8, length: u64 },
    /// Arbitrary bytes.
    Bytes(Vec<u8>),
}

pub(crate) fn grain(offset: u64, byte: u8) -> SpecimenItem {
    SpecimenItem::Grain {
        offset,
        byte,
        length: GRAIN_BYTES,
    }
}

/// A progress marker, as VMware sends it while it has no data.
pub(crate) fn progress() -> SpecimenItem {
    SpecimenItem::Bytes(marker(4, 0).to_vec())
}

/// A stream of `items` for a disk of `disk_bytes`.
pub(crate) fn stream(tables: TablePlacement, disk_bytes: u64, items: &[SpecimenItem]) -> Vec<u8> {
    let mut extent = SparseExtent {
        disk_bytes,
        grain_bytes: GRAIN_BYTES,
        descriptor: Some((SECTOR_BYTES, DESCRIPTOR_SECTORS * SECTOR_BYTES)),
        table_entries: TABLE_ENTRIES,
        directory: 0,
        second_directory: None,
        has_zero_grains: false,
        is_compressed: true,
        is_open: false,
        overhead: (1 + DESCRIPTOR_SECTORS) * SECTOR_BYTES,
    };
    let preamble = extent.overhead;
    let table_count = extent.table_count();
    if tables == TablePlacement::InFront {
        extent.directory = preamble;
        extent.overhead += (1 + table_count) * SECTOR_BYTES;
    }
    let mut bytes = extent.to_bytes();
    let text = Descriptor::text_of_stream("a.vmdk", disk_bytes / SECTOR_BYTES, ImageId([7; 16]));
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(to_usize(extent.overhead), 0);
    let mut entries = vec![0_u32; to_usize(table_count * TABLE_ENTRIES)];
    for item in items {
        match item {
            SpecimenItem::Bytes(other) => bytes.extend_from_slice(other),
            SpecimenItem::Grain { offset, byte, length } => {
                if let Some(entry) = entries.get_mut(to_usize(offset / GRAIN_BYTES)) {
                    *entry = sector_of(&bytes);
                }
                bytes.extend(compressed(*offset, &vec![*byte; to_usize(*length)]));
            }
        }
    }
    let table_bytes: Vec<Vec<u8>> = entries
        .chunks(to_usize(TABLE_ENTRIES))
        .map(|table| sector(&numbers(table)))
        .collect();
    match tables {
        TablePlacement::InFront => {
            let first = u32::try_from(preamble / SECTOR_BYTES + 1).expect("it is small");
            let places: Vec<u32> = (first..).take(table_bytes.len()).collect();
            let all = [vec![sector(&numbers(&places))], table_bytes].concat().concat();
            bytes[to_usize(preamble)..to_usize(preamble) + all.len()].copy_from_slice(&all);
        }
        TablePlacement::AtEnd => {
            let mut places = Vec::new();
            for table in table_bytes {
                bytes.extend(marker(TABLE, TABLE_BYTES.div_ceil(SECTOR_BYTES)));
                places.push(sector_of(&bytes));
                bytes.extend(table);
            }
            bytes.extend(marker(DIRECTORY, 1));
            extent.directory = bytes.len() as u64;
            bytes.extend(sector(&numbers(&places)));
            bytes.extend(marker(FOOTER, 1));
            bytes.extend(extent.to_bytes());
            bytes.extend(marker(END_OF_STREAM, 0));
        }
    }
    bytes
}

/// A stored grain.
pub(crate) fn compressed(offset: u64, content: &[u8]) -> Vec<u8> {
    let mut compressor = Compressor::new(CompressionLvl::default());
    let mut packed = vec![0; compressor.zlib_compress_bound(content.len())];
    let count = compressor.zlib_compress(content, &mut packed).expect("there is room");
    let mut bytes = (offset / SECTOR_BYTES).to_le_bytes().to_vec();
    bytes.extend(u32::try_from(count).expect("it is small").to_le_bytes());
    assert_eq!(bytes.len(), GRAIN_MARKER_BYTES);
    bytes.extend_from_slice(&packed[..count]);
    sector(&bytes)
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn sector_of(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len() as u64 / SECTOR_BYTES).expect("it is small")
}

/// The bytes, padded to a sector.
fn sector(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(to_usize(SECTOR_BYTES)), 0);
    bytes
}
