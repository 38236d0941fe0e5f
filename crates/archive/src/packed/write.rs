//! Compresses a stream on all cores.

use std::io;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::index::PackedIndex;
use super::{gzip, zstd_frame};
use crate::checksum::xxh64;
use crate::packed::frame::{GZIP_BLOCK_BYTES, Packing, ZSTD_BLOCK_BYTES};
use crate::{Error, Result};
use holdfast_block::{OrderedResults, Threads};

/// The window covers a whole block: at the default level this compensates for the block borders and costs no time. Larger blocks compress some
/// percent better but slower, since two threads with such blocks exceed a cache.
const ZSTD_WINDOW_LOG: u32 = 22;
/// Blocks queued for the thread that distributes them.
const WAITING: usize = 2;
const GZIP_LEVEL: i32 = 6;
const ZSTD_LEVEL: i32 = 3;

/// Options for compressing a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackOptions {
    /// The compression.
    pub packing: Packing,
    /// The level: 1 to 12 for gzip, 1 to 19 for zstd; `None` for the default.
    pub level: Option<i32>,
    /// The threads.
    pub threads: Threads,
}

impl PackOptions {
    fn block_bytes(&self) -> usize {
        match self.packing {
            Packing::Gzip => GZIP_BLOCK_BYTES,
            Packing::Zstd | Packing::Xz | Packing::None => ZSTD_BLOCK_BYTES,
        }
    }

    /// The level, checked.
    fn level(&self) -> Result<i32> {
        let (default, most) = match self.packing {
            Packing::Gzip => (GZIP_LEVEL, 12),
            Packing::Zstd => (ZSTD_LEVEL, 19),
            Packing::None => return Ok(0),
            Packing::Xz => {
                return Err(Error::InvalidOption {
                    option: "packing",
                    detail: "streams are not written with xz: use zstd, which is faster".to_owned(),
                });
            }
        };
        let level = self.level.unwrap_or(default);
        if (1..=most).contains(&level) {
            Ok(level)
        } else {
            Err(Error::InvalidOption {
                option: "level",
                detail: format!(
                    "{level} is not between 1 and {most}, the levels of {}",
                    self.packing.name()
                ),
            })
        }
    }
}

/// The result of compressing a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Packed {
    /// Bytes read.
    pub unpacked_bytes: u64,
    /// Bytes written, including the index.
    pub written_bytes: u64,
}

/// Reuses buffers: faulting in fresh memory took a measurable part of the time.
#[derive(Clone)]
struct BufferPool {
    buffers: Arc<Mutex<Vec<Vec<u8>>>>,
    /// The capacity of each: the largest packed block.
    capacity: usize,
}

impl BufferPool {
    fn new(block_bytes: usize) -> Self {
        Self {
            buffers: Arc::default(),
            capacity: zstd::zstd_safe::compress_bound(block_bytes),
        }
    }

    /// An empty buffer.
    fn take(&self) -> Vec<u8> {
        let found = self.lock().pop();
        let mut buffer = found.unwrap_or_else(|| Vec::with_capacity(self.capacity));
        buffer.clear();
        buffer
    }

    fn give(&self, buffer: Vec<u8>) {
        self.lock().push(buffer);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A writer that compresses. Without [`Packer::finish`] the file is incomplete.
pub struct Packer {
    buffers: BufferPool,
    block: Vec<u8>,
    block_bytes: usize,
    blocks: Option<SyncSender<Vec<u8>>>,
    /// Whether all blocks were submitted. Otherwise no index is written, since it would make the stream look complete.
    was_completed: Arc<AtomicBool>,
    writer: Option<JoinHandle<Result<Packed>>>,
}

impl Packer {
    /// Starts compressing into `output`, which is written on another thread. With [`Packing::None`], the stream is copied.
    ///
    /// # Errors
    /// The level is out of range.
    pub fn new(output: Box<dyn Write + Send>, options: PackOptions) -> Result<Self> {
        let level = options.level()?;
        let (blocks, handed_in) = sync_channel::<Vec<u8>>(WAITING);
        let packing = options.packing;
        let buffers = BufferPool::new(options.block_bytes());
        let of_workers = buffers.clone();
        let packed = OrderedResults::start(
            options.threads,
            move || handed_in.recv().ok(),
            move || worker(packing, level, of_workers.clone()),
        );
        let of_writer = buffers.clone();
        let was_completed: Arc<AtomicBool> = Arc::default();
        let seen_whole = Arc::clone(&was_completed);
        let writer = std::thread::spawn(move || write_all(&packed, packing, output, &of_writer, &seen_whole));
        Ok(Self {
            buffers,
            block: Vec::new(),
            block_bytes: options.block_bytes(),
            blocks: Some(blocks),
            was_completed,
            writer: Some(writer),
        })
    }

    fn push(&mut self, block: Vec<u8>) -> io::Result<()> {
        let is_taken = self.blocks.as_ref().is_some_and(|blocks| blocks.send(block).is_ok());
        // The writing thread has the cause.
        if is_taken {
            Ok(())
        } else {
            Err(self.join().err().map_or_else(ended, to_io))
        }
    }

    fn join(&mut self) -> Result<Packed> {
        self.blocks = None;
        let failed = || Error::Write {
            offset: 0,
            source: ended(),
        };
        match self.writer.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) | None => Err(failed()),
        }
    }

    /// Compresses the rest, writes the index, and flushes.
    ///
    /// # Errors
    /// Writing, now or earlier.
    pub fn finish(mut self) -> Result<Packed> {
        let rest = std::mem::take(&mut self.block);
        if !rest.is_empty()
            && let Err(source) = self.push(rest)
        {
            return Err(Error::Write { offset: 0, source });
        }
        self.was_completed.store(true, Ordering::Release);
        self.join()
    }
}

impl Write for Packer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.block.capacity() == 0 {
            self.block = self.buffers.take();
        }
        let count = bytes.len().min(self.block_bytes - self.block.len());
        self.block.extend_from_slice(bytes.get(..count).unwrap_or_default());
        if self.block.len() == self.block_bytes {
            let block = std::mem::take(&mut self.block);
            self.push(block)?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn ended() -> io::Error {
    io::Error::other("a thread of this program has failed")
}

fn to_io(error: Error) -> io::Error {
    match error {
        Error::Write { source, .. } => source,
        other => io::Error::other(other),
    }
}

struct PackedBlock {
    bytes: Vec<u8>,
    unpacked_bytes: u32,
    checksum: u32,
}

fn worker(
    packing: Packing,
    level: i32,
    buffers: BufferPool,
) -> impl FnMut(Vec<u8>) -> io::Result<PackedBlock> + Send + 'static {
    let gzip_level = libdeflater::CompressionLvl::new(level).unwrap_or_default();
    let mut deflate = libdeflater::Compressor::new(gzip_level);
    let mut zstd = (packing == Packing::Zstd).then(|| zstd_compressor(level));
    move |bytes| {
        let unpacked_bytes = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        let (checksum, packed) = match (packing, &mut zstd) {
            (Packing::Gzip, _) => (libdeflater::crc32(&bytes), gzip::pack(&mut deflate, &bytes)?),
            (Packing::Zstd, Some(Ok(compressor))) => {
                let mut packed = buffers.take();
                compressor.compress_to_buffer(&bytes, &mut packed)?;
                // The index repeats the checksum at the end of the frame.
                let checksum = zstd_frame::checksum_of(&packed);
                (checksum.unwrap_or_else(|| low_half(xxh64(&bytes))), packed)
            }
            (Packing::Zstd, Some(Err(error))) => return Err(io::Error::other(error.to_string())),
            (Packing::Zstd | Packing::Xz | Packing::None, _) => {
                return Ok(PackedBlock {
                    bytes,
                    unpacked_bytes,
                    checksum: 0,
                });
            }
        };
        buffers.give(bytes);
        Ok(PackedBlock {
            bytes: packed,
            unpacked_bytes,
            checksum,
        })
    }
}

fn zstd_compressor(level: i32) -> io::Result<zstd::bulk::Compressor<'static>> {
    let mut compressor = zstd::bulk::Compressor::new(level)?;
    compressor.include_checksum(true)?;
    compressor.include_contentsize(true)?;
    compressor.set_parameter(zstd::zstd_safe::CParameter::WindowLog(ZSTD_WINDOW_LOG))?;
    Ok(compressor)
}

/// The lower half of a hash, as in seek tables of zstd.
#[expect(clippy::cast_possible_truncation, reason = "the half that is wanted")]
pub(super) fn low_half(hash: u64) -> u32 {
    hash as u32
}

fn write_all(
    blocks: &OrderedResults<io::Result<PackedBlock>>,
    packing: Packing,
    mut output: Box<dyn Write + Send>,
    buffers: &BufferPool,
    was_completed: &AtomicBool,
) -> Result<Packed> {
    let mut index = PackedIndex::default();
    let mut packed = Packed::default();
    let failed = |offset| move |source| Error::Write { offset, source };
    while let Some(block) = blocks.next().map_err(failed(packed.written_bytes))? {
        let block = block.map_err(failed(packed.written_bytes))?;
        let length =
            u32::try_from(block.bytes.len()).map_err(|error| failed(packed.written_bytes)(io::Error::other(error)))?;
        output.write_all(&block.bytes).map_err(failed(packed.written_bytes))?;
        index.push(length, block.unpacked_bytes, block.checksum);
        packed.written_bytes += u64::from(length);
        packed.unpacked_bytes += u64::from(block.unpacked_bytes);
        if packing != Packing::Gzip {
            buffers.give(block.bytes);
        }
    }
    if !was_completed.load(Ordering::Acquire) {
        return Err(failed(packed.written_bytes)(ended()));
    }
    if packing != Packing::None {
        let bytes = index.encode(packing).map_err(failed(packed.written_bytes))?;
        output.write_all(&bytes).map_err(failed(packed.written_bytes))?;
        packed.written_bytes += bytes.len() as u64;
    }
    output.flush().map_err(failed(packed.written_bytes))?;
    Ok(packed)
}

/// Compresses all of `input` into `output`. `progress` gets the number of bytes read, and can abort with an error.
///
/// # Errors
/// Reading and writing; errors of `progress`.
pub fn pack(
    mut input: impl Read,
    output: Box<dyn Write + Send>,
    options: PackOptions,
    progress: &mut dyn FnMut(u64) -> io::Result<()>,
) -> Result<Packed> {
    let mut packer = Packer::new(output, options)?;
    let mut read_bytes = 0;
    loop {
        let mut block = packer.buffers.take();
        let read = input.by_ref().take(packer.block_bytes as u64).read_to_end(&mut block);
        let read = read.and_then(|count| progress(read_bytes + count as u64).map(|()| count));
        let count = read.map_err(|source| Error::Read {
            offset: read_bytes,
            source,
        })?;
        if count == 0 {
            return packer.finish();
        }
        read_bytes += count as u64;
        packer.push(block).map_err(|source| Error::Write {
            offset: read_bytes,
            source,
        })?;
    }
}
