//! Copies a disk into a new image on several threads.
//!
//! Workers read pieces of the source, find zeroes and compress; one thread collects the results in order and places
//! them; workers write uncompressed data there. The number of pieces in flight is bounded.

use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{AlignedBuffer, BlockDevice, BlockDeviceMut, EitherData, to_usize};

use crate::pipeline::copy_pipeline::{Continue, PendingWrites, Pipeline, PlacedWrite, stopped};
use crate::pipeline::piece::{BufferPart, ClassifiedBuffer, Piece, read_base, read_piece};
use crate::{BulkWriter, ClusterCompressor, Error, Result};

/// Workers per thread if nothing is compressed: most of them wait for the medium.
const COPIERS_PER_THREAD: usize = 6;

/// Options for filling a new image.
#[derive(Debug, Clone)]
pub struct FillOptions {
    /// Threads that compute at the same time.
    pub threads: NonZero<usize>,
    /// Whether clusters are compressed, and how hard.
    pub storage: Storage,
}

/// Whether clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Storage {
    /// Uncompressed.
    #[default]
    Plain,
    /// Compressed, except clusters that would not become smaller.
    Compressed {
        /// Compression level; a good default if none is given.
        level: Option<u32>,
    },
}

/// How the bytes of the source were stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FillReport {
    /// Stored uncompressed.
    pub plain_bytes: u64,
    /// Stored compressed: size before compression.
    pub compressed_bytes: u64,
    /// Stored compressed: size after compression.
    pub compressed_stored_bytes: u64,
    /// Zero, and not stored.
    pub zero_bytes: u64,
}

/// Copies `source` into `writer`, which stays open for [`BulkWriter::finish`].
///
/// Zeroes are left out, or marked as zero where a backing file would be read otherwise.
///
/// `progress` is called with the current offset; if it returns [`Continue::Stop`], the copy ends with an error.
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
/// Equal clusters are left out, so that they are read from the backing file. Otherwise like [`fill`].
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
                "it has {} bytes, too few for a disk of {}",
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
        Ok(move |range: Range<u64>, buffer: AlignedBuffer| {
            let piece = read_piece(source, range, buffer)?.padded(cluster_bytes, disk_end);
            let below = match base {
                None => None,
                Some(base) => Some(read_base(base, &piece, &mut below)?),
            };
            Ok(match &mut compressor {
                None => piece.sort(cluster_bytes, below, None),
                Some(compressor) => piece.sort(cluster_bytes, below, Some(&mut |cluster| compressor.compress(cluster))),
            })
        })
    };
    let file = Arc::clone(writer.data_file());
    let mut store = CompressedFill {
        writer,
        report: FillReport::default(),
        stored_end: 0,
    };
    let pipeline = Pipeline {
        source,
        cluster_bytes,
        threads: options.threads,
        worker_count: match options.storage {
            Storage::Plain => options.threads.get() * COPIERS_PER_THREAD,
            Storage::Compressed { .. } => options.threads.get(),
        },
        write: &|bytes, offset| Ok(file.write_at(bytes, offset)?),
    };
    pipeline.run(make_worker, &mut |sorted: ClassifiedBuffer| {
        let mut writes = Vec::new();
        for part in &sorted.parts {
            store.part(part, &sorted.piece, &mut writes)?;
        }
        report_progress(progress, sorted, writes)
    })?;
    store.zero_over_backing(disk_end)?;
    let stored_bytes = store.report.plain_bytes + store.report.compressed_bytes;
    Ok(FillReport {
        zero_bytes: source.size_bytes().saturating_sub(stored_bytes),
        ..store.report
    })
}

/// Places collected results in the image.
struct CompressedFill<'a> {
    writer: &'a mut BulkWriter,
    report: FillReport,
    /// End of the last stored cluster.
    stored_end: u64,
}

impl CompressedFill<'_> {
    /// Stores a part, or appends to `writes` where bytes of the piece are to be written.
    fn part(&mut self, part: &BufferPart, piece: &Piece, writes: &mut Vec<PlacedWrite>) -> Result<()> {
        match part {
            BufferPart::Plain(range) => {
                self.zero_over_backing(piece.offset + range.start)?;
                let (start, length) = (to_usize(range.start), to_usize(range.end - range.start));
                let placed = self.writer.place(length, piece.offset + range.start)?;
                writes.extend(placed.into_iter().map(|placed| PlacedWrite {
                    bytes: start + placed.bytes.start..start + placed.bytes.end,
                    ..placed
                }));
                self.report.plain_bytes += range.end - range.start;
                self.stored_end = piece.offset + range.end;
            }
            BufferPart::SameAsBacking(range) => {
                self.zero_over_backing(piece.offset + range.start)?;
                self.stored_end = piece.offset + range.end;
            }
            BufferPart::Compressed { at, bytes } => {
                self.zero_over_backing(piece.offset + at)?;
                self.writer.append_compressed(bytes, piece.offset + at)?;
                let held = self.writer.cluster_bytes().min(piece.length - at);
                self.report.compressed_bytes += held;
                self.report.compressed_stored_bytes += bytes.len() as u64;
                self.stored_end = piece.offset + at + held;
            }
        }
        Ok(())
    }

    /// In an overlay, marks clusters that were left out before `end` as zero.
    fn zero_over_backing(&mut self, end: u64) -> Result<()> {
        if self.writer.has_backing() && self.stored_end < end {
            self.writer.append_zeroes(self.stored_end..end)?;
        }
        Ok(())
    }
}

/// Reports progress, and returns the pending writes.
fn report_progress(
    progress: &mut dyn FnMut(u64) -> Continue,
    sorted: ClassifiedBuffer,
    writes: Vec<PlacedWrite>,
) -> Result<PendingWrites> {
    let reached = sorted.piece.offset + sorted.piece.length;
    match progress(reached) {
        Continue::Go => Ok(PendingWrites {
            buffer: sorted.piece.buffer,
            writes,
        }),
        Continue::Stop => Err(stopped(reached)),
    }
}

/// Content of a device before it is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetContent {
    /// All zero, as in a new raw image: zeroes are left out.
    Zeroes,
    /// Unknown, as on a block device: zeroes of the source are written, by deallocation where possible.
    Unknown,
}

/// Copies `source` into `target`, which must be at least as large; bytes past the end of the source remain. Flushes at
/// the end.
///
/// `progress` is as in [`fill`].
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
        Ok(|range: Range<u64>, buffer: AlignedBuffer| {
            Ok(read_piece(source, range, buffer)?.sort(GRAIN_BYTES, None, None))
        })
    };
    let mut report = FillReport::default();
    let mut gaps = GapFiller {
        target,
        content,
        end: 0,
    };
    let pipeline = Pipeline {
        source,
        cluster_bytes: GRAIN_BYTES,
        threads,
        worker_count: threads.get() * COPIERS_PER_THREAD,
        write: &|bytes, offset| Ok(target.write_at(bytes, offset)?),
    };
    pipeline.run(make_worker, &mut |sorted: ClassifiedBuffer| {
        let mut writes = Vec::new();
        for part in &sorted.parts {
            if let BufferPart::Plain(range) = part {
                gaps.zero_up_to(sorted.piece.offset + range.start, progress)?;
                gaps.end = sorted.piece.offset + range.end;
                report.plain_bytes += range.end - range.start;
                writes.push(PlacedWrite {
                    bytes: to_usize(range.start)..to_usize(range.end),
                    file_offset: sorted.piece.offset + range.start,
                });
            }
        }
        gaps.zero_up_to(sorted.piece.offset + sorted.piece.length, progress)?;
        report_progress(progress, sorted, writes)
    })?;
    gaps.zero_up_to(source.size_bytes(), progress)?;
    target.flush()?;
    report.zero_bytes = source.size_bytes() - report.plain_bytes;
    Ok(report)
}

/// Zeroes the gaps between written ranges.
struct GapFiller<'a> {
    target: &'a dyn BlockDeviceMut,
    content: TargetContent,
    /// End of the last written range.
    end: u64,
}

impl GapFiller<'_> {
    /// Zeroes everything before `offset`, in steps that can be stopped: the device may have to write all of it.
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
