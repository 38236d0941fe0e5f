//! Thin provisioning: UNMAP, WRITE SAME, GET LBA STATUS, and READ CAPACITY (SBC-3 sections 4.7 and 5).

use std::sync::PoisonError;

use holdfast_block::{BlockDeviceMut, ExtentKind, is_zero, to_usize};

use super::blocks::{DeviceFailure, Persistence, Writable, read_failure, write_failure};
use super::cdb::{BlockSpan, Cdb};
use super::inquiry::{UNMAP_DESCRIPTOR_COUNT_MAX, WRITE_SAME_BYTES_MAX};
use super::reply::truncated;
use super::sense::{Failure, Sense};
use super::unit::LogicalUnit;
use crate::server::export_device::Absent;

/// Bytes that are written at a time.
const PIECE_BYTES: u64 = 1 << 20;
const DESCRIPTOR_BYTES: usize = 16;
/// Extents of one answer.
const STATUS_COUNT_MAX: usize = 256;

/// UNMAP: the blocks read as zero afterwards, and take no space if the device can release it.
pub(super) fn unmap(unit: &LogicalUnit, cdb: &Cdb, data: &[u8]) -> Result<(), DeviceFailure> {
    const ANCHOR: u8 = 1;
    if cdb.byte(1) & ANCHOR != 0 {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let writable = Writable::new(unit)?;
    if cdb.u16(7) == 0 {
        return Ok(());
    }
    let (header, rest) = data
        .split_first_chunk::<8>()
        .ok_or(Sense::PARAMETER_LIST_LENGTH_ERROR)?;
    let [_, _, high, low, ..] = *header;
    let length = usize::from(u16::from_be_bytes([high, low]));
    let list = rest.get(..length).unwrap_or(rest);
    let (descriptors, _) = list.as_chunks::<DESCRIPTOR_BYTES>();
    if descriptors.len() > to_usize(u64::from(UNMAP_DESCRIPTOR_COUNT_MAX)) {
        return Err(Sense::INVALID_FIELD_IN_PARAMETERS.into());
    }
    let mut ranges = Vec::with_capacity(descriptors.len());
    for descriptor in descriptors {
        let (first, rest) = descriptor.split_first_chunk().unwrap_or((&[0; 8], &[]));
        let span = BlockSpan {
            first: u64::from_be_bytes(*first),
            count: u64::from(rest.first_chunk().map_or(0, |count| u32::from_be_bytes(*count))),
        };
        ranges.push(unit.range(span)?);
    }
    // All ranges were checked before the first one changes.
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        let shared = unit.exclusive.read().unwrap_or_else(PoisonError::into_inner);
        writable.device.write_zeroes(range).map_err(write_failure)?;
        drop(shared);
    }
    writable.finish(Persistence::Later)
}

/// WRITE SAME: one block of data is written to all blocks; zeros take no space if the device can release it.
pub(super) fn write_same(unit: &LogicalUnit, cdb: &Cdb, data: &[u8]) -> Result<(), DeviceFailure> {
    const PROTECTION_OR_ANCHOR: u8 = 0xf0;
    /// Obsolete bits: addresses as data.
    const ADDRESS_AS_DATA: u8 = 0x06;
    let flags = cdb.byte(1);
    if flags & (PROTECTION_OR_ANCHOR | ADDRESS_AS_DATA) != 0 || (is_without_data(cdb) && cdb.byte(0) != 0x93) {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let writable = Writable::new(unit)?;
    let span = cdb.blocks();
    let range = unit.range(span)?;
    if span.count == 0 || range.end - range.start > WRITE_SAME_BYTES_MAX {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let shared = unit.exclusive.read().unwrap_or_else(PoisonError::into_inner);
    let block_length = to_usize(unit.block_bytes());
    let block = match data.get(..block_length) {
        _ if is_without_data(cdb) => None,
        Some(block) => Some(block).filter(|block| !is_zero(block)),
        None => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
    };
    match block {
        None => writable.device.write_zeroes(range).map_err(write_failure)?,
        Some(block) => write_pattern(writable.device, block, range)?,
    }
    drop(shared);
    writable.finish(Persistence::Later)
}

/// Whether a WRITE SAME (16) has no data: the block is zero.
pub(super) fn is_without_data(cdb: &Cdb) -> bool {
    cdb.byte(1) & 1 != 0
}

fn write_pattern(device: &dyn BlockDeviceMut, block: &[u8], range: std::ops::Range<u64>) -> Result<(), DeviceFailure> {
    let length = (range.end - range.start).min(PIECE_BYTES);
    let piece = block.repeat(to_usize(length) / block.len());
    let mut offset = range.start;
    while offset < range.end {
        let length = to_usize(range.end - offset).min(piece.len());
        let part = piece.get(..length).unwrap_or(&piece);
        device.write_at(part, offset).map_err(write_failure)?;
        offset += length as u64;
    }
    Ok(())
}

/// GET LBA STATUS: which blocks are mapped.
pub(super) fn lba_status(unit: &LogicalUnit, cdb: &Cdb) -> Result<Vec<u8>, DeviceFailure> {
    const DEALLOCATED: u8 = 1;
    let first = cdb.u64(2);
    if first >= unit.block_count {
        return Err(Sense::ADDRESS_OUT_OF_RANGE.into());
    }
    let block_bytes = unit.block_bytes();
    let end = unit.block_count * block_bytes;
    let start = first * block_bytes;
    let extents = unit
        .device
        .reader()
        .extents(start..end, STATUS_COUNT_MAX)
        .map_err(read_failure)?;
    // First block, end, and whether the blocks are mapped; a block with some data is mapped.
    let mut runs: Vec<(u64, u64, bool)> = Vec::new();
    let mut position = first;
    for extent in &extents {
        let is_mapped = match extent.kind {
            ExtentKind::Data => true,
            ExtentKind::Zero => false,
            ExtentKind::Absent => unit.options.absent == Absent::MayHoldData,
        };
        let extent_end = if is_mapped {
            extent.end().div_ceil(block_bytes)
        } else {
            extent.end() / block_bytes
        };
        let extent_end = extent_end.min(unit.block_count);
        // A hole that does not begin at a block shares this block with the data before it, which was counted.
        if extent_end <= position {
            continue;
        }
        match runs.last_mut() {
            Some((_, last, kind)) if *kind == is_mapped => *last = extent_end,
            _ => runs.push((position, extent_end, is_mapped)),
        }
        position = extent_end;
    }
    if runs.is_empty() {
        runs.push((first, first + 1, true));
    }
    let mut data = vec![0; 8];
    for (from, to, is_mapped) in runs {
        // A longer run continues in the next answer.
        let count = u32::try_from(to - from).unwrap_or(u32::MAX);
        data.extend(from.to_be_bytes());
        data.extend(count.to_be_bytes());
        data.extend([if is_mapped { 0 } else { DEALLOCATED }, 0, 0, 0]);
        if u64::from(count) < to - from {
            break;
        }
    }
    let length = u32::try_from(data.len() - 4).unwrap_or(u32::MAX);
    if let Some(field) = data.first_chunk_mut() {
        *field = length.to_be_bytes();
    }
    Ok(truncated(data, to_usize(u64::from(cdb.u32(10)))))
}

/// READ CAPACITY (10).
pub(super) fn capacity10(unit: &LogicalUnit, cdb: &Cdb) -> Result<Vec<u8>, Failure> {
    const PARTIAL_MEDIUM: u8 = 1;
    if cdb.byte(8) & PARTIAL_MEDIUM == 0 && cdb.u32(2) != 0 {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let last = u32::try_from(unit.block_count.saturating_sub(1)).unwrap_or(u32::MAX);
    Ok([last.to_be_bytes(), unit.options.sector_size.bytes().to_be_bytes()].concat())
}

/// READ CAPACITY (16).
pub(super) fn capacity16(unit: &LogicalUnit, cdb: &Cdb) -> Vec<u8> {
    const THIN_AND_READS_ZERO: u8 = 0xc0;
    let block_bytes = unit.options.sector_size.bytes();
    let mut data = unit.block_count.saturating_sub(1).to_be_bytes().to_vec();
    data.extend(block_bytes.to_be_bytes());
    // Logical blocks for each physical block: smaller writes may be slower.
    let exponent = (unit.physical_block_bytes() / block_bytes).trailing_zeros();
    let exponent = u8::try_from(exponent).unwrap_or(0);
    let provisioning = if unit.is_read_only() { 0 } else { THIN_AND_READS_ZERO };
    data.extend([0, exponent, provisioning, 0]);
    data.resize(32, 0);
    truncated(data, to_usize(u64::from(cdb.u32(10))))
}
