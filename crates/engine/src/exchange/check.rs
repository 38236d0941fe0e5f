//! Reads an archive to its end and verifies all checksums in it.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use holdfast_archive::{
    ArchiveDisk, ArchiveKind, DiskContent, Error as ArchiveError, PackedFile, Packing, Piece, StreamImages, Unpacked,
    open,
};
use holdfast_block::{BlockDevice as _, FileDevice, IoMode};

use super::import::{note_unverified, open_options, threads, warn_of_corrections};
use crate::job::{Job, Result, Unit};

/// Remark on a zstd stream that may be truncated: its frames could be those of Holdfast, but nothing shows that it is complete.
pub const MAY_BE_CUT: &str = "frames as long as those of holdfast compress stand where no index lists them: if they are its own, a part is missing or came twice";

/// An archive without errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedArchive {
    /// Its kind.
    pub kind: ArchiveKind,
    /// Its compression.
    pub packing: Packing,
    /// Bytes of the archive as read.
    pub read_bytes: u64,
    /// Its disks, in the order of the archive.
    pub disks: Vec<CheckedDisk>,
}

/// A disk without errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedDisk {
    /// Its name in the archive.
    pub key: String,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes of it that are stored in the archive.
    pub data_bytes: u64,
    /// Whether the archive describes it as empty, without a file for it.
    pub is_blank: bool,
}

/// Reads and checks an archive to its end.
///
/// # Errors
/// The first error in the archive.
pub fn check_archive(stream: Box<dyn Read + Send>, images: StreamImages, job: Job<'_>) -> Result<CheckedArchive> {
    let mut archive = open(stream, open_options(images, job))?;
    job.progress.phase("checking the archive", Unit::Bytes);
    let mut data_bytes = vec![0; archive.reader.disks().len()];
    let mut reported = 0;
    while let Some(piece) = archive.reader.next()? {
        if let Piece::Data { disk, bytes, .. } = piece {
            data_bytes[disk] += bytes.len() as u64;
        }
        let read = archive.read.bytes();
        job.progress.advance(read - reported);
        reported = read;
        job.interrupt.check()?;
    }
    warn_of_corrections(&archive.reader.corrections(), job);
    note_unverified(&archive.reader.unverified(), job);
    let checked = |(disk, data_bytes): (&ArchiveDisk, u64)| CheckedDisk {
        key: disk.key.clone(),
        size_bytes: disk.size_bytes,
        data_bytes,
        is_blank: disk.content == DiskContent::Blank,
    };
    let disks = archive.reader.disks().iter().zip(data_bytes).map(checked).collect();
    Ok(CheckedArchive {
        kind: archive.kind,
        packing: archive.packing,
        read_bytes: archive.read.bytes(),
        disks,
    })
}

/// Opens a packed file that has an index at its end.
pub fn open_packed(path: &Path) -> Result<PackedFile> {
    let file = FileDevice::open(path, IoMode::Buffered).map_err(|error| crate::Error::from(error).on(path))?;
    PackedFile::open(Arc::new(file)).map_err(|error| crate::Error::from(error).on(path))
}

/// Reads a packed stream to its end and verifies every gzip and zstd checksum. Returns its compression; none if it is not packed.
///
/// # Errors
/// It is damaged or truncated.
pub fn check_stream(stream: Box<dyn Read + Send>, job: Job<'_>) -> Result<Option<Packing>> {
    let read_error = |offset| {
        move |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => ArchiveError::CutOff {
                what: "the packed stream",
                offset,
            },
            _ => ArchiveError::Read { offset, source },
        }
    };
    let mut stream = Unpacked::new(stream, threads(job)).map_err(read_error(0))?;
    if stream.packing() == Packing::None {
        return Ok(None);
    }
    job.progress.phase("checking the packed stream", Unit::Bytes);
    let mut buffer = vec![0; 1 << 20];
    let mut unpacked_bytes = 0;
    loop {
        let count = stream.read(&mut buffer).map_err(read_error(unpacked_bytes))?;
        if count == 0 {
            break;
        }
        unpacked_bytes += count as u64;
        job.progress.advance(count as u64);
        job.interrupt.check()?;
    }
    if stream.may_be_cut() {
        job.progress.warning(MAY_BE_CUT);
    }
    Ok(Some(stream.packing()))
}

/// Unpacks and verifies every block in the index of a file, on all threads; returns the number of blocks.
///
/// # Errors
/// The first damaged block.
pub fn check_packed(file: &PackedFile, job: Job<'_>) -> Result<u64> {
    job.progress.phase("checking the packed blocks", Unit::Bytes);
    job.progress.total(file.index().packed_bytes());
    let mut reported = 0;
    let report = file.check(threads(job).count, &mut |done| {
        job.progress.advance(done - reported);
        reported = done;
        job.interrupt.check().map_err(std::io::Error::other)
    });
    job.interrupt.check()?;
    Ok(report?.block_count)
}

/// Writes a range of a packed stream to `write`.
pub fn read_packed(
    file: &PackedFile,
    range: std::ops::Range<u64>,
    write: &mut dyn std::io::Write,
    job: Job<'_>,
) -> Result<()> {
    let slice = holdfast_block::SliceDevice::new(file, range)?;
    job.progress.phase("reading", Unit::Bytes);
    job.progress.total(slice.size_bytes());
    crate::files::ordered_stream::write_to_stream(&slice, write, job)
}
