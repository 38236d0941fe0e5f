//! From full frames to durable packs, in parallel.
//!
//! The coordinator passes full frames on. Sealers compress and seal them, in any order; the appender writes them into
//! their packs, in order; the committer makes packs durable. Every queue is bounded, and the total memory is that of a
//! few frames. Without threads, the caller executes each step at once: the same code, in an order that a simulation can
//! repeat.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use super::frame_room::FrameRoom;
use crate::error::{Error, Result};
use crate::format::codec::{Compressor, WRITTEN_FRAME_BYTES_MAX};
use crate::format::pack::{Directory, FrameContent, PackKey, PackKind, PackWriter, SealedFrame, UnsealedFrame};
use crate::id::{PackId, WriterId};
use crate::progress::stage::{Stage, StageTimer, timed};
use crate::store::Store;

/// A pack that accepts frames.
pub(crate) struct OpenPack {
    pub(crate) id: PackId,
    pub(crate) kind: PackKind,
    key: Arc<PackKey>,
    /// Bytes appended so far, which determine when the pack is full.
    stored_bytes: AtomicU64,
}

impl OpenPack {
    pub(crate) fn new(id: PackId, kind: PackKind, key: PackKey) -> Self {
        Self {
            id,
            kind,
            key: Arc::new(key),
            stored_bytes: AtomicU64::new(0),
        }
    }

    pub(crate) fn stored_bytes(&self) -> u64 {
        self.stored_bytes.load(Ordering::Relaxed)
    }
}

/// A frame to seal, and its pack.
pub(crate) struct FrameJob {
    pub(crate) pack: Arc<OpenPack>,
    pub(crate) frame: UnsealedFrame,
}

/// The end of a pack.
struct PackCompletion {
    pack: Arc<OpenPack>,
    frame_count: usize,
    attachment: Vec<u8>,
}

/// A pack that is durable.
pub(crate) struct FinishedPack {
    pub(crate) pack: PackId,
    pub(crate) directory: Directory,
    pub(crate) stored_bytes: u64,
}

enum ToAppender {
    Frame(Arc<OpenPack>, SealedFrame),
    End(PackCompletion),
}

/// Reusable buffers: reusing memory is faster than allocating fresh pages.
///
/// A buffer occupies as much memory as its largest content so far. So compressed frames, whose lengths differ, get
/// fresh ones.
#[derive(Clone)]
pub(crate) struct BufferPool {
    free: Arc<Mutex<Vec<Vec<u8>>>>,
    free_count_max: usize,
}

/// Number of free frame buffers that are kept.
pub(crate) const FREE_FRAME_COUNT_MAX: usize = 2;

/// Bytes of compressed frames that may wait for their predecessors while all sealers are busy: a frame that is slow to
/// compress delays those after it.
const WAITING_BYTES: usize = 3 << 19;

impl BufferPool {
    /// A pool that keeps at most `free_count_max` unused buffers.
    pub(crate) fn keeping(free_count_max: usize) -> Self {
        Self {
            free: Arc::default(),
            free_count_max,
        }
    }

    pub(crate) fn take(&self) -> Vec<u8> {
        self.lock().pop().unwrap_or_default()
    }

    pub(crate) fn give(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        let mut free = self.lock();
        if free.len() < self.free_count_max && buffer.capacity() > 0 {
            free.push(buffer);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The open packs.
struct Appender {
    store: Arc<dyn Store>,
    writer: WriterId,
    open: HashMap<PackId, OpenWriter>,
    raw_buffers: BufferPool,
    room: Arc<FrameRoom>,
}

impl Drop for Appender {
    fn drop(&mut self) {
        self.room.close();
    }
}

struct OpenWriter {
    writer: PackWriter,
    end: Option<PackCompletion>,
}

impl Appender {
    /// Processes a frame or an end; returns the pack if that completed it.
    fn take(&mut self, message: ToAppender) -> Result<Option<(PackWriter, PackCompletion)>> {
        let pack = match &message {
            ToAppender::Frame(pack, _) => Arc::clone(pack),
            ToAppender::End(end) => Arc::clone(&end.pack),
        };
        let entry = match self.open.entry(pack.id) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let key = Arc::clone(&pack.key);
                let writer = PackWriter::create(&*self.store, pack.id, pack.kind, self.writer, key)?;
                entry.insert(OpenWriter { writer, end: None })
            }
        };
        match message {
            ToAppender::Frame(pack, frame) => {
                pack.stored_bytes.fetch_add(frame.stored_bytes(), Ordering::Relaxed);
                entry.writer.add(frame, |frame| {
                    // The memory is returned first: a thread that waits for budget takes memory next, and
                    // should find it.
                    let held_bytes = frame.held_bytes();
                    if frame.content != FrameContent::Tree {
                        self.raw_buffers.give(frame.into_raw_buffer());
                    }
                    self.room.give_back(held_bytes);
                })?;
            }
            ToAppender::End(end) => entry.end = Some(end),
        }
        let complete = entry
            .end
            .as_ref()
            .is_some_and(|end| end.frame_count == entry.writer.frame_count());
        if !complete {
            return Ok(None);
        }
        let done = self.open.remove(&pack.id).expect("the entry was just used");
        Ok(done.end.map(|end| (done.writer, end)))
    }
}

fn commit(writer: PackWriter, end: PackCompletion) -> Result<FinishedPack> {
    let (directory, stored_bytes) = writer.finish(end.attachment)?;
    Ok(FinishedPack {
        pack: end.pack.id,
        directory,
        stored_bytes,
    })
}

fn seal(job: FrameJob, compressor: &mut Compressor, raw_buffers: &BufferPool) -> (Arc<OpenPack>, SealedFrame) {
    let (frame, free) = job.frame.seal(compressor, &job.pack.key);
    if frame.content != FrameContent::Tree {
        raw_buffers.give(free);
    }
    (job.pack, frame)
}

/// The coordinator's interface to the pipeline.
pub(crate) struct PackOutput<'a> {
    mode: OutputMode,
    timer: &'a dyn StageTimer,
    /// Number of ended packs that are not known to be durable.
    unfinished: usize,
    raw_buffers: BufferPool,
}

enum OutputMode {
    Inline {
        compressor: Box<Compressor>,
        appender: Box<Appender>,
        finished: Vec<FinishedPack>,
    },
    Threads {
        room: Arc<FrameRoom>,
        jobs: Sender<FrameJob>,
        ends: Sender<ToAppender>,
        finished: Receiver<Result<FinishedPack>>,
    },
}

impl<'a> PackOutput<'a> {
    /// An output with `sealer_count` sealers in `scope`; with 0 the caller does everything.
    pub(crate) fn new<'scope>(
        scope: &'scope Scope<'scope, 'a>,
        store: Arc<dyn Store>,
        timer: &'a dyn StageTimer,
        writer: WriterId,
        sealer_count: usize,
    ) -> Self {
        let raw_buffers = BufferPool::keeping(FREE_FRAME_COUNT_MAX);
        let appender = Appender {
            store,
            writer,
            open: HashMap::new(),
            raw_buffers: raw_buffers.clone(),
            room: Arc::new(FrameRoom::new(sealer_count * WRITTEN_FRAME_BYTES_MAX + WAITING_BYTES)),
        };
        let mode = if sealer_count == 0 {
            OutputMode::Inline {
                compressor: Box::new(Compressor::new()),
                appender: Box::new(appender),
                finished: Vec::new(),
            }
        } else {
            spawn(scope, appender, sealer_count, timer)
        };
        Self {
            mode,
            timer,
            unfinished: 0,
            raw_buffers,
        }
    }

    /// The buffers for uncompressed frames.
    pub(crate) fn raw_buffers(&self) -> &BufferPool {
        &self.raw_buffers
    }

    /// Submits a full frame; waits while the queue is full.
    pub(crate) fn frame(&mut self, job: FrameJob) -> Result<()> {
        match &mut self.mode {
            OutputMode::Inline { compressor, .. } => {
                let (pack, frame) = seal(job, compressor, &self.raw_buffers);
                self.append(ToAppender::Frame(pack, frame))
            }
            OutputMode::Threads {
                room, jobs, finished, ..
            } => timed(self.timer, Stage::AwaitSealers, || {
                room.take(job.frame.raw.len()) && jobs.send(job).is_ok()
            })
            .then_some(())
            .ok_or_else(|| first_error(finished)),
        }
    }

    /// Ends a pack of `frame_count` frames.
    pub(crate) fn end(&mut self, pack: Arc<OpenPack>, frame_count: usize, attachment: Vec<u8>) -> Result<()> {
        self.unfinished += 1;
        let end = ToAppender::End(PackCompletion {
            pack,
            frame_count,
            attachment,
        });
        match &mut self.mode {
            OutputMode::Inline { .. } => self.append(end),
            OutputMode::Threads { ends, finished, .. } => {
                timed(self.timer, Stage::AwaitDurable, || ends.send(end)).map_err(|_| first_error(finished))
            }
        }
    }

    fn append(&mut self, message: ToAppender) -> Result<()> {
        let OutputMode::Inline { appender, finished, .. } = &mut self.mode else {
            unreachable!("with threads, only the appender appends")
        };
        if let Some((writer, end)) = appender.take(message)? {
            finished.push(commit(writer, end)?);
        }
        Ok(())
    }

    /// Packs that became durable since the last call.
    pub(crate) fn finished(&mut self) -> Result<Vec<FinishedPack>> {
        let packs: Vec<_> = match &mut self.mode {
            OutputMode::Inline { finished, .. } => std::mem::take(finished),
            OutputMode::Threads { finished, .. } => finished.try_iter().collect::<Result<_>>()?,
        };
        self.unfinished -= packs.len();
        Ok(packs)
    }

    /// Waits until all ended packs are durable.
    pub(crate) fn wait_for_ended(&mut self) -> Result<Vec<FinishedPack>> {
        let mut packs = self.finished()?;
        while self.unfinished > 0 {
            let OutputMode::Threads { finished, .. } = &self.mode else {
                unreachable!("without threads a pack is finished when it ends")
            };
            let pack = timed(self.timer, Stage::AwaitDurable, || finished.recv());
            packs.push(pack.map_err(|_| first_error(finished))??);
            self.unfinished -= 1;
        }
        Ok(packs)
    }
}

/// The error that closed a queue early.
fn first_error(finished: &Receiver<Result<FinishedPack>>) -> Error {
    finished.iter().find_map(Result::err).unwrap_or(Error::Cancelled)
}

fn spawn<'scope, 'a>(
    scope: &'scope Scope<'scope, 'a>,
    mut appender: Appender,
    sealer_count: usize,
    timer: &'a dyn StageTimer,
) -> OutputMode {
    let room = Arc::clone(&appender.room);
    let (jobs, job_queue) = bounded::<FrameJob>(1);
    let (sealed, sealed_queue) = bounded::<ToAppender>(sealer_count);
    let (complete, complete_queue) = bounded::<(PackWriter, PackCompletion)>(1);
    let (done, finished) = unbounded();
    for _ in 0..sealer_count {
        let (job_queue, sealed) = (job_queue.clone(), sealed.clone());
        let (room, raw_buffers) = (Arc::clone(&room), appender.raw_buffers.clone());
        scope.spawn(move || {
            let mut compressor = Compressor::new();
            for job in job_queue {
                let raw_bytes = job.frame.raw.len();
                let (pack, frame) = timed(timer, Stage::Seal, || seal(job, &mut compressor, &raw_buffers));
                room.give_back(raw_bytes - frame.held_bytes());
                let frame = ToAppender::Frame(pack, frame);
                if timed(timer, Stage::AwaitStore, || sealed.send(frame)).is_err() {
                    return;
                }
            }
        });
    }
    let failed = done.clone();
    scope.spawn(move || {
        for message in sealed_queue {
            match appender.take(message) {
                Ok(None) => {}
                Ok(Some(pack)) => {
                    if complete.send(pack).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    // The receiver stops; if it is gone, all threads have stopped already.
                    failed.send(Err(error)).ok();
                    return;
                }
            }
        }
    });
    scope.spawn(move || {
        for (writer, end) in complete_queue {
            let result = commit(writer, end);
            let stop = result.is_err();
            if done.send(result).is_err() || stop {
                return;
            }
        }
    });
    OutputMode::Threads {
        room,
        jobs,
        ends: sealed,
        finished,
    }
}
