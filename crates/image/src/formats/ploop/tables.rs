//! Reads and changes the cluster table.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use super::header::{AT_EXTENSION, AT_IN_USE, CLOSED_WITHOUT_EXTENSIONS, HEADER_BYTES, PloopHeader};
use crate::allocation_table::pages::{Pages, TableChanges};
use crate::allocation_table::{AllocationTable, clear_room, end_of_block, for_each_entry};
use crate::file::ImageFile;
use crate::model::mapped_extent::{MappedExtent, MappedKind};
use crate::{Error, Result};

/// Memory for the table of one layer: enough for a disk of 2 TiB.
const CACHE_BYTES: u64 = 8 << 20;

pub(crate) struct PloopTables {
    image: Arc<str>,
    header: PloopHeader,
    file: Arc<dyn ImageFile>,
    pages: Pages,
    /// End of the last cluster; known once writing has started.
    end: u64,
}

impl PloopTables {
    pub(crate) fn new(image: Arc<str>, header: PloopHeader, file: Arc<dyn ImageFile>) -> Self {
        Self {
            image,
            header,
            pages: Pages::new(Arc::clone(&file), CACHE_BYTES),
            file,
            end: 0,
        }
    }

    /// Limits the memory for cached tables.
    pub(crate) fn with_cache_bytes(self, cache_bytes: u64) -> Self {
        Self {
            pages: Pages::new(Arc::clone(&self.file), cache_bytes),
            ..self
        }
    }

    fn not_writable(&self, detail: &str) -> Error {
        Error::NotWritable {
            image: self.image.to_string(),
            detail: detail.to_owned(),
        }
    }

    /// Allocates cluster `index` after all others; it reads as zero.
    fn reserve_cluster(&mut self, index: u64) -> Result<()> {
        let start = self.end;
        let entry = u32::try_from(start / self.header.entry_bytes()).map_err(|_| {
            self.not_writable("the file has reached the maximum size of its format; convert it to another format")
        })?;
        self.end = start + self.header.cluster_bytes;
        clear_room(&*self.file, start..self.end)?;
        self.pages.write(&entry.to_le_bytes(), HEADER_BYTES + index * 4)
    }
}

/// Calls `visit` with the offset and the index of every stored cluster.
pub(super) fn for_each_cluster(
    file: &dyn ImageFile,
    header: &PloopHeader,
    mut visit: impl FnMut(u64, u64),
) -> Result<()> {
    for_each_entry(file, HEADER_BYTES, header.entry_count, |index, entry| {
        let entry = u32::from_le_bytes(entry);
        if entry != 0 {
            visit(index, header.host(entry));
        }
    })
}

impl AllocationTable for PloopTables {
    fn disk_bytes(&self) -> u64 {
        self.header.disk_bytes
    }

    fn unit_bytes(&self) -> u64 {
        self.header.cluster_bytes
    }

    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        let cluster = self.header.cluster_bytes;
        MappedExtent::of_pieces(length_max, |done| {
            let at = offset + done;
            let within = at % cluster;
            let entry = u32::from_le_bytes(self.pages.array(HEADER_BYTES + at / cluster * 4)?);
            let kind = match entry {
                0 => MappedKind::Absent,
                entry => MappedKind::Data {
                    host: self.header.host(entry) + within,
                },
            };
            Ok(MappedExtent {
                length: cluster - within,
                kind,
            })
        })
    }

    fn is_cut_off(&self) -> Result<bool> {
        let mut end = 0;
        for_each_cluster(&*self.file, &self.header, |index, host| {
            end = end.max(end_of_block(
                host,
                index,
                self.header.cluster_bytes,
                self.header.disk_bytes,
            ));
        })?;
        Ok(end > self.file.length_bytes()?)
    }

    fn start(&mut self) -> Result<()> {
        if self.header.is_open {
            return Err(self.not_writable("it was not closed cleanly, or is open; run holdfast image check --repair"));
        }
        let cluster = self.header.cluster_bytes;
        let (mut end, mut is_wrong, mut seen) = (self.header.data_offset, false, HashSet::new());
        for_each_cluster(&*self.file, &self.header, |_, host| {
            is_wrong |= !seen.insert(host) || host < self.header.data_offset;
            end = end.max(host + cluster);
        })?;
        if is_wrong {
            return Err(
                self.not_writable("two ranges of the disk share a cluster; run holdfast image check for details")
            );
        }
        // Keep the alignment of the other clusters, in units of an entry.
        let base = self.header.data_offset % self.header.entry_bytes();
        if base != 0 {
            return Err(self.not_writable("its clusters begin at an offset that its table cannot store"));
        }
        self.end = self.header.data_offset + (end - self.header.data_offset).next_multiple_of(cluster);
        // Extensions, such as bitmaps, are outdated from now on.
        self.pages.write(&CLOSED_WITHOUT_EXTENSIONS.to_le_bytes(), AT_IN_USE)?;
        self.pages.write(&[0; 8], AT_EXTENSION)
    }

    fn reserve(&mut self, range: Range<u64>) -> Result<()> {
        let cluster = self.header.cluster_bytes;
        for index in range.start / cluster..range.end.div_ceil(cluster) {
            self.reserve_cluster(index)?;
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
        // The header shares the first sector of the table, so it is written with it.
        self.pages.take_changes(0..HEADER_BYTES + self.header.entry_count * 4)
    }

    fn changes_stored(&mut self) {
        self.pages.changes_stored();
    }
}
