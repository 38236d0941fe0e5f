//! Writes a stream sequentially, from a device that is read once, in order.

use std::io::Write;
use std::num::NonZero;
use std::ops::Range;

use holdfast_block::{AlignedBuffer, BlockDevice, is_zero, to_usize};
use libdeflater::{CompressionLvl, Compressor};

use super::{DIRECTORY, END_OF_STREAM, FOOTER, GRAIN_MARKER_BYTES, SECTOR_BYTES, TABLE, marker};
use crate::formats::vmdk::create::{DESCRIPTOR_SECTORS, GRAIN_BYTES, TABLE_ENTRIES};
use crate::formats::vmdk::descriptor::Descriptor;
use crate::formats::vmdk::extent::SparseExtent;
use crate::model::bytes::{put, round_up};
use crate::model::identity::ImageId;
use crate::pipeline::copy_pipeline::{PendingWrites, Pipeline};
use crate::pipeline::piece::{BufferPart, ClassifiedBuffer, Piece, read_piece};
use crate::{Continue, Error, Result};

/// Offset of the first grain, as in VMware.
const OVERHEAD_BYTES: u64 = 128 * SECTOR_BYTES;
const TABLE_BYTES: u64 = TABLE_ENTRIES * 4;
/// The limit of VMware, which bounds the directory in memory to 8 MiB.
const SIZE_BYTES_MAX: u64 = 64 << 40;
/// Higher levels save another two or three percent.
const LEVEL_DEFAULT: u32 = 4;
const LEVEL_MAX: u32 = 12;

/// Options of a stream.
#[derive(Debug, Clone)]
pub struct StreamOptions<'a> {
    /// The file name stored in the descriptor: no path, quotes or control characters.
    pub name: &'a str,
    /// The UUID stored in the descriptor.
    pub id: ImageId,
    /// Compression level, 1 to 12; a good default if none is given.
    pub level: Option<u32>,
    /// Threads that compress.
    pub threads: NonZero<usize>,
}

/// The result of writing a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamReport {
    /// Length of the stream.
    pub file_bytes: u64,
    /// Size of the disk in its header: that of the device, rounded up to 512.
    pub size_bytes: u64,
    /// Stored grains; all others are zero.
    pub grain_count: u64,
}

/// Writes `device` to `sink` as a streamOptimized VMDK, the format inside archives of VMware and VirtualBox.
///
/// The output is sequential: `sink` can be a pipe. The extents of `device` are queried from start to end, a few at a
/// time, and each byte of data is read once, by several threads that take their pieces in order; zeroes are left out.
/// The same device with the same options gives the same stream, byte for byte.
///
/// `progress` is as in [`fill`](crate::fill). Memory: some MiB for each thread, and the directory: 128 KiB for each
/// TiB of the disk, which may have 64.
///
/// # Errors
/// [`Error::InvalidOption`] for options or a size that VMDK does not support. After any other error, the
/// output is not a valid VMDK: it has no end.
pub fn write_stream_optimized(
    device: &dyn BlockDevice,
    sink: &mut dyn Write,
    options: &StreamOptions<'_>,
    progress: &mut dyn FnMut(u64) -> Continue,
) -> Result<StreamReport> {
    let level = level_of(options.level)?;
    let size_bytes = round_up(device.size_bytes(), SECTOR_BYTES);
    let mut stream = StreamWriter::start(sink, size_bytes, options)?;
    let make_worker = || {
        let mut compressor = Compressor::new(level);
        Ok(move |range: Range<u64>, buffer: AlignedBuffer| {
            // The last grain is stored in full: not every reader accepts a shorter one.
            let piece = read_piece(device, range, buffer)?.padded(GRAIN_BYTES, u64::MAX);
            compress(piece, &mut compressor)
        })
    };
    let pipeline = Pipeline {
        source: device,
        cluster_bytes: GRAIN_BYTES,
        threads: options.threads,
        worker_count: options.threads.get(),
        write: &|_, _| Ok(()),
    };
    pipeline.run(make_worker, &mut |sorted: ClassifiedBuffer| {
        let ClassifiedBuffer { piece, parts } = sorted;
        for part in parts {
            if let BufferPart::Compressed { at, bytes } = part {
                stream.grain(piece.offset + at, &bytes)?;
            }
        }
        let reached = (piece.offset + piece.length).min(device.size_bytes());
        match progress(reached) {
            Continue::Go => Ok(PendingWrites {
                buffer: piece.buffer,
                writes: Vec::new(),
            }),
            Continue::Stop => Err(crate::pipeline::copy_pipeline::stopped(reached)),
        }
    })?;
    stream.finish()
}

fn level_of(level: Option<u32>) -> Result<CompressionLvl> {
    let level = level.unwrap_or(LEVEL_DEFAULT);
    let known = i32::try_from(level).ok().filter(|_| (1..=LEVEL_MAX).contains(&level));
    known
        .and_then(|level| CompressionLvl::new(level).ok())
        .ok_or_else(|| Error::InvalidOption {
            option: "compression level",
            detail: format!("{level} is not between 1 and {LEVEL_MAX}"),
        })
}

/// Compresses the grains of a piece, with markers and padding.
fn compress(piece: Piece, compressor: &mut Compressor) -> Result<ClassifiedBuffer> {
    let mut parts = Vec::new();
    let held = piece.buffer.get(..to_usize(piece.length)).unwrap_or(&piece.buffer);
    for (at, grain) in (0..)
        .step_by(to_usize(GRAIN_BYTES))
        .zip(held.chunks(to_usize(GRAIN_BYTES)))
    {
        if is_zero(grain) {
            continue;
        }
        let mut bytes = vec![0; GRAIN_MARKER_BYTES + compressor.zlib_compress_bound(grain.len())];
        let (_, room) = bytes.split_at_mut(GRAIN_MARKER_BYTES);
        let stored = compressor
            .zlib_compress(grain, room)
            .ok()
            .and_then(|count| u32::try_from(count).ok());
        let Some(stored) = stored else {
            let gone = std::io::Error::other("the compressor exceeded its own bound");
            return Err(Error::Device(holdfast_block::Error::io(
                "compress",
                piece.offset + at,
                gone,
            )));
        };
        let sector = (piece.offset + at) / SECTOR_BYTES;
        put(&mut bytes, 0, &sector.to_le_bytes());
        put(&mut bytes, 8, &stored.to_le_bytes());
        let end = GRAIN_MARKER_BYTES as u64 + u64::from(stored);
        bytes.truncate(to_usize(end));
        bytes.resize(to_usize(end.next_multiple_of(SECTOR_BYTES)), 0);
        parts.push(BufferPart::Compressed { at, bytes });
    }
    Ok(ClassifiedBuffer { piece, parts })
}

/// The state of a stream that is being written.
struct StreamWriter<'a> {
    sink: &'a mut dyn Write,
    name: &'a str,
    extent: SparseExtent,
    /// Bytes written so far.
    at: u64,
    /// Sectors of the tables written so far.
    directory: Vec<u32>,
    /// Index of the current table.
    number: usize,
    table: Vec<u32>,
    grain_count: u64,
}

impl<'a> StreamWriter<'a> {
    /// Writes everything before the first grain.
    fn start(sink: &'a mut dyn Write, size_bytes: u64, options: &StreamOptions<'a>) -> Result<Self> {
        let invalid = |option, detail| Err(Error::InvalidOption { option, detail });
        if size_bytes > SIZE_BYTES_MAX {
            return invalid(
                "size",
                format!("a VMDK cannot have {size_bytes} bytes: the maximum is 64 TiB"),
            );
        }
        let name = options.name;
        if name.is_empty() || name.contains(|character: char| character.is_control() || matches!(character, '"' | '/'))
        {
            return invalid("name", format!("{name:?} is no name of a file that a VMDK can say"));
        }
        let extent = SparseExtent {
            disk_bytes: size_bytes,
            grain_bytes: GRAIN_BYTES,
            descriptor: Some((SECTOR_BYTES, DESCRIPTOR_SECTORS * SECTOR_BYTES)),
            table_entries: TABLE_ENTRIES,
            directory: 0,
            second_directory: None,
            has_zero_grains: false,
            is_compressed: true,
            is_open: false,
            overhead: OVERHEAD_BYTES,
        };
        let mut head = extent.to_bytes();
        let text = Descriptor::text_of_stream(name, size_bytes / SECTOR_BYTES, options.id);
        head.extend_from_slice(text.as_bytes());
        if head.len() as u64 > (1 + DESCRIPTOR_SECTORS) * SECTOR_BYTES {
            return invalid("name", format!("{} bytes are too many to be written down", name.len()));
        }
        head.resize(to_usize(OVERHEAD_BYTES), 0);
        let mut stream = Self {
            sink,
            name,
            directory: vec![0; to_usize(extent.table_count())],
            extent,
            at: 0,
            number: 0,
            table: vec![0; to_usize(TABLE_ENTRIES)],
            grain_count: 0,
        };
        stream.write(&head)?;
        Ok(stream)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.sink
            .write_all(bytes)
            .map_err(|source| holdfast_block::Error::io("write", self.at, source))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// The current offset in sectors, as tables store it.
    fn sector(&self) -> Result<u32> {
        u32::try_from(self.at / SECTOR_BYTES).map_err(|_| Error::NotWritable {
            image: self.name.to_owned(),
            detail: "the file is as large as its tables can reach, 2 TiB; choose another format".to_owned(),
        })
    }

    /// Writes the stored grain at `offset` of the disk. Grains must come in order.
    #[expect(
        clippy::indexing_slicing,
        reason = "the remainder of a division by the length is less than it"
    )]
    fn grain(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let index = to_usize(offset / GRAIN_BYTES);
        let (number, entry) = (index / self.table.len(), index % self.table.len());
        if number != self.number {
            self.end_table()?;
            self.number = number;
        }
        self.table[entry] = self.sector()?;
        self.grain_count += 1;
        self.write(bytes)
    }

    /// Writes the current table, unless it is empty.
    fn end_table(&mut self) -> Result<()> {
        if self.table.iter().all(|sector| *sector == 0) {
            return Ok(());
        }
        self.write(&marker(TABLE, TABLE_BYTES / SECTOR_BYTES))?;
        let sector = self.sector()?;
        let entry = self.directory.get_mut(self.number);
        *entry.expect("the directory has an entry for each table of the disk") = sector;
        let bytes = to_bytes(&self.table);
        self.write(&bytes)?;
        self.table.fill(0);
        Ok(())
    }

    /// Writes everything after the last grain.
    fn finish(mut self) -> Result<StreamReport> {
        self.end_table()?;
        let mut directory = to_bytes(&self.directory);
        directory.resize(
            directory
                .len()
                .next_multiple_of(to_usize(SECTOR_BYTES))
                .max(to_usize(SECTOR_BYTES)),
            0,
        );
        self.write(&marker(DIRECTORY, directory.len() as u64 / SECTOR_BYTES))?;
        self.extent.directory = u64::from(self.sector()?) * SECTOR_BYTES;
        self.write(&directory)?;
        self.write(&marker(FOOTER, 1))?;
        let footer = self.extent.to_bytes();
        self.write(&footer)?;
        self.write(&marker(END_OF_STREAM, 0))?;
        self.sink
            .flush()
            .map_err(|source| holdfast_block::Error::io("write", self.at, source))?;
        Ok(StreamReport {
            file_bytes: self.at,
            size_bytes: self.extent.disk_bytes,
            grain_count: self.grain_count,
        })
    }
}

fn to_bytes(sectors: &[u32]) -> Vec<u8> {
    sectors.iter().flat_map(|sector| sector.to_le_bytes()).collect()
}
