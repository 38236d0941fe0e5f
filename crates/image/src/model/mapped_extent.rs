//! The location of a range of the disk according to the tables of one layer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::file::ImageFile;

/// How a range of the disk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MappedKind {
    /// Not in this layer.
    Absent,
    Zero,
    /// Stored in the data file from `host` on.
    Data {
        host: u64,
    },
    /// In a compressed cluster.
    Compressed(Compressed),
}

/// A range of the disk that is stored in one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MappedExtent {
    pub(crate) length: u64,
    pub(crate) kind: MappedKind,
}

/// The location of compressed data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compressed {
    /// Offset in the image file.
    pub(crate) offset: u64,
    /// Bytes up to the end of the last sector; the data may end earlier.
    pub(crate) length_bytes: u64,
}

impl MappedExtent {
    /// Whether an extent of kind `next` right after this one can be merged with it.
    fn continues(&self, next: MappedKind) -> bool {
        match (self.kind, next) {
            (MappedKind::Absent, MappedKind::Absent) | (MappedKind::Zero, MappedKind::Zero) => true,
            (MappedKind::Data { host }, MappedKind::Data { host: next }) => host.checked_add(self.length) == Some(next),
            _ => false,
        }
    }

    /// The longest extent of at most `length_max` bytes that consists of pieces of one kind; data must be contiguous
    /// on the host. `piece` returns the piece at an offset from the start.
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

/// The last known length of a file; read again only for an offset past it.
#[derive(Debug, Default)]
pub(crate) struct KnownLength(AtomicU64);

impl KnownLength {
    pub(crate) fn contains(&self, file: &dyn ImageFile, offset: u64) -> Result<bool> {
        if offset < self.0.load(Ordering::Relaxed) {
            return Ok(true);
        }
        Ok(offset < self.refreshed(file)?)
    }

    /// How many bytes between `offset` and `end` are inside `file`.
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
