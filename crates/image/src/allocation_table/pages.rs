//! A write-back cache for the tables and headers of an image file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use holdfast_block::to_usize;

use crate::Result;
use crate::file::ImageFile;
use crate::model::shared_cache::SharedCache;

/// Size of reads.
const PAGE_BYTES: u64 = 4096;
/// Size of writes: in all formats tables begin and end at sectors, and data may follow in the same page.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// Sectors by their offsets.
type Sectors = BTreeMap<u64, Vec<u8>>;

/// The metadata of an image file, with pending changes.
pub(crate) struct Pages {
    file: Arc<dyn ImageFile>,
    cache: SharedCache<Vec<u8>>,
    /// Changes that no store has taken.
    changed: Sectors,
    /// The sectors of [`write_early`](Self::write_early): as they were before the changes in `changed`, with only the
    /// early ones.
    early: Sectors,
    /// Changes that are being stored: older than `changed`, newer than the file.
    storing: Arc<Sectors>,
}

/// Changes of tables that are stored together, while the tables are read and changed further.
pub(crate) struct TableChanges {
    file: Arc<dyn ImageFile>,
    sectors: Arc<Sectors>,
    early: Sectors,
    table: Range<u64>,
}

impl Pages {
    /// Caches pages of `file` in at most `cache_bytes` of memory.
    pub(crate) fn new(file: Arc<dyn ImageFile>, cache_bytes: u64) -> Self {
        Self {
            file,
            cache: SharedCache::new(cache_bytes),
            changed: Sectors::new(),
            early: Sectors::new(),
            storing: Arc::default(),
        }
    }

    /// Fills `buffer` from `offset`; zero past the end of the file.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.read_taken(buffer, offset)?;
        overlay(&self.changed, buffer, offset);
        Ok(())
    }

    /// The same without the changes that no store has taken.
    fn read_taken(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let page_at = at / PAGE_BYTES * PAGE_BYTES;
            let within = to_usize(at - page_at);
            let length = (to_usize(PAGE_BYTES) - within).min(buffer.len() - done);
            let page = self.page(page_at)?;
            buffer[done..done + length].copy_from_slice(&page[within..within + length]);
            done += length;
        }
        overlay(&self.storing, buffer, offset);
        Ok(())
    }

    pub(crate) fn array<const N: usize>(&self, offset: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read(&mut bytes, offset)?;
        Ok(bytes)
    }

    fn page(&self, offset: u64) -> Result<Arc<Vec<u8>>> {
        if let Some(page) = self.cache.get(offset) {
            return Ok(page);
        }
        let mut page = vec![0; to_usize(PAGE_BYTES)];
        self.file.read_at(&mut page, offset)?;
        let page = Arc::new(page);
        self.cache.insert(offset, Arc::clone(&page), PAGE_BYTES);
        Ok(page)
    }

    /// Changes bytes in memory.
    pub(crate) fn write(&mut self, bytes: &[u8], offset: u64) -> Result<()> {
        for (sector_at, within, piece) in sector_pieces(bytes, offset) {
            if !self.changed.contains_key(&sector_at) {
                let mut sector = vec![0; to_usize(SECTOR_BYTES)];
                self.read(&mut sector, sector_at)?;
                self.changed.insert(sector_at, sector);
            }
            let sector = self.changed.get_mut(&sector_at).expect("it was just inserted");
            sector[within..within + piece.len()].copy_from_slice(piece);
        }
        Ok(())
    }

    /// Changes bytes of the table in memory, on which other changes of the table depend: they become durable before the
    /// other changes of this store are written.
    pub(crate) fn write_early(&mut self, bytes: &[u8], offset: u64) -> Result<()> {
        for (sector_at, within, piece) in sector_pieces(bytes, offset) {
            if !self.early.contains_key(&sector_at) {
                let mut sector = vec![0; to_usize(SECTOR_BYTES)];
                self.read_taken(&mut sector, sector_at)?;
                self.early.insert(sector_at, sector);
            }
            let sector = self.early.get_mut(&sector_at).expect("it was just inserted");
            sector[within..within + piece.len()].copy_from_slice(piece);
        }
        self.write(bytes, offset)
    }

    /// Bytes of changes that no store has taken.
    pub(crate) fn changed_bytes(&self) -> u64 {
        self.changed.len() as u64 * SECTOR_BYTES
    }

    /// Takes all changes, to store them without access to these pages. `table` refers to the rest.
    /// [`changes_stored`](Self::changes_stored) must follow before the next call.
    pub(crate) fn take_changes(&mut self, table: Range<u64>) -> TableChanges {
        assert!(self.storing.is_empty(), "the changes of the last store are pending");
        self.storing = Arc::new(std::mem::take(&mut self.changed));
        TableChanges {
            file: Arc::clone(&self.file),
            sectors: Arc::clone(&self.storing),
            early: std::mem::take(&mut self.early),
            table,
        }
    }

    /// Reads the taken changes from the file from now on: they are durable.
    pub(crate) fn changes_stored(&mut self) {
        for at in self.storing.keys() {
            // A page that was read meanwhile may have a sector as it was before.
            self.cache.remove(at / PAGE_BYTES * PAGE_BYTES);
        }
        self.storing = Arc::default();
    }
}

impl TableChanges {
    /// No changes.
    pub(crate) fn none(file: &Arc<dyn ImageFile>) -> Self {
        Self {
            file: Arc::clone(file),
            sectors: Arc::default(),
            early: Sectors::new(),
            table: 0..0,
        }
    }

    /// Writes the changes durably: first everything except the table, then the early changes of the table, then the
    /// table, which refers to the rest. All data must be durable before.
    pub(crate) fn store(&self) -> Result<()> {
        let is_in_table = |at: u64| at + SECTOR_BYTES > self.table.start && at < self.table.end;
        let sectors = || self.sectors.iter().map(|(at, sector)| (*at, sector));
        self.write(sectors().filter(|(at, _)| !is_in_table(*at)))?;
        self.write(self.early.iter().map(|(at, sector)| (*at, sector)))?;
        self.write(sectors().filter(|(at, _)| is_in_table(*at)))
    }

    /// Writes these sectors, in order, and syncs the file; does nothing if there are none.
    fn write<'a>(&self, sectors: impl Iterator<Item = (u64, &'a Vec<u8>)>) -> Result<()> {
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (at, sector) in sectors {
            match runs.last_mut() {
                Some((start, run)) if *start + run.len() as u64 == at => run.extend_from_slice(sector),
                _ => runs.push((at, sector.clone())),
            }
        }
        for (at, run) in &runs {
            self.file.write_at(run, *at)?;
        }
        if !runs.is_empty() {
            self.file.sync()?;
        }
        Ok(())
    }
}

/// Replaces the bytes of `buffer`, which begins at `offset`, by those of `sectors`.
fn overlay(sectors: &Sectors, buffer: &mut [u8], offset: u64) {
    let end = offset + buffer.len() as u64;
    let first = offset / SECTOR_BYTES * SECTOR_BYTES;
    for (sector_at, sector) in sectors.range(first..end) {
        let (from, to) = (offset.max(*sector_at), end.min(sector_at + SECTOR_BYTES));
        let source = &sector[to_usize(from - sector_at)..to_usize(to - sector_at)];
        buffer[to_usize(from - offset)..to_usize(to - offset)].copy_from_slice(source);
    }
}

/// Divides `bytes` at `offset` at the sectors: the offset of the sector, the offset in it, and the bytes.
fn sector_pieces(bytes: &[u8], offset: u64) -> impl Iterator<Item = (u64, usize, &[u8])> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let sector_at = at / SECTOR_BYTES * SECTOR_BYTES;
        let within = to_usize(at - sector_at);
        let length = (to_usize(SECTOR_BYTES) - within).min(bytes.len() - done);
        let piece = &bytes[done..done + length];
        done += length;
        (length > 0).then_some((sector_at, within, piece))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Pages;
    use crate::file::ImageFile as _;
    use crate::file::memory::{MemoryFile, RecordingFile};

    #[test]
    fn pages_cache_changes_and_write_sectors() {
        let file = Arc::new(MemoryFile::new(vec![7; 10_000]));
        let mut pages = Pages::new(file.clone(), 8192);
        assert_eq!(pages.array::<4>(4094).unwrap(), [7; 4]);
        assert_eq!(pages.array::<4>(9998).unwrap(), [7, 7, 0, 0], "zero past the end");
        pages.write(&[1, 2, 3, 4], 1022).unwrap();
        assert_eq!(pages.array::<6>(1021).unwrap(), [7, 1, 2, 3, 4, 7]);
        assert_eq!(pages.changed_bytes(), 1024);
        // Data after the table, in the same page, is written concurrently.
        file.write_at(&[9; 512], 1536).unwrap();
        let changes = pages.take_changes(0..512);
        // While the changes are stored, they are visible, and the same sector changes again.
        assert_eq!(pages.array::<6>(1021).unwrap(), [7, 1, 2, 3, 4, 7]);
        assert_eq!(pages.changed_bytes(), 0);
        pages.write(&[5], 1022).unwrap();
        changes.store().unwrap();
        pages.changes_stored();
        let mut found = [0; 3];
        file.read_at(&mut found, 1535).unwrap();
        assert_eq!(found, [7, 9, 9]);
        assert_eq!(pages.array::<6>(1021).unwrap(), [7, 5, 2, 3, 4, 7]);
        assert_eq!(pages.changed_bytes(), 512);
        file.read_at(&mut found, 1022).unwrap();
        assert_eq!(found, [1, 2, 3]);
    }

    /// A sector that has an early change is stored with only this change first.
    #[test]
    fn early_changes_are_stored_before_the_table() {
        let file = Arc::new(RecordingFile::new(vec![7; 4096], None));
        let mut pages = Pages::new(file.clone(), 8192);
        pages.write(&[1], 100).unwrap();
        pages.write_early(&[2], 101).unwrap();
        pages.write(&[3], 2048).unwrap();
        let changes = pages.take_changes(0..512);
        // Both changes of the first store are in the sector of the second one.
        pages.write_early(&[4], 102).unwrap();
        changes.store().unwrap();
        pages.changes_stored();
        assert_eq!(file.operation_count(), 6, "three steps, each with a sync");
        let after = |count: usize| {
            let bytes = file.crashed_after(count, |_| 1);
            (bytes[2048], [bytes[100], bytes[101], bytes[102]])
        };
        assert_eq!(after(1), (7, [7, 7, 7]));
        assert_eq!(after(2), (3, [7, 7, 7]));
        assert_eq!(after(4), (3, [7, 2, 7]));
        assert_eq!(after(6), (3, [1, 2, 7]));
        pages.take_changes(0..512).store().unwrap();
        assert_eq!(after(8), (3, [1, 2, 4]));
    }
}
