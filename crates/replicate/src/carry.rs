//! Transfers a stream from the sending to the receiving program.
//!
//! One thread reads, one compresses where that is wanted, one writes, with a few chunks between them. The thread that started them watches
//! both programs, and kills the one whose other end is gone: so no thread waits for ever.

use std::io::{self, BufReader, Read, Write};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_block::{Clock, Throttle, ThrottleLimits};
use holdfast_host::provider::{Incoming, StreamCheck, StreamRefusal};
use holdfast_host::{Piped, PipedEnd};
use zstd::stream::read::Decoder;

use super::compression::{CHUNK_BYTES, Compression, FrameCompressor};
use holdfast_engine::Interrupted;

/// Limit of chunks that wait between two threads.
const QUEUE_LENGTH: usize = 4;
/// Number of bytes to read at a time.
const READ_BYTES: usize = CHUNK_BYTES / 4;
/// Unused time of the rate limit that may be used later, in milliseconds.
const BURST_MS: u32 = 50;
/// A delay is divided into sleeps of this length, so that an interrupted job ends soon.
const PIECE: Duration = Duration::from_millis(100);
/// Interval of checks whether a program has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(3);
/// Time limit for the sender to end after everything was received.
const GRACE: Duration = Duration::from_secs(10);

/// How a stream is compressed during the transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkFilter {
    None,
    /// It is compressed while the link is slower than that.
    CompressAdaptively,
    Compress,
    Decompress,
}

/// Options of a transfer.
#[derive(Clone)]
pub(super) struct TransferOptions {
    pub(super) filter: LinkFilter,
    /// Maximum rate over the link, in bytes per second.
    pub(super) limit: Option<NonZeroU64>,
    pub(super) clock: Arc<dyn Clock>,
}

/// A running transfer.
pub(super) struct Transfer {
    counts: Arc<TransferCounters>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct TransferCounters {
    /// Bytes of the uncompressed stream.
    stream: AtomicU64,
    /// Bytes that were sent over the link.
    link: AtomicU64,
    /// Number of frames that wait for the link.
    waiting: AtomicUsize,
    is_over: AtomicBool,
    /// Why the transfer failed before the end of the stream.
    failure: Mutex<Option<String>>,
    /// Why the check refused the stream.
    refusal: Mutex<Option<String>>,
}

impl TransferCounters {
    fn refuse(&self, refusal: &StreamRefusal) {
        let mut known = self.refusal.lock().unwrap_or_else(PoisonError::into_inner);
        known.get_or_insert_with(|| refusal.to_string());
    }

    fn fail(&self, what: &str, error: &io::Error) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert_with(|| format!("{what}: {error}"));
    }
}

struct LinkRateLimit {
    throttle: Throttle,
    options: TransferOptions,
    counts: Arc<TransferCounters>,
}

impl LinkRateLimit {
    fn new(options: &TransferOptions, counts: &Arc<TransferCounters>) -> Self {
        let throttle = Throttle::default();
        let limits = ThrottleLimits {
            bytes_per_second: options.limit,
            operations_per_second: None,
            burst_ms: BURST_MS,
        };
        throttle.set_limits(limits, options.clock.now());
        Self {
            throttle,
            options: options.clone(),
            counts: Arc::clone(counts),
        }
    }

    fn pass(&self, bytes: usize) {
        let clock = &self.options.clock;
        self.counts.link.fetch_add(bytes as u64, Ordering::Relaxed);
        let mut left = self.throttle.reserve(bytes as u64, clock.now());
        while !left.is_zero() && !self.counts.is_over.load(Ordering::Relaxed) {
            let piece = left.min(PIECE);
            clock.sleep(piece);
            left -= piece;
        }
    }
}

/// Reads from the link, at the limited rate.
struct LinkReader<R> {
    from: R,
    pace: LinkRateLimit,
}

impl<R: Read> Read for LinkReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.from.read(buffer)?;
        self.pace.pass(length);
        Ok(length)
    }
}

impl TransferOptions {
    /// Starts threads that transfer a stream into a program that receives it. Only the part that passes `check` is
    /// transferred.
    pub(super) fn start_into(
        &self,
        from: impl Read + Send + 'static,
        to: impl Write + Send + 'static,
        check: StreamCheck,
    ) -> io::Result<Transfer> {
        self.carry(from, to, |stream| {
            check.guard(Box::new(BufReader::with_capacity(READ_BYTES, stream)))
        })
    }

    /// Starts threads that transfer everything from `from` to `to`, which does not receive the stream into a dataset,
    /// so it is not checked.
    pub(super) fn start(
        &self,
        from: impl Read + Send + 'static,
        to: impl Write + Send + 'static,
    ) -> io::Result<Transfer> {
        self.carry(from, to, |stream| stream)
    }

    fn carry(
        &self,
        from: impl Read + Send + 'static,
        mut to: impl Write + Send + 'static,
        check: impl FnOnce(Box<dyn Read + Send>) -> Box<dyn Read + Send>,
    ) -> io::Result<Transfer> {
        let counts = Arc::new(TransferCounters::default());
        let mut threads = Vec::new();
        let mut spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work)?;
            threads.push(thread);
            io::Result::Ok(())
        };
        let (send, chunks) = sync_channel(QUEUE_LENGTH);
        let pace = LinkRateLimit::new(self, &counts);
        let (from, pace): (Box<dyn Read + Send>, _) = if self.filter == LinkFilter::Decompress {
            (Box::new(Decoder::new(LinkReader { from, pace })?), None)
        } else {
            (Box::new(from), Some(pace))
        };
        // The stream itself is checked: after it was decompressed, and before it is compressed.
        let from = check(from);
        let of_reader = Arc::clone(&counts);
        spawn("reading", Box::new(move || read(from, &send, &of_reader)))?;
        let chunks = match self.filter {
            LinkFilter::None | LinkFilter::Decompress => chunks,
            filter => {
                let (send, compressed) = sync_channel(QUEUE_LENGTH);
                let of_compressor = Arc::clone(&counts);
                spawn(
                    "packing",
                    Box::new(move || compress(&chunks, &send, filter, &of_compressor)),
                )?;
                compressed
            }
        };
        let of_writer = Arc::clone(&counts);
        let is_compressed = matches!(self.filter, LinkFilter::CompressAdaptively | LinkFilter::Compress);
        let write = move || {
            for chunk in chunks {
                if is_compressed {
                    of_writer.waiting.fetch_sub(1, Ordering::Relaxed);
                }
                if let Some(pace) = &pace {
                    pace.pass(chunk.len());
                }
                if let Err(error) = to.write_all(&chunk) {
                    return of_writer.fail("write", &error);
                }
            }
            if let Err(error) = to.flush() {
                of_writer.fail("write", &error);
            }
        };
        spawn("writing", Box::new(write))?;
        Ok(Transfer { counts, threads })
    }
}

/// Reads to the end. After an error, the bytes that were read are still sent: the receiver keeps them.
fn read(mut from: Box<dyn Read + Send>, send: &SyncSender<Vec<u8>>, counts: &TransferCounters) {
    loop {
        let mut chunk = vec![0; READ_BYTES];
        match from.read(&mut chunk) {
            Ok(0) => return,
            Ok(length) => {
                chunk.truncate(length);
                counts.stream.fetch_add(length as u64, Ordering::Relaxed);
                if send.send(chunk).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                return match StreamRefusal::of(&error) {
                    Some(refusal) => counts.refuse(refusal),
                    None => counts.fail("read", &error),
                };
            }
        }
    }
}

/// Compresses chunks to frames. Short chunks that are already available are combined.
fn compress(chunks: &Receiver<Vec<u8>>, send: &SyncSender<Vec<u8>>, filter: LinkFilter, counts: &TransferCounters) {
    let mut compressor = match FrameCompressor::new() {
        Ok(compressor) => compressor,
        Err(error) => return counts.fail("pack", &error),
    };
    while let Ok(mut chunk) = chunks.recv() {
        while chunk.len() < CHUNK_BYTES * 3 / 4 {
            let Ok(more) = chunks.try_recv() else { break };
            chunk.extend(more);
        }
        let effort = match filter {
            LinkFilter::Compress => Compression::Full,
            _ if counts.waiting.load(Ordering::Relaxed) >= QUEUE_LENGTH / 2 => Compression::Try,
            _ => Compression::None,
        };
        let frame = match compressor.frame(&chunk, effort) {
            Ok(frame) => frame,
            Err(error) => return counts.fail("pack", &error),
        };
        counts.waiting.fetch_add(1, Ordering::Relaxed);
        if send.send(frame).is_err() {
            return;
        }
    }
}

impl Transfer {
    /// Bytes of the uncompressed stream so far.
    pub(super) fn stream_bytes(&self) -> u64 {
        self.counts.stream.load(Ordering::Relaxed)
    }

    /// Bytes sent over the link so far.
    pub(super) fn link_bytes(&self) -> u64 {
        self.counts.link.load(Ordering::Relaxed)
    }

    /// Why the transfer failed before the end of the stream.
    pub(super) fn failure(&self) -> Option<String> {
        let failure = self.counts.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone()
    }

    /// Why the check refused the stream.
    pub(super) fn refusal(&self) -> Option<String> {
        let refusal = self.counts.refusal.lock().unwrap_or_else(PoisonError::into_inner);
        refusal.clone()
    }

    pub(super) fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.counts.is_over.store(true, Ordering::Relaxed);
    }
}

/// The exit states of both programs.
pub(super) struct TransferEnds {
    pub(super) sender: PipedEnd,
    pub(super) receiver: PipedEnd,
    /// Whether the receiver ended before the sender had sent everything.
    pub(super) receiver_was_first: bool,
}

/// Why waiting for the programs failed.
#[derive(Debug)]
pub(super) enum WatchError {
    /// The job was interrupted.
    Interrupted(Interrupted),
    /// The operating system cannot report the end of a program.
    Io(io::Error),
}

impl From<Interrupted> for WatchError {
    fn from(interrupted: Interrupted) -> Self {
        Self::Interrupted(interrupted)
    }
}

impl From<io::Error> for WatchError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Waits until both programs have ended. Calls `step` at short intervals with the transfer so far.
pub(super) fn watch(
    transfer: &Transfer,
    sender: &mut Piped,
    receiver: &mut Incoming,
    clock: &dyn Clock,
    mut step: impl FnMut(&Transfer) -> Result<(), Interrupted>,
) -> Result<TransferEnds, WatchError> {
    let mut receiver_was_first = false;
    let mut grace_until = None;
    loop {
        step(transfer)?;
        let (sent, received) = (sender.try_end()?, receiver.try_end()?);
        match (sent, received) {
            (Some(sender), Some(receiver)) => {
                return Ok(TransferEnds {
                    sender,
                    receiver,
                    receiver_was_first,
                });
            }
            (None, Some(received)) => {
                let until = *grace_until.get_or_insert_with(|| clock.now() + GRACE);
                if !received.is_success() || clock.now() >= until {
                    receiver_was_first = true;
                    sender.kill();
                }
            }
            _ => {}
        }
        clock.sleep(LOOK_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::{Clock as _, SystemClock};
    use holdfast_host::{LocalTools, Piped, StreamTools as _};

    use holdfast_host::provider::Incoming;

    use super::{LinkFilter, TransferEnds, TransferOptions, watch};

    fn start(script: &str) -> Piped {
        let tools = LocalTools::new(Arc::new(SystemClock::new()), Duration::from_secs(60));
        tools.start("sh", &["-c", script]).unwrap()
    }

    fn carry(from: &str, to: &str, filter: LinkFilter, limit: Option<u64>) -> (TransferEnds, u64, u64) {
        let clock = Arc::new(SystemClock::new());
        let options = TransferOptions {
            filter,
            limit: limit.and_then(NonZeroU64::new),
            clock: clock.clone(),
        };
        let (mut sender, mut receiver) = (start(from), Incoming::checked_elsewhere(start(to)));
        let (to, check) = receiver.take_input().unwrap();
        let transfer = options.start_into(sender.take_output().unwrap(), to, check).unwrap();
        let ends = watch(&transfer, &mut sender, &mut receiver, &*clock, |_| Ok(()));
        (ends.unwrap(), transfer.stream_bytes(), transfer.link_bytes())
    }

    const MANY: &str = "head -c 20000000 /dev/zero";
    const COUNTED: &str = "test $(wc -c) = 20000000";

    #[test]
    fn all_of_it_arrives_packed_or_not() {
        for (from, to, filter) in [
            (MANY.to_owned(), COUNTED.to_owned(), LinkFilter::None),
            (MANY.to_owned(), format!("zstd -dc | {COUNTED}"), LinkFilter::Compress),
            (
                MANY.to_owned(),
                format!("zstd -dc | {COUNTED}"),
                LinkFilter::CompressAdaptively,
            ),
            (format!("{MANY} | zstd -c"), COUNTED.to_owned(), LinkFilter::Decompress),
        ] {
            let (ends, stream, link) = carry(&from, &to, filter, None);
            assert!(
                ends.sender.is_success() && ends.receiver.is_success(),
                "{filter:?}: {}",
                ends.receiver.reason()
            );
            assert_eq!(stream, 20_000_000, "{filter:?}");
            match filter {
                LinkFilter::None => assert_eq!(link, stream),
                LinkFilter::CompressAdaptively => assert!(link < stream + 10_000, "{link}"),
                _ => assert!(link < 100_000, "{filter:?}: {link}"),
            }
        }
    }

    #[test]
    fn a_slow_link_gets_packed_chunks_and_a_limit_is_kept() {
        let clock = SystemClock::new();
        let (ends, stream, link) = carry(
            MANY,
            "zstd -dc >/dev/null",
            LinkFilter::CompressAdaptively,
            Some(4_000_000),
        );
        assert!(ends.receiver.is_success() && stream == 20_000_000);
        assert!(link < 10_000_000, "{link}");
        let (_, _, link) = carry(
            "head -c 1000000 /dev/zero",
            "cat >/dev/null",
            LinkFilter::None,
            Some(1_000_000),
        );
        assert!(link == 1_000_000 && clock.now() > Duration::from_millis(900));
    }

    #[test]
    fn a_program_without_its_other_side_is_ended() {
        let clock = SystemClock::new();
        let (ends, ..) = carry(
            "cat /dev/zero",
            "head -c 100000 >/dev/null; echo full >&2; exit 7",
            LinkFilter::None,
            None,
        );
        assert_eq!((ends.receiver.code, &ends.receiver.reason()[..]), (Some(7), "full"));
        let (ends, ..) = carry("sleep 600", "exit 1", LinkFilter::None, None);
        assert!(ends.receiver_was_first && ends.sender.code.is_none());
        let (ends, stream, _) = carry(
            "head -c 1000 /dev/zero; exit 3",
            "cat >/dev/null; exit 1",
            LinkFilter::None,
            None,
        );
        assert_eq!((ends.sender.code, ends.receiver.code, stream), (Some(3), Some(1), 1000));
        let (ends, ..) = carry("printf rubbish", "cat >/dev/null; exit 1", LinkFilter::Decompress, None);
        assert!(ends.receiver.code == Some(1));
        assert!(clock.now() < Duration::from_secs(60));
    }
}
