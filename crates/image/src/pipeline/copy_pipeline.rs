//! Copies a disk: workers read and write in parallel, and one thread collects their results in order.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZero;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use holdfast_block::{AlignedBuffer, BlockDevice, ExtentKind};

use crate::pipeline::piece::ClassifiedBuffer;
use crate::{Error, Result};

/// Bytes that a worker reads at once, or one cluster if that is more: they are still in the core's cache when they are
/// written. With 2 MiB, a conversion takes an eighth more CPU time.
const PIECE_BYTES: u64 = 512 << 10;
/// Pieces in flight per thread: enough to keep every thread busy while the host delays some of them.
const PIECES_PER_THREAD: u64 = 8;
const EXTENT_COUNT_MAX: usize = 64;

/// Hands out the ranges of the source that hold data, rounded to clusters, in order.
struct Ranges<'a> {
    source: &'a dyn BlockDevice,
    cluster_bytes: u64,
    piece_bytes: u64,
    at: u64,
    /// End of the data that `at` lies in.
    data_end: u64,
    /// End of the range whose extents are known.
    listed_end: u64,
}

impl Ranges<'_> {
    fn next(&mut self) -> Result<Option<Range<u64>>> {
        let size_bytes = self.source.size_bytes();
        while self.at >= self.data_end {
            if self.listed_end >= size_bytes {
                return Ok(None);
            }
            let list = self.source.extents(self.listed_end..size_bytes, EXTENT_COUNT_MAX)?;
            self.listed_end = list.end();
            if let Some(data) = list.as_slice().iter().find(|extent| extent.kind == ExtentKind::Data) {
                let start = data.offset / self.cluster_bytes * self.cluster_bytes;
                self.at = start.max(self.at);
                self.data_end = data.end().next_multiple_of(self.cluster_bytes).min(size_bytes);
                self.listed_end = self.data_end;
            }
        }
        let border = (self.at / self.piece_bytes + 1) * self.piece_bytes;
        let range = self.at..self.data_end.min(border);
        self.at = range.end;
        Ok(Some(range))
    }
}

/// A buffer, and where its bytes are to be written.
pub(crate) struct PendingWrites {
    pub(crate) buffer: AlignedBuffer,
    pub(crate) writes: Vec<PlacedWrite>,
}

/// State that workers and the collecting thread share.
struct PipelineQueue<'a> {
    ranges: Ranges<'a>,
    /// Whether all ranges were handed out.
    is_read: bool,
    /// Number of the next range.
    handed_out: u64,
    /// Number of the next result to collect.
    taken: u64,
    results: BTreeMap<u64, Result<ClassifiedBuffer>>,
    waiting: VecDeque<PendingWrites>,
    /// Pieces that are queued for writing or being written.
    unwritten: u64,
    /// The first write that failed.
    failure: Option<Error>,
    /// Requests the workers to exit.
    is_shutdown: bool,
    /// Workers that are running.
    workers: usize,
    buffers: Vec<AlignedBuffer>,
}

enum Task {
    Write(PendingWrites),
    Read(u64, Result<Range<u64>>, AlignedBuffer),
}

impl PipelineQueue<'_> {
    /// The next task, if there is one now. Writes come first: they free memory for reads.
    fn next(&mut self, in_flight_max: u64) -> Option<Task> {
        if let Some(writing) = self.waiting.pop_front() {
            return Some(Task::Write(writing));
        }
        if self.is_read || self.handed_out - self.taken + self.unwritten >= in_flight_max {
            return None;
        }
        let next = self.ranges.next().transpose();
        self.is_read = !matches!(next, Some(Ok(_)));
        let number = self.handed_out;
        let range = next?;
        self.handed_out += 1;
        Some(Task::Read(number, range, self.buffers.pop().unwrap_or_default()))
    }

    /// Whether all ranges were collected and written.
    fn is_done(&self) -> bool {
        self.is_read && self.handed_out == self.taken && self.unwritten == 0
    }
}

struct PipelineState<'a> {
    shared: Mutex<PipelineQueue<'a>>,
    /// Signals the collecting thread: a result arrived, or none will any more.
    arrived: Condvar,
    /// Signals the workers: there may be a task.
    is_task: Condvar,
    in_flight_max: u64,
}

/// A copy job and its settings.
pub(crate) struct Pipeline<'a> {
    pub(crate) source: &'a dyn BlockDevice,
    /// Pieces are aligned to it.
    pub(crate) cluster_bytes: u64,
    /// Threads that compute at the same time, which bounds the pieces in flight.
    pub(crate) threads: NonZero<usize>,
    pub(crate) worker_count: usize,
    /// Writes bytes at an offset of the file.
    pub(crate) write: &'a (dyn Fn(&[u8], u64) -> Result<()> + Sync),
}

impl Pipeline<'_> {
    /// Copies the disk. `take` gets the results in order, and decides what is written where.
    pub(crate) fn run<W>(
        &self,
        make_worker: impl Fn() -> Result<W>,
        take: &mut dyn FnMut(ClassifiedBuffer) -> Result<PendingWrites>,
    ) -> Result<()>
    where
        W: FnMut(Range<u64>, AlignedBuffer) -> Result<ClassifiedBuffer> + Send,
    {
        let state = PipelineState {
            shared: Mutex::new(PipelineQueue {
                ranges: Ranges {
                    source: self.source,
                    cluster_bytes: self.cluster_bytes,
                    piece_bytes: PIECE_BYTES.max(self.cluster_bytes),
                    at: 0,
                    data_end: 0,
                    listed_end: 0,
                },
                is_read: false,
                handed_out: 0,
                taken: 0,
                results: BTreeMap::new(),
                waiting: VecDeque::new(),
                unwritten: 0,
                failure: None,
                is_shutdown: false,
                workers: self.worker_count,
                buffers: Vec::new(),
            }),
            arrived: Condvar::new(),
            is_task: Condvar::new(),
            in_flight_max: self.threads.get() as u64 * PIECES_PER_THREAD,
        };
        let workers = (0..self.worker_count)
            .map(|_| make_worker())
            .collect::<Result<Vec<_>>>()?;
        std::thread::scope(|scope| {
            for mut worker in workers {
                let state = &state;
                scope.spawn(move || state.work(&mut worker, self.write));
            }
            let _over = ShutdownGuard(&state);
            state.collect(take)
        })
    }
}

/// Shuts the pipeline down when the collecting thread leaves, also by a panic: otherwise workers would wait forever.
struct ShutdownGuard<'a, 'b>(&'a PipelineState<'b>);

impl Drop for ShutdownGuard<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().is_shutdown = true;
        self.0.is_task.notify_all();
        self.0.arrived.notify_all();
    }
}

/// Counts a worker that exits. If it panicked, the others exit, too, and the thread scope passes the panic on to the
/// caller.
struct WorkerGuard<'a, 'b>(&'a PipelineState<'b>);

impl Drop for WorkerGuard<'_, '_> {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.workers -= 1;
        shared.is_shutdown |= std::thread::panicking();
        drop(shared);
        self.0.is_task.notify_all();
        self.0.arrived.notify_all();
    }
}

impl<'a> PipelineState<'a> {
    fn lock(&self) -> MutexGuard<'_, PipelineQueue<'a>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(
        &self,
        read: &mut dyn FnMut(Range<u64>, AlignedBuffer) -> Result<ClassifiedBuffer>,
        write: &(dyn Fn(&[u8], u64) -> Result<()> + Sync),
    ) {
        let _leaving = WorkerGuard(self);
        let mut shared = self.lock();
        while !shared.is_shutdown {
            let Some(task) = shared.next(self.in_flight_max) else {
                // The collecting thread may be waiting for this write.
                self.arrived.notify_one();
                shared = self.is_task.wait(shared).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(shared);
            match task {
                Task::Read(number, range, buffer) => {
                    let result = range.and_then(|range| read(range, buffer));
                    shared = self.lock();
                    shared.results.insert(number, result);
                }
                Task::Write(writing) => {
                    let mut writes = writing.writes.into_iter();
                    let written =
                        writes.try_for_each(|placed| write(&writing.buffer[placed.bytes], placed.file_offset));
                    shared = self.lock();
                    shared.unwritten -= 1;
                    shared.buffers.push(writing.buffer);
                    if let Err(error) = written {
                        shared.failure.get_or_insert(error);
                    }
                    self.is_task.notify_one();
                }
            }
            self.arrived.notify_one();
        }
    }

    /// Collects results in order, until all are written or one is an error.
    fn collect(&self, take: &mut dyn FnMut(ClassifiedBuffer) -> Result<PendingWrites>) -> Result<()> {
        let mut shared = self.lock();
        loop {
            if let Some(error) = shared.failure.take() {
                return Err(error);
            }
            let number = shared.taken;
            match shared.results.remove(&number) {
                Some(result) => {
                    drop(shared);
                    let writing = take(result?)?;
                    shared = self.lock();
                    shared.taken += 1;
                    if writing.writes.is_empty() {
                        shared.buffers.push(writing.buffer);
                    } else {
                        shared.unwritten += 1;
                        shared.waiting.push_back(writing);
                    }
                    self.is_task.notify_one();
                }
                None if shared.is_done() || shared.workers == 0 => return Ok(()),
                None => shared = self.arrived.wait(shared).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// A range of the buffer and its place in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlacedWrite {
    /// The range in the buffer.
    pub(crate) bytes: Range<usize>,
    /// The offset in the file that [`BulkWriter::data_file`] returns.
    pub(crate) file_offset: u64,
}

/// Whether a long job continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continue {
    /// Continue.
    Go,
    /// Stop as soon as possible.
    Stop,
}

pub(crate) fn stopped(offset: u64) -> Error {
    Error::Device(holdfast_block::Error::io(
        "copy",
        offset,
        std::io::Error::from(std::io::ErrorKind::Interrupted),
    ))
}
