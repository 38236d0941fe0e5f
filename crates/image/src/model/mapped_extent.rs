//! Where a range of the disk is stored, as the tables of one layer say.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::file::ImageFile;

/// What a run of bytes of the disk is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MappedKind {
    /// Not in this layer.
    Absent,
    /// Reads as zero.
    Zero,
    /// In the data file, beginning at `host`.
    Data { host: u64 },
    /// Inside one compressed cluster.
    Compressed(Compressed),
}

/// A run of bytes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MappedExtent {
    pub(crate) length: u64,
    pub(crate) kind: MappedKind,
}

/// Where compressed data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compressed {
    /// First byte in the image file.
    pub(crate) offset: u64,
    /// Bytes up to the end of the last sector; the data may end before that.
    pub(crate) length_bytes: u64,
}

impl MappedExtent {
    /// Whether a run of the kind `next`, which begins where this one ends, is one with it.
    fn continues(&self, next: MappedKind) -> bool {
        match (self.kind, next) {
            (MappedKind::Absent, MappedKind::Absent) | (MappedKind::Zero, MappedKind::Zero) => true,
            (MappedKind::Data { host }, MappedKind::Data { host: next }) => host.checked_add(self.length) == Some(next),
            _ => false,
        }
    }

    /// The longest run of at most `length_max` bytes that is made of pieces of one kind; those of data lie one after another on the
    /// host. `piece` gives the piece that begins so many bytes from the start.
    pub(crate) fn of_pieces(length_max: u64, mut piece: impl FnMut(u64) -> Result<Self>) -> Result<Self> {
        let mut run = Self {
            length: 0,
            kind: MappedKind::Absent,
        };
        while run.length < length_max {
            let next = piece(run.length)?;
            let length = next.length.min(length_max - run.length);
            if run.length == 0 {
                run = Self { length, ..next };
            } else if run.continues(next.kind) {
                run.length += length;
            } else {
                break;
            }
        }
        Ok(run)
    }
}

/// A file's length as last seen: asked again only when something lies behind it.
#[derive(Debug, Default)]
pub(crate) struct KnownLength(AtomicU64);

impl KnownLength {
    /// Whether `offset` lies inside `file`.
    pub(crate) fn contains(&self, file: &dyn ImageFile, offset: u64) -> Result<bool> {
        if offset < self.0.load(Ordering::Relaxed) {
            return Ok(true);
        }
        Ok(offset < self.refreshed(file)?)
    }

    /// How many of the bytes from `offset` to `end` `file` has; what is behind its end is no data.
    pub(crate) fn held(&self, file: &dyn ImageFile, offset: u64, end: u64) -> Result<u64> {
        let known = self.0.load(Ordering::Relaxed);
        let length = if end <= known { known } else { self.refreshed(file)? };
        Ok(length.min(end).saturating_sub(offset))
    }

    fn refreshed(&self, file: &dyn ImageFile) -> Result<u64> {
        let length = file.length_bytes()?;
        self.0.store(length, Ordering::Relaxed);
        Ok(length)
    }
}
