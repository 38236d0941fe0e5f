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

/// The metadata of an image file, with pending changes.
pub(crate) struct Pages {
    file: Arc<dyn ImageFile>,
    cache: SharedCache<Vec<u8>>,
    changed: BTreeMap<u64, Vec<u8>>,
}

impl Pages {
    /// Caches pages of `file` in at most `cache_bytes` of memory.
    pub(crate) fn new(file: Arc<dyn ImageFile>, cache_bytes: u64) -> Self {
        Self {
            file,
            cache: SharedCache::new(cache_bytes),
            changed: BTreeMap::new(),
        }
    }

    /// Fills `buffer` from `offset`; zero past the end of the file.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
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
        let end = offset + buffer.len() as u64;
        let first = offset / SECTOR_BYTES * SECTOR_BYTES;
        for (sector_at, sector) in self.changed.range(first..end) {
            let (from, to) = (offset.max(*sector_at), end.min(sector_at + SECTOR_BYTES));
            let source = &sector[to_usize(from - sector_at)..to_usize(to - sector_at)];
            buffer[to_usize(from - offset)..to_usize(to - offset)].copy_from_slice(source);
        }
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
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let sector_at = at / SECTOR_BYTES * SECTOR_BYTES;
            let within = to_usize(at - sector_at);
            let length = (to_usize(SECTOR_BYTES) - within).min(bytes.len() - done);
            if !self.changed.contains_key(&sector_at) {
                let mut sector = vec![0; to_usize(SECTOR_BYTES)];
                self.read(&mut sector, sector_at)?;
                self.changed.insert(sector_at, sector);
            }
            let sector = self.changed.get_mut(&sector_at).expect("it was just inserted");
            sector[within..within + length].copy_from_slice(&bytes[done..done + length]);
            done += length;
        }
        Ok(())
    }

    pub(crate) fn changed_bytes(&self) -> u64 {
        self.changed.len() as u64 * SECTOR_BYTES
    }

    /// Writes the changes durably: first everything except `table`, then `table`, which refers to the rest.
    pub(crate) fn store(&mut self, table: &Range<u64>) -> Result<()> {
        for is_in_table in [false, true] {
            let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
            for (at, sector) in &self.changed {
                if (at + SECTOR_BYTES > table.start && *at < table.end) != is_in_table {
                    continue;
                }
                match runs.last_mut() {
                    Some((start, run)) if *start + run.len() as u64 == *at => run.extend_from_slice(sector),
                    _ => runs.push((*at, sector.clone())),
                }
            }
            for (at, run) in &runs {
                self.file.write_at(run, *at)?;
            }
            if !runs.is_empty() {
                self.file.sync()?;
            }
        }
        for at in std::mem::take(&mut self.changed).into_keys() {
            self.cache.remove(at / PAGE_BYTES * PAGE_BYTES);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Pages;
    use crate::file::ImageFile as _;
    use crate::file::memory::MemoryFile;

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
        pages.store(&(0..512)).unwrap();
        let mut found = [0; 3];
        file.read_at(&mut found, 1535).unwrap();
        assert_eq!(found, [7, 9, 9]);
        assert_eq!(pages.array::<6>(1021).unwrap(), [7, 1, 2, 3, 4, 7]);
        assert_eq!(pages.changed_bytes(), 0);
    }
}
