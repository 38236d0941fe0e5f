//! Partition tables of the MBR, with logical partitions in an extended one.
//!
//! | offset | content |
//! |---:|---|
//! | 446 | four entries of 16 bytes |
//! | 510 | 55 AA |
//!
//! An entry: status (0 or 80), 3 bytes of geometry, type, 3 bytes of geometry, first sector (4 bytes), sectors (4). The
//! extended partition begins with a table of the same form: its first entry is a logical partition, relative to this
//! table; the second entry is the next table, relative to the extended partition. Sectors have 512 bytes.

use std::collections::BTreeSet;

use holdfast_block::BlockDevice;

use super::{Partition, detect, read_up_to};
use crate::fields::Fields;
use crate::{Error, Result};

const SECTOR_BYTES: u64 = 512;
const ENTRIES_AT: usize = 446;
const ENTRY_BYTES: usize = 16;
const TYPES_EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
const TYPE_PROTECTIVE: u8 = 0xee;
const TYPE_DYNAMIC: u8 = 0x42;
/// Linux names at most 255 partitions of a disk.
const LOGICAL_COUNT_MAX: u32 = 251;

#[derive(Debug, Clone, Copy)]
struct MbrEntry {
    status: u8,
    kind: u8,
    first: u64,
    count: u64,
}

/// Reads the table at the start of a device. None if there is no table; its first sector may be the boot sector of a file
/// system.
///
/// # Errors
/// [`Error::Damaged`] if there is a table, but a partition lies outside the device, or the table is that of a GPT.
pub(super) fn read(device: &dyn BlockDevice) -> Result<Option<Vec<Partition>>> {
    let sector = read_up_to(device, 0, SECTOR_BYTES)?;
    let Some(entries) = entries(&sector)? else {
        return Ok(None);
    };
    let has_partitions = entries.iter().any(|entry| entry.kind != 0);
    let is_table = entries.iter().all(|entry| matches!(entry.status, 0 | 0x80));
    if !has_partitions || !is_table || detect::is_boot_sector(&sector) {
        return Ok(None);
    }
    let sector_count = device.size_bytes() / SECTOR_BYTES;
    let mut partitions = Vec::new();
    for (number, entry) in (1u32..).zip(entries) {
        if entry.kind == TYPE_PROTECTIVE {
            return Err(Error::damaged(
                "GPT",
                "the disk is marked as having one, but neither copy is valid",
            ));
        }
        if entry.kind == 0 || entry.count == 0 {
            continue;
        }
        check_inside(entry.first, entry.count, sector_count)?;
        if TYPES_EXTENDED.contains(&entry.kind) {
            add_logical(device, entry, &mut partitions)?;
        } else {
            partitions.push(partition(number, entry.first, entry));
        }
    }
    partitions.sort_by_key(|partition| partition.number);
    Ok(Some(partitions))
}

fn entries(sector: &[u8]) -> Result<Option<[MbrEntry; 4]>> {
    let fields = Fields::new("partition table", sector);
    if sector.len() < 512 || fields.u16(510)? != 0xaa55 {
        return Ok(None);
    }
    let mut entries = [MbrEntry {
        status: 0,
        kind: 0,
        first: 0,
        count: 0,
    }; 4];
    for (number, entry) in entries.iter_mut().enumerate() {
        let at = ENTRIES_AT + number * ENTRY_BYTES;
        *entry = MbrEntry {
            status: fields.u8(at)?,
            kind: fields.u8(at + 4)?,
            first: u64::from(fields.u32(at + 8)?),
            count: u64::from(fields.u32(at + 12)?),
        };
    }
    Ok(Some(entries))
}

fn check_inside(first: u64, count: u64, sector_count: u64) -> Result<()> {
    if first == 0 || first + count > sector_count {
        let detail = format!(
            "a partition of sectors {first} to {} does not lie on the disk",
            first + count
        );
        return Err(Error::damaged("partition table", detail));
    }
    Ok(())
}

fn partition(number: u32, first: u64, entry: MbrEntry) -> Partition {
    Partition {
        number,
        start_bytes: first * SECTOR_BYTES,
        size_bytes: entry.count * SECTOR_BYTES,
        name: None,
        refused: (entry.kind == TYPE_DYNAMIC).then_some("a dynamic disk of Windows (LDM)"),
    }
}

/// Adds the logical partitions of an extended one, numbered from 5.
fn add_logical(device: &dyn BlockDevice, extended: MbrEntry, partitions: &mut Vec<Partition>) -> Result<()> {
    let sector_count = device.size_bytes() / SECTOR_BYTES;
    let mut table = extended.first;
    let mut seen = BTreeSet::new();
    let mut number = 5;
    loop {
        if !seen.insert(table) || seen.len() > LOGICAL_COUNT_MAX as usize {
            return Err(Error::damaged("partition table", "its extended partition does not end"));
        }
        let sector = read_up_to(device, table * SECTOR_BYTES, SECTOR_BYTES)?;
        let Some([logical, next, ..]) = entries(&sector)? else {
            return Err(Error::damaged(
                "partition table",
                format!("there is none at sector {table}"),
            ));
        };
        if logical.kind != 0 && logical.count != 0 {
            let first = table + logical.first;
            check_inside(first, logical.count, sector_count)?;
            partitions.push(partition(number, first, logical));
            number += 1;
        }
        if next.kind == 0 || next.first == 0 {
            return Ok(());
        }
        table = extended.first + next.first;
    }
}
