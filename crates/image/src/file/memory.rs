//! Image files in memory, for tests: a plain one, and one that records changes and injects failures.

use std::ops::Range;
#[cfg(test)]
use std::sync::Mutex;
use std::sync::{PoisonError, RwLock};

use holdfast_block::{ExtentKind, ExtentList, Result, to_usize};

use super::ImageFile;

#[derive(Debug, Default)]
pub(crate) struct MemoryFile {
    bytes: RwLock<Vec<u8>>,
}

impl MemoryFile {
    /// A file that contains `bytes`.
    #[cfg(test)]
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes: RwLock::new(bytes),
        }
    }
}

impl ImageFile for MemoryFile {
    fn length_bytes(&self) -> Result<u64> {
        Ok(self.bytes.read().unwrap_or_else(PoisonError::into_inner).len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let bytes = self.bytes.read().unwrap_or_else(PoisonError::into_inner);
        let start = to_usize(offset.min(bytes.len() as u64));
        let length = buffer.len().min(bytes.len() - start);
        buffer[..length].copy_from_slice(&bytes[start..start + length]);
        buffer[length..].fill(0);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        let start = to_usize(offset);
        if bytes.len() < start + data.len() {
            bytes.resize(start + data.len(), 0);
        }
        bytes[start..start + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn set_length(&self, length_bytes: u64) -> Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        bytes.resize(to_usize(length_bytes), 0);
        Ok(())
    }

    fn punch(&self, range: Range<u64>) -> Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        let length = bytes.len() as u64;
        bytes[to_usize(range.start.min(length))..to_usize(range.end.min(length))].fill(0);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end - range.start, ExtentKind::Data);
        Ok(list)
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}

#[cfg(test)]
/// A change that was made to a [`RecordingFile`].
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Write {
        offset: u64,
        data: Vec<u8>,
    },
    SetLength(u64),
    /// The end of a sync, which makes the first `covered` operations durable: those before its start.
    Sync {
        covered: usize,
    },
}

/// Work that a test does while a sync is under way.
#[cfg(test)]
pub(crate) type DuringSync = Box<dyn FnMut() + Send>;

#[cfg(test)]
/// A file in memory that records every change, so that a crash at any point can be simulated. One operation can be
/// made to fail.
pub(crate) struct RecordingFile {
    live: MemoryFile,
    start: Vec<u8>,
    operations: Mutex<Vec<Operation>>,
    fail_at: Mutex<Option<usize>>,
    /// Called between the start and the end of each sync.
    during_sync: Mutex<Option<DuringSync>>,
    /// The byte that punched ranges read as.
    punched: u8,
}

#[cfg(test)]
impl RecordingFile {
    /// A file that contains `start`, already durable; operation number `fail_at` fails.
    pub(crate) fn new(start: Vec<u8>, fail_at: Option<usize>) -> Self {
        Self {
            live: MemoryFile::new(start.clone()),
            start,
            operations: Mutex::default(),
            fail_at: Mutex::new(fail_at),
            during_sync: Mutex::default(),
            // Garbage, to prove that no code reads a range after it was punched.
            punched: 0xdb,
        }
    }

    /// The same, but punched ranges read as zero.
    pub(crate) fn with_zero_holes(self) -> Self {
        Self { punched: 0, ..self }
    }

    /// Calls `work` between the start and the end of each further sync, except those that `work` itself causes. Its
    /// writes become durable with a later sync.
    pub(crate) fn set_during_sync(&self, work: Option<DuringSync>) {
        *self.during_sync.lock().unwrap() = work;
    }

    /// The next operation fails.
    pub(crate) fn fail_next(&self) {
        self.fail_at(self.operation_count() + 1);
    }

    /// Operation `number` fails, counted from 1; with 0, none does.
    pub(crate) fn fail_at(&self, number: usize) {
        *self.fail_at.lock().unwrap() = Some(number);
    }

    pub(crate) fn sync_count(&self) -> usize {
        let operations = self.operations.lock().unwrap();
        operations
            .iter()
            .filter(|operation| matches!(operation, Operation::Sync { .. }))
            .count()
    }

    pub(crate) fn operation_count(&self) -> usize {
        self.operations.lock().unwrap().len()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.live.bytes.read().unwrap().clone()
    }

    /// The file after a simulated crash after `count` operations: synced data is present, and of later writes
    /// only those 512-byte sectors that `choose` picks (called with an exclusive upper bound).
    pub(crate) fn crashed_after(&self, count: usize, mut choose: impl FnMut(u64) -> u64) -> Vec<u8> {
        let operations = self.operations.lock().unwrap();
        let done = &operations[..count];
        let synced = done
            .iter()
            .filter_map(|operation| match operation {
                Operation::Sync { covered } => Some(*covered),
                _ => None,
            })
            .max()
            .unwrap_or(0);
        let file = MemoryFile::new(self.start.clone());
        for (number, operation) in done.iter().enumerate() {
            let outcome = if number < synced { 0 } else { choose(3) };
            match operation {
                Operation::Sync { .. } => {}
                _ if outcome == 1 => {}
                Operation::SetLength(length) => file.set_length(*length).unwrap(),
                Operation::Write { offset, data } if outcome == 0 => file.write_at(data, *offset).unwrap(),
                Operation::Write { offset, data } => {
                    let mut at = 0;
                    while at < data.len() {
                        let sector_end = 512 - to_usize((offset + at as u64) % 512);
                        let end = (at + sector_end).min(data.len());
                        if choose(2) == 0 {
                            file.write_at(&data[at..end], offset + at as u64).unwrap();
                        }
                        at = end;
                    }
                }
            }
        }
        file.bytes.into_inner().unwrap()
    }

    fn record(&self, operation: Operation) -> Result<()> {
        let mut operations = self.operations.lock().unwrap();
        operations.push(operation);
        if *self.fail_at.lock().unwrap() == Some(operations.len()) {
            operations.pop();
            operations.push(Operation::SetLength(self.live.length_bytes()?));
            let reason = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(holdfast_block::Error::io("write", 0, reason));
        }
        Ok(())
    }
}

#[cfg(test)]
impl ImageFile for RecordingFile {
    fn length_bytes(&self) -> Result<u64> {
        self.live.length_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.live.read_at(buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.record(Operation::Write {
            offset,
            data: data.to_vec(),
        })?;
        self.live.write_at(data, offset)
    }

    fn set_length(&self, length_bytes: u64) -> Result<()> {
        self.record(Operation::SetLength(length_bytes))?;
        self.live.set_length(length_bytes)
    }

    fn punch(&self, range: Range<u64>) -> Result<()> {
        let end = range.end.min(self.live.length_bytes()?);
        if range.start < end {
            self.write_at(&vec![self.punched; to_usize(end - range.start)], range.start)?;
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        let covered = self.operation_count();
        let work = self.during_sync.lock().unwrap().take();
        if let Some(mut work) = work {
            work();
            self.during_sync.lock().unwrap().get_or_insert(work);
        }
        self.record(Operation::Sync { covered })
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.live.extents(range, extent_count_max)
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}

#[cfg(test)]
/// Reproducible pseudo-random numbers, for workloads and simulated crashes.
pub(crate) struct Random(pub(crate) u64);

#[cfg(test)]
impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}
