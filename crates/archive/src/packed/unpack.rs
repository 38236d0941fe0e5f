//! Unpacks a stream if it is compressed: gzip, zstd and xz are detected by their first bytes.
//!
//! Frames of bounded length, as `holdfast compress` and other parallel programs write them, are unpacked on all cores; a single long frame, on one
//! thread besides the reader's. Streams of xz are always unpacked on one thread.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::io;
use std::io::{BufReader, Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use flate2::bufread::GzDecoder;

use crate::packed::frame::{Frame, Input, Packing};
use crate::packed::{GzipValidator, ZstdValidator, gzip, zstd_read};
use holdfast_block::{OrderedResults, Threads};

/// Bytes per chunk of a stream that is unpacked on one thread.
const CHUNK_BYTES: usize = 1 << 20;
/// Read-ahead for a member of unknown length.
const AHEAD_BYTES: usize = 64 << 10;
/// The error message of zstd for a frame that needs a larger window than its decoder allows by default.
const ZSTD_WINDOW: &str = "requires too much memory";
/// Memory for the dictionary of xz. `xz -9`, the largest preset, needs half of it.
const XZ_MEMORY_BYTES_MAX: u64 = 128 << 20;
/// An unpacked stream.
pub struct Unpacked {
    packing: Packing,
    source: Source,
    read: Arc<AtomicU64>,
    may_be_cut: Arc<AtomicBool>,
}

enum Source {
    Plain(Input),
    Chunks {
        chunks: OrderedResults<io::Result<Vec<u8>>>,
        chunk: Vec<u8>,
        at: usize,
        is_finished: bool,
    },
}

impl Unpacked {
    /// Detects the compression by the start of `stream`.
    ///
    /// # Errors
    /// Reading.
    pub fn new(stream: Box<dyn Read + Send>, threads: Threads) -> io::Result<Self> {
        let mut input = Input {
            ahead: Cursor::new(Vec::new()),
            stream,
            read: Arc::default(),
        };
        let mut start = Vec::new();
        input.by_ref().take(4).read_to_end(&mut start)?;
        let packing = Packing::sniff(&start);
        input.give_back(start);
        let read = Arc::clone(&input.read);
        let may_be_cut: Arc<AtomicBool> = Arc::default();
        let source = match packing {
            Packing::None => Source::Plain(input),
            Packing::Gzip => Source::chunks(Unpacking::new(input, Packing::Gzip, &may_be_cut), threads),
            Packing::Zstd => Source::chunks(Unpacking::new(input, Packing::Zstd, &may_be_cut), threads),
            Packing::Xz => Source::chunks(Unpacking::of_stream(xz_decoder(input)?, &may_be_cut), threads),
        };
        Ok(Self {
            packing,
            source,
            read,
            may_be_cut,
        })
    }

    /// A stream of blocks that are unpacked elsewhere.
    pub(crate) fn of_blocks(blocks: OrderedResults<io::Result<Vec<u8>>>) -> Self {
        Self {
            packing: Packing::None,
            source: Source::Chunks {
                chunks: blocks,
                chunk: Vec::new(),
                at: 0,
                is_finished: false,
            },
            read: Arc::default(),
            may_be_cut: Arc::default(),
        }
    }

    /// Whether all frames have Holdfast's full block length, so that the stream may be truncated: the last frame of
    /// Holdfast is usually shorter. Known at the end of the stream.
    pub fn may_be_cut(&self) -> bool {
        self.may_be_cut.load(Ordering::Relaxed)
    }

    /// Its compression.
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// Counter of packed bytes that were read, including those that are not unpacked yet.
    pub(crate) fn counter(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.read)
    }
}

impl Read for Unpacked {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.source {
            Source::Plain(input) => input.read(buffer),
            Source::Chunks {
                chunks,
                chunk,
                at,
                is_finished,
            } => {
                while *at == chunk.len() {
                    if *is_finished || buffer.is_empty() {
                        return Ok(0);
                    }
                    match chunks.next()? {
                        Some(next) => (*chunk, *at) = (next?, 0),
                        None => *is_finished = true,
                    }
                }
                let count = buffer.len().min(chunk.len() - *at);
                if let Some((target, source)) = buffer.get_mut(..count).zip(chunk.get(*at..*at + count)) {
                    target.copy_from_slice(source);
                }
                *at += count;
                Ok(count)
            }
        }
    }
}

impl Source {
    fn chunks(mut unpacking: Unpacking, threads: Threads) -> Self {
        let make_worker = || {
            let mut workers = (libdeflater::Decompressor::new(), zstd::bulk::Decompressor::new());
            move |part: UnpackTask| match part {
                UnpackTask::Ready(result) => result,
                UnpackTask::Gzip { bytes, unpacked_bytes } => gzip::unpack(&mut workers.0, &bytes, unpacked_bytes),
                UnpackTask::Zstd { bytes, unpacked_bytes } => match &mut workers.1 {
                    Ok(decompressor) => decompressor.decompress(&bytes, unpacked_bytes).map_err(damaged),
                    Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
                },
            }
        };
        Self::Chunks {
            chunks: OrderedResults::start(threads, move || unpacking.next(), make_worker),
            chunk: Vec::new(),
            at: 0,
            is_finished: false,
        }
    }
}

fn xz_decoder(input: Input) -> io::Result<Box<dyn Read + Send>> {
    let decoder = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_BYTES_MAX, liblzma::stream::CONCATENATED)?;
    let input = BufReader::with_capacity(AHEAD_BYTES, input);
    Ok(Box::new(liblzma::bufread::XzDecoder::new_stream(input, decoder)))
}

/// Whether a stream of xz needs more memory than [`XZ_MEMORY_BYTES_MAX`].
fn is_xz_memory(error: &io::Error) -> bool {
    let of_xz = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(of_xz, Some(liblzma::stream::Error::MemLimit))
}

/// Marks errors of decompression as damage, and keeps errors of the operating system.
fn damaged(error: io::Error) -> io::Error {
    if is_xz_memory(&error) {
        return io::Error::new(
            io::ErrorKind::Unsupported,
            "the packed stream takes more than 128 MiB of memory to unpack: unpack it on the way, xz -dc FILE | holdfast ...",
        );
    }
    if error.to_string().contains(ZSTD_WINDOW) {
        return io::Error::new(
            io::ErrorKind::Unsupported,
            "the packed stream takes more than 128 MiB of memory to unpack: unpack it on the way, zstd -dc --long=31 FILE | holdfast ...",
        );
    }
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the packed stream ends early: it was cut off",
        );
    }
    if error.raw_os_error().is_none() {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the packed stream is damaged: {error}"),
        )
    } else {
        error
    }
}

/// Work that the reading thread passes to the others.
enum UnpackTask {
    Ready(io::Result<Vec<u8>>),
    Gzip { bytes: Vec<u8>, unpacked_bytes: usize },
    Zstd { bytes: Vec<u8>, unpacked_bytes: usize },
}

/// The reading thread.
struct Unpacking {
    state: UnpackState,
    /// Validators for the two compressions.
    gzip: GzipValidator,
    zstd: ZstdValidator,
    may_be_cut: Arc<AtomicBool>,
}

enum UnpackState {
    Frames(Input, Packing),
    /// A member of gzip, unpacked in pieces.
    Member(Box<GzDecoder<BufReader<Input>>>),
    /// The rest of a zstd stream, or a stream of xz, unpacked in pieces.
    Stream(Box<dyn Read + Send>),
    Finished,
}

impl Unpacking {
    fn new(input: Input, packing: Packing, may_be_cut: &Arc<AtomicBool>) -> Self {
        Self::of_state(UnpackState::Frames(input, packing), may_be_cut)
    }

    fn of_stream(stream: Box<dyn Read + Send>, may_be_cut: &Arc<AtomicBool>) -> Self {
        Self::of_state(UnpackState::Stream(stream), may_be_cut)
    }

    fn of_state(state: UnpackState, may_be_cut: &Arc<AtomicBool>) -> Self {
        Self {
            state,
            gzip: GzipValidator::default(),
            zstd: ZstdValidator::default(),
            may_be_cut: Arc::clone(may_be_cut),
        }
    }

    fn next(&mut self) -> Option<UnpackTask> {
        let (part, state) = match std::mem::replace(&mut self.state, UnpackState::Finished) {
            UnpackState::Finished => return None,
            UnpackState::Frames(input, packing) => self.frame(input, packing),
            UnpackState::Member(member) => Self::part_of(member),
            UnpackState::Stream(stream) => Self::chunk(stream),
        };
        self.state = state;
        part
    }

    fn frame(&mut self, mut input: Input, packing: Packing) -> (Option<UnpackTask>, UnpackState) {
        let frame = match packing {
            Packing::Gzip => gzip::read_member(&mut input),
            Packing::Zstd | Packing::Xz | Packing::None => zstd_read::read_frame(&mut input, &mut self.zstd),
        };
        // Each block of Holdfast is a separate member: without validation, a truncated stream or a missing block would
        // not be detected.
        let frame = frame.and_then(|frame| {
            match &frame {
                Frame::End | Frame::Long { .. } => self.gzip.check_end()?,
                Frame::Whole { bytes, unpacked_bytes } if packing == Packing::Gzip => {
                    self.gzip.member(bytes, *unpacked_bytes)?;
                }
                Frame::Whole { bytes, unpacked_bytes } => self.zstd.frame(bytes, *unpacked_bytes),
            }
            Ok(frame)
        });
        match frame {
            Err(error) => (Some(UnpackTask::Ready(Err(error))), UnpackState::Finished),
            Ok(Frame::End) => {
                self.may_be_cut.store(self.zstd.may_be_cut(), Ordering::Relaxed);
                (None, UnpackState::Finished)
            }
            Ok(Frame::Whole { bytes, unpacked_bytes }) => {
                let part = match packing {
                    Packing::Gzip => UnpackTask::Gzip { bytes, unpacked_bytes },
                    Packing::Zstd | Packing::Xz | Packing::None => UnpackTask::Zstd { bytes, unpacked_bytes },
                };
                (Some(part), UnpackState::Frames(input, packing))
            }
            Ok(Frame::Long { start }) => {
                input.give_back(start);
                Self::unframed(input, packing)
            }
        }
    }

    fn unframed(input: Input, packing: Packing) -> (Option<UnpackTask>, UnpackState) {
        if packing == Packing::Gzip {
            return Self::part_of(Box::new(GzDecoder::new(BufReader::with_capacity(AHEAD_BYTES, input))));
        }
        match zstd::stream::read::Decoder::new(input) {
            Ok(stream) => Self::chunk(Box::new(stream)),
            Err(error) => (Some(UnpackTask::Ready(Err(error))), UnpackState::Finished),
        }
    }

    /// Unpacks a part of a gzip member. After its end, another one may follow.
    fn part_of(mut member: Box<GzDecoder<BufReader<Input>>>) -> (Option<UnpackTask>, UnpackState) {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        let read = member.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut chunk);
        match read {
            Err(error) => (Some(UnpackTask::Ready(Err(damaged(error)))), UnpackState::Finished),
            Ok(0) => {
                let reader = member.into_inner();
                let ahead = reader.buffer().to_vec();
                let mut input = reader.into_inner();
                input.give_back(ahead);
                // The next call reads the next member, without recursion: a stream may have any number of empty members.
                (
                    Some(UnpackTask::Ready(Ok(Vec::new()))),
                    UnpackState::Frames(input, Packing::Gzip),
                )
            }
            Ok(_) => (Some(UnpackTask::Ready(Ok(chunk))), UnpackState::Member(member)),
        }
    }

    fn chunk(mut stream: Box<dyn Read + Send>) -> (Option<UnpackTask>, UnpackState) {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        match stream.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut chunk) {
            Err(error) => (Some(UnpackTask::Ready(Err(damaged(error)))), UnpackState::Finished),
            Ok(0) => (None, UnpackState::Finished),
            Ok(_) => (Some(UnpackTask::Ready(Ok(chunk))), UnpackState::Stream(stream)),
        }
    }
}
