//! A device whose accepted writes survive the end of its process, also before a flush.
//!
//! A device may keep a part of its state in memory until the next flush, such as tables of an image. If its process is
//! killed, that state is lost as in a power failure, but the programs that have written do not know it: they continue,
//! and a later flush would report that all is durable. [`LoggedDevice`] therefore keeps all writes since the last flush
//! in a [`WriteLog`], a file in memory that another process holds as well. A successor replays it before it serves
//! requests.
//!
//! Simultaneous writes to overlapping ranges take turns, so that the log has the order in which the device got them.

#![deny(clippy::indexing_slicing, reason = "an earlier process has written the log")]

mod log;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use log::{AreaId, LogRecord};
pub use log::{ReplayReport, WriteLog};

use crate::{BlockDevice, BlockDeviceMut, Error, ExtentList, FlushRounds, Result};

/// A longer write is split: a record must fit in an area of the log.
const WRITE_BYTES_MAX: usize = 1 << 20;

/// A device with a log of its writes since the last flush.
pub struct LoggedDevice<D> {
    device: D,
    log: WriteLog,
    state: Mutex<State>,
    changed: Condvar,
    rounds: FlushRounds,
}

#[derive(Default)]
struct State {
    /// The area that gets new records.
    active: AreaId,
    first: Area,
    second: Area,
    /// Ranges of writes that the device is executing.
    writing: Vec<Range<u64>>,
    /// A flush of the device has failed, or is running. Data of a failed flush may be lost although a later flush would
    /// succeed, so all later flushes fail. The log still has the data for a successor.
    has_failed: bool,
}

impl State {
    fn area(&mut self, id: AreaId) -> &mut Area {
        match id {
            AreaId::First => &mut self.first,
            AreaId::Second => &mut self.second,
        }
    }
}

#[derive(Default, Clone, Copy)]
struct Area {
    used_bytes: u64,
    /// Writes with a record in this area that the device is executing.
    writing_count: usize,
}

impl<D: BlockDeviceMut> LoggedDevice<D> {
    /// Uses an empty log.
    ///
    /// # Errors
    /// The log has records: they must be [replayed](WriteLog::replay) first.
    pub fn new(device: D, log: WriteLog) -> Result<Self> {
        if !log.is_empty()? {
            return Err(Error::layer(LogNotEmpty));
        }
        Ok(Self {
            device,
            log,
            state: Mutex::default(),
            changed: Condvar::new(),
            rounds: FlushRounds::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a record, and lets the device execute the write.
    fn execute(&self, record: &LogRecord<'_>, apply: impl FnOnce() -> Result<()>) -> Result<()> {
        let range = record.range();
        let area = loop {
            let mut state = self.lock();
            while state.writing.iter().any(|other| overlap(other, &range)) {
                state = self.wait(state);
            }
            let active = state.active;
            let used_bytes = state.area(active).used_bytes;
            if !record.fits(used_bytes) {
                drop(state);
                self.flush()?;
                continue;
            }
            let used_bytes = self.log.append(active, used_bytes, record)?;
            let area = state.area(active);
            area.used_bytes = used_bytes;
            area.writing_count += 1;
            state.writing.push(range.clone());
            break active;
        };
        let applied = apply();
        let mut state = self.lock();
        state.area(area).writing_count -= 1;
        if let Some(at) = state.writing.iter().position(|other| *other == range) {
            state.writing.swap_remove(at);
        }
        drop(state);
        self.changed.notify_all();
        applied
    }

    /// Flushes the device, and clears the records that the flush has made durable. New writes go to the other area
    /// meanwhile.
    fn flush_once(&self) -> Result<()> {
        let mut state = self.lock();
        if state.has_failed {
            return Err(Error::layer(FlushFailed));
        }
        // Also if the log fails: its records are not complete any more.
        state.has_failed = true;
        let old = state.active;
        // A round clears its area, and after a failed one there are no more.
        self.log.begin(old.other())?;
        state.active = old.other();
        while state.area(old).writing_count > 0 {
            state = self.wait(state);
        }
        drop(state);
        self.device.flush()?;
        let mut state = self.lock();
        self.log.clear(old)?;
        state.area(old).used_bytes = 0;
        state.has_failed = false;
        Ok(())
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The log of a device has records of an earlier process.
#[derive(Debug, thiserror::Error)]
#[error("the log has writes of an earlier process")]
struct LogNotEmpty;

/// An earlier flush of the device has failed.
#[derive(Debug, thiserror::Error)]
#[error("an earlier flush has failed, so it is not known which writes are durable")]
struct FlushFailed;

impl<D: BlockDeviceMut> BlockDevice for LoggedDevice<D> {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl<D: BlockDeviceMut> BlockDeviceMut for LoggedDevice<D> {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        let mut at = offset;
        for piece in data.chunks(WRITE_BYTES_MAX) {
            let record = LogRecord::Write {
                offset: at,
                data: piece,
            };
            self.execute(&record, || self.device.write_at(piece, at))?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, crate::device::range_length(&range))?;
        let record = LogRecord::Zero { range: range.clone() };
        self.execute(&record, || self.device.write_zeroes(range))
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, crate::device::range_length(&range))?;
        let record = LogRecord::Trim { range: range.clone() };
        self.execute(&record, || self.device.trim(range))
    }

    fn flush(&self) -> Result<()> {
        self.rounds.flush(|| self.flush_once())
    }
}
