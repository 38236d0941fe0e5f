//! Reads and changes the block table and the sector bitmaps.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::footer::{FOOTER_BYTES, FOOTER_BYTES_SHORT, FooterBytes};
use super::header::VhdHeader;
use super::sparse::SparseHeader;
use super::{FREE, SECTOR_BYTES};
use crate::allocation_table::bits::BitOrder;
use crate::allocation_table::pages::{Pages, TableChanges};
use crate::allocation_table::{AllocationTable, clear_room, for_each_entry};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::info::ImageKind;
use crate::model::mapped_extent::{KnownLength, MappedExtent, MappedKind};
use crate::{Error, Result};

/// Memory for the table and bitmaps of one layer.
const CACHE_BYTES: u64 = 8 << 20;
/// Alignment of the data of new blocks.
const ALIGNMENT: u64 = 4096;
/// 2040 GiB: the limit of a table of sector numbers.
pub(super) const DISK_BYTES_MAX: u64 = 2040 << 30;

/// The mapping of a fixed image, which has no tables.
struct FixedTables {
    disk_bytes: u64,
    file: Arc<dyn ImageFile>,
}

impl AllocationTable for FixedTables {
    fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    fn unit_bytes(&self) -> u64 {
        SECTOR_BYTES
    }

    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        Ok(MappedExtent {
            length: length_max,
            kind: MappedKind::Data { host: offset },
        })
    }

    /// The footer is valid, so the file has everything before it.
    fn is_cut_off(&self) -> Result<bool> {
        Ok(false)
    }

    fn start(&mut self) -> Result<()> {
        Ok(())
    }

    fn reserve(&mut self, _range: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn set_zero(&mut self, _range: Range<u64>) -> Result<u64> {
        Ok(0)
    }

    fn changed_bytes(&self) -> u64 {
        0
    }

    fn take_changes(&mut self) -> TableChanges {
        TableChanges::none(&self.file)
    }

    fn changes_stored(&mut self) {}
}

/// The tables of an image, by its kind.
pub(crate) fn of(image: Arc<str>, header: VhdHeader, file: Arc<dyn ImageFile>) -> Box<dyn AllocationTable> {
    match header.sparse.clone() {
        None => Box::new(FixedTables {
            disk_bytes: header.footer.disk_bytes(),
            file,
        }),
        Some(sparse) => Box::new(SparseTables::new(image, header, sparse, file)),
    }
}

/// The tables of a dynamic or differencing image.
struct SparseTables {
    image: Arc<str>,
    disk_bytes: u64,
    kind: ImageKind,
    header: SparseHeader,
    footer: Box<FooterBytes>,
    file: Arc<dyn ImageFile>,
    length: KnownLength,
    pages: Pages,
    /// Length of the footer at the end; 0 if there is none.
    footer_bytes_at_end: u64,
    /// End of the last block; known once writing has started.
    end: u64,
}

impl SparseTables {
    fn new(image: Arc<str>, header: VhdHeader, sparse: SparseHeader, file: Arc<dyn ImageFile>) -> Self {
        Self {
            image,
            disk_bytes: header.footer.disk_bytes(),
            kind: header.footer.kind,
            header: sparse,
            footer: header.footer_bytes,
            footer_bytes_at_end: match (header.has_footer_at_end, header.is_footer_short) {
                (false, _) => 0,
                (true, false) => FOOTER_BYTES,
                (true, true) => FOOTER_BYTES_SHORT,
            },
            pages: Pages::new(Arc::clone(&file), CACHE_BYTES),
            file,
            length: KnownLength::default(),
            end: 0,
        }
    }

    /// Where block `index` begins, with its bitmap.
    fn block(&self, index: u64) -> Result<Option<u64>> {
        Ok(
            match u32::from_be_bytes(self.pages.array(self.header.entry_offset(index))?) {
                FREE => None,
                sector => Some(u64::from(sector) * SECTOR_BYTES),
            },
        )
    }

    /// The extent at `at` inside its block.
    fn piece(&self, at: u64, length_max: u64) -> Result<MappedExtent> {
        let within = at % self.header.block_bytes;
        let rest = self.header.block_bytes - within;
        let Some(block) = self.block(at / self.header.block_bytes)? else {
            return Ok(MappedExtent {
                length: rest,
                kind: MappedKind::Absent,
            });
        };
        // A bitmap past the end of the file would read as zero: no sector of the block would be stored.
        if !self
            .length
            .contains(&*self.file, block + self.header.bitmap_bytes() - 1)?
        {
            return Err(corrupt(&self.image, "block", block, "past the end of the file"));
        }
        let (sector, skipped) = (within / SECTOR_BYTES, within % SECTOR_BYTES);
        let count_max = (skipped + length_max.min(rest)).div_ceil(SECTOR_BYTES);
        let (count, is_set) = BitOrder::HighFirst.same(&self.pages, block, sector, count_max)?;
        let kind = if is_set {
            MappedKind::Data {
                host: block + self.header.bitmap_bytes() + within,
            }
        } else {
            MappedKind::Absent
        };
        Ok(MappedExtent {
            length: count * SECTOR_BYTES - skipped,
            kind,
        })
    }

    /// Allocates block `index` at the end of the file; if there is a parent, none of its sectors is marked yet.
    fn new_block(&mut self, index: u64) -> Result<u64> {
        let bitmap_bytes = self.header.bitmap_bytes();
        let start = (self.end + bitmap_bytes).next_multiple_of(ALIGNMENT) - bitmap_bytes;
        let data = start + bitmap_bytes;
        let end = data + self.header.block_bytes;
        let Some(sector) = u32::try_from(start / SECTOR_BYTES)
            .ok()
            .filter(|sector| *sector != FREE)
        else {
            return Err(Error::NotWritable {
                image: self.image.to_string(),
                detail: "the file has reached the maximum size of its format; convert it to another format".to_owned(),
            });
        };
        clear_room(&*self.file, data..end)?;
        // Until the tables are stored, a footer follows the new block as well; if a crash destroys it, its copy at
        // the start is used.
        self.file.write_at(&*self.footer, end)?;
        let bits = if self.kind == ImageKind::Differencing { 0 } else { 0xff };
        self.pages.write(&vec![bits; to_usize(bitmap_bytes)], start)?;
        self.pages
            .write(&sector.to_be_bytes(), self.header.entry_offset(index))?;
        self.end = end;
        Ok(start)
    }

    /// Marks `sectors` of the block at `block` as stored; they read as zero.
    fn allocate_sectors(&mut self, block: u64, sectors: Range<u64>) -> Result<()> {
        for byte in sectors.start / 8..sectors.end.div_ceil(8) {
            let [before] = self.pages.array::<1>(block + byte)?;
            let wanted = (0..8).filter(|bit| sectors.contains(&(byte * 8 + bit)));
            let after = wanted.fold(before, |bits, bit| bits | BitOrder::HighFirst.bit(bit));
            if after != before {
                self.pages.write(&[after], block + byte)?;
            }
        }
        Ok(())
    }
}

pub(super) fn for_each_sector(file: &dyn ImageFile, header: &SparseHeader, mut visit: impl FnMut(u32)) -> Result<()> {
    for_each_entry(file, header.table_offset, header.entry_count, |_, entry| {
        visit(u32::from_be_bytes(entry));
    })
}

impl AllocationTable for SparseTables {
    fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    fn unit_bytes(&self) -> u64 {
        SECTOR_BYTES
    }

    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        MappedExtent::of_pieces(length_max, |done| self.piece(offset + done, length_max - done))
    }

    fn is_cut_off(&self) -> Result<bool> {
        let whole = self.header.bitmap_bytes() + self.header.block_bytes;
        let mut end = 0;
        for_each_sector(&*self.file, &self.header, |sector| {
            if sector != FREE {
                end = end.max(u64::from(sector) * SECTOR_BYTES + whole);
            }
        })?;
        Ok(end > self.file.length_bytes()?)
    }

    fn start(&mut self) -> Result<()> {
        let whole = self.header.bitmap_bytes() + self.header.block_bytes;
        let mut end = self
            .header
            .tables_end
            .max(self.header.offset + super::sparse::HEADER_BYTES);
        let mut sectors = Vec::new();
        for_each_sector(&*self.file, &self.header, |sector| {
            if sector != FREE {
                sectors.push(sector);
                end = end.max(u64::from(sector) * SECTOR_BYTES + whole);
            }
        })?;
        sectors.sort_unstable();
        let is_close = |(first, second): (&u32, &u32)| u64::from(second - first) * SECTOR_BYTES < whole;
        let is_in_tables = |sector: &u32| u64::from(*sector) * SECTOR_BYTES < self.header.tables_end;
        if sectors.iter().zip(sectors.iter().skip(1)).any(is_close) || sectors.first().is_some_and(is_in_tables) {
            return Err(Error::NotWritable {
                image: self.image.to_string(),
                detail: "two blocks overlap, or one overlaps the tables; run holdfast image check for details"
                    .to_owned(),
            });
        }
        // Data of other programs between blocks and footer remains.
        let file_bytes = self.file.length_bytes()?;
        let last = file_bytes - self.footer_bytes_at_end;
        self.end = end.max(last.next_multiple_of(SECTOR_BYTES));
        if self.footer_bytes_at_end == 0 {
            self.file.write_at(&*self.footer, self.end)?;
            self.footer_bytes_at_end = FOOTER_BYTES;
        }
        if self.end >= 2 * DISK_BYTES_MAX {
            return Err(corrupt(
                &self.image,
                "table",
                self.header.table_offset,
                "its offset is too large",
            ));
        }
        Ok(())
    }

    fn reserve(&mut self, range: Range<u64>) -> Result<()> {
        let block_bytes = self.header.block_bytes;
        let mut at = range.start;
        while at < range.end {
            let (index, within) = (at / block_bytes, at % block_bytes);
            let end = range.end.min((index + 1) * block_bytes);
            let sectors = within / SECTOR_BYTES..(within + end - at).div_ceil(SECTOR_BYTES);
            let block = if let Some(block) = self.block(index)? {
                let data = block + self.header.bitmap_bytes();
                self.file
                    .punch(data + sectors.start * SECTOR_BYTES..data + sectors.end * SECTOR_BYTES)?;
                block
            } else {
                self.new_block(index)?
            };
            self.allocate_sectors(block, sectors)?;
            at = end;
        }
        Ok(())
    }

    fn set_zero(&mut self, _range: Range<u64>) -> Result<u64> {
        Ok(0)
    }

    fn changed_bytes(&self) -> u64 {
        self.pages.changed_bytes()
    }

    fn take_changes(&mut self) -> TableChanges {
        // Bitmaps before the table that refers to them.
        let table = self.header.table_offset..self.header.table_offset + self.header.entry_count * 4;
        self.pages.take_changes(table)
    }

    fn changes_stored(&mut self) {
        self.pages.changes_stored();
    }
}
