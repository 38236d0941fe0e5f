//! Zeroing and releasing space.

use std::ops::Range;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::open::{Medium, OpenFile};
use crate::device::range_length;
use crate::{Error, Result, to_usize};

/// Size of the buffer of zeroes, which is written if nothing better works.
const ZEROES_LENGTH_MAX: u64 = 1 << 20;

/// Whether the kernel supports the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KernelSupport {
    Done,
    NotSupported,
}

impl OpenFile {
    /// Punches a hole; if that is not supported, marks the range as zero; if that is not supported either, writes
    /// zeroes.
    pub(super) fn write_zeroes(&self, range: &Range<u64>) -> Result<()> {
        let inner = self.whole_blocks(range);
        if range_length(&inner) == 0 {
            return self.write_zero_bytes(range);
        }
        for method in [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE] {
            if self.fallocate(method, &inner)? == KernelSupport::Done {
                self.write_zero_bytes(&(range.start..inner.start))?;
                return self.write_zero_bytes(&(inner.end..range.end));
            }
        }
        self.write_zero_bytes(range)
    }

    /// Punches a hole if the kernel supports it; otherwise does nothing.
    pub(super) fn trim(&self, range: &Range<u64>) -> Result<()> {
        let inner = self.whole_blocks(range);
        if range_length(&inner) > 0 {
            self.fallocate(FallocateFlags::PUNCH_HOLE, &inner)?;
        }
        Ok(())
    }

    /// The part of `range` that the kernel accepts: all of it for a file, whole sectors for a block device.
    fn whole_blocks(&self, range: &Range<u64>) -> Range<u64> {
        match self.medium {
            Medium::RegularFile => range.clone(),
            Medium::BlockDevice => {
                let block = u64::from(self.block_size_bytes);
                range.start.next_multiple_of(block)..range.end / block * block
            }
        }
    }

    fn fallocate(&self, method: FallocateFlags, range: &Range<u64>) -> Result<KernelSupport> {
        let flags = method | FallocateFlags::KEEP_SIZE;
        loop {
            return match rustix::fs::fallocate(&self.file, flags, range.start, range_length(range)) {
                Ok(()) => Ok(KernelSupport::Done),
                Err(Errno::INTR) => continue,
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV) => Ok(KernelSupport::NotSupported),
                Err(errno) => Err(Error::io("write zeroes", range.start, errno)),
            };
        }
    }

    fn write_zero_bytes(&self, range: &Range<u64>) -> Result<()> {
        let length = range_length(range);
        let zeroes = vec![0; to_usize(length.min(ZEROES_LENGTH_MAX))];
        let mut at = range.start;
        while at < range.end {
            let piece = (range.end - at).min(ZEROES_LENGTH_MAX);
            self.write_buffered(&zeroes[..to_usize(piece)], at)?;
            at += piece;
        }
        Ok(())
    }
}
