//! Footer and header, byte by byte. All numbers are big-endian.

use super::{BLOCK_BYTES, SECTOR_BYTES};

/// Offset of the table.
pub(super) const TABLE_OFFSET: u64 = 2048;
/// Offset of the empty sector for the parent locator.
const LOCATOR_OFFSET: u64 = 1536;

/// The kind of disk in a footer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Dynamic = 3,
    Differencing = 4,
}

/// The parent of a differencing disk.
pub(super) struct ParentName<'a> {
    pub(super) uuid: [u8; 16],
    pub(super) path: &'a str,
}

/// The footer of a disk.
pub(super) fn footer(size_bytes: u64, kind: Kind, uuid: [u8; 16]) -> [u8; 512] {
    let mut footer = [0; 512];
    put(&mut footer, 0, b"conectix");
    put(&mut footer, 8, &2_u32.to_be_bytes());
    put(&mut footer, 12, &0x0001_0000_u32.to_be_bytes());
    put(&mut footer, 16, &512_u64.to_be_bytes());
    put(&mut footer, 24, &820_454_400_u32.to_be_bytes()); // 2026-01-01, in seconds since 2000
    put(&mut footer, 28, b"caml");
    put(&mut footer, 32, &1_u32.to_be_bytes());
    put(&mut footer, 40, &size_bytes.to_be_bytes());
    put(&mut footer, 48, &size_bytes.to_be_bytes());
    put(&mut footer, 56, &geometry(size_bytes));
    put(&mut footer, 60, &(kind as u32).to_be_bytes());
    put(&mut footer, 68, &uuid);
    let checksum = checksum(&footer, 64);
    put(&mut footer, 64, &checksum.to_be_bytes());
    footer
}

/// The header of a disk of `block_count` blocks.
pub(super) fn header(block_count: u32, parent: Option<&ParentName<'_>>) -> [u8; 1024] {
    let mut header = [0; 1024];
    put(&mut header, 0, b"cxsparse");
    put(&mut header, 8, &u64::MAX.to_be_bytes());
    put(&mut header, 16, &TABLE_OFFSET.to_be_bytes());
    put(&mut header, 24, &0x0001_0000_u32.to_be_bytes());
    put(&mut header, 28, &block_count.to_be_bytes());
    put(&mut header, 32, &(2_u32 << 20).to_be_bytes());
    if let Some(parent) = parent {
        put(&mut header, 40, &parent.uuid);
        put(&mut header, 56, &820_454_400_u32.to_be_bytes());
        let name: Vec<u8> = parent
            .path
            .encode_utf16()
            .take(256)
            .flat_map(u16::to_be_bytes)
            .collect();
        put(&mut header, 64, &name);
        // The locator refers to the URL of a file. vhd-tool leaves its text out of a stream, so the sector is empty.
        let url_bytes = u32::try_from(parent.path.len() + "file://".len()).unwrap_or_default();
        put(&mut header, 576, b"MacX");
        put(&mut header, 580, &512_u32.to_be_bytes());
        put(&mut header, 584, &url_bytes.to_be_bytes());
        put(&mut header, 592, &LOCATOR_OFFSET.to_be_bytes());
    }
    let checksum = checksum(&header, 36);
    put(&mut header, 36, &checksum.to_be_bytes());
    header
}

fn put(bytes: &mut [u8], offset: usize, field: &[u8]) {
    bytes[offset..offset + field.len()].copy_from_slice(field);
}

/// The complement of the sum of all bytes except for the four bytes of the checksum.
pub(super) fn checksum(bytes: &[u8], checksum_offset: usize) -> u32 {
    let others = bytes
        .iter()
        .enumerate()
        .filter(|(offset, _)| !(checksum_offset..checksum_offset + 4).contains(offset));
    !others.fold(0_u32, |sum, (_, byte)| sum.wrapping_add(u32::from(*byte)))
}

/// Cylinders, heads and sectors, as computed in the appendix of the specification.
fn geometry(size_bytes: u64) -> [u8; 4] {
    let total = (size_bytes / SECTOR_BYTES).min(65_535 * 16 * 255);
    let (heads, sectors, cylinders_and_heads) = if total >= 65_535 * 16 * 63 {
        (16, 255, total / 255)
    } else {
        let mut sectors = 17;
        let mut both = total / sectors;
        let mut heads = both.div_ceil(1024).max(4);
        if both >= heads * 1024 || heads > 16 {
            sectors = 31;
            heads = 16;
            both = total / sectors;
        }
        if both >= heads * 1024 {
            sectors = 63;
            heads = 16;
            both = total / sectors;
        }
        (heads, sectors, both)
    };
    let cylinders = u16::try_from(cylinders_and_heads / heads)
        .unwrap_or(u16::MAX)
        .to_be_bytes();
    let byte = |number: u64| u8::try_from(number).unwrap_or(u8::MAX);
    [cylinders[0], cylinders[1], byte(heads), byte(sectors)]
}

/// Number of blocks of a disk.
pub(super) fn block_count(size_bytes: u64) -> u32 {
    u32::try_from(size_bytes.div_ceil(BLOCK_BYTES)).unwrap_or(u32::MAX)
}
