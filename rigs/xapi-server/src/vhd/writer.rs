//! Writing a VHD.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use holdfast_block::{is_zero, to_usize};

use super::layout::{Kind, ParentName, TABLE_OFFSET, block_count, footer, header};
use super::{BLOCK_BYTES, SECTOR_BYTES, UNUSED};
use crate::database::new_uuid;
use crate::disk::{Disk, TRACKED_BYTES};
use crate::habits::{Habits, VhdBitmaps, VhdOrder};

/// The content of sectors that the bitmap excludes: noise, so that a reader that uses them is detected.
const NOISE: u8 = 0xE5;

/// The parent of a differencing disk.
pub(crate) struct Parent {
    pub(crate) disk: Disk,
    pub(crate) uuid: String,
    /// The path that the parent would have on the host.
    pub(crate) path: String,
}

/// Writes `disk`, or its differences to `parent`, as a VHD.
pub(crate) fn write(out: &mut dyn Write, disk: &Disk, parent: Option<&Parent>, habits: &Habits) -> io::Result<()> {
    let file = disk.file()?;
    let parent_file = parent
        .map(|parent| Ok::<_, io::Error>((parent.disk.file()?, parent.disk.size_bytes)))
        .transpose()?;
    let changed = parent.and_then(|parent| disk.changed_since(&parent.disk));
    let mut block = vec![0; to_usize(BLOCK_BYTES)];
    let mut other = vec![0; to_usize(BLOCK_BYTES)];
    let mut order = Vec::new();
    for number in 0..block_count(disk.size_bytes) {
        read_block(&file, disk.size_bytes, number, &mut block)?;
        let is_there = match &parent_file {
            None => !is_zero(&block),
            Some((parent, size_bytes)) => {
                read_block(parent, *size_bytes, number, &mut other)?;
                block != other || changed.as_ref().is_some_and(|changed| was_written(changed, number))
            }
        };
        if is_there {
            order.push(number);
        }
    }
    if habits.vhd_order == VhdOrder::Reversed {
        order.reverse();
    }
    let kind = if parent.is_some() {
        Kind::Differencing
    } else {
        Kind::Dynamic
    };
    let footer = footer(disk.size_bytes, kind, uuid_bytes(&new_uuid()));
    let name = parent.map(|parent| ParentName {
        uuid: uuid_bytes(&parent.uuid),
        path: &parent.path,
    });
    out.write_all(&footer)?;
    out.write_all(&header(block_count(disk.size_bytes), name.as_ref()))?;
    out.write_all(&[0; 512])?;
    out.write_all(&table(block_count(disk.size_bytes), &order))?;
    for number in order {
        read_block(&file, disk.size_bytes, number, &mut block)?;
        let mut bitmap = [0xFF_u8; 512];
        if let (Some((parent, size_bytes)), VhdBitmaps::Changed) = (&parent_file, habits.vhd_bitmaps) {
            read_block(parent, *size_bytes, number, &mut other)?;
            keep_changes(&mut bitmap, &mut block, &other);
        }
        out.write_all(&bitmap)?;
        out.write_all(&block)?;
    }
    out.write_all(&footer)
}

/// Keeps only the sectors of `block` that differ from `other`, and sets their bits.
fn keep_changes(bitmap: &mut [u8; 512], block: &mut [u8], other: &[u8]) {
    bitmap.fill(0);
    let sector_bytes = to_usize(SECTOR_BYTES);
    let sectors = block.chunks_mut(sector_bytes).zip(other.chunks(sector_bytes));
    for (index, (sector, other)) in sectors.enumerate() {
        if sector == other {
            sector.fill(NOISE);
        } else {
            bitmap[index / 8] |= 0x80 >> (index % 8);
        }
    }
}

/// The allocation table for blocks that are in the stream in this order.
fn table(block_count: u32, order: &[u32]) -> Vec<u8> {
    let table_bytes = (u64::from(block_count) * 4).next_multiple_of(SECTOR_BYTES);
    let mut table = vec![0xFF; to_usize(table_bytes)];
    debug_assert_eq!(UNUSED.to_be_bytes(), [0xFF; 4]);
    let mut sector = (TABLE_OFFSET + table_bytes) / SECTOR_BYTES;
    for number in order {
        let place = *number as usize * 4;
        let entry = u32::try_from(sector).unwrap_or(UNUSED);
        table[place..place + 4].copy_from_slice(&entry.to_be_bytes());
        sector += 1 + BLOCK_BYTES / SECTOR_BYTES;
    }
    table
}

/// Reads a block; bytes after the end of the disk are zero.
fn read_block(file: &File, size_bytes: u64, number: u32, block: &mut [u8]) -> io::Result<()> {
    let start = u64::from(number) * BLOCK_BYTES;
    let length = to_usize(BLOCK_BYTES.min(size_bytes.saturating_sub(start)));
    block[length..].fill(0);
    file.read_exact_at(&mut block[..length], start)
}

fn was_written(changed: &[bool], number: u32) -> bool {
    let per_block = to_usize(BLOCK_BYTES / TRACKED_BYTES);
    let first = number as usize * per_block;
    changed.iter().skip(first).take(per_block).any(|changed| *changed)
}

fn uuid_bytes(uuid: &str) -> [u8; 16] {
    let digits: String = uuid.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or_default().to_be_bytes()
}
