//! Reads and changes the block allocation table and the sector bitmaps.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::MIB;
use super::header::{Region, VhdxHeader};
use super::metadata::Metadata;
use super::opened::OpenedVhdx;
use crate::allocation_table::bits::BitOrder;
use crate::allocation_table::pages::{Pages, TableChanges};
use crate::allocation_table::{AllocationTable, clear_room, end_of_block, for_each_entry};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::identity::ImageId;
use crate::model::mapped_extent::{KnownLength, MappedExtent, MappedKind};
use crate::{Error, Result};

/// Memory for the table and bitmaps of one layer.
const CACHE_BYTES: u64 = 8 << 20;
const STATE_MASK: u64 = 7;
const OFFSET_MASK: u64 = !(MIB - 1);

/// States of a block, in the low bits of its entry.
pub(super) mod state {
    pub(in crate::formats::vhdx) const NOT_PRESENT: u64 = 0;
    pub(in crate::formats::vhdx) const UNDEFINED: u64 = 1;
    pub(in crate::formats::vhdx) const ZERO: u64 = 2;
    pub(in crate::formats::vhdx) const UNMAPPED: u64 = 3;
    pub(in crate::formats::vhdx) const FULL: u64 = 6;
    pub(in crate::formats::vhdx) const PARTIAL: u64 = 7;
    /// Of a sector bitmap block.
    pub(in crate::formats::vhdx) const BITS_PRESENT: u64 = 6;
}

/// An entry of the block allocation table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatEntry(pub(super) u64);

impl BatEntry {
    pub(super) fn new(state: u64, offset: u64) -> Self {
        Self(offset | state)
    }

    pub(super) fn state(self) -> u64 {
        self.0 & STATE_MASK
    }

    pub(super) fn offset(self) -> u64 {
        self.0 & OFFSET_MASK
    }

    /// Whether reserved bits are set.
    pub(super) fn has_reserved(self) -> bool {
        self.0 & !(STATE_MASK | OFFSET_MASK) != 0
    }
}

pub(crate) struct VhdxTables {
    image: Arc<str>,
    header: VhdxHeader,
    bat: Region,
    metadata: Metadata,
    file: Arc<dyn ImageFile>,
    length: KnownLength,
    pages: Pages,
    /// End of the space in use; known once writing has started.
    end: u64,
}

impl VhdxTables {
    pub(crate) fn new(image: Arc<str>, opened: OpenedVhdx) -> Self {
        Self {
            image,
            header: opened.header,
            bat: opened.bat,
            metadata: opened.metadata,
            pages: Pages::new(Arc::clone(&opened.file), CACHE_BYTES),
            file: opened.file,
            length: KnownLength::default(),
            end: 0,
        }
    }

    fn entry(&self, number: u64) -> Result<BatEntry> {
        Ok(BatEntry(u64::from_le_bytes(
            self.pages.array(self.bat.offset + number * 8)?,
        )))
    }

    fn set_entry(&mut self, number: u64, entry: BatEntry) -> Result<()> {
        self.pages.write(&entry.0.to_le_bytes(), self.bat.offset + number * 8)
    }

    /// Where the sector bits of block `index` begin, lowest bit first.
    fn bits_of(&self, index: u64) -> Result<Option<u64>> {
        let entry = self.entry(self.metadata.entry_of_bits(index))?;
        if entry.state() != state::BITS_PRESENT {
            return Ok(None);
        }
        let within = index % self.metadata.chunk_blocks();
        let bits_bytes = self.metadata.block_bytes / self.metadata.sector_bytes / 8;
        let bits = entry.offset() + within * bits_bytes;
        // A bitmap past the end of the file would read as zero: no sector of the block would be stored.
        if !self
            .length
            .contains(&*self.file, (bits + bits_bytes).saturating_sub(1))?
        {
            return Err(self.wrong(index, "its sector bitmap is past the end of the file"));
        }
        Ok(Some(bits))
    }

    /// The extent at `at` inside its block.
    fn piece(&self, at: u64, length_max: u64) -> Result<MappedExtent> {
        let block = self.metadata.block_bytes;
        let (index, within) = (at / block, at % block);
        let rest = block - within;
        let entry = self.entry(self.metadata.entry_of(index))?;
        let data = MappedKind::Data {
            host: entry.offset() + within,
        };
        let kind = match entry.state() {
            state::NOT_PRESENT if self.metadata.has_parent => MappedKind::Absent,
            state::NOT_PRESENT | state::UNDEFINED | state::ZERO | state::UNMAPPED => MappedKind::Zero,
            state::FULL => data,
            state::PARTIAL if self.metadata.has_parent => {
                let sector_bytes = self.metadata.sector_bytes;
                let Some(bits) = self.bits_of(index)? else {
                    return Err(self.wrong(index, "its sector bitmap is missing"));
                };
                let (sector, skipped) = (within / sector_bytes, within % sector_bytes);
                let count_max = (skipped + length_max.min(rest)).div_ceil(sector_bytes);
                let (count, is_set) = BitOrder::LowFirst.same(&self.pages, bits, sector, count_max)?;
                return Ok(MappedExtent {
                    length: count * sector_bytes - skipped,
                    kind: if is_set { data } else { MappedKind::Absent },
                });
            }
            other => return Err(self.wrong(index, &format!("its state is {other}"))),
        };
        Ok(MappedExtent { length: rest, kind })
    }

    fn wrong(&self, index: u64, detail: &str) -> Error {
        let at = self.bat.offset + self.metadata.entry_of(index) * 8;
        let disk = index * self.metadata.block_bytes;
        corrupt(
            &self.image,
            "block table",
            at,
            format!("{detail} (for disk offset {disk})"),
        )
    }

    /// Allocates `length` bytes at the end of the file; they read as zero.
    fn room(&mut self, length: u64) -> Result<u64> {
        let start = self.end;
        let end = start + length;
        clear_room(&*self.file, start..end)?;
        self.end = end.next_multiple_of(MIB);
        Ok(start)
    }

    /// Allocates the sector bitmap block that covers block `index`. Its entry is stored before the others: none of them
    /// may claim sector bits before.
    fn make_bits(&mut self, index: u64) -> Result<()> {
        let entry = BatEntry::new(state::BITS_PRESENT, self.room(MIB)?);
        let number = self.metadata.entry_of_bits(index);
        self.pages
            .write_early(&entry.0.to_le_bytes(), self.bat.offset + number * 8)
    }

    /// Marks `sectors` of block `index` as stored; with `is_new`, unmarks all others.
    #[expect(
        clippy::indexing_slicing,
        reason = "the sectors are of this block, and so are the bits"
    )]
    fn allocate_sectors(&mut self, index: u64, sectors: Range<u64>, is_new: bool) -> Result<()> {
        if self.bits_of(index)?.is_none() {
            self.make_bits(index)?;
        }
        let bits = self
            .bits_of(index)?
            .ok_or_else(|| self.wrong(index, "its sector bitmap is missing"))?;
        let count = self.metadata.block_bytes / self.metadata.sector_bytes / 8;
        let mut bytes = vec![0; to_usize(count)];
        if !is_new {
            self.pages.read(&mut bytes, bits)?;
        }
        for sector in sectors {
            bytes[to_usize(sector / 8)] |= BitOrder::LowFirst.bit(sector);
        }
        self.pages.write(&bytes, bits)
    }

    /// Allocates the bytes `within` of block `index`.
    fn reserve_in(&mut self, index: u64, within: Range<u64>) -> Result<()> {
        let (number, block) = (self.metadata.entry_of(index), self.metadata.block_bytes);
        let entry = self.entry(number)?;
        let sector = self.metadata.sector_bytes;
        let sectors = within.start / sector..within.end.div_ceil(sector);
        if entry.state() == state::PARTIAL {
            let host = entry.offset();
            self.file.punch(host + within.start..host + within.end)?;
            return self.allocate_sectors(index, sectors, false);
        }
        let is_whole = within == (0..block) || entry.state() != state::NOT_PRESENT || !self.metadata.has_parent;
        let host = self.room(block)?;
        let state = if is_whole { state::FULL } else { state::PARTIAL };
        if !is_whole {
            self.allocate_sectors(index, sectors, true)?;
        }
        self.set_entry(number, BatEntry::new(state, host))
    }
}

pub(super) fn for_each_block(
    file: &dyn ImageFile,
    bat: Region,
    metadata: &Metadata,
    mut visit: impl FnMut(u64, BatEntry),
) -> Result<()> {
    for_each_entry(file, bat.offset, metadata.entry_count(), |number, entry| {
        visit(number, BatEntry(u64::from_le_bytes(entry)));
    })
}

/// Whether this entry belongs to a sector bitmap block.
pub(super) fn is_of_bits(metadata: &Metadata, number: u64) -> bool {
    (number + 1).is_multiple_of(metadata.chunk_blocks() + 1)
}

/// The block index of entry `number`, which must not belong to a sector bitmap.
pub(super) fn block_of(metadata: &Metadata, number: u64) -> u64 {
    number - number / (metadata.chunk_blocks() + 1)
}

/// The minimum end of a block in the file.
pub(super) fn block_end(metadata: &Metadata, number: u64, entry: BatEntry) -> u64 {
    let block = block_of(metadata, number);
    end_of_block(entry.offset(), block, metadata.block_bytes, metadata.disk_bytes)
}

/// The minimum end of a sector bitmap in the file: it covers the blocks of the chunk that are inside the disk.
pub(super) fn bits_end(metadata: &Metadata, number: u64, entry: BatEntry) -> u64 {
    let first = number / (metadata.chunk_blocks() + 1) * metadata.chunk_blocks();
    let count = metadata
        .block_count()
        .saturating_sub(first)
        .min(metadata.chunk_blocks());
    let block_bits_bytes = metadata.block_bytes / metadata.sector_bytes / 8;
    entry.offset().saturating_add(count * block_bits_bytes)
}

impl AllocationTable for VhdxTables {
    fn disk_bytes(&self) -> u64 {
        self.metadata.disk_bytes
    }

    fn unit_bytes(&self) -> u64 {
        if self.metadata.has_parent {
            self.metadata.sector_bytes
        } else {
            self.metadata.block_bytes
        }
    }

    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        MappedExtent::of_pieces(length_max, |done| self.piece(offset + done, length_max - done))
    }

    fn is_cut_off(&self) -> Result<bool> {
        let mut end = 0;
        for_each_block(&*self.file, self.bat, &self.metadata, |number, entry| {
            if is_of_bits(&self.metadata, number) {
                if self.metadata.has_parent && entry.state() == state::BITS_PRESENT {
                    end = end.max(bits_end(&self.metadata, number, entry));
                }
            } else if matches!(entry.state(), state::FULL | state::PARTIAL) {
                end = end.max(block_end(&self.metadata, number, entry));
            }
        })?;
        Ok(end > self.file.length_bytes()?)
    }

    fn start(&mut self) -> Result<()> {
        // New space begins after the end of the file, the table and the log: the latter two may extend past the end of
        // the file.
        let table_end = self.bat.offset.saturating_add(self.bat.length_bytes);
        let log_end = self.header.log_offset.saturating_add(self.header.log_bytes.into());
        let mut end = self.file.length_bytes()?.max(table_end).max(log_end);
        let mut is_wild = false;
        for_each_block(&*self.file, self.bat, &self.metadata, |number, entry| {
            let length = if is_of_bits(&self.metadata, number) {
                MIB
            } else {
                self.metadata.block_bytes
            };
            if entry.state() >= state::FULL {
                is_wild |= entry.offset() > i64::MAX as u64 / 2;
                end = end.max(entry.offset().saturating_add(length));
            }
        })?;
        if is_wild {
            return Err(corrupt(
                &self.image,
                "block table",
                self.bat.offset,
                "its offset is too large",
            ));
        }
        self.end = end.next_multiple_of(MIB);
        // By DataWriteGuid, children detect that their parent was modified.
        self.header.file_write = ImageId::random()?;
        self.header.data_write = ImageId::random()?;
        self.header.store_next(&*self.file, &self.image)
    }

    fn reserve(&mut self, range: Range<u64>) -> Result<()> {
        let block = self.metadata.block_bytes;
        let mut at = range.start;
        while at < range.end {
            let index = at / block;
            let end = range.end.min((index + 1) * block);
            self.reserve_in(index, at % block..end - index * block)?;
            at = end;
        }
        Ok(())
    }

    fn set_zero(&mut self, range: Range<u64>) -> Result<u64> {
        let block = self.metadata.block_bytes;
        for index in range.start / block..range.end / block {
            let number = self.metadata.entry_of(index);
            // A partially present block keeps its space.
            if self.entry(number)?.state() == state::PARTIAL {
                return Ok((index * block).saturating_sub(range.start));
            }
            self.set_entry(number, BatEntry::new(state::ZERO, 0))?;
        }
        Ok(range.end / block * block - range.start)
    }

    fn zero_bytes(&self) -> u64 {
        self.metadata.block_bytes
    }

    fn changed_bytes(&self) -> u64 {
        self.pages.changed_bytes()
    }

    fn take_changes(&mut self) -> TableChanges {
        // Bitmaps before the table that refers to them.
        self.pages
            .take_changes(self.bat.offset..self.bat.offset + self.bat.length_bytes)
    }

    fn changes_stored(&mut self) {
        self.pages.changes_stored();
    }
}
