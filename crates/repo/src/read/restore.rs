//! Restores a disk.
//!
//! Frames are read sequentially, each decoded once by one of several threads, and its pieces are written by others, so
//! that decoding never waits for the target. Everything is verified: the seal of every frame, and the print of every
//! block.

mod request;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam_channel::{Receiver, Sender, bounded};
use holdfast_block::{AlignedBuffer, to_usize};

use crate::error::{Error, Result};
use crate::format::fingerprint::{BLOCK_LENGTH, BlockHash, FingerprintKeys, PRINT_LENGTH, is_zero, print_of};
use crate::format::pack::FrameContent;
use crate::progress::job::JobProgress;
use crate::read::device::SnapshotDevice;
use crate::read::frame_check::{Depth, check_frame};
use crate::read::frame_plan::{FramePlan, PlannedBatch, PlannedPiece, plan_again};
use crate::repository::Repository;
use crate::repository::packs::FrameBuffers;
pub use request::{RestoreReport, RestoreRequest, TargetState};

#[derive(Default)]
struct Counters {
    written: AtomicU64,
    equal: AtomicU64,
    zero: AtomicU64,
    decoded: AtomicU64,
}

impl Repository {
    /// Restores an open disk to a target; everything is durable on return.
    pub fn restore(
        &self,
        disk: &SnapshotDevice,
        request: &RestoreRequest<'_>,
        progress: &dyn JobProgress,
    ) -> Result<RestoreReport> {
        use holdfast_block::BlockDevice;
        let (target_bytes, disk_bytes) = (request.target.size_bytes(), disk.size_bytes());
        if target_bytes < disk_bytes {
            return Err(Error::TargetTooSmall {
                target_bytes,
                disk_bytes,
            });
        }
        let (flush, flushes) = bounded(1);
        let job = RestoreJob {
            repository: self,
            disk,
            keys: self.vault.fingerprint_keys(),
            request,
            progress,
            counters: Counters::default(),
            failure: Mutex::new(None),
            flush,
        };
        job.run(FramePlan::new(disk.map(), &self.packs), &flushes)?;
        request.target.flush().map_err(|source| job.target_error(source))?;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &job.counters;
        Ok(RestoreReport {
            written_bytes: count(&counters.written),
            equal_bytes: count(&counters.equal),
            zero_bytes: count(&counters.zero),
            decoded_bytes: count(&counters.decoded),
        })
    }
}

/// Number of written bytes after which the target is flushed in the background, so that little remains to flush at the
/// end.
const FLUSH_BYTES: u64 = 64 << 20;

/// Writers for each decoding thread. They mostly wait for the target, so that decoding need not wait.
const WRITERS_PER_THREAD: usize = 2;

/// Frames in memory for each decoding thread: one that is being decoded, and one that is being written.
const FRAMES_PER_THREAD: usize = 2;

/// A frame that was decoded and checked, and its pieces to write.
struct Decoded {
    raw: AlignedBuffer,
    wanted: Vec<PlannedPiece>,
}

/// Passes decoded frames to the writers, and their memory back.
#[derive(Clone)]
struct WriterQueue {
    decoded: Sender<Decoded>,
    free: Receiver<AlignedBuffer>,
}

/// Stops the flusher when the job ends, also after an error or a panic.
struct StopFlusher<'a> {
    done: &'a AtomicBool,
    flush: &'a Sender<()>,
}

impl Drop for StopFlusher<'_> {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        self.flush.try_send(()).ok();
    }
}

struct RestoreJob<'a> {
    repository: &'a Repository,
    disk: &'a SnapshotDevice,
    keys: FingerprintKeys,
    request: &'a RestoreRequest<'a>,
    progress: &'a dyn JobProgress,
    counters: Counters,
    failure: Mutex<Option<Error>>,
    flush: Sender<()>,
}

/// Memory that a worker reuses.
struct Scratch {
    buffers: FrameBuffers,
    raw: AlignedBuffer,
    target: Vec<u8>,
    hashes: Vec<BlockHash>,
    /// The writer threads, unless the worker writes itself.
    writers: Option<WriterQueue>,
}

impl Scratch {
    fn new(writers: Option<WriterQueue>) -> Self {
        Self {
            writers,
            buffers: FrameBuffers::new(),
            raw: AlignedBuffer::default(),
            target: Vec::new(),
            hashes: Vec::new(),
        }
    }
}

impl RestoreJob<'_> {
    fn run(&self, mut plan: FramePlan<'_>, flushes: &Receiver<()>) -> Result<()> {
        if self.request.thread_count == 0 {
            return self.run_here(plan);
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| self.flush_on_request(flushes, &done));
            let _stop = StopFlusher {
                done: &done,
                flush: &self.flush,
            };
            let (send, groups) = bounded::<Vec<PlannedPiece>>(self.request.thread_count * 2);
            let frame_count = self.request.thread_count * FRAMES_PER_THREAD;
            let (send_decoded, decoded) = bounded(frame_count);
            let (give_back, free) = bounded(frame_count);
            for _ in self.request.thread_count..frame_count {
                give_back.send(AlignedBuffer::default()).ok();
            }
            for _ in 0..self.request.thread_count * WRITERS_PER_THREAD {
                let (decoded, give_back) = (decoded.clone(), give_back.clone());
                scope.spawn(move || self.write_decoded(&decoded, &give_back));
            }
            let writers = WriterQueue {
                decoded: send_decoded,
                free,
            };
            for _ in 0..self.request.thread_count {
                let (groups, writers) = (groups.clone(), writers.clone());
                scope.spawn(move || self.work(&groups, writers));
            }
            drop((groups, writers, decoded, give_back));
            while let Some(batch) = plan.next()? {
                self.zeroes(&batch)?;
                for group in batch.pieces.chunk_by(|a, b| (a.pack, a.frame) == (b.pack, b.frame)) {
                    self.check_cancelled()?;
                    if send.send(group.to_vec()).is_err() {
                        // All workers have stopped: one of them has reported the error.
                        return Ok(());
                    }
                }
            }
            Ok::<_, Error>(())
        })?;
        match self.failure().take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Flushes the target on request.
    fn flush_on_request(&self, flushes: &Receiver<()>, done: &AtomicBool) {
        while flushes.recv().is_ok() && !done.load(Ordering::Acquire) {
            if let Err(source) = self.request.target.flush() {
                self.fail(self.target_error(source));
                return;
            }
        }
    }

    /// Writes frames until all decoders have ended. After a failure it still returns the memory of frames: a decoder
    /// that waits for memory would not notice the failure.
    fn write_decoded(&self, frames: &Receiver<Decoded>, give_back: &Sender<AlignedBuffer>) {
        for Decoded { raw, wanted } in frames {
            if self.failure().is_none()
                && let Err(error) = self.write(&raw, &wanted)
            {
                self.fail(error);
            }
            // After the last frame, no decoder waits for its memory.
            give_back.send(raw).ok();
        }
    }

    /// Writes pieces of a decoded frame; they were checked to be within the frame.
    fn write(&self, raw: &[u8], wanted: &[PlannedPiece]) -> Result<()> {
        for piece in wanted {
            let start = piece.frame_offset as usize;
            let bytes = &raw[start..start + piece.length as usize];
            let written = self.request.target.write_at(bytes, piece.disk_offset);
            written.map_err(|source| self.target_error(source))?;
            self.count_written(bytes.len() as u64);
        }
        Ok(())
    }

    /// Records the first error; all threads stop when they see it.
    fn fail(&self, error: Error) {
        self.failure().get_or_insert(error);
    }

    fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_written(&self, bytes: u64) {
        let before = self.counters.written.fetch_add(bytes, Ordering::Relaxed);
        if before / FLUSH_BYTES != (before + bytes) / FLUSH_BYTES {
            // A pending request is sufficient.
            self.flush.try_send(()).ok();
        }
    }

    fn run_here(&self, mut plan: FramePlan<'_>) -> Result<()> {
        let mut scratch = Scratch::new(None);
        while let Some(batch) = plan.next()? {
            self.zeroes(&batch)?;
            for group in batch.pieces.chunk_by(|a, b| (a.pack, a.frame) == (b.pack, b.frame)) {
                self.check_cancelled()?;
                self.group(group, &mut scratch)?;
                self.advance(group);
            }
        }
        Ok(())
    }

    fn advance(&self, group: &[PlannedPiece]) {
        self.progress
            .advance(group.iter().map(|piece| u64::from(piece.length)).sum());
    }

    /// The loop of a decoder thread.
    fn work(&self, groups: &Receiver<Vec<PlannedPiece>>, writers: WriterQueue) {
        let mut scratch = Scratch::new(Some(writers));
        for group in groups {
            if self.failure().is_some() {
                return;
            }
            if let Err(error) = self.group(&group, &mut scratch) {
                self.fail(error);
                return;
            }
            self.advance(&group);
        }
    }

    fn check_cancelled(&self) -> Result<()> {
        if self.progress.cancelled().load(Ordering::Relaxed) {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }

    fn target_error(&self, source: holdfast_block::Error) -> Error {
        Error::Device {
            role: "target",
            name: self.request.target_name.clone(),
            source,
        }
    }

    /// Writes all pieces that were planned to be in one frame, also if gc has moved them since.
    fn group(&self, group: &[PlannedPiece], scratch: &mut Scratch) -> Result<()> {
        let packs = &self.repository.packs;
        let mut waiting = vec![group.to_vec()];
        let mut missing = None;
        while let Some(mut group) = waiting.pop() {
            match self.frame(&group, scratch) {
                // Missing for the first time: see `Packs::follow`.
                Err(Error::MissingPack { pack }) if missing != Some(pack) => {
                    missing = Some(pack);
                    packs.refresh()?;
                    group.extend(waiting.drain(..).flatten());
                    let again = plan_again(&mut self.disk.map(), packs, &group)?;
                    let groups = again.chunk_by(|a, b| (a.pack, a.frame) == (b.pack, b.frame));
                    waiting.extend(groups.map(<[_]>::to_vec));
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Writes all pieces of one frame.
    fn frame(&self, group: &[PlannedPiece], scratch: &mut Scratch) -> Result<()> {
        let PlannedPiece { pack, frame, .. } = group[0];
        let packs = &self.repository.packs;
        let prints = packs.prints(pack, frame)?;
        let reader = packs.frame_reader(pack)?;
        let is_blocks = reader.frame(frame)?.content == FrameContent::Blocks;
        let mut wanted = Vec::new();
        let mut equal_bytes = 0;
        if self.request.state == TargetState::Similar && is_blocks {
            for piece in group {
                self.differing(piece, &prints, scratch, &mut wanted)?;
            }
            let wanted_bytes: u64 = wanted.iter().map(|piece| u64::from(piece.length)).sum();
            equal_bytes = group.iter().map(|piece| u64::from(piece.length)).sum::<u64>() - wanted_bytes;
            if wanted.is_empty() {
                self.counters.equal.fetch_add(equal_bytes, Ordering::Relaxed);
                return Ok(());
            }
        } else {
            wanted.extend_from_slice(group);
        }
        packs.frame(pack, frame, &mut scratch.buffers, &mut scratch.raw)?;
        self.counters.equal.fetch_add(equal_bytes, Ordering::Relaxed);
        self.counters
            .decoded
            .fetch_add(scratch.raw.len() as u64, Ordering::Relaxed);
        check_frame(&self.keys, &reader, frame, &scratch.raw, &prints, Depth::Prints)?;
        for piece in &wanted {
            let (start, length) = (piece.frame_offset as usize, piece.length as usize);
            if start + length > scratch.raw.len() {
                let detail = format!("bytes at {start} of frame {frame} are behind its end");
                return Err(Error::damaged(&reader.name, reader.frame(frame)?.offset, detail));
            }
        }
        let Some(writers) = &scratch.writers else {
            return self.write(&scratch.raw, &wanted);
        };
        let raw = std::mem::take(&mut scratch.raw);
        writers.decoded.send(Decoded { raw, wanted }).ok();
        scratch.raw = writers.free.recv().unwrap_or_default();
        Ok(())
    }

    /// Adds the parts of `piece` that differ from the target to `wanted`.
    fn differing(
        &self,
        piece: &PlannedPiece,
        prints: &[u8],
        scratch: &mut Scratch,
        wanted: &mut Vec<PlannedPiece>,
    ) -> Result<()> {
        scratch
            .target
            .resize((piece.length as usize).next_multiple_of(BLOCK_LENGTH), 0);
        let (read, padding) = scratch.target.split_at_mut(piece.length as usize);
        padding.fill(0);
        self.request
            .target
            .read_at(read, piece.disk_offset)
            .map_err(|source| self.target_error(source))?;
        let first_block = piece.frame_offset as usize / BLOCK_LENGTH;
        let mut at = 0;
        scratch.hashes.clear();
        self.keys.hash_blocks(&scratch.target, &mut scratch.hashes);
        for (block, hash) in (first_block..).zip(&scratch.hashes) {
            let length = BLOCK_LENGTH.min(piece.length as usize - at);
            let print = prints.get(block * PRINT_LENGTH..(block + 1) * PRINT_LENGTH);
            if print != Some(print_of(hash)) {
                let shift = u32::try_from(at).expect("a piece lies in one frame");
                let length = u32::try_from(length).expect("a block is small");
                match wanted.last_mut() {
                    Some(last)
                        if last.disk_offset + u64::from(last.length) == piece.disk_offset + at as u64
                            && last.frame_offset + last.length == piece.frame_offset + shift =>
                    {
                        last.length += length;
                    }
                    _ => wanted.push(PlannedPiece {
                        frame_offset: piece.frame_offset + shift,
                        disk_offset: piece.disk_offset + at as u64,
                        length,
                        ..*piece
                    }),
                }
            }
            at += length;
        }
        Ok(())
    }

    fn zeroes(&self, batch: &PlannedBatch) -> Result<()> {
        for &(offset, length) in &batch.zeroes {
            self.check_cancelled()?;
            self.counters.zero.fetch_add(length, Ordering::Relaxed);
            let range = offset..offset + length;
            match self.request.state {
                TargetState::Zeroed => {}
                TargetState::Unknown => {
                    self.request
                        .target
                        .write_zeroes(range)
                        .map_err(|source| self.target_error(source))?;
                    self.counters.written.fetch_add(length, Ordering::Relaxed);
                }
                TargetState::Similar => self.zero_differing(range)?,
            }
            self.progress.advance(length);
        }
        Ok(())
    }

    /// Writes zeroes to the non-zero parts of `range` of the target.
    fn zero_differing(&self, range: std::ops::Range<u64>) -> Result<()> {
        const STEP_BYTES: u64 = 1 << 20;
        let target = self.request.target;
        let failed = |source| self.target_error(source);
        let mut buffer = Vec::new();
        holdfast_block::for_each_extent(target, range, |extent| {
            if extent.kind != holdfast_block::ExtentKind::Data {
                self.counters.equal.fetch_add(extent.length, Ordering::Relaxed);
                return Ok(());
            }
            let mut at = extent.offset;
            while at < extent.end() {
                let step = STEP_BYTES.min(extent.end() - at);
                buffer.resize(to_usize(step), 0);
                target.read_at(&mut buffer, at)?;
                let counter = if is_zero(&buffer) {
                    &self.counters.equal
                } else {
                    &self.counters.written
                };
                if !is_zero(&buffer) {
                    target.write_zeroes(at..at + step)?;
                }
                counter.fetch_add(step, Ordering::Relaxed);
                at += step;
            }
            Ok(())
        })
        .map_err(failed)
    }
}
