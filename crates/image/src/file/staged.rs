//! Keeps the changes of a file in memory until they are executed: until then only readers of this object see them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use holdfast_block::{Error as BlockError, ExtentKind, ExtentList, Result, to_usize};

use super::ImageFile;

const PAGE_BYTES: u64 = 4096;
/// Limit of the memory for changes, which a malicious image must not exhaust: enough to rewrite the refcounts of 4
/// TiB in clusters of 64 KiB.
const CHANGED_BYTES_MAX: u64 = 512 << 20;

/// Memory that a change takes besides its data.
const CHANGE_BYTES: u64 = 64;

/// A recorded change.
enum StagedChange {
    Write { offset: u64, data: Vec<u8> },
    SetLength(u64),
    Punch(Range<u64>),
    Sync,
}

/// A file with pending changes in memory.
pub(crate) struct Staged {
    base: Arc<dyn ImageFile>,
    state: Mutex<StagedState>,
}

struct StagedState {
    length_bytes: u64,
    /// End of the visible part of the underlying file. If the file was truncated and grew again, bytes after it read
    /// as zero.
    base_end: u64,
    pages: BTreeMap<u64, Box<[u8; to_usize(PAGE_BYTES)]>>,
    /// Whole pages that were punched: end by start. Pages in `pages` take precedence.
    holes: BTreeMap<u64, u64>,
    changes: Vec<StagedChange>,
    changed_bytes: u64,
    changed_bytes_max: u64,
}

impl Staged {
    /// Starts without changes.
    pub(crate) fn new(base: Arc<dyn ImageFile>) -> Result<Self> {
        let length_bytes = base.length_bytes()?;
        Ok(Self {
            base,
            state: Mutex::new(StagedState {
                length_bytes,
                base_end: length_bytes,
                pages: BTreeMap::new(),
                holes: BTreeMap::new(),
                changes: Vec::new(),
                changed_bytes: 0,
                changed_bytes_max: CHANGED_BYTES_MAX,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, StagedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_changed(&self) -> bool {
        let is_change = |change: &StagedChange| !matches!(change, StagedChange::Sync);
        self.lock().changes.iter().any(is_change)
    }

    /// Applies the changes to the file, durably. After an error the file has those changes that precede the failed
    /// one.
    pub(crate) fn execute(&self) -> Result<()> {
        for change in &self.lock().changes {
            match change {
                StagedChange::Write { offset, data } => self.base.write_at(data, *offset)?,
                StagedChange::SetLength(length_bytes) => self.base.set_length(*length_bytes)?,
                StagedChange::Punch(range) => self.base.punch(range.clone())?,
                StagedChange::Sync => self.base.sync()?,
            }
        }
        self.base.sync()
    }
}

impl StagedState {
    fn read(&self, base: &dyn ImageFile, buffer: &mut [u8], offset: u64) -> Result<()> {
        let end = offset.saturating_add(buffer.len() as u64);
        let seen = to_usize(self.base_end.clamp(offset, end) - offset);
        if seen > 0 {
            base.read_at(&mut buffer[..seen], offset)?;
        }
        buffer[seen..].fill(0);
        let part = |from: u64, to: u64| -> Range<usize> {
            let (from, to) = (from.clamp(offset, end), to.clamp(offset, end));
            to_usize(from - offset)..to_usize(to - offset)
        };
        let first = self
            .holes
            .range(..=offset)
            .next_back()
            .map_or(offset, |(start, _)| *start);
        for (start, hole_end) in self.holes.range(first..end.max(first)) {
            buffer[part(*start, *hole_end)].fill(0);
        }
        let first = offset / PAGE_BYTES * PAGE_BYTES;
        for (start, page) in self.pages.range(first..end.max(first)) {
            let target = part(*start, start + PAGE_BYTES);
            let within = to_usize(offset.saturating_sub(*start));
            buffer[target.clone()].copy_from_slice(&page[within..within + target.len()]);
        }
        // Bytes past the end read as zero, also in the last page.
        buffer[part(self.length_bytes, u64::MAX)].fill(0);
        Ok(())
    }

    /// Copies `data` into the pages.
    fn put(&mut self, base: &dyn ImageFile, data: &[u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let start = at / PAGE_BYTES * PAGE_BYTES;
            let within = to_usize(at - start);
            let length = (data.len() - done).min(to_usize(PAGE_BYTES) - within);
            if !self.pages.contains_key(&start) {
                let mut page = Box::new([0; to_usize(PAGE_BYTES)]);
                self.account(PAGE_BYTES, start)?;
                self.read(base, &mut page[..], start)?;
                self.pages.insert(start, page);
            }
            if let Some(page) = self.pages.get_mut(&start) {
                page[within..within + length].copy_from_slice(&data[done..done + length]);
            }
            done += length;
        }
        Ok(())
    }

    fn add_hole(&mut self, range: Range<u64>) {
        let covered: Vec<u64> = self.pages.range(range.clone()).map(|(start, _)| *start).collect();
        for start in covered {
            self.pages.remove(&start);
        }
        // Merge all holes that touch it.
        let mut hole = range;
        while let Some((start, end)) = self
            .holes
            .range(..=hole.end)
            .next_back()
            .map(|(start, end)| (*start, *end))
        {
            if end < hole.start {
                break;
            }
            self.holes.remove(&start);
            hole = hole.start.min(start)..hole.end.max(end);
        }
        self.holes.insert(hole.start, hole.end);
    }

    fn record(&mut self, change: StagedChange) {
        self.changes.push(change);
    }

    /// Adds to the memory in use, up to its limit.
    fn account(&mut self, bytes: u64, offset: u64) -> Result<()> {
        self.changed_bytes = self.changed_bytes.saturating_add(bytes);
        if self.changed_bytes > self.changed_bytes_max {
            let reason = format!(
                "the changes need more than {} MiB of memory",
                self.changed_bytes_max >> 20
            );
            let reason = std::io::Error::new(std::io::ErrorKind::OutOfMemory, reason);
            return Err(BlockError::io("plan a write", offset, reason));
        }
        Ok(())
    }
}

impl ImageFile for Staged {
    fn length_bytes(&self) -> Result<u64> {
        Ok(self.lock().length_bytes)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.lock().read(&*self.base, buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let mut state = self.lock();
        state.account(data.len() as u64 + CHANGE_BYTES, offset)?;
        let end = offset.saturating_add(data.len() as u64);
        state.length_bytes = state.length_bytes.max(end);
        state.put(&*self.base, data, offset)?;
        state.record(StagedChange::Write {
            offset,
            data: data.to_vec(),
        });
        Ok(())
    }

    fn set_length(&self, length_bytes: u64) -> Result<()> {
        let mut state = self.lock();
        if length_bytes < state.length_bytes {
            let start = length_bytes / PAGE_BYTES * PAGE_BYTES;
            let end = state.length_bytes.next_multiple_of(PAGE_BYTES);
            let within = to_usize(length_bytes - start);
            if let Some(page) = state.pages.get_mut(&start) {
                page[within..].fill(0);
            }
            let next_page = start + if within == 0 { 0 } else { PAGE_BYTES };
            let punched: Vec<u64> = state
                .pages
                .range(next_page..end.max(next_page))
                .map(|(at, _)| *at)
                .collect();
            for at in punched {
                state.pages.remove(&at);
            }
            state.base_end = state.base_end.min(length_bytes);
        }
        state.length_bytes = length_bytes;
        state.record(StagedChange::SetLength(length_bytes));
        Ok(())
    }

    fn punch(&self, range: Range<u64>) -> Result<()> {
        let mut state = self.lock();
        let end = range.end.min(state.length_bytes);
        if range.start >= end {
            return Ok(());
        }
        let inner = range.start.next_multiple_of(PAGE_BYTES)..end / PAGE_BYTES * PAGE_BYTES;
        if inner.start < inner.end {
            let zeroes = [0; to_usize(PAGE_BYTES)];
            state.put(&*self.base, &zeroes[..to_usize(inner.start - range.start)], range.start)?;
            state.put(&*self.base, &zeroes[..to_usize(end - inner.end)], inner.end)?;
            state.add_hole(inner);
        } else {
            let zeroes = vec![0; to_usize(end - range.start)];
            state.put(&*self.base, &zeroes, range.start)?;
        }
        state.account(CHANGE_BYTES, range.start)?;
        state.record(StagedChange::Punch(range.start..end));
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.lock().record(StagedChange::Sync);
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end.saturating_sub(range.start), ExtentKind::Data);
        Ok(list)
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::to_usize;

    use super::Staged;
    use crate::file::ImageFile;
    use crate::file::memory::{MemoryFile, Random};

    fn bytes_of(file: &dyn ImageFile) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Random changes are visible through the staged file, leave the file unchanged, and are applied by `execute`.
    #[test]
    fn staged_changes_match_the_execution() {
        for seed in 0..200 {
            let mut random = Random(seed);
            let start: Vec<u8> = (0..30_000).map(|at: u32| at.to_le_bytes()[0] | 1).collect();
            let base = Arc::new(MemoryFile::new(start.clone()));
            let model = MemoryFile::new(start.clone());
            let staged = Staged::new(Arc::clone(&base) as Arc<dyn ImageFile>).unwrap();
            assert!(!staged.is_changed());
            for step in 0..30_u8 {
                let (at, length) = (random.below(40_000), random.below(14_000));
                match random.below(4) {
                    0 => {
                        let data = vec![step; to_usize(length % 700)];
                        staged.write_at(&data, at).unwrap();
                        model.write_at(&data, at).unwrap();
                    }
                    1 => {
                        staged.punch(at..at + length).unwrap();
                        model.punch(at..at + length).unwrap();
                    }
                    2 if step % 3 == 0 => {
                        staged.set_length(at).unwrap();
                        model.set_length(at).unwrap();
                    }
                    _ => staged.sync().unwrap(),
                }
                assert!(bytes_of(&staged) == bytes_of(&model), "seed {seed}, step {step}");
                let mut piece = [9; 5000];
                let mut expected = [8; 5000];
                staged.read_at(&mut piece, at).unwrap();
                model.read_at(&mut expected, at).unwrap();
                assert!(piece == expected, "seed {seed}, step {step}, at {at}");
            }
            assert!(bytes_of(&*base) == start, "the file changed early");
            staged.execute().unwrap();
            assert!(bytes_of(&*base) == bytes_of(&model), "seed {seed}");
        }
    }

    #[test]
    fn staged_memory_is_bounded() {
        let staged = Staged::new(Arc::new(MemoryFile::default())).unwrap();
        staged.lock().changed_bytes_max = 1 << 20;
        let piece = vec![1; 32 << 10];
        let mut written = 0;
        let error = loop {
            match staged.write_at(&piece, 0) {
                Ok(()) => written += piece.len() as u64,
                Err(error) => break error,
            }
        };
        assert!(written <= 1 << 20);
        assert!(error.to_string().contains("plan a write"), "{error}");
    }
}
