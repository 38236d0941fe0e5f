//! Reads and writes formats that divide the disk into blocks and locate them by a table.
//!
//! VDI, VHD, VHDX, VMDK and Parallels differ in their tables and headers; reading, writing, and the order of durable
//! writes are the same. A format implements [`AllocationTable`]; [`TableLayer`] reads with it, and [`TableMut`]
//! writes.

pub(crate) mod bits;
pub(crate) mod pages;
pub(crate) mod writer;

#[cfg(test)]
pub(crate) mod crash_tests;
pub(crate) mod resize;

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentList, to_usize};

use self::pages::TableChanges;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::layered::{Layered, push_file};
use crate::model::mapped_extent::{Compressed, KnownLength, MappedExtent, MappedKind};
use crate::model::repair_action::RepairAction;
use crate::{Error, Result};

/// The allocation table of an image.
///
/// Changes stay in memory until [`take_changes`](Self::take_changes), whose result stores them. After a crash the image
/// has the content of the last complete store, or of later writes in place; space that was reserved and not stored is
/// reused.
pub(crate) trait AllocationTable: Send + Sync {
    /// Size of the disk.
    fn disk_bytes(&self) -> u64;

    /// Granularity of the table, a power of two: a block, or a sector where blocks have sector bitmaps.
    fn unit_bytes(&self) -> u64;

    /// The extent that begins at `offset`: at least one byte, and at most `length_max`.
    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent>;

    /// Decompresses bytes of the disk at `offset`.
    fn read_compressed(&self, buffer: &mut [u8], offset: u64, compressed: Compressed) -> Result<()> {
        let _ = (buffer, offset);
        Err(Error::Device(holdfast_block::Error::io(
            "decompress",
            compressed.offset,
            std::io::Error::from(std::io::ErrorKind::Unsupported),
        )))
    }

    /// The index of the file that contains `host`, and the offset in it.
    fn place_of(&self, host: u64) -> (usize, u64) {
        (0, host)
    }

    /// Whether `host` is inside its file. `file` is the concatenation of all opened files, `length` its last known
    /// length.
    fn has(&self, length: &KnownLength, file: &dyn ImageFile, host: u64) -> Result<bool> {
        length.contains(file, host)
    }

    /// Whether a file is truncated: a write past its end would replace the missing data with zeroes.
    fn is_cut_off(&self) -> Result<bool>;

    /// Prepares the first change after opening. Its changes are stored with the next ones.
    fn start(&mut self) -> Result<()>;

    /// Allocates space that reads as zero for `range`, which consists of whole units without data.
    fn reserve(&mut self, range: Range<u64>) -> Result<()>;

    /// Marks units at the start of `range` as zero; `range` consists of whole units without data. Returns how many
    /// bytes were marked; 0 if the format cannot mark them.
    fn set_zero(&mut self, range: Range<u64>) -> Result<u64>;

    /// Granularity of [`set_zero`](Self::set_zero).
    fn zero_bytes(&self) -> u64 {
        self.unit_bytes()
    }

    /// Bytes of tables that changed and were not taken.
    fn changed_bytes(&self) -> u64;

    /// Takes the changes, to store them while the tables are used and changed further. All data must be durable before
    /// they are stored, and [`changes_stored`](Self::changes_stored) must follow.
    fn take_changes(&mut self) -> TableChanges;

    /// The taken changes are durable.
    fn changes_stored(&mut self);
}

/// An image that is read through its allocation table.
pub(crate) struct TableLayer {
    pub(crate) image: Arc<str>,
    pub(crate) file: Arc<dyn ImageFile>,
    pub(crate) tables: Box<dyn AllocationTable>,
    pub(crate) backing: Option<Arc<dyn BlockDevice>>,
    /// Units that were reserved, and whose content could not be written: they are read from the backing device.
    unwritten: Range<u64>,
    length: KnownLength,
}

impl TableLayer {
    pub(crate) fn new(
        image: Arc<str>,
        file: Arc<dyn ImageFile>,
        tables: Box<dyn AllocationTable>,
        backing: Option<Arc<dyn BlockDevice>>,
    ) -> Self {
        Self {
            image,
            file,
            tables,
            backing,
            unwritten: 0..0,
            length: KnownLength::default(),
        }
    }
}

impl Layered for TableLayer {
    fn disk_bytes(&self) -> u64 {
        self.tables.disk_bytes()
    }

    fn unit_bytes(&self) -> u64 {
        self.tables.unit_bytes()
    }

    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        if self.unwritten.contains(&offset) {
            return Ok(MappedExtent {
                length: length_max.min(self.unwritten.end - offset),
                kind: MappedKind::Absent,
            });
        }
        let before_unwritten = self.unwritten.start.checked_sub(offset).filter(|length| *length > 0);
        self.tables.run(
            offset,
            before_unwritten.map_or(length_max, |length| length_max.min(length)),
        )
    }

    fn read_data(&self, buffer: &mut [u8], host: u64) -> Result<()> {
        // A block is allocated in full, up to the end of the disk: missing bytes mean that the file is truncated.
        self.check_there(host, buffer.len() as u64)?;
        Ok(self.file.read_at(buffer, host)?)
    }

    fn check_there(&self, host: u64, length: u64) -> Result<()> {
        let last = host.saturating_add(length) - 1;
        if !self.tables.has(&self.length, &*self.file, last)? {
            return Err(corrupt(&self.image, "block", last, "past the end of the file"));
        }
        Ok(())
    }

    fn place_of(&self, host: u64) -> (usize, u64) {
        self.tables.place_of(host)
    }

    fn read_compressed(&self, buffer: &mut [u8], offset: u64, compressed: Compressed) -> Result<()> {
        self.tables.read_compressed(buffer, offset, compressed)
    }

    /// Uses the holes of the file: zeroes inside a block may have been punched.
    fn push_data(&self, list: &mut ExtentList, host: u64, length: u64) -> Result<bool> {
        push_file(&*self.file, list, host, length)
    }

    fn backing(&self) -> Option<&dyn BlockDevice> {
        self.backing.as_deref()
    }
}

/// Calls `visit` for each of `count` entries of `N` bytes, from `offset` on.
pub(crate) fn for_each_entry<const N: usize>(
    file: &dyn ImageFile,
    offset: u64,
    count: u64,
    mut visit: impl FnMut(u64, [u8; N]),
) -> Result<()> {
    const BYTES_AT_ONCE: u64 = 256 << 10;
    let at_once = BYTES_AT_ONCE / N as u64;
    let mut index = 0;
    while index < count {
        let mut bytes = vec![0; to_usize(at_once.min(count - index)) * N];
        file.read_at(&mut bytes, offset + index * N as u64)?;
        for entry in bytes.chunks_exact(N) {
            visit(index, entry.try_into().expect("chunks of that size"));
            index += 1;
        }
    }
    Ok(())
}

/// Writes `count` entries of `N` bytes from `offset` on.
pub(crate) fn write_entries<const N: usize>(
    file: &dyn ImageFile,
    offset: u64,
    count: u64,
    entry: impl Fn(u64) -> [u8; N],
) -> Result<()> {
    const COUNT_AT_ONCE: u64 = 64 << 10;
    let mut index = 0;
    while index < count {
        let end = count.min(index + COUNT_AT_ONCE);
        let bytes: Vec<u8> = (index..end).flat_map(&entry).collect();
        file.write_at(&bytes, offset + index * N as u64)?;
        index = end;
    }
    Ok(())
}

/// The minimum end in its file of block `number`, which begins at `host`: of the last block only the part inside the
/// disk has to exist, and of a block past the end of the disk only the first byte.
pub(crate) fn end_of_block(host: u64, number: u64, block_bytes: u64, disk_bytes: u64) -> u64 {
    let of_disk = disk_bytes.saturating_sub(number.saturating_mul(block_bytes));
    host.saturating_add(block_bytes.min(of_disk).max(1))
}

/// The first block that the end of the file truncates, found during a repair.
#[derive(Default)]
pub(crate) struct TruncatedBlock {
    end: u64,
    disk_offset: u64,
}

impl TruncatedBlock {
    /// Examines block `number`, which begins at `host` inside the file.
    pub(crate) fn examine(&mut self, host: u64, number: u64, block_bytes: u64, disk_bytes: u64) {
        let end = end_of_block(host, number, block_bytes, disk_bytes);
        if end > self.end {
            (self.end, self.disk_offset) = (end, number * block_bytes);
        }
    }

    /// Extends the file so that the missing data reads as zero.
    pub(crate) fn extend_file(&self, file: &dyn ImageFile, actions: &mut Vec<RepairAction>) -> Result<()> {
        let file_bytes = file.length_bytes()?;
        if self.end <= file_bytes {
            return Ok(());
        }
        file.set_length(self.end)?;
        file.sync()?;
        actions.push(RepairAction::EntriesDiscarded {
            what: "ends of blocks",
            count: 1,
            unit_bytes: self.end - file_bytes,
            first_disk_offset: Some(self.disk_offset),
        });
        Ok(())
    }
}

/// Copies bytes of the file to a range that does not overlap the source.
pub(crate) fn copy_room(file: &dyn ImageFile, from: u64, to: u64, length_bytes: u64) -> Result<()> {
    const BYTES_AT_ONCE: u64 = 1 << 20;
    let mut done = 0;
    while done < length_bytes {
        let mut piece = vec![0; to_usize((length_bytes - done).min(BYTES_AT_ONCE))];
        file.read_at(&mut piece, from + done)?;
        file.write_at(&piece, to + done)?;
        done += piece.len() as u64;
    }
    Ok(())
}

/// Makes `room` read as zero and extends the file to it: a crash may have left data there.
pub(crate) fn clear_room(file: &dyn ImageFile, room: Range<u64>) -> Result<()> {
    let file_bytes = file.length_bytes()?;
    if room.start < file_bytes {
        file.punch(room.start..room.end.min(file_bytes))?;
    }
    if room.end > file_bytes {
        file.set_length(room.end)?;
    }
    Ok(())
}
