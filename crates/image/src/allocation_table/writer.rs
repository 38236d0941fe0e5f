//! Writes to an image through its tables.
//!
//! Several threads may write into allocated blocks; changes of tables are made one at a time. Data is durable before
//! the table that refers to it is written.
//!
//! A flush takes the changes of the tables, and then syncs and writes without a lock: no read and no write waits for a
//! sync. What is written meanwhile becomes durable with the next flush. Flushes at the same time share a round of
//! syncs.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, FlushRounds, Result as BlockResult, to_usize};

use super::TableLayer;
use super::pages::TableChanges;
use crate::error::corrupt;
use crate::model::layered::{BackingUse, Layered as _};
use crate::model::mapped_extent::{MappedExtent, MappedKind};
use crate::{Error, Result};

/// A write that lets the changed tables reach this size stores them.
const CHANGED_BYTES_MAX: u64 = 16 << 20;
/// Limit of one write that needs table changes.
const SPAN_BYTES_MAX: u64 = 8 << 20;

/// An image that is written through its allocation table.
pub(crate) struct TableMut {
    size_bytes: u64,
    unit_bytes: u64,
    state: RwLock<TableState>,
    /// The stores of table changes, one at a time.
    rounds: FlushRounds,
}

struct TableState {
    layer: TableLayer,
    is_started: bool,
    /// The reason why the image cannot be written any more: data that could not be synced may be lost.
    failure: Option<String>,
}

impl TableMut {
    pub(crate) fn new(layer: TableLayer) -> Self {
        Self {
            size_bytes: layer.disk_bytes(),
            unit_bytes: layer.unit_bytes(),
            state: RwLock::new(TableState {
                layer,
                is_started: false,
                failure: None,
            }),
            rounds: FlushRounds::new(),
        }
    }

    /// Reads the layer while it is not changed.
    pub(crate) fn with_layer<T>(&self, read: impl FnOnce(&TableLayer) -> Result<T>) -> Result<T> {
        self.shared(|state| read(&state.layer))
    }

    fn shared<T>(&self, work: impl FnOnce(&TableState) -> Result<T>) -> Result<T> {
        work(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn exclusive<T>(&self, work: impl FnOnce(&mut TableState) -> Result<T>) -> Result<T> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        state.check_health()?;
        work(&mut state)
    }

    /// Runs a change of the tables with exclusive access. Stores the tables if many changes are pending.
    fn with_tables<T>(&self, change: impl FnOnce(&mut TableState) -> Result<T>) -> Result<T> {
        let mut is_large = false;
        let changed = self.exclusive(|state| {
            if !state.is_started {
                state.layer.tables.start()?;
                state.is_started = true;
            }
            let changed = change(state)?;
            is_large = state.layer.tables.changed_bytes() >= CHANGED_BYTES_MAX;
            Ok(changed)
        })?;
        if is_large {
            self.commit()?;
        }
        Ok(changed)
    }

    /// Makes all completed writes durable.
    fn commit(&self) -> Result<()> {
        self.rounds.flush(|| self.commit_round())
    }

    /// Makes all data durable, then the tables as they were at the start.
    fn commit_round(&self) -> Result<()> {
        let (file, is_changed) = self.shared(|state| {
            state.check_health()?;
            Ok((Arc::clone(&state.layer.file), state.layer.tables.changed_bytes() > 0))
        })?;
        let changes = if is_changed {
            Some(self.exclusive(|state| Ok(state.layer.tables.take_changes()))?)
        } else {
            None
        };
        let synced = file.sync().map_err(Error::from);
        let stored = synced.and_then(|()| changes.as_ref().map_or(Ok(()), TableChanges::store));
        if stored.is_err() || changes.is_some() {
            let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
            match &stored {
                Ok(()) => state.layer.tables.changes_stored(),
                Err(error) => state.failure = Some(error.to_string()),
            }
        }
        stored
    }

    /// Writes in place as much as possible; returns the number of bytes.
    fn overwrite(&self, data: &[u8], offset: u64) -> Result<usize> {
        self.shared(|state| {
            state.check_health()?;
            if !state.is_started {
                return Ok(0);
            }
            let mut done = 0;
            while done < data.len() {
                let run = state.layer.run(offset + done as u64, (data.len() - done) as u64)?;
                let MappedKind::Data { host } = run.kind else { break };
                let length = to_usize(run.length);
                state.layer.file.write_at(&data[done..done + length], host)?;
                done += length;
            }
            Ok(done)
        })
    }

    fn write(&self, data: &[u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let (rest, at) = (&data[done..], offset + done as u64);
            done += match self.overwrite(rest, at)? {
                0 => self.with_tables(|state| state.extend(rest, at))?,
                count => count,
            };
        }
        Ok(())
    }

    /// The extent at the start of `range`, after punching it if it is data. None if writing has not been started.
    fn punch(&self, range: &Range<u64>) -> Result<Option<MappedExtent>> {
        self.shared(|state| {
            state.check_health()?;
            if !state.is_started {
                return Ok(None);
            }
            let run = state.layer.run(range.start, range.end - range.start)?;
            if let MappedKind::Data { host } = run.kind {
                state.layer.file.punch(host..host + run.length)?;
            }
            Ok(Some(run))
        })
    }

    /// Zeroes `range`. Bytes without a block are zeroed only if `must` is set.
    fn zero(&self, range: Range<u64>, must: bool) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            at = match self.punch(&(at..range.end))? {
                None => self.with_tables(|_| Ok(at))?,
                Some(run) => match run.kind {
                    MappedKind::Absent | MappedKind::Compressed(_) if must => {
                        self.with_tables(|state| state.zero_absent(at..at + run.length))?
                    }
                    _ => at + run.length,
                },
            };
        }
        Ok(())
    }
}

impl TableState {
    fn check_health(&self) -> Result<()> {
        match &self.failure {
            None => Ok(()),
            Some(detail) => Err(Error::NotWritable {
                image: self.layer.image.to_string(),
                detail: format!("earlier writes may be lost ({detail}); open it again"),
            }),
        }
    }

    /// Writes the beginning of `data` if that requires a change of the tables; returns the number of bytes, 0 if it
    /// can be written in place now.
    fn extend(&mut self, data: &[u8], offset: u64) -> Result<usize> {
        let run = self.layer.run(offset, (data.len() as u64).min(SPAN_BYTES_MAX))?;
        let unit = self.layer.unit_bytes();
        let units = offset / unit * unit..(offset + run.length).next_multiple_of(unit);
        let reads_as_zero = match run.kind {
            MappedKind::Data { .. } => return Ok(0),
            MappedKind::Zero => true,
            MappedKind::Absent => self.layer.is_bottom(units.start),
            MappedKind::Compressed(_) => {
                return Err(Error::NotWritable {
                    image: self.layer.image.to_string(),
                    detail: "compressed blocks cannot be changed; convert it first".to_owned(),
                });
            }
        };
        if reads_as_zero {
            self.layer.tables.reserve(units)?;
            return Ok(0);
        }
        // Units that are written in part get the rest from the backing device.
        let disk_end = self.layer.disk_bytes();
        let mut content = vec![0; to_usize(units.end - units.start)];
        let length = to_usize(run.length);
        if units != (offset..offset + run.length) {
            let held = to_usize(units.end.min(disk_end) - units.start);
            self.layer
                .read(&mut content[..held], units.start, BackingUse::Backing)?;
        }
        let start = to_usize(offset - units.start);
        content[start..start + length].copy_from_slice(&data[..length]);
        let written = match self.layer.tables.reserve(units.clone()) {
            Ok(()) => self.write_reserved(&content, units.start),
            Err(error) => Err(error),
        };
        if let Err(error) = &written {
            // Reserved units without their content would hide the backing device.
            self.layer.unwritten = units;
            self.failure = Some(error.to_string());
        }
        written?;
        Ok(length)
    }

    /// Writes into units that were just reserved.
    fn write_reserved(&self, content: &[u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < content.len() {
            // Tables map whole blocks, also past the end of the disk.
            let run = self
                .layer
                .tables
                .run(offset + done as u64, (content.len() - done) as u64)?;
            let MappedKind::Data { host } = run.kind else {
                return Err(corrupt(&self.layer.image, "table", 0, "the block was not allocated"));
            };
            let length = to_usize(run.length);
            self.layer.file.write_at(&content[done..done + length], host)?;
            done += length;
        }
        Ok(())
    }

    /// Makes the start of a range without blocks read as zero; returns the end of the zeroed part.
    fn zero_absent(&mut self, range: Range<u64>) -> Result<u64> {
        let unit = self.layer.tables.zero_bytes();
        let run = self.layer.run(range.start, range.end - range.start)?;
        let end = range.start + run.length;
        match run.kind {
            MappedKind::Zero => return Ok(end),
            MappedKind::Absent if self.layer.is_bottom(range.start) => return Ok(end),
            // Another thread wrote there in the meantime.
            MappedKind::Data { .. } => return Ok(range.start),
            _ => {}
        }
        let is_end = end == self.layer.disk_bytes();
        let whole_end = if is_end {
            end.next_multiple_of(unit)
        } else {
            end / unit * unit
        };
        let whole = range.start.next_multiple_of(unit)..whole_end;
        if whole.start == range.start && whole.start < whole.end {
            let done = self.layer.tables.set_zero(whole.clone())?;
            if done > 0 {
                return Ok((range.start + done).min(end));
            }
        }
        // Up to the next whole unit, or all of it if the format cannot mark units as zero.
        let piece = if whole.start > range.start && whole.start < end {
            whole.start - range.start
        } else {
            run.length.min(SPAN_BYTES_MAX)
        };
        let zeroes = vec![0; to_usize(piece)];
        let written = self.extend(&zeroes, range.start)?;
        Ok(range.start + written as u64)
    }
}

impl BlockDevice for TableMut {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        Ok(self.shared(|state| state.layer.read(buffer, offset, BackingUse::Backing))?)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        Ok(self.shared(|state| state.layer.list_extents(range, extent_count_max, BackingUse::Backing))?)
    }

    fn block_size_bytes(&self) -> u32 {
        u32::try_from(self.unit_bytes).unwrap_or(u32::MAX)
    }
}

impl BlockDeviceMut for TableMut {
    fn write_at(&self, data: &[u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, data.len() as u64)?;
        Ok(self.write(data, offset)?)
    }

    fn write_zeroes(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        Ok(self.zero(range, true)?)
    }

    fn trim(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        Ok(self.zero(range, false)?)
    }

    fn flush(&self) -> BlockResult<()> {
        Ok(self.commit()?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::{BlockDevice, BlockDeviceMut as _, MemoryDevice};

    use super::TableMut;
    use crate::allocation_table::TableLayer;
    use crate::file::ImageFile;
    use crate::file::flush_tests::syncs_of_joined_flushes;
    use crate::file::memory::RecordingFile;
    use crate::formats::ploop::create::write_empty;
    use crate::formats::ploop::header::PloopHeader;
    use crate::formats::ploop::tables::PloopTables;

    fn device_over(recording: &Arc<RecordingFile>, backing: Option<Arc<dyn BlockDevice>>) -> TableMut {
        write_empty(&**recording, 98_304, 4096).unwrap();
        let file: Arc<dyn ImageFile> = recording.clone();
        let header = PloopHeader::load(&*file, "image").unwrap();
        let tables = Box::new(PloopTables::new("image".into(), header, Arc::clone(&file)));
        TableMut::new(TableLayer::new("image".into(), file, tables, backing))
    }

    /// The cluster is reserved, cleared and then written: each of these can fail.
    #[test]
    fn a_failed_write_leaves_the_rest_of_its_cluster() {
        let backing = Arc::new(MemoryDevice::from_bytes(&vec![0x55; 98_304]));
        for number in 1.. {
            let recording = Arc::new(RecordingFile::new(Vec::new(), None).with_zero_holes());
            let device = device_over(&recording, Some(backing.clone()));
            device.write_at(&[0x66; 512], 0).unwrap();
            recording.fail_at(recording.operation_count() + number);
            let is_written = device.write_at(&[0x77; 512], 8192 + 512).is_ok();
            let mut found = vec![0; 98_304];
            device.read_at(&mut found, 0).unwrap();
            let mut expected = vec![0x55; 98_304];
            expected[..512].fill(0x66);
            if is_written {
                expected[8192 + 512..8192 + 1024].fill(0x77);
            }
            assert!(found == expected, "operation {number} fails");
            if is_written {
                assert!(number > 2, "each operation has failed once");
                break;
            }
        }
    }

    #[test]
    fn flushes_at_the_same_time_take_two_rounds() {
        let recording = Arc::new(RecordingFile::new(Vec::new(), None).with_zero_holes());
        let device = device_over(&recording, None);
        let count = syncs_of_joined_flushes(&recording, &device, &device.rounds, &|| device.commit_round());
        assert_eq!(count, 4, "data and table, twice");
    }
}
