//! Formats that divide the disk into blocks, and say by a table where each one is.
//!
//! VDI, VHD, VHDX, VMDK and Parallels differ in their tables and headers; reading, writing, and the order in which things become
//! durable are the same. A format implements [`AllocationTable`]; [`TableLayer`] reads by it, and [`TableMut`] writes by it.

pub(crate) mod bits;
pub(crate) mod pages;
pub(crate) mod writer;

#[cfg(test)]
pub(crate) mod crash_tests;
pub(crate) mod resize;

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentList, to_usize};

use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::layered::{Layered, push_file};
use crate::model::mapped_extent::{Compressed, KnownLength, MappedExtent};
use crate::model::repair_action::RepairAction;
use crate::{Error, Result};

/// The tables of an image: what they say, and how they change.
///
/// Changes are made in memory until [`store`](Self::store). A crash at any moment leaves an image that reads as it did at the last
/// `store`, or as later writes in place have it; what was reserved and not stored is room that is used again.
pub(crate) trait AllocationTable: Send + Sync {
    /// Size of the disk.
    fn disk_bytes(&self) -> u64;

    /// Bytes that the tables tell apart, a power of two: a block, or a sector where blocks have bitmaps of their sectors.
    fn unit_bytes(&self) -> u64;

    /// The run that begins at `offset`, at most `length_max` and at least one byte long.
    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent>;

    /// Decompresses what a compressed run says of the disk's bytes at `offset`.
    fn read_compressed(&self, buffer: &mut [u8], offset: u64, compressed: Compressed) -> Result<()> {
        let _ = (buffer, offset);
        Err(Error::Device(holdfast_block::Error::io(
            "decompress",
            compressed.offset,
            std::io::Error::from(std::io::ErrorKind::Unsupported),
        )))
    }

    /// Which of the files has the byte at `host`, and where in it.
    fn place_of(&self, host: u64) -> (usize, u64) {
        (0, host)
    }

    /// Whether the byte at `host` is in its file, of which all that are opened are `file`, and `length` what is known of its length.
    fn has(&self, length: &KnownLength, file: &dyn ImageFile, host: u64) -> Result<bool> {
        length.contains(file, host)
    }

    /// Whether a file ends before the end of what the tables lead to: what would be written behind its end makes zeroes of what was cut off.
    fn is_cut_off(&self) -> Result<bool>;

    /// Before the first change of this opening. What it changes is stored with the next [`store`](Self::store).
    fn start(&mut self) -> Result<()>;

    /// Makes room for `range`, whole units none of which is data: afterwards they are, in new room that reads as zero.
    fn reserve(&mut self, range: Range<u64>) -> Result<()>;

    /// Says that whole units, none of which is data, read as zero, from the start of `range` on; gives how many bytes, 0 where the
    /// format cannot say that here.
    fn set_zero(&mut self, range: Range<u64>) -> Result<u64>;

    /// What [`set_zero`](Self::set_zero) can be said of.
    fn zero_bytes(&self) -> u64 {
        self.unit_bytes()
    }

    /// Bytes of tables that have changed since the last `store`.
    fn changed_bytes(&self) -> u64;

    /// Writes what has changed. All data is durable when this is called; all of the tables is when it returns.
    fn store(&mut self) -> Result<()>;
}

/// An image that is read by its tables.
pub(crate) struct TableLayer {
    pub(crate) image: Arc<str>,
    pub(crate) file: Arc<dyn ImageFile>,
    pub(crate) tables: Box<dyn AllocationTable>,
    pub(crate) backing: Option<Arc<dyn BlockDevice>>,
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
        self.tables.run(offset, length_max)
    }

    fn read_data(&self, buffer: &mut [u8], host: u64) -> Result<()> {
        // Whoever makes a block makes all of it, as far as the disk goes: what is not there was cut off, and is lost.
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

    /// The file is asked for its holes: what reads as zero inside of a block was given back to the file system.
    fn push_data(&self, list: &mut ExtentList, host: u64, length: u64) -> Result<bool> {
        push_file(&*self.file, list, host, length)
    }

    fn backing(&self) -> Option<&dyn BlockDevice> {
        self.backing.as_deref()
    }
}

/// Calls `visit` with every entry of a table of `count` entries of `N` bytes at `offset`, in order.
pub(crate) fn for_each_entry<const N: usize>(
    file: &dyn ImageFile,
    (offset, count): (u64, u64),
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

/// Writes a table of `count` entries of `N` bytes at `offset`.
pub(crate) fn write_entries<const N: usize>(
    file: &dyn ImageFile,
    (offset, count): (u64, u64),
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

/// Where block `number` of the disk, which begins at `host`, ends in its file at the least: its part of the disk has to be there, and of one
/// that is behind the disk the beginning.
pub(crate) fn end_of_block(host: u64, number: u64, block_bytes: u64, disk_bytes: u64) -> u64 {
    let of_disk = disk_bytes.saturating_sub(number.saturating_mul(block_bytes));
    host.saturating_add(block_bytes.min(of_disk).max(1))
}

/// A block whose end is not in its file any more, as far as a repair has met it.
#[derive(Default)]
pub(crate) struct TruncatedBlock {
    end: u64,
    disk_offset: u64,
}

impl TruncatedBlock {
    /// Block `number`, which begins at `host`, inside of the file.
    pub(crate) fn meet(&mut self, host: u64, number: u64, block_bytes: u64, disk_bytes: u64) {
        let end = end_of_block(host, number, block_bytes, disk_bytes);
        if end > self.end {
            (self.end, self.disk_offset) = (end, number * block_bytes);
        }
    }

    /// Gives up what was cut off: it reads as zero from now on.
    pub(crate) fn give_up(&self, file: &dyn ImageFile, actions: &mut Vec<RepairAction>) -> Result<()> {
        let file_bytes = file.length_bytes()?;
        if self.end <= file_bytes {
            return Ok(());
        }
        file.set_length(self.end)?;
        file.sync()?;
        actions.push(RepairAction::GivenUp {
            what: "ends of blocks",
            count: 1,
            unit_bytes: self.end - file_bytes,
            first_disk_offset: Some(self.disk_offset),
        });
        Ok(())
    }
}

/// Copies bytes of the file to where they do not overlap those that they are from.
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

/// Makes `room` a part of the file that reads as zero: what a crash has left there goes.
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
