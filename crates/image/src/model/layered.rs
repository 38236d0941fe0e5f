//! Reads one layer of a chain, with or without its backing file. All formats with tables share this.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, Error as BlockError, ExtentKind, ExtentList, Result as BlockResult, to_usize};

use crate::Result;
use crate::model::mapped_extent::{Compressed, MappedExtent, MappedKind};

const SUB_EXTENT_COUNT_MAX: usize = 256;

/// The content of absent ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackingUse {
    /// The backing file, or zero if there is none.
    Backing,
    /// Absent: the layer is read alone.
    Nothing,
}

/// A layer of a chain that maps ranges of the disk by tables.
pub(crate) trait Layered: Send + Sync {
    /// Size of the disk.
    fn disk_bytes(&self) -> u64;

    /// Granularity of the tables, a power of two: a cluster, block or sector.
    fn unit_bytes(&self) -> u64;

    /// The extent that begins at `offset`: at most `length_max` bytes, and at least one unless that is 0.
    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent>;

    /// Reads stored data at `host`.
    fn read_data(&self, buffer: &mut [u8], host: u64) -> Result<()>;

    /// Reads from compressed data the bytes of the disk at `offset`.
    fn read_compressed(&self, buffer: &mut [u8], offset: u64, compressed: Compressed) -> Result<()>;

    /// Appends `length` bytes of stored data; false if the list is full.
    fn push_data(&self, list: &mut ExtentList, host: u64, length: u64) -> Result<bool>;

    /// The index of the layer's file that contains `host`, and the offset in it.
    fn place_of(&self, host: u64) -> (usize, u64) {
        (0, host)
    }

    /// Fails if the file ends before `host + length`, which means that it is truncated.
    fn check_there(&self, host: u64, length: u64) -> Result<()>;

    /// The backing file.
    fn backing(&self) -> Option<&dyn BlockDevice>;

    /// Reads bytes of the layer; with [`BackingUse::Backing`] absent ones come from the backing file.
    fn read(&self, buffer: &mut [u8], offset: u64, below: BackingUse) -> Result<()> {
        let mut rest = buffer;
        let mut at = offset;
        while !rest.is_empty() {
            let run = self.run(at, rest.len() as u64)?;
            let (piece, tail) = rest.split_at_mut(to_usize(run.length));
            match run.kind {
                MappedKind::Zero => piece.fill(0),
                MappedKind::Absent => match below {
                    BackingUse::Backing => self.read_backing(piece, at)?,
                    BackingUse::Nothing => piece.fill(0),
                },
                MappedKind::Data { host } => self.read_data(piece, host)?,
                MappedKind::Compressed(compressed) => self.read_compressed(piece, at, compressed)?,
            }
            at += run.length;
            rest = tail;
        }
        Ok(())
    }

    /// Reads from the backing file, which may be shorter; zero past its end.
    fn read_backing(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let Some(backing) = self.backing() else {
            buffer.fill(0);
            return Ok(());
        };
        let held = backing.size_bytes().saturating_sub(offset).min(buffer.len() as u64);
        let (inside, outside) = buffer.split_at_mut(to_usize(held));
        if !inside.is_empty() {
            backing.read_at(inside, offset)?;
        }
        outside.fill(0);
        Ok(())
    }

    /// Whether the backing file has nothing at or after `offset`.
    fn is_bottom(&self, offset: u64) -> bool {
        self.backing().is_none_or(|backing| backing.size_bytes() <= offset)
    }

    /// Extents of `range`; absent ones are resolved through the backing file with [`BackingUse::Backing`].
    fn list_extents(&self, range: Range<u64>, extent_count_max: usize, below: BackingUse) -> Result<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        while list.end() < range.end {
            let at = list.end();
            let run = self.run(at, range.end - at)?;
            let is_complete = match (run.kind, below) {
                (MappedKind::Zero, _) => list.push(run.length, ExtentKind::Zero),
                (MappedKind::Compressed(_), _) => list.push(run.length, ExtentKind::Data),
                (MappedKind::Data { host }, _) => self.push_data(&mut list, host, run.length)?,
                (MappedKind::Absent, BackingUse::Nothing) => list.push(run.length, ExtentKind::Absent),
                (MappedKind::Absent, BackingUse::Backing) => push_backing(self.backing(), &mut list, run.length)?,
            };
            if !is_complete {
                break;
            }
        }
        Ok(list)
    }
}

/// Appends `length` bytes with the extents of the backing file.
fn push_backing(backing: Option<&dyn BlockDevice>, list: &mut ExtentList, length: u64) -> Result<bool> {
    let end = list.end() + length;
    if let Some(backing) = backing {
        let held_end = backing.size_bytes().min(end);
        while list.end() < held_end {
            for extent in backing.extents(list.end()..held_end, SUB_EXTENT_COUNT_MAX)? {
                let kind = match extent.kind {
                    ExtentKind::Data => ExtentKind::Data,
                    ExtentKind::Zero | ExtentKind::Absent => ExtentKind::Zero,
                };
                if !list.push(extent.length, kind) {
                    return Ok(false);
                }
            }
        }
    }
    Ok(list.push(end - list.end(), ExtentKind::Zero))
}

/// Appends `length` bytes at `host` with the holes of `file`. A range past the end of the file is lost data, not a
/// hole: reading it fails.
pub(crate) fn push_file(
    file: &dyn crate::file::ImageFile,
    list: &mut ExtentList,
    host: u64,
    length: u64,
) -> Result<bool> {
    let held = file.length_bytes()?.saturating_sub(host).min(length);
    let (start, goal) = (list.end(), list.end() + held);
    while list.end() < goal {
        let from = host + (list.end() - start);
        for extent in file.extents(from..host + held, SUB_EXTENT_COUNT_MAX)? {
            if !list.push(extent.length, extent.kind) {
                return Ok(false);
            }
        }
    }
    Ok(list.push(length - held, ExtentKind::Data))
}

/// A layer read together with its backing files.
pub(crate) struct WithBacking<L: ?Sized>(pub(crate) Arc<L>);

/// A layer read alone: absent ranges are reported as absent, and read as zero.
pub(crate) struct WithoutBacking<L: ?Sized>(pub(crate) Arc<L>);

macro_rules! device_of_layer {
    ($name:ident, $below:expr) => {
        impl<L: Layered + ?Sized> BlockDevice for $name<L> {
            fn size_bytes(&self) -> u64 {
                self.0.disk_bytes()
            }

            fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
                self.check_bounds(offset, buffer.len() as u64)?;
                self.0.read(buffer, offset, $below).map_err(BlockError::from)
            }

            fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
                self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
                self.0
                    .list_extents(range, extent_count_max, $below)
                    .map_err(BlockError::from)
            }

            fn block_size_bytes(&self) -> u32 {
                u32::try_from(self.0.unit_bytes()).unwrap_or(u32::MAX)
            }
        }
    };
}

device_of_layer!(WithBacking, BackingUse::Backing);
device_of_layer!(WithoutBacking, BackingUse::Nothing);
