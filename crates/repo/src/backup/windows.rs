//! Reads a source: windows of blocks with their hashes, by several threads, returned in disk order.
//!
//! The planner walks the source's extents and separates windows with data from zero ranges; holes are never read. Each
//! reader takes the next window, reads it, and hashes its blocks while they are in the cache. The number of windows in
//! flight, and therefore the memory, is bounded.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::Scope;

use crossbeam_channel::{Receiver, Sender, unbounded};
use holdfast_block::{BlockDevice, DirtyBitmap, Error as DeviceError, ExtentKind, to_usize};

use crate::format::fingerprint::{BATCH_BLOCK_COUNT, BLOCK_BYTES, BLOCK_LENGTH, BlockHash, FingerprintKeys, is_zero};
use crate::packing::BufferPool;
use crate::progress::stage::{Stage, StageTimer, timed};

/// Bytes of a window: large enough for efficient reads, small enough for the cache of a core.
pub(crate) const WINDOW_BYTES: u64 = 1 << 20;
const WINDOW_BLOCK_COUNT: usize = to_usize(WINDOW_BYTES / BLOCK_BYTES);
const EXTENT_COUNT_MAX: usize = 256;

/// The hash of a block, or that it is zero.
pub(crate) type HashedBlock = Option<BlockHash>;

/// The next item of the source.
pub(crate) enum SourceItem {
    /// A number of zero bytes, a multiple of the block size.
    Zero(u64),
    /// Blocks that were read.
    Window(Window),
    /// Blocks that were not read, because they are unchanged since the parent.
    Unchanged(Range<u64>),
}

/// Blocks that were read and hashed.
pub(crate) struct Window {
    pub(crate) offset: u64,
    /// Whole blocks; past the end of the device they are zero.
    pub(crate) data: Vec<u8>,
    pub(crate) hashes: Vec<HashedBlock>,
    /// Bytes that were actually read.
    pub(crate) read_bytes: u64,
}

enum Plan {
    Zero(u64),
    Unchanged(Range<u64>),
    /// A window, whole blocks, and the ranges in it that hold data.
    Read {
        window: Range<u64>,
        data: Vec<Range<u64>>,
    },
}

/// Walks the extents of a source.
struct Planner<'a> {
    device: &'a dyn BlockDevice,
    /// The ranges that may differ from the parent, if known.
    changed: Option<&'a DirtyBitmap>,
    position: u64,
    /// Data ranges that begin at or after `position`, extended to whole blocks, up to `known_end`.
    ranges: std::collections::VecDeque<Range<u64>>,
    known_end: u64,
}

impl<'a> Planner<'a> {
    fn new(device: &'a dyn BlockDevice, changed: Option<&'a DirtyBitmap>) -> Self {
        Self {
            device,
            changed,
            position: 0,
            ranges: std::collections::VecDeque::new(),
            known_end: 0,
        }
    }

    /// End of the device in whole blocks.
    fn end(&self) -> u64 {
        self.device.size_bytes().next_multiple_of(BLOCK_BYTES)
    }

    /// Queries extents until they reach `offset` or a data range is known.
    fn look_ahead(&mut self, offset: u64) -> Result<(), DeviceError> {
        let size = self.device.size_bytes();
        while self.known_end < offset.min(size) {
            let list = self.device.extents(self.known_end..size, EXTENT_COUNT_MAX)?;
            if list.end() <= self.known_end {
                let detail = "the device described no bytes".to_owned();
                return Err(DeviceError::Corrupt {
                    what: "list of extents",
                    offset: self.known_end,
                    detail,
                });
            }
            self.known_end = list.end();
            for extent in list.as_slice().iter().filter(|extent| extent.kind == ExtentKind::Data) {
                let range = extent.offset / BLOCK_BYTES * BLOCK_BYTES..extent.end().next_multiple_of(BLOCK_BYTES);
                match self.ranges.back_mut() {
                    Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                    _ => self.ranges.push_back(range),
                }
            }
        }
        Ok(())
    }

    /// The end of the changed blocks that begin at `position`; and the unchanged blocks before them, if any.
    fn skip_unchanged(&mut self) -> (u64, Option<Range<u64>>) {
        let end = self.end();
        let Some(changed) = self.changed else {
            return (end, None);
        };
        let dirty = changed.next_dirty(self.position).unwrap_or(end..end);
        let (start, dirty_end) = (
            (dirty.start / BLOCK_BYTES * BLOCK_BYTES).min(end),
            dirty.end.next_multiple_of(BLOCK_BYTES).min(end),
        );
        if start <= self.position {
            return (dirty_end, None);
        }
        let unchanged = self.position..start;
        self.position = start;
        // Extents of skipped ranges are not queried: that can take longer than reading the rest.
        self.known_end = self.known_end.max(start.min(self.device.size_bytes()));
        while self.ranges.front().is_some_and(|range| range.end <= start) {
            self.ranges.pop_front();
        }
        (dirty_end, Some(unchanged))
    }

    fn next(&mut self) -> Result<Option<Plan>, DeviceError> {
        if self.position >= self.end() {
            return Ok(None);
        }
        let (end, unchanged) = self.skip_unchanged();
        if let Some(range) = unchanged {
            return Ok(Some(Plan::Unchanged(range)));
        }
        let window_end = (self.position / WINDOW_BYTES + 1).saturating_mul(WINDOW_BYTES).min(end);
        self.look_ahead(window_end)?;
        while self.ranges.is_empty() && self.known_end < self.device.size_bytes().min(end) {
            self.look_ahead(self.known_end + 1)?;
        }
        let first = self.ranges.front().map_or(end, |range| range.start.max(self.position));
        if first >= window_end {
            // No data before the window of the first range: a single run of zeroes of any length.
            let zero_end = (first / WINDOW_BYTES * WINDOW_BYTES).max(window_end).min(end);
            let length = zero_end - self.position;
            self.position = zero_end;
            return Ok(Some(Plan::Zero(length)));
        }
        let offset = self.position;
        let mut data = Vec::new();
        while let Some(range) = self.ranges.front_mut() {
            if range.start >= window_end {
                break;
            }
            data.push(range.start.max(offset)..range.end.min(window_end));
            if range.end <= window_end {
                self.ranges.pop_front();
            } else {
                range.start = window_end;
                break;
            }
        }
        self.position = window_end;
        let window = offset..window_end;
        Ok(Some(Plan::Read { window, data }))
    }
}

/// Reads and hashes windows of a device.
#[derive(Clone)]
struct WindowReader<'a> {
    device: &'a dyn BlockDevice,
    keys: &'a FingerprintKeys,
    pool: BufferPool,
}

impl WindowReader<'_> {
    fn execute(&self, plan: Plan) -> Result<SourceItem, DeviceError> {
        match plan {
            Plan::Zero(length) => Ok(SourceItem::Zero(length)),
            Plan::Unchanged(range) => Ok(SourceItem::Unchanged(range)),
            Plan::Read { window, data } => self.read(window, &data).map(SourceItem::Window),
        }
    }

    /// Reads the data ranges of a window.
    fn read(&self, window: Range<u64>, ranges: &[Range<u64>]) -> Result<Window, DeviceError> {
        let offset = window.start;
        let length = window.end - offset;
        let mut data = self.pool.take();
        data.resize(to_usize(length), 0);
        let mut hashes: Vec<HashedBlock> = vec![None; to_usize(length / BLOCK_BYTES)];
        let mut read_bytes = 0;
        for range in ranges {
            let inside = to_usize(range.start - offset)..to_usize(range.end - offset);
            let available = range.end.min(self.device.size_bytes()) - range.start;
            let (read, padding) = data[inside.clone()].split_at_mut(to_usize(available));
            self.device.read_at(read, range.start)?;
            padding.fill(0);
            read_bytes += available;
            let first = inside.start / BLOCK_LENGTH;
            hash_data(self.keys, data[inside].as_chunks().0, &mut hashes[first..]);
        }
        Ok(Window {
            offset,
            data,
            hashes,
            read_bytes,
        })
    }
}

/// Hashes the non-zero blocks, many in parallel.
fn hash_data(keys: &FingerprintKeys, blocks: &[[u8; BLOCK_LENGTH]], hashes: &mut [HashedBlock]) {
    for (blocks, hashes) in blocks
        .chunks(BATCH_BLOCK_COUNT)
        .zip(hashes.chunks_mut(BATCH_BLOCK_COUNT))
    {
        let mut data = [&blocks[0]; BATCH_BLOCK_COUNT];
        let mut numbers = [0; BATCH_BLOCK_COUNT];
        let mut count = 0;
        for (number, block) in blocks.iter().enumerate().filter(|(_, block)| !is_zero(*block)) {
            (data[count], numbers[count]) = (block, number);
            count += 1;
        }
        let mut hashed = [BlockHash::default(); BATCH_BLOCK_COUNT];
        keys.block_hashes(&data[..count], &mut hashed[..count]);
        for (number, hash) in numbers[..count].iter().zip(hashed) {
            hashes[*number] = Some(hash);
        }
    }
}

type Read = (u64, Result<SourceItem, DeviceError>);

/// The state shared by readers: the next window, and how far ahead they may read.
struct ReaderShared<'a> {
    planner: Mutex<PlannerState<'a>>,
    may_read_ahead: Condvar,
    look_ahead: u64,
}

struct PlannerState<'a> {
    planner: Planner<'a>,
    /// Number of items assigned to readers, and number taken by the coordinator.
    issued: u64,
    taken: u64,
    done: bool,
}

impl ReaderShared<'_> {
    /// The next task, when the reader may take it; `None` at the end.
    fn next(&self) -> Option<(u64, Result<Plan, DeviceError>)> {
        let mut state = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if state.done {
                return None;
            }
            if state.issued < state.taken + self.look_ahead {
                break;
            }
            state = self.may_read_ahead.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let plan = state.planner.next().transpose();
        state.done = !matches!(plan, Some(Ok(_)));
        let number = state.issued;
        state.issued += 1;
        plan.map(|plan| (number, plan))
    }

    fn take_one(&self) {
        self.planner.lock().unwrap_or_else(PoisonError::into_inner).taken += 1;
        self.may_read_ahead.notify_one();
    }

    fn stop(&self) {
        self.planner.lock().unwrap_or_else(PoisonError::into_inner).done = true;
        self.may_read_ahead.notify_all();
    }
}

/// The coordinator's view of a source.
pub(crate) struct SourceReader<'a> {
    mode: ReadMode<'a>,
    windows: WindowReader<'a>,
    timer: &'a dyn StageTimer,
}

enum ReadMode<'a> {
    Inline(Planner<'a>),
    Threads {
        shared: std::sync::Arc<ReaderShared<'a>>,
        reads: Receiver<Read>,
        early: BTreeMap<u64, Result<SourceItem, DeviceError>>,
        next: u64,
    },
}

impl<'a> SourceReader<'a> {
    /// A reader with `reader_count` threads in `scope`; with 0, the caller reads.
    pub(crate) fn new<'scope>(
        scope: &'scope Scope<'scope, 'a>,
        device: &'a dyn BlockDevice,
        changed: Option<&'a DirtyBitmap>,
        keys: &'a FingerprintKeys,
        timer: &'a dyn StageTimer,
        reader_count: usize,
    ) -> Self {
        let look_ahead = reader_count + 2;
        let windows = WindowReader {
            device,
            keys,
            pool: BufferPool::keeping(look_ahead),
        };
        let planner = Planner::new(device, changed);
        if reader_count == 0 {
            return Self {
                mode: ReadMode::Inline(planner),
                windows,
                timer,
            };
        }
        let shared = std::sync::Arc::new(ReaderShared {
            planner: Mutex::new(PlannerState {
                planner,
                issued: 0,
                taken: 0,
                done: false,
            }),
            may_read_ahead: Condvar::new(),
            look_ahead: look_ahead as u64,
        });
        let (send, reads) = unbounded();
        for _ in 0..reader_count {
            let (shared, send, windows) = (std::sync::Arc::clone(&shared), send.clone(), windows.clone());
            scope.spawn(move || read_ahead(&shared, &windows, timer, &send));
        }
        Self {
            mode: ReadMode::Threads {
                shared,
                reads,
                early: BTreeMap::new(),
                next: 0,
            },
            windows,
            timer,
        }
    }

    /// The next item; `None` at the end of the device.
    pub(crate) fn next(&mut self) -> Result<Option<SourceItem>, DeviceError> {
        match &mut self.mode {
            ReadMode::Inline(planner) => match planner.next()? {
                None => Ok(None),
                Some(plan) => self.windows.execute(plan).map(Some),
            },
            ReadMode::Threads {
                shared,
                reads,
                early,
                next,
            } => loop {
                if let Some(item) = early.remove(next) {
                    *next += 1;
                    shared.take_one();
                    return item.map(Some);
                }
                match timed(self.timer, Stage::AwaitReaders, || reads.recv()) {
                    Ok((number, item)) => early.insert(number, item),
                    // All readers have ended and no item is left.
                    Err(_) => return Ok(None),
                };
            },
        }
    }

    /// Reads blocks that were skipped at first, `range` within one window.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Window, DeviceError> {
        self.windows.read(range.clone(), &[range])
    }

    /// Returns the memory of a window for reuse.
    pub(crate) fn recycle(&self, window: Window) {
        self.windows.pool.give(window.data);
    }
}

impl Drop for SourceReader<'_> {
    fn drop(&mut self) {
        if let ReadMode::Threads { shared, .. } = &self.mode {
            shared.stop();
        }
    }
}

fn read_ahead(shared: &ReaderShared<'_>, windows: &WindowReader<'_>, timer: &dyn StageTimer, send: &Sender<Read>) {
    while let Some((number, plan)) = shared.next() {
        let item = timed(timer, Stage::ReadAndHash, || {
            plan.and_then(|plan| windows.execute(plan))
        });
        if send.send((number, item)).is_err() {
            return;
        }
    }
}

const _: () = assert!(WINDOW_BLOCK_COUNT == 256);

#[cfg(test)]
mod tests {
    use holdfast_block::{BlockDeviceMut, MemoryDevice, to_usize};

    use super::{SourceItem, SourceReader};
    use crate::format::fingerprint::FingerprintKeys;
    use crate::key::{MasterSecret, SystemRandomness};
    use crate::progress::stage::NoStageTimer;

    fn keys() -> FingerprintKeys {
        FingerprintKeys::new(&MasterSecret::generate(&SystemRandomness).unwrap().keyring())
    }

    /// Every byte is returned once and in order, holes are not read, and the number of threads makes no
    /// difference.
    #[test]
    fn a_source_is_read_in_order_and_holes_are_not() {
        let size = (9 << 20) + 5;
        let device = MemoryDevice::new(size);
        for (offset, length) in [
            (0, 10),
            (4095, 2),
            ((1 << 20) - 1, 2),
            (5 << 20, 3 << 20),
            (size - 1, 1),
        ] {
            device.write_at(&vec![7; length], offset).unwrap();
        }
        let expected = device.to_bytes();
        let keys = keys();
        for reader_count in [0, 1, 3] {
            let mut bytes = Vec::new();
            let mut read_bytes = 0;
            std::thread::scope(|scope| {
                let mut reader = SourceReader::new(scope, &device, None, &keys, &NoStageTimer, reader_count);
                while let Some(item) = reader.next().unwrap() {
                    match item {
                        SourceItem::Zero(length) => bytes.resize(bytes.len() + to_usize(length), 0),
                        SourceItem::Unchanged(_) => unreachable!("the source has no changed-block information"),
                        SourceItem::Window(window) => {
                            assert_eq!(window.offset, bytes.len() as u64);
                            for (block, hash) in window.data.chunks(4096).zip(&window.hashes) {
                                let mut expected = Vec::new();
                                keys.hash_blocks(block, &mut expected);
                                assert!(hash.is_none_or(|hash| hash == expected[0]));
                                let zero = [0; 4096];
                                bytes.extend_from_slice(if hash.is_some() { block } else { &zero });
                            }
                            read_bytes += window.read_bytes;
                            reader.recycle(window);
                        }
                    }
                }
            });
            assert_eq!(bytes.len() as u64, size.next_multiple_of(4096));
            assert!(bytes[..expected.len()] == expected && bytes[expected.len()..].iter().all(|byte| *byte == 0));
            assert!(read_bytes < (3 << 20) + 5 * 8192, "{read_bytes}");
        }
    }

    #[test]
    fn a_coordinator_that_stops_early_leaves_no_thread_behind() {
        let device = MemoryDevice::from_bytes(&vec![1; 20 << 20]);
        let keys = keys();
        std::thread::scope(|scope| {
            let mut reader = SourceReader::new(scope, &device, None, &keys, &NoStageTimer, 2);
            assert!(reader.next().unwrap().is_some());
        });
    }
}
