//! The data of virtual disks, and the time of the last write to each block.
//!
//! Each disk is a file. Time is a counter of writes: every write stamps the 64 KiB blocks that it touches with the next
//! number, and a snapshot copies the stamps. The changes between two snapshots of one disk are the blocks that the
//! later one has stamped after the earlier one was taken.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes per bit of changed block tracking (CBT).
pub(crate) const TRACKED_BYTES: u64 = 64 << 10;
/// Number of bytes to copy at a time.
const COPY_BYTES: u64 = 1 << 20;

/// Counts writes and other events.
static LAST: AtomicU64 = AtomicU64::new(0);

/// Returns the next number.
pub(crate) fn tick() -> u64 {
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// A disk, or a snapshot of one.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    /// `None` after `VDI.data_destroy`.
    file: Option<Arc<File>>,
    path: PathBuf,
    pub(crate) size_bytes: u64,
    stamps: Vec<u64>,
    /// The time at which the snapshot was taken.
    taken: Option<u64>,
    /// The uninterrupted period of change tracking that the disk belongs to.
    pub(crate) tracking: Option<u64>,
    /// Identifies a disk together with its snapshots.
    origin: u64,
}

/// The reason for which the changes between two disks are unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unrelated {
    /// One of the disks is not tracked.
    NotTracked,
    /// The disks are not snapshots of one disk in one tracking period, or are in the wrong order.
    NotOfOneDisk,
}

impl Disk {
    /// Creates a disk of zeroes in a new file.
    pub(crate) fn create(path: &Path, size_bytes: u64) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(size_bytes)?;
        Ok(Self {
            file: Some(Arc::new(file)),
            path: path.to_owned(),
            size_bytes,
            stamps: vec![0; block_count(size_bytes)],
            taken: None,
            tracking: None,
            origin: tick(),
        })
    }

    /// The file, which can be read and written without a lock.
    pub(crate) fn file(&self) -> io::Result<Arc<File>> {
        let gone = || io::Error::other("the data of this disk was destroyed");
        self.file.clone().ok_or_else(gone)
    }

    /// Writes `bytes` at `offset`.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        if end > self.size_bytes {
            return Err(io::Error::other("write past the end of the disk"));
        }
        self.file()?.write_all_at(bytes, offset)?;
        self.touch(offset, end);
        Ok(())
    }

    /// Records that `start..end` was written.
    pub(crate) fn touch(&mut self, start: u64, end: u64) {
        let stamp = tick();
        let blocks = index(start / TRACKED_BYTES)..index(end.div_ceil(TRACKED_BYTES)).min(self.stamps.len());
        self.stamps[blocks].fill(stamp);
    }

    /// Copies the disk to a new file, as a snapshot.
    pub(crate) fn snapshot(&self, path: &Path) -> io::Result<Self> {
        let mut copy = Self::create(path, self.size_bytes)?;
        copy_sparse(&*self.file()?, &*copy.file()?, self.size_bytes)?;
        copy.stamps.clone_from(&self.stamps);
        copy.taken = Some(tick());
        copy.tracking = self.tracking;
        copy.origin = self.origin;
        Ok(copy)
    }

    /// Copies the disk to a new file, as a clone. Changes of the clone are not tracked.
    pub(crate) fn fork(&self, path: &Path) -> io::Result<Self> {
        let mut copy = self.snapshot(path)?;
        copy.taken = None;
        copy.tracking = None;
        Ok(copy)
    }

    /// Changes the size of the disk.
    pub(crate) fn resize(&mut self, size_bytes: u64) -> io::Result<()> {
        self.file()?.set_len(size_bytes)?;
        self.size_bytes = size_bytes;
        self.stamps.resize(block_count(size_bytes), tick());
        Ok(())
    }

    /// Removes the data; the stamps of changes are kept.
    pub(crate) fn destroy_data(&mut self) -> io::Result<()> {
        match self.file.take() {
            Some(_) => std::fs::remove_file(&self.path),
            None => Ok(()),
        }
    }

    /// The 64 KiB blocks that changed since `earlier` was taken, by their stamps, even if the disk is not tracked.
    pub(crate) fn changed_since(&self, earlier: &Self) -> Option<Vec<bool>> {
        let taken = earlier.taken.filter(|_| earlier.origin == self.origin)?;
        let is_later = self.taken.is_none_or(|mine| mine >= taken);
        is_later.then(|| self.stamps.iter().map(|stamp| *stamp > taken).collect())
    }

    /// The bitmap of `VDI.list_changed_blocks`: one bit per 64 KiB, the first one in the highest bit of the first byte.
    pub(crate) fn changed_blocks(&self, earlier: &Self) -> Result<Vec<u8>, Unrelated> {
        let (Some(mine), Some(theirs)) = (self.tracking, earlier.tracking) else {
            return Err(Unrelated::NotTracked);
        };
        let changed = self.changed_since(earlier).filter(|_| mine == theirs);
        let changed = changed.ok_or(Unrelated::NotOfOneDisk)?;
        let byte = |bits: &[bool]| {
            bits.iter()
                .enumerate()
                .fold(0_u8, |byte, (index, bit)| byte | u8::from(*bit) << (7 - index))
        };
        Ok(changed.chunks(8).map(byte).collect())
    }
}

fn block_count(size_bytes: u64) -> usize {
    index(size_bytes.div_ceil(TRACKED_BYTES))
}

fn index(number: u64) -> usize {
    holdfast_block::to_usize(number)
}

/// Copies the ranges that are not zero.
pub(crate) fn copy_sparse(from: &File, to: &File, size_bytes: u64) -> io::Result<()> {
    let mut buffer = vec![0; index(COPY_BYTES)];
    let mut offset = 0;
    while offset < size_bytes {
        let length = COPY_BYTES.min(size_bytes - offset);
        let piece = &mut buffer[..index(length)];
        from.read_exact_at(piece, offset)?;
        if !holdfast_block::is_zero(piece) {
            to.write_all_at(piece, offset)?;
        }
        offset += length;
    }
    Ok(())
}
