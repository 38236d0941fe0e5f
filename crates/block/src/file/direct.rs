//! Direct I/O, bypassing the page cache.
//!
//! Direct I/O needs aligned offsets, lengths and memory. Whole blocks of 4096 bytes bypass the page cache, through an
//! aligned bounce buffer if the caller's memory is not aligned; reads may cover more than was requested. The unaligned
//! ends of a *write* use the page cache instead of a read-modify-write of their blocks, so that two threads that write
//! different bytes of one block cannot overwrite each other's bytes. A block is a page, so one request never accesses a
//! page in both ways.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::OnceLock;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::IoMode;
use crate::aligned::{ALIGNMENT, AlignedBuffer, is_aligned};
use crate::to_usize;

const ALIGNMENT_BYTES: u64 = ALIGNMENT as u64;
/// Largest bounce buffer of one request.
const BOUNCE_LENGTH_MAX: usize = 1 << 20;

/// Direct I/O to an open file, for requests of a minimum length.
///
/// If the file system refuses direct I/O, all requests use the page cache, and [`refusal`](Self::refusal) returns the
/// reason.
#[derive(Debug, Default)]
pub struct DirectPath {
    file: Option<File>,
    length_min: usize,
    refusal: OnceLock<String>,
}

/// The access mode of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// Whether the file system accepted the descriptor but not the request: it needs another alignment, or does not support
/// direct I/O.
fn is_refusal(error: &std::io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::INVAL)
}

impl DirectPath {
    /// Minimum length of a large request: a disk is about as fast with requests of this length as with longer ones.
    pub const LARGE_LENGTH: usize = 512 << 10;

    /// Opens `file` a second time. Requests of fewer than `length_min` bytes use the page cache.
    pub fn open(file: &File, access: Access, length_min: usize) -> Self {
        // By its descriptor, because the name may refer to another file by now.
        let opened = OpenOptions::new()
            .read(true)
            .write(access == Access::ReadWrite)
            .custom_flags(OFlags::DIRECT.bits().cast_signed())
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let refusal = OnceLock::new();
        let file = opened
            .map_err(|error| refusal.set(format!("the file system refuses direct I/O: {error}")))
            .ok();
        Self {
            file,
            length_min,
            refusal,
        }
    }

    /// Whether sufficiently long requests bypass the page cache.
    pub fn is_usable(&self) -> bool {
        self.file.is_some() && self.refusal.get().is_none()
    }

    /// Minimum length of requests that bypass the page cache.
    pub fn length_min(&self) -> usize {
        self.length_min
    }

    /// The reason for which the file system refused direct I/O.
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.get().map(String::as_str)
    }

    fn file_for(&self, length: usize) -> Option<&File> {
        self.file
            .as_ref()
            .filter(|_| length >= self.length_min && self.refusal.get().is_none())
    }

    fn refuse(&self, error: &std::io::Error) {
        self.refusal
            .get_or_init(|| format!("the file system refuses direct I/O at this alignment: {error}"));
    }

    /// Reads until `buffer` is full or the file ends; returns the number of bytes read. `buffered` is the same file
    /// without direct I/O.
    pub fn read(&self, buffered: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let Some(direct) = self.file_for(buffer.len()) else {
            return read_up_to(buffered, buffer, offset);
        };
        match read_direct(direct, buffer, offset) {
            Err(error) if is_refusal(&error) => {
                self.refuse(&error);
                read_up_to(buffered, buffer, offset)
            }
            outcome => outcome,
        }
    }

    /// Writes all of `data`; returns whether the data, except for unaligned ends, bypassed the page cache. `buffered`
    /// is the same file without direct I/O.
    pub fn write(&self, buffered: &File, data: &[u8], offset: u64) -> std::io::Result<IoMode> {
        let end = offset + data.len() as u64;
        let first = offset.next_multiple_of(ALIGNMENT_BYTES);
        let last = end / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
        let direct = self.file_for(data.len()).filter(|_| first < last);
        let Some(direct) = direct else {
            buffered.write_all_at(data, offset)?;
            return Ok(IoMode::Buffered);
        };
        let (head, rest) = data.split_at(to_usize(first - offset));
        let (middle, tail) = rest.split_at(to_usize(last - first));
        match write_direct(direct, middle, first) {
            Err(error) if is_refusal(&error) => {
                self.refuse(&error);
                buffered.write_all_at(data, offset)?;
                return Ok(IoMode::Buffered);
            }
            outcome => outcome?,
        }
        buffered.write_all_at(head, offset)?;
        buffered.write_all_at(tail, last)?;
        Ok(IoMode::Direct)
    }
}

/// Reads until `buffer` is full or the file ends; returns the number of bytes read.
fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(length) => done += length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Like [`read_up_to`], but bypasses the page cache.
fn read_direct(direct: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let aligned = offset.is_multiple_of(ALIGNMENT_BYTES) && buffer.len().is_multiple_of(ALIGNMENT);
    if aligned && is_aligned(buffer) {
        return read_up_to(direct, buffer, offset);
    }
    let end = offset + buffer.len() as u64;
    let first = offset / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    let cover = to_usize(end.next_multiple_of(ALIGNMENT_BYTES) - first);
    let mut bounce = AlignedBuffer::new(cover.min(BOUNCE_LENGTH_MAX));
    let (mut at, mut done) = (first, 0);
    while done < buffer.len() {
        let skip = to_usize((offset + done as u64) - at);
        let wanted = (buffer.len() - done).min(bounce.len() - skip);
        let got = read_up_to(direct, &mut bounce, at)?.saturating_sub(skip).min(wanted);
        buffer[done..done + got].copy_from_slice(&bounce[skip..skip + got]);
        done += got;
        if got < wanted {
            break;
        }
        at += bounce.len() as u64;
    }
    Ok(done)
}

/// Writes whole blocks, bypassing the page cache.
fn write_direct(direct: &File, data: &[u8], offset: u64) -> std::io::Result<()> {
    if is_aligned(data) {
        return direct.write_all_at(data, offset);
    }
    let mut bounce = AlignedBuffer::new(data.len().min(BOUNCE_LENGTH_MAX));
    let mut at = offset;
    for piece in data.chunks(BOUNCE_LENGTH_MAX) {
        let buffer = &mut bounce[..piece.len()];
        buffer.copy_from_slice(piece);
        direct.write_all_at(buffer, at)?;
        at += piece.len() as u64;
    }
    Ok(())
}
