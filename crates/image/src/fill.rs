//! Copying a disk into a new image, on several threads.
//!
//! Workers read pieces of the source, find zeroes and compress; one thread appends the results in order. At most
//! a few pieces per worker are in flight.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use holdfast_block::{BlockDevice, BlockDeviceMut, EitherData, ExtentKind, to_usize};

use crate::piece::{Part, Piece, Sorted, read_base, read_piece};
use crate::{BulkWriter, ClusterCompressor, Error, Result};

/// Bytes that a worker takes at once, or a cluster where that is more.
const PIECE_BYTES: u64 = 1 << 20;
/// Pieces in flight per worker: enough that it has work while a busy host lets the appending thread wait.
const PIECES_PER_WORKER: u64 = 8;
const EXTENT_COUNT_MAX: usize = 64;

/// How to fill a new image.
#[derive(Debug, Clone)]
pub struct FillOptions {
    /// Threads that read and compress.
    pub threads: NonZero<usize>,
    /// Whether clusters are compressed, and how hard.
    pub storage: Storage,
}

/// How clusters are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Storage {
    /// As they are.
    #[default]
    Plain,
    /// Compressed where that makes them smaller.
    Compressed {
        /// The level of the image's compression, or a good default.
        level: Option<u32>,
    },
}

/// What became of the bytes of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FillReport {
    /// Stored as they are.
    pub plain_bytes: u64,
    /// Stored compressed, counted before compression.
    pub compressed_bytes: u64,
    /// What they take compressed.
    pub compressed_stored_bytes: u64,
    /// Zero, and not stored.
    pub zero_bytes: u64,
}

/// Copies all of `source` into `writer`, which stays open for [`BulkWriter::finish`].
///
/// Zeroes are left out, or said to be zero where a backing file would show through.
///
/// `progress` is called with the offset that was reached; when it gives [`Continue::Stop`] the copy ends there, with an error.
pub fn fill(
    source: &dyn BlockDevice,
    writer: &mut BulkWriter,
    options: &FillOptions,
    progress: &mut dyn FnMut(u64) -> Continue,
) -> Result<FillReport> {
    fill_from(source, None, writer, options, progress)
}

/// Copies into `writer` what differs between `source` and `base`, the backing file of the new image.
///
/// Clusters that are equal are left out, so that they are read from the backing file. Otherwise as [`fill`].
pub fn fill_above(
    source: &dyn BlockDevice,
    base: &dyn BlockDevice,
    writer: &mut BulkWriter,
    options: &FillOptions,
    progress: &mut dyn FnMut(u64) -> Continue,
) -> Result<FillReport> {
    fill_from(&EitherData::new(source, base), Some(base), writer, options, progress)
}

fn fill_from(
    source: &dyn BlockDevice,
    base: Option<&dyn BlockDevice>,
    writer: &mut BulkWriter,
    options: &FillOptions,
    progress: &mut dyn FnMut(u64) -> Continue,
) -> Result<FillReport> {
    if source.size_bytes() > writer.size_bytes() {
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!(
                "{} bytes do not hold a disk of {}",
                writer.size_bytes(),
                source.size_bytes()
            ),
        });
    }
    let cluster_bytes = writer.cluster_bytes();
    let disk_end = writer.size_bytes();
    let compression = match options.storage {
        Storage::Plain => None,
        Storage::Compressed { level } => Some((writer.compression(), level)),
    };
    let make_worker = || -> Result<_> {
        let mut compressor = compression
            .map(|(compression, level)| ClusterCompressor::new(compression, level))
            .transpose()?;
        let mut below = Vec::new();
        Ok(move |range: Range<u64>, buffer: Vec<u8>| {
            let piece = read_piece(source, range, buffer)?.padded(cluster_bytes, disk_end);
            let below = match base {
                None => None,
                Some(base) => Some(read_base(base, &piece, &mut below)?),
            };
            Ok(piece.sort(cluster_bytes, below, compressor.as_mut()))
        })
    };
    let mut store = Store {
        writer,
        report: FillReport::default(),
        stored_end: 0,
    };
    run(
        source,
        cluster_bytes,
        options.threads,
        make_worker,
        &mut |sorted: Sorted| {
            for part in &sorted.parts {
                store.part(part, &sorted.piece)?;
            }
            go_on(progress, sorted)
        },
    )?;
    store.hide_backing(disk_end)?;
    let stored_bytes = store.report.plain_bytes + store.report.compressed_bytes;
    Ok(FillReport {
        zero_bytes: source.size_bytes().saturating_sub(stored_bytes),
        ..store.report
    })
}

/// The one who appends.
struct Store<'a> {
    writer: &'a mut BulkWriter,
    report: FillReport,
    /// End of the last cluster that was stored.
    stored_end: u64,
}

impl Store<'_> {
    fn part(&mut self, part: &Part, piece: &Piece) -> Result<()> {
        match part {
            Part::Plain(range) => {
                self.hide_backing(piece.offset + range.start)?;
                let bytes = &piece.buffer[to_usize(range.start)..to_usize(range.end)];
                self.writer.append(bytes, piece.offset + range.start)?;
                self.report.plain_bytes += range.end - range.start;
                self.stored_end = piece.offset + range.end;
            }
            Part::AsBelow(range) => {
                self.hide_backing(piece.offset + range.start)?;
                self.stored_end = piece.offset + range.end;
            }
            Part::Compressed { at, bytes } => {
                self.hide_backing(piece.offset + at)?;
                self.writer.append_compressed(bytes, piece.offset + at)?;
                let held = self.writer.cluster_bytes().min(piece.length - at);
                self.report.compressed_bytes += held;
                self.report.compressed_stored_bytes += bytes.len() as u64;
                self.stored_end = piece.offset + at + held;
            }
        }
        Ok(())
    }

    /// Makes the clusters that were left out before `end` read as zero in an overlay, too.
    fn hide_backing(&mut self, end: u64) -> Result<()> {
        if self.writer.has_backing() && self.stored_end < end {
            self.writer.append_zeroes(self.stored_end..end)?;
        }
        Ok(())
    }
}

/// Reports progress; gives the buffer back for the next piece.
fn go_on(progress: &mut dyn FnMut(u64) -> Continue, sorted: Sorted) -> Result<Vec<u8>> {
    let reached = sorted.piece.offset + sorted.piece.length;
    match progress(reached) {
        Continue::Go => Ok(sorted.piece.buffer),
        Continue::Stop => Err(stopped(reached)),
    }
}

/// What a device that is to be filled holds before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetContent {
    /// Zeroes only, as a new raw image does: zeroes are left out.
    Zeroes,
    /// Anything, as a block device does: what is zero in the source is made zero, and space given back where that is possible.
    Unknown,
}

/// Copies all of `source` into `target`, which is at least as large; what is behind its end stays. Flushes at the end.
///
/// `progress` as in [`fill`].
pub fn fill_device(
    source: &dyn BlockDevice,
    target: &dyn BlockDeviceMut,
    content: TargetContent,
    threads: NonZero<usize>,
    progress: &mut dyn FnMut(u64) -> Continue,
) -> Result<FillReport> {
    const GRAIN_BYTES: u64 = 4096;
    target.check_bounds(0, source.size_bytes())?;
    let make_worker = || {
        Ok(|range: Range<u64>, buffer: Vec<u8>| {
            let piece = read_piece(source, range, buffer)?;
            let sorted = piece.sort(GRAIN_BYTES, None, None);
            // Where a byte lands does not depend on the others: the workers write themselves.
            for part in &sorted.parts {
                if let Part::Plain(range) = part {
                    let bytes = &sorted.piece.buffer[to_usize(range.start)..to_usize(range.end)];
                    target.write_at(bytes, sorted.piece.offset + range.start)?;
                }
            }
            Ok(sorted)
        })
    };
    let mut report = FillReport::default();
    let mut gaps = Gaps {
        target,
        content,
        end: 0,
    };
    run(source, GRAIN_BYTES, threads, make_worker, &mut |sorted: Sorted| {
        for part in &sorted.parts {
            if let Part::Plain(range) = part {
                gaps.zero_up_to(sorted.piece.offset + range.start, progress)?;
                gaps.end = sorted.piece.offset + range.end;
                report.plain_bytes += range.end - range.start;
            }
        }
        gaps.zero_up_to(sorted.piece.offset + sorted.piece.length, progress)?;
        go_on(progress, sorted)
    })?;
    gaps.zero_up_to(source.size_bytes(), progress)?;
    target.flush()?;
    report.zero_bytes = source.size_bytes() - report.plain_bytes;
    Ok(report)
}

/// What lies between the bytes that are written.
struct Gaps<'a> {
    target: &'a dyn BlockDeviceMut,
    content: TargetContent,
    /// End of what was written last.
    end: u64,
}

impl Gaps<'_> {
    /// Makes what lies before `offset` zero, in steps that can be stopped: a medium may have to write all of it.
    fn zero_up_to(&mut self, offset: u64, progress: &mut dyn FnMut(u64) -> Continue) -> Result<()> {
        const STEP_BYTES: u64 = 64 << 20;
        while self.content == TargetContent::Unknown && self.end < offset {
            let end = offset.min(self.end + STEP_BYTES);
            self.target.write_zeroes(self.end..end)?;
            self.end = end;
            if progress(end) == Continue::Stop {
                return Err(stopped(end));
            }
        }
        Ok(())
    }
}

/// Whether a long job goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continue {
    /// It does.
    Go,
    /// It stops as soon as it can.
    Stop,
}

fn stopped(offset: u64) -> Error {
    Error::Device(holdfast_block::Error::io(
        "copy",
        offset,
        std::io::Error::from(std::io::ErrorKind::Interrupted),
    ))
}

/// Hands out the ranges of the source that hold data, rounded to clusters, in order.
struct Ranges<'a> {
    source: &'a dyn BlockDevice,
    cluster_bytes: u64,
    piece_bytes: u64,
    at: u64,
    /// End of the data that `at` lies in.
    data_end: u64,
    /// How far the source was asked.
    asked: u64,
}

impl Ranges<'_> {
    fn next(&mut self) -> Result<Option<Range<u64>>> {
        let size_bytes = self.source.size_bytes();
        while self.at >= self.data_end {
            if self.asked >= size_bytes {
                return Ok(None);
            }
            let list = self.source.extents(self.asked..size_bytes, EXTENT_COUNT_MAX)?;
            self.asked = list.end();
            if let Some(data) = list.as_slice().iter().find(|extent| extent.kind == ExtentKind::Data) {
                let start = data.offset / self.cluster_bytes * self.cluster_bytes;
                self.at = start.max(self.at);
                self.data_end = data.end().next_multiple_of(self.cluster_bytes).min(size_bytes);
                self.asked = self.data_end;
            }
        }
        let border = (self.at / self.piece_bytes + 1) * self.piece_bytes;
        let range = self.at..self.data_end.min(border);
        self.at = range.end;
        Ok(Some(range))
    }
}

/// What workers and the collecting thread share.
struct Shared<'a> {
    ranges: Ranges<'a>,
    /// Number of the next range to hand out.
    handed_out: u64,
    /// Number of the next result to take in.
    taken: u64,
    is_over: bool,
    /// Workers that may still bring a result.
    workers: usize,
    results: BTreeMap<u64, Result<Sorted>>,
    buffers: Vec<Vec<u8>>,
}

struct Exchange<'a> {
    shared: Mutex<Shared<'a>>,
    /// A result arrived, or there will be none.
    arrived: Condvar,
    /// A result was taken in: there is room for another.
    has_room: Condvar,
    in_flight_max: u64,
}

fn run<W>(
    source: &dyn BlockDevice,
    cluster_bytes: u64,
    threads: NonZero<usize>,
    make_worker: impl Fn() -> Result<W>,
    take: &mut dyn FnMut(Sorted) -> Result<Vec<u8>>,
) -> Result<()>
where
    W: FnMut(Range<u64>, Vec<u8>) -> Result<Sorted> + Send,
{
    let exchange = Exchange {
        shared: Mutex::new(Shared {
            ranges: Ranges {
                source,
                cluster_bytes,
                piece_bytes: PIECE_BYTES.max(cluster_bytes),
                at: 0,
                data_end: 0,
                asked: 0,
            },
            handed_out: 0,
            taken: 0,
            is_over: false,
            workers: 0,
            results: BTreeMap::new(),
            buffers: Vec::new(),
        }),
        arrived: Condvar::new(),
        has_room: Condvar::new(),
        in_flight_max: threads.get() as u64 * PIECES_PER_WORKER,
    };
    let workers = (0..threads.get()).map(|_| make_worker()).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        for mut worker in workers {
            let exchange = &exchange;
            scope.spawn(move || exchange.work(&mut worker));
        }
        let _over = Over(&exchange);
        exchange.collect(take)
    })
}

/// Ends the exchange for everybody when its owner leaves, also by a panic: nobody may wait for what never comes.
struct Over<'a, 'b>(&'a Exchange<'b>);

impl Drop for Over<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.has_room.notify_all();
        self.0.arrived.notify_all();
    }
}

/// A worker that goes: when it panicked, the others go too, and the panic reaches the caller from the thread's scope.
struct Leaving<'a, 'b>(&'a Exchange<'b>);

impl Drop for Leaving<'_, '_> {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.workers -= 1;
        shared.is_over |= std::thread::panicking();
        drop(shared);
        self.0.has_room.notify_all();
        self.0.arrived.notify_all();
    }
}

impl<'a> Exchange<'a> {
    fn lock(&self) -> MutexGuard<'_, Shared<'a>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker's life.
    fn work(&self, worker: &mut dyn FnMut(Range<u64>, Vec<u8>) -> Result<Sorted>) {
        self.lock().workers += 1;
        let _leaving = Leaving(self);
        let mut shared = self.lock();
        loop {
            while !shared.is_over && shared.handed_out - shared.taken >= self.in_flight_max {
                shared = self.has_room.wait(shared).unwrap_or_else(PoisonError::into_inner);
            }
            if shared.is_over {
                return;
            }
            let next = shared.ranges.next().transpose();
            let Some(next) = next else {
                shared.is_over = true;
                self.arrived.notify_all();
                self.has_room.notify_all();
                return;
            };
            let number = shared.handed_out;
            shared.handed_out += 1;
            let buffer = shared.buffers.pop().unwrap_or_default();
            drop(shared);
            let result = next.and_then(|range| worker(range, buffer));
            shared = self.lock();
            shared.is_over |= result.is_err();
            shared.results.insert(number, result);
            self.arrived.notify_one();
        }
    }

    /// Takes results in, in order, until there are no more or one is an error.
    fn collect(&self, take: &mut dyn FnMut(Sorted) -> Result<Vec<u8>>) -> Result<()> {
        let mut shared = self.lock();
        loop {
            let number = shared.taken;
            match shared.results.remove(&number) {
                Some(result) => {
                    drop(shared);
                    let buffer = take(result?)?;
                    shared = self.lock();
                    shared.taken += 1;
                    shared.buffers.push(buffer);
                    self.has_room.notify_one();
                }
                None if shared.is_over && (shared.handed_out == shared.taken || shared.workers == 0) => return Ok(()),
                None => shared = self.arrived.wait(shared).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}
