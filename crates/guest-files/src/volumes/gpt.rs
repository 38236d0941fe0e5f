//! GUID partition tables, with both copies of their header.
//!
//! | offset | bytes | header |
//! |---:|---:|---|
//! | 0 | 8 | `EFI PART` |
//! | 12 | 4 | length of the header |
//! | 16 | 4 | CRC-32 of the header, with zero here |
//! | 24 | 8 | sector of this header |
//! | 72 | 8 | first sector of the entries |
//! | 80 | 4 | number of entries |
//! | 84 | 4 | length of an entry |
//! | 88 | 4 | CRC-32 of the entries |
//!
//! An entry: type (16 bytes; zero if unused), identity (16), first and last sector (8 each), flags (8), name in UTF-16.
//! The second header is in the last sector.

use holdfast_block::BlockDevice;

use super::checksum::ieee;
use super::{Partition, read_up_to};
use crate::fields::{Fields, utf8_of_utf16};
use crate::{Error, Result};

const SIGNATURE: &[u8] = b"EFI PART";
const HEADER_BYTES_MIN: usize = 92;
const CRC_AT: usize = 16;
/// 128 entries of 128 bytes are usual.
const ENTRIES_BYTES_MAX: u64 = 1 << 20;
const SECTOR_SIZES: [u64; 2] = [512, 4096];
/// The type of the partitions of a dynamic disk, as stored: AF9B60A0-1431-4F62-BC68-3311714A69AD.
const TYPE_DYNAMIC: [u8; 16] = [
    0xa0, 0x60, 0x9b, 0xaf, 0x31, 0x14, 0x62, 0x4f, 0xbc, 0x68, 0x33, 0x11, 0x71, 0x4a, 0x69, 0xad,
];

/// Reads the table of a device; none if there is none. A note says that only the second copy is valid.
///
/// # Errors
/// [`Error::Damaged`] if a copy begins like a table, but none is valid.
pub(super) fn read(device: &dyn BlockDevice, disk: &str, notes: &mut Vec<String>) -> Result<Option<Vec<Partition>>> {
    let mut failure = None;
    for sector_bytes in SECTOR_SIZES {
        let last = (device.size_bytes() / sector_bytes).saturating_sub(1);
        for sector in [1, last] {
            match read_copy(device, sector_bytes, sector) {
                Ok(None) => {}
                Ok(Some(partitions)) => {
                    if sector != 1 {
                        notes.push(format!(
                            "{disk}: the first copy of the GPT is damaged, the second is used"
                        ));
                    }
                    return Ok(Some(partitions));
                }
                Err(Error::Device(error)) => return Err(error.into()),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
    }
    failure.map_or(Ok(None), Err)
}

/// The partitions of the copy whose header is in a sector; none if no header begins there.
fn read_copy(device: &dyn BlockDevice, sector_bytes: u64, sector: u64) -> Result<Option<Vec<Partition>>> {
    let bytes = read_up_to(device, sector * sector_bytes, sector_bytes)?;
    if !bytes.starts_with(SIGNATURE) {
        return Ok(None);
    }
    let fields = Fields::new("GPT header", &bytes);
    let length = fields.u32(12)? as usize;
    if length < HEADER_BYTES_MIN {
        return Err(fields.damaged(format!("its length is {length}")));
    }
    let mut header = fields.bytes(0, length)?.to_vec();
    header.iter_mut().skip(CRC_AT).take(4).for_each(|byte| *byte = 0);
    if ieee(&header) != fields.u32(CRC_AT)? {
        return Err(fields.damaged("its checksum differs"));
    }
    if fields.u64(24)? != sector {
        return Err(fields.damaged(format!("it is in sector {sector}, and belongs in {}", fields.u64(24)?)));
    }
    let count = u64::from(fields.u32(80)?);
    let entry_bytes = u64::from(fields.u32(84)?);
    let table_bytes = count * entry_bytes;
    if entry_bytes < 128 || table_bytes > ENTRIES_BYTES_MAX {
        return Err(fields.damaged(format!("{count} entries of {entry_bytes} bytes")));
    }
    let table_at = fields.u64(72)?.checked_mul(sector_bytes);
    let table_at = table_at.ok_or_else(|| fields.damaged("its entries are past the end of the disk"))?;
    let table = read_up_to(device, table_at, table_bytes)?;
    if table.len() as u64 != table_bytes || ieee(&table) != fields.u32(88)? {
        return Err(Error::damaged("GPT", "the checksum of its entries differs"));
    }
    let mut partitions = Vec::new();
    for (number, entry) in (1u32..).zip(table.chunks(holdfast_block::to_usize(entry_bytes))) {
        partitions.extend(partition(number, entry, sector_bytes, device.size_bytes())?);
    }
    Ok(Some(partitions))
}

fn partition(number: u32, entry: &[u8], sector_bytes: u64, disk_bytes: u64) -> Result<Option<Partition>> {
    let fields = Fields::new("GPT entry", entry);
    let kind = fields.bytes(0, 16)?;
    if kind.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let (first, last) = (fields.u64(32)?, fields.u64(40)?);
    let start_bytes = first.checked_mul(sector_bytes);
    let end_bytes = last.checked_add(1).and_then(|end| end.checked_mul(sector_bytes));
    let (Some(start_bytes), Some(end_bytes)) = (start_bytes, end_bytes) else {
        return Err(fields.damaged(format!("partition {number} is larger than any disk")));
    };
    if first == 0 || start_bytes >= end_bytes || end_bytes > disk_bytes {
        return Err(fields.damaged(format!(
            "partition {number} of sectors {first} to {last} does not lie on the disk"
        )));
    }
    let name = utf8_of_utf16(fields.bytes(56, 72)?);
    Ok(Some(Partition {
        number,
        start_bytes,
        size_bytes: end_bytes - start_bytes,
        name: crate::fields::label_of(&name),
        refused: (kind == TYPE_DYNAMIC).then_some("a dynamic disk of Windows (LDM)"),
    }))
}
