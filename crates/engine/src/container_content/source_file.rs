//! A regular file that is read: its ranges with data, and their bytes.

use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Ranges of one file; what follows them is read as one range.
const EXTENT_COUNT_MAX: usize = 1 << 18;

/// The ranges with data of a file.
///
/// # Errors
/// Of the file system.
pub(super) fn extents_of(file: &OwnedFd, size_bytes: u64, allocated_bytes: u64) -> io::Result<Vec<Range<u64>>> {
    let mut extents: Vec<Range<u64>> = Vec::new();
    if allocated_bytes >= size_bytes {
        extents.extend((size_bytes > 0).then_some(0..size_bytes));
        return Ok(extents);
    }
    let mut at = 0;
    while at < size_bytes {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data follows.
            Err(Errno::NXIO) => break,
            // The file system does not know holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(error) => return Err(error.into()),
        };
        let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(size_bytes),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => size_bytes,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        if start >= size_bytes || end <= start {
            break;
        }
        if extents.len() == EXTENT_COUNT_MAX - 1 {
            extents.push(start..size_bytes);
            break;
        }
        extents.push(start..end);
        at = end;
    }
    Ok(extents)
}

/// The bytes of ranges of a file. A file that has become shorter ends with zeroes.
pub(super) struct ExtentReader<'a> {
    file: &'a OwnedFd,
    extents: &'a [Range<u64>],
    at: u64,
    pub(super) is_shorter: bool,
}

impl<'a> ExtentReader<'a> {
    pub(super) fn new(file: &'a OwnedFd, extents: &'a [Range<u64>]) -> Self {
        Self {
            file,
            at: extents.first().map_or(0, |first| first.start),
            extents,
            is_shorter: false,
        }
    }
}

impl Read for ExtentReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some((extent, rest)) = self.extents.split_first() else {
            return Ok(0);
        };
        let left = extent.end - self.at;
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let piece = buffer.get_mut(..length).unwrap_or_default();
        if piece.is_empty() {
            return Ok(0);
        }
        let mut count = rustix::io::retry_on_intr(|| rustix::io::pread(self.file, &mut *piece, self.at))?;
        if count == 0 {
            self.is_shorter = true;
            piece.fill(0);
            count = length;
        }
        self.at += count as u64;
        if self.at == extent.end {
            self.extents = rest;
            self.at = rest.first().map_or(0, |next| next.start);
        }
        Ok(count)
    }
}
