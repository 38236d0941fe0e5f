//! Commands that read and write blocks (SBC-3 section 5).

use std::ops::Range;
use std::sync::PoisonError;

use holdfast_block::{BlockDeviceMut, Error as DeviceError, to_usize};

use super::cdb::{BlockSpan, Cdb};
use super::reply::DataIn;
use super::sense::{Failure, Sense};
use super::unit::LogicalUnit;

/// Data is compared and combined in pieces of this length.
const PIECE_BYTES: usize = 1 << 20;

/// Forced unit access: the data is durable before the status.
const FORCE_UNIT_ACCESS: u8 = 0x08;

/// A failed command: its status, and the error of the device.
#[derive(Debug)]
pub(crate) struct DeviceFailure {
    pub(crate) failure: Failure,
    /// The error for the log; `None` if the initiator made a mistake.
    pub(crate) error: Option<DeviceError>,
}

impl From<Failure> for DeviceFailure {
    fn from(failure: Failure) -> Self {
        Self { failure, error: None }
    }
}

impl From<Sense> for DeviceFailure {
    fn from(sense: Sense) -> Self {
        Failure::from(sense).into()
    }
}

/// Translates an error of a read.
pub(crate) fn read_failure(error: DeviceError) -> DeviceFailure {
    DeviceFailure {
        failure: Sense::UNRECOVERED_READ_ERROR.into(),
        error: Some(error),
    }
}

/// Translates an error of a write.
pub(super) fn write_failure(error: DeviceError) -> DeviceFailure {
    let sense = if error.is_no_space() {
        Sense::SPACE_ALLOCATION_FAILED
    } else {
        Sense::WRITE_ERROR
    };
    DeviceFailure {
        failure: sense.into(),
        error: Some(error),
    }
}

/// Refuses protection information: no unit has any.
fn refuse_protection(cdb: &Cdb) -> Result<(), Failure> {
    let is_short = cdb.byte(0) < 0x20;
    if !is_short && cdb.byte(1) >> 5 != 0 {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    Ok(())
}

/// How VERIFY and WRITE AND VERIFY compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByteCheck {
    /// The medium is read.
    Medium,
    /// The medium is compared with the data.
    Data,
    /// Every block is compared with one block of data.
    OneBlock,
}

impl ByteCheck {
    pub(super) fn of(cdb: &Cdb) -> Result<Self, Failure> {
        match cdb.byte(1) >> 1 & 3 {
            0 => Ok(Self::Medium),
            1 => Ok(Self::Data),
            3 => Ok(Self::OneBlock),
            _ => Err(Sense::INVALID_FIELD_IN_CDB.into()),
        }
    }
}

/// When written data is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Persistence {
    /// After a flush.
    Later,
    /// Before the status.
    Now,
}

impl Persistence {
    /// By the bit FUA of a command with at least 10 bytes.
    fn of(cdb: &Cdb) -> Self {
        if cdb.byte(1) & FORCE_UNIT_ACCESS == 0 {
            Self::Later
        } else {
            Self::Now
        }
    }
}

/// A unit that may be written, and its device.
pub(super) struct Writable<'a> {
    pub(super) device: &'a dyn BlockDeviceMut,
    /// Whether every write must be durable: there is no write cache.
    pub(super) writes_through: bool,
}

impl<'a> Writable<'a> {
    /// Refuses units that are protected.
    pub(super) fn new(unit: &'a LogicalUnit) -> Result<Self, Failure> {
        let pages = unit.lock().pages;
        match unit.device.writer() {
            Some(device) if !pages.is_write_protected => Ok(Self {
                device,
                writes_through: !pages.has_write_cache,
            }),
            _ => Err(Sense::WRITE_PROTECTED.into()),
        }
    }

    /// Makes earlier writes durable if the command or the cache page wants it.
    pub(super) fn finish(&self, persistence: Persistence) -> Result<(), DeviceFailure> {
        if persistence == Persistence::Now || self.writes_through {
            self.device.flush().map_err(write_failure)?;
        }
        Ok(())
    }

    /// Writes `data`, which may be shorter than the range if the initiator sent less than the command wants.
    fn write(&self, range: &Range<u64>, data: &[u8]) -> Result<(), DeviceFailure> {
        let length = to_usize(range.end - range.start).min(data.len());
        let data = data.get(..length).unwrap_or(data);
        self.device.write_at(data, range.start).map_err(write_failure)
    }
}

pub(super) fn read(unit: &LogicalUnit, cdb: &Cdb) -> Result<DataIn, Failure> {
    refuse_protection(cdb)?;
    let range = unit.transfer_range(cdb.blocks())?;
    Ok(DataIn::Device {
        offset: range.start,
        length: range.end - range.start,
    })
}

/// WRITE, and WRITE AND VERIFY.
pub(super) fn write(unit: &LogicalUnit, cdb: &Cdb, data: &[u8], verify: Verification) -> Result<(), DeviceFailure> {
    refuse_protection(cdb)?;
    if verify == Verification::After && ByteCheck::of(cdb)? == ByteCheck::OneBlock {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let writable = Writable::new(unit)?;
    let range = unit.transfer_range(cdb.blocks())?;
    let shared = unit.exclusive.read().unwrap_or_else(PoisonError::into_inner);
    writable.write(&range, data)?;
    drop(shared);
    let is_short = cdb.byte(0) < 0x20;
    match verify {
        Verification::None if is_short => writable.finish(Persistence::Later),
        Verification::None => writable.finish(Persistence::of(cdb)),
        Verification::After => {
            writable.finish(Persistence::Now)?;
            compare(
                unit,
                range.start,
                data.get(..to_usize(range.end - range.start)).unwrap_or(data),
            )
        }
    }
}

/// Whether written data is read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verification {
    None,
    After,
}

/// Compares the device with `expected`.
fn compare(unit: &LogicalUnit, offset: u64, expected: &[u8]) -> Result<(), DeviceFailure> {
    let mut buffer = vec![0; PIECE_BYTES.min(expected.len())];
    let mut position = offset;
    for expected in expected.chunks(PIECE_BYTES) {
        let found = buffer.get_mut(..expected.len()).unwrap_or_default();
        unit.device.reader().read_at(found, position).map_err(read_failure)?;
        if found != expected {
            let before = position - offset;
            let same = found
                .iter()
                .zip(expected)
                .take_while(|(left, right)| left == right)
                .count();
            let at = u32::try_from(before + same as u64).unwrap_or(u32::MAX);
            return Err(Sense::MISCOMPARE_DURING_VERIFY.with_information(at).into());
        }
        position += expected.len() as u64;
    }
    Ok(())
}

pub(super) fn verify(unit: &LogicalUnit, cdb: &Cdb, data: &[u8]) -> Result<(), DeviceFailure> {
    refuse_protection(cdb)?;
    let check = ByteCheck::of(cdb)?;
    let span = cdb.blocks();
    match check {
        ByteCheck::Medium => {
            // No data is transferred, so a verification may be long: it is read in pieces.
            let range = unit.range(span)?;
            read_through(unit, range)
        }
        ByteCheck::Data => {
            let range = unit.transfer_range(span)?;
            let length = to_usize(range.end - range.start).min(data.len());
            compare(unit, range.start, data.get(..length).unwrap_or(data))
        }
        ByteCheck::OneBlock => {
            let range = unit.transfer_range(span)?;
            let block = data
                .get(..to_usize(unit.block_bytes()))
                .ok_or(Sense::INVALID_FIELD_IN_CDB)?;
            for offset in range.step_by(block.len()) {
                compare(unit, offset, block)?;
            }
            Ok(())
        }
    }
}

/// Reads and discards a range.
fn read_through(unit: &LogicalUnit, range: Range<u64>) -> Result<(), DeviceFailure> {
    let mut buffer = vec![0; PIECE_BYTES];
    let mut offset = range.start;
    while offset < range.end {
        let length = to_usize(range.end - offset).min(PIECE_BYTES);
        let piece = buffer.get_mut(..length).unwrap_or_default();
        unit.device.reader().read_at(piece, offset).map_err(read_failure)?;
        offset += length as u64;
    }
    Ok(())
}

/// PRE-FETCH: data that is slow to get is in the cache of its device afterwards.
pub(super) fn prefetch(unit: &LogicalUnit, cdb: &Cdb) -> Result<(), DeviceFailure> {
    /// Longer ranges would only displace one another.
    const PREFETCH_BYTES_MAX: u64 = 64 << 20;
    let range = unit.range(to_the_end(unit, cdb.blocks()))?;
    let end = range.end.min(range.start.saturating_add(PREFETCH_BYTES_MAX));
    read_through(unit, range.start..end)
}

/// A number of 0 blocks means all blocks to the end of the unit.
fn to_the_end(unit: &LogicalUnit, span: BlockSpan) -> BlockSpan {
    match span.count {
        0 => BlockSpan {
            count: unit.block_count.saturating_sub(span.first),
            ..span
        },
        _ => span,
    }
}

pub(super) fn synchronize_cache(unit: &LogicalUnit, cdb: &Cdb) -> Result<(), DeviceFailure> {
    unit.range(to_the_end(unit, cdb.blocks()))?;
    match unit.device.writer() {
        Some(device) => device.flush().map_err(write_failure),
        // A device that cannot be written has nothing to flush.
        None => Ok(()),
    }
}

/// COMPARE AND WRITE: the first half of the data is compared, and the second half is written if it is equal.
pub(super) fn compare_and_write(unit: &LogicalUnit, cdb: &Cdb, data: &[u8]) -> Result<(), DeviceFailure> {
    refuse_protection(cdb)?;
    let writable = Writable::new(unit)?;
    let span = BlockSpan {
        first: cdb.u64(2),
        count: u64::from(cdb.byte(13)),
    };
    let range = unit.transfer_range(span)?;
    let length = to_usize(range.end - range.start);
    if data.len() != 2 * length {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let (expected, new) = data.split_at(length);
    let alone = unit.exclusive.write().unwrap_or_else(PoisonError::into_inner);
    compare(unit, range.start, expected)?;
    writable.write(&range, new)?;
    drop(alone);
    writable.finish(Persistence::of(cdb))
}

/// ORWRITE: the disjunction of the blocks and the data is written.
pub(super) fn or_write(unit: &LogicalUnit, cdb: &Cdb, data: &[u8]) -> Result<(), DeviceFailure> {
    refuse_protection(cdb)?;
    let writable = Writable::new(unit)?;
    let range = unit.transfer_range(cdb.blocks())?;
    let length = to_usize(range.end - range.start).min(data.len());
    let data = data.get(..length).unwrap_or(data);
    let alone = unit.exclusive.write().unwrap_or_else(PoisonError::into_inner);
    let mut offset = range.start;
    for piece in data.chunks(PIECE_BYTES) {
        let mut combined = vec![0; piece.len()];
        unit.device
            .reader()
            .read_at(&mut combined, offset)
            .map_err(read_failure)?;
        for (old, new) in combined.iter_mut().zip(piece) {
            *old |= new;
        }
        writable.device.write_at(&combined, offset).map_err(write_failure)?;
        offset += piece.len() as u64;
    }
    drop(alone);
    writable.finish(Persistence::of(cdb))
}
