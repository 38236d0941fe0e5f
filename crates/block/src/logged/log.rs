//! A file with writes in their order: a header, and two areas of records.
//!
//! ```text
//! 0         8 bytes   "HFWRLOG1"
//! 8         4 bytes   the words of its user, see `WriteLog::set_note`
//! 16, 32    16 bytes  each area: sequence, used bytes
//! 4096      16 MiB    records of the first area
//! 4096+16M  16 MiB    records of the second area
//!
//! record    8 bytes kind, 8 bytes offset, 8 bytes length, and the data of a write
//! ```
//! Numbers are in the byte order of the host: a log never leaves it. A record counts when the used bytes include it, so a
//! process that is killed while it appends leaves no partial record. The area with the lower sequence is the older one.

#![deny(clippy::indexing_slicing, reason = "an earlier process has written the log")]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use crate::{BlockDeviceMut, Error, Result, to_usize};

const MAGIC: &[u8; 8] = b"HFWRLOG1";
const NOTE_OFFSET: u64 = 8;
const AREAS_OFFSET: u64 = 16;
const AREA_HEADER_BYTES: u64 = 16;
const RECORDS_OFFSET: u64 = 4096;
const AREA_BYTES: u64 = 16 << 20;
const RECORD_HEADER_BYTES: usize = 24;

const KIND_WRITE: u64 = 1;
const KIND_ZERO: u64 = 2;
const KIND_TRIM: u64 = 3;

/// One of the two areas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum AreaId {
    #[default]
    First,
    Second,
}

impl AreaId {
    pub(super) fn index(self) -> usize {
        match self {
            Self::First => 0,
            Self::Second => 1,
        }
    }

    pub(super) fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    fn header_offset(self) -> u64 {
        AREAS_OFFSET + self.index() as u64 * AREA_HEADER_BYTES
    }

    fn records_offset(self) -> u64 {
        RECORDS_OFFSET + self.index() as u64 * AREA_BYTES
    }
}

/// A change of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LogRecord<'a> {
    Write { offset: u64, data: &'a [u8] },
    Zero { range: Range<u64> },
    Trim { range: Range<u64> },
}

impl LogRecord<'_> {
    pub(super) fn range(&self) -> Range<u64> {
        match self {
            Self::Write { offset, data } => *offset..offset.saturating_add(data.len() as u64),
            Self::Zero { range } | Self::Trim { range } => range.clone(),
        }
    }

    fn data(&self) -> &[u8] {
        match self {
            Self::Write { data, .. } => data,
            Self::Zero { .. } | Self::Trim { .. } => &[],
        }
    }

    fn kind(&self) -> u64 {
        match self {
            Self::Write { .. } => KIND_WRITE,
            Self::Zero { .. } => KIND_ZERO,
            Self::Trim { .. } => KIND_TRIM,
        }
    }

    fn stored_bytes(&self) -> u64 {
        (RECORD_HEADER_BYTES + self.data().len()) as u64
    }

    /// Whether an area with so many used bytes has room for it.
    pub(super) fn fits(&self, used_bytes: u64) -> bool {
        used_bytes + self.stored_bytes() <= AREA_BYTES
    }

    fn header(&self) -> Vec<u8> {
        let range = self.range();
        let length = range.end.saturating_sub(range.start);
        [self.kind(), range.start, length]
            .into_iter()
            .flat_map(u64::to_ne_bytes)
            .collect()
    }
}

/// What a replay has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplayReport {
    /// Number of writes.
    pub record_count: u64,
    /// Bytes of their data.
    pub data_bytes: u64,
}

/// A log of writes in a file.
pub struct WriteLog {
    file: File,
}

fn failed(action: &'static str, offset: u64) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::io(action, offset, source)
}

fn invalid(offset: u64, reason: &str) -> Error {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidData, reason.to_owned());
    Error::io("read the write log", offset, source)
}

impl WriteLog {
    /// Makes an empty log in a file, whose content is lost.
    pub fn create(file: File) -> Result<Self> {
        let length = RECORDS_OFFSET + 2 * AREA_BYTES;
        file.set_len(0).map_err(failed("create the write log", 0))?;
        file.set_len(length).map_err(failed("create the write log", 0))?;
        let log = Self { file };
        log.write(&1_u64.to_ne_bytes(), AreaId::First.header_offset())?;
        log.write(MAGIC, 0)?;
        Ok(log)
    }

    /// Opens the log of an earlier process.
    pub fn open(file: File) -> Result<Self> {
        let log = Self { file };
        if log.read::<8>(0)? != *MAGIC {
            return Err(invalid(0, "it is not a log of writes"));
        }
        Ok(log)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let written = self.file.write_all_at(bytes, offset);
        written.map_err(failed("write the write log", offset))
    }

    fn read<const LENGTH: usize>(&self, offset: u64) -> Result<[u8; LENGTH]> {
        let mut bytes = [0; LENGTH];
        let read = self.file.read_exact_at(&mut bytes, offset);
        read.map_err(failed("read the write log", offset))?;
        Ok(bytes)
    }

    fn number(&self, offset: u64) -> Result<u64> {
        self.read(offset).map(u64::from_ne_bytes)
    }

    /// A number for the processes that share the log, 0 at first.
    pub fn note(&self) -> Result<u32> {
        self.read(NOTE_OFFSET).map(u32::from_ne_bytes)
    }

    /// Sets the number.
    pub fn set_note(&self, note: u32) -> Result<()> {
        self.write(&note.to_ne_bytes(), NOTE_OFFSET)
    }

    /// Whether there is nothing to replay.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.used_bytes(AreaId::First)? == 0 && self.used_bytes(AreaId::Second)? == 0)
    }

    fn sequence(&self, area: AreaId) -> Result<u64> {
        self.number(area.header_offset())
    }

    fn used_bytes(&self, area: AreaId) -> Result<u64> {
        let offset = area.header_offset() + 8;
        match self.number(offset)? {
            used_bytes if used_bytes <= AREA_BYTES => Ok(used_bytes),
            _ => Err(invalid(offset, "an area is longer than the log")),
        }
    }

    /// Appends a record to an area with `used_bytes`; returns the used bytes after it.
    pub(super) fn append(&self, area: AreaId, used_bytes: u64, record: &LogRecord<'_>) -> Result<u64> {
        let at = area.records_offset() + used_bytes;
        self.write(&record.header(), at)?;
        self.write(record.data(), at + RECORD_HEADER_BYTES as u64)?;
        let used_bytes = used_bytes + record.stored_bytes();
        self.write(&used_bytes.to_ne_bytes(), area.header_offset() + 8)?;
        Ok(used_bytes)
    }

    /// Makes an empty area the newer one.
    pub(super) fn begin(&self, area: AreaId) -> Result<()> {
        let sequence = self.sequence(area.other())? + 1;
        self.write(&sequence.to_ne_bytes(), area.header_offset())
    }

    pub(super) fn clear(&self, area: AreaId) -> Result<()> {
        self.write(&0_u64.to_ne_bytes(), area.header_offset() + 8)
    }

    /// Repeats all writes of an earlier process on a device, flushes it, and clears the log.
    pub fn replay(&self, device: &dyn BlockDeviceMut) -> Result<ReplayReport> {
        let mut areas = [AreaId::First, AreaId::Second];
        if self.sequence(AreaId::First)? > self.sequence(AreaId::Second)? {
            areas.reverse();
        }
        let mut report = ReplayReport::default();
        for area in areas {
            self.replay_area(area, device, &mut report)?;
        }
        device.flush()?;
        areas.into_iter().try_for_each(|area| self.clear(area))?;
        Ok(report)
    }

    fn replay_area(&self, area: AreaId, device: &dyn BlockDeviceMut, report: &mut ReplayReport) -> Result<()> {
        let start = area.records_offset();
        let end = start + self.used_bytes(area)?;
        let mut at = start;
        let mut data = Vec::new();
        while at < end {
            let (kind, offset, length) = (self.number(at)?, self.number(at + 8)?, self.number(at + 16)?);
            let range_end = offset
                .checked_add(length)
                .ok_or_else(|| invalid(at, "a record has no end"))?;
            let after_header = at + RECORD_HEADER_BYTES as u64;
            at = match kind {
                KIND_WRITE if length <= end.saturating_sub(after_header) => {
                    data.resize(to_usize(length), 0);
                    let read = self.file.read_exact_at(&mut data, after_header);
                    read.map_err(failed("read the write log", after_header))?;
                    device.write_at(&data, offset)?;
                    report.data_bytes += length;
                    after_header + length
                }
                KIND_ZERO => {
                    device.write_zeroes(offset..range_end)?;
                    after_header
                }
                KIND_TRIM => {
                    device.trim(offset..range_end)?;
                    after_header
                }
                _ => return Err(invalid(at, "a record is invalid")),
            };
            report.record_count += 1;
        }
        Ok(())
    }
}
