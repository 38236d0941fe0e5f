//! Reading and writing, through the page cache or past it.
//!
//! Direct I/O wants offsets, lengths and memory aligned. Whole blocks of 4096 bytes go past the page cache, through an
//! aligned bounce buffer where the caller's memory is not aligned; reads may cover more than was asked. The unaligned
//! ends of a *write* go through the page cache instead of reading, changing and writing back their blocks: so two threads
//! that write to different bytes of one block cannot undo each other. A block is a page, so a page is never both.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;

use super::open::OpenFile;
use crate::aligned::{ALIGNMENT, AlignedBuffer, is_aligned};
use crate::{Error, Result, to_usize};

const ALIGNMENT_BYTES: u64 = ALIGNMENT as u64;
/// Most memory that one request takes for bouncing.
const BOUNCE_LENGTH_MAX: usize = 1 << 20;

/// Whether the file system took the descriptor but not the request: it wants other alignment, or none of this.
fn is_refusal(error: &std::io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::INVAL)
}

/// Reads until `buffer` is full or the file ends; returns the bytes read.
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

impl OpenFile {
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let done = match self.usable_direct(buffer.len()) {
            Some(direct) => match read_direct(direct, buffer, offset) {
                Err(error) if is_refusal(&error) => {
                    self.refuse_direct(&error);
                    read_up_to(&self.file, buffer, offset)
                }
                outcome => outcome,
            },
            None => read_up_to(&self.file, buffer, offset),
        }
        .map_err(|error| Error::io("read", offset, error))?;
        if done < buffer.len() {
            return Err(self.shrunk(offset + done as u64));
        }
        Ok(())
    }

    pub(super) fn write(&self, data: &[u8], offset: u64) -> Result<()> {
        let Some(direct) = self.usable_direct(data.len()) else {
            return self.write_buffered(data, offset);
        };
        let end = offset + data.len() as u64;
        let first = offset.next_multiple_of(ALIGNMENT_BYTES);
        let last = end / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
        if first >= last {
            return self.write_buffered(data, offset);
        }
        let (head, rest) = data.split_at(to_usize(first - offset));
        let (middle, tail) = rest.split_at(to_usize(last - first));
        match write_direct(direct, middle, first) {
            Err(error) if is_refusal(&error) => {
                self.refuse_direct(&error);
                return self.write_buffered(data, offset);
            }
            outcome => outcome.map_err(|error| Error::io("write", first, error))?,
        }
        self.write_buffered(head, offset)?;
        self.write_buffered(tail, last)
    }

    pub(super) fn write_buffered(&self, data: &[u8], offset: u64) -> Result<()> {
        self.file
            .write_all_at(data, offset)
            .map_err(|error| Error::io("write", offset, error))
    }

    /// The error for bytes at `offset` that should be there and are not.
    pub(super) fn shrunk(&self, offset: u64) -> Error {
        match self.file.metadata() {
            Ok(metadata) => Error::Shrunk {
                offset,
                size_bytes: self.size_bytes,
                actual_size_bytes: metadata.len(),
            },
            Err(error) => Error::io("look for the size", offset, error),
        }
    }

    /// The way past the page cache, where a request of `length` bytes takes it.
    fn usable_direct(&self, length: usize) -> Option<&File> {
        self.direct
            .as_ref()
            .filter(|_| length >= self.direct_length_min && self.direct_refusal.get().is_none())
    }

    fn refuse_direct(&self, error: &std::io::Error) {
        self.direct_refusal
            .get_or_init(|| format!("the file system refuses direct I/O at this alignment: {error}"));
    }
}

/// As [`read_up_to`], past the page cache.
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

/// Writes whole blocks past the page cache.
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
