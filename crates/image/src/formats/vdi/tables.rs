//! Reads and changes the block map.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use super::header::{AT_MODIFICATION, AT_STORED, VdiHeader, VdiKind};
use super::{FREE, ZERO};
use crate::allocation_table::pages::{Pages, TableChanges};
use crate::allocation_table::{AllocationTable, clear_room, end_of_block, for_each_entry};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::identity::ImageId;
use crate::model::mapped_extent::{MappedExtent, MappedKind};
use crate::{Error, Result};

/// Memory for the map of one layer: enough for a disk of 2 TiB.
const CACHE_BYTES: u64 = 8 << 20;

pub(crate) struct VdiTables {
    image: Arc<str>,
    header: VdiHeader,
    file: Arc<dyn ImageFile>,
    pages: Pages,
    /// Number of the next block to store; known once writing has started.
    next: u32,
}

impl VdiTables {
    pub(crate) fn new(image: Arc<str>, header: VdiHeader, file: Arc<dyn ImageFile>) -> Self {
        Self {
            image,
            header,
            pages: Pages::new(Arc::clone(&file), CACHE_BYTES),
            file,
            next: 0,
        }
    }

    fn entry(&self, index: u64) -> Result<u32> {
        Ok(u32::from_le_bytes(self.pages.array(self.header.entry_offset(index))?))
    }

    fn set_entry(&mut self, index: u64, entry: u32) -> Result<()> {
        self.pages.write(&entry.to_le_bytes(), self.header.entry_offset(index))
    }

    /// Allocates block `index` after all others; it reads as zero.
    fn reserve_block(&mut self, index: u64) -> Result<()> {
        let number = self.next;
        if number >= ZERO {
            return Err(corrupt(&self.image, "block map", 0, "no block number is left"));
        }
        let start = self.header.host(number) - self.header.extra_bytes;
        let end = self.header.host(number) + self.header.block_bytes;
        clear_room(&*self.file, start..end)?;
        self.next = number + 1;
        self.set_entry(index, number)
    }
}

pub(super) fn for_each_number(file: &dyn ImageFile, header: &VdiHeader, mut visit: impl FnMut(u64, u32)) -> Result<()> {
    for_each_entry(file, header.map_offset, header.block_count, |index, entry| {
        visit(index, u32::from_le_bytes(entry));
    })
}

impl AllocationTable for VdiTables {
    fn disk_bytes(&self) -> u64 {
        self.header.disk_bytes
    }

    fn unit_bytes(&self) -> u64 {
        self.header.block_bytes
    }

    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        let block = self.header.block_bytes;
        MappedExtent::of_pieces(length_max, |done| {
            let at = offset + done;
            let within = at % block;
            let kind = match self.entry(at / block)? {
                FREE => MappedKind::Absent,
                ZERO => MappedKind::Zero,
                number => MappedKind::Data {
                    host: self.header.host(number) + within,
                },
            };
            Ok(MappedExtent {
                length: block - within,
                kind,
            })
        })
    }

    fn is_cut_off(&self) -> Result<bool> {
        let mut end = 0;
        for_each_number(&*self.file, &self.header, |index, entry| {
            if entry < ZERO {
                let host = self.header.host(entry);
                end = end.max(end_of_block(
                    host,
                    index,
                    self.header.block_bytes,
                    self.header.disk_bytes,
                ));
            }
        })?;
        Ok(end > self.file.length_bytes()?)
    }

    fn start(&mut self) -> Result<()> {
        let mut next = 0;
        let mut is_twice = false;
        let mut seen = HashSet::new();
        for_each_number(&*self.file, &self.header, |_, entry| {
            if entry < ZERO {
                next = next.max(entry + 1);
                is_twice |= !seen.insert(entry);
            }
        })?;
        if is_twice {
            return Err(Error::NotWritable {
                image: self.image.to_string(),
                detail: "two ranges of the disk share a block; run holdfast image check for details".to_owned(),
            });
        }
        self.next = next;
        // By this, children detect that their parent was modified.
        self.header.modification = ImageId::random()?;
        let modification = self.header.modification.to_guid();
        self.pages.write(&modification, AT_MODIFICATION as u64)
    }

    fn reserve(&mut self, range: Range<u64>) -> Result<()> {
        let block = self.header.block_bytes;
        for index in range.start / block..range.end.div_ceil(block) {
            self.reserve_block(index)?;
        }
        self.header.stored_count = self.next;
        self.pages.write(&self.next.to_le_bytes(), AT_STORED as u64)
    }

    fn set_zero(&mut self, range: Range<u64>) -> Result<u64> {
        debug_assert_ne!(
            self.header.kind,
            VdiKind::Fixed,
            "all blocks of a fixed image are allocated"
        );
        let block = self.header.block_bytes;
        for index in range.start / block..range.end.div_ceil(block) {
            self.set_entry(index, ZERO)?;
        }
        Ok(range.end - range.start)
    }

    fn changed_bytes(&self) -> u64 {
        self.pages.changed_bytes()
    }

    fn take_changes(&mut self) -> TableChanges {
        // VirtualBox stores the next block at this number: it must be above all numbers in the map.
        let map = self.header.map_offset..self.header.map_offset + self.header.block_count * 4;
        self.pages.take_changes(map)
    }

    fn changes_stored(&mut self) {
        self.pages.changes_stored();
    }
}
