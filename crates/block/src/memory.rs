//! A device in memory, which stores only pages that are not zero.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use crate::device::range_length;
use crate::{BlockDevice, BlockDeviceMut, ExtentKind, ExtentList, Result, to_usize};

const PAGE_BYTES: u64 = 4096;
const PAGE_LENGTH: usize = to_usize(PAGE_BYTES);

type PageMap = BTreeMap<u64, Box<[u8]>>;

/// A device in memory; pages that were never written take no space and are reported as zero.
#[derive(Debug)]
pub struct MemoryDevice {
    size_bytes: u64,
    pages: RwLock<PageMap>,
}

impl MemoryDevice {
    /// A device of `size_bytes` that reads as zero.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            size_bytes,
            pages: RwLock::default(),
        }
    }

    /// A device with the content `bytes`; pages of zeroes are not stored.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let device = Self::new(bytes.len() as u64);
        {
            let mut pages = device.pages.write().unwrap_or_else(PoisonError::into_inner);
            for (number, page) in (0u64..).zip(bytes.chunks(PAGE_LENGTH)) {
                if page.iter().any(|byte| *byte != 0) {
                    write_page(&mut pages, number, 0, page);
                }
            }
        }
        device
    }

    /// A copy of all bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(self.size_bytes)];
        self.read_at(&mut bytes, 0).expect("memory can be read");
        bytes
    }
}

fn write_page(pages: &mut PageMap, number: u64, start: usize, data: &[u8]) {
    let page = pages
        .entry(number)
        .or_insert_with(|| vec![0; PAGE_LENGTH].into_boxed_slice());
    page[start..start + data.len()].copy_from_slice(data);
}

/// Splits `offset..offset + length` at page boundaries: page number, start within the page, length.
fn page_pieces(offset: u64, length: u64) -> impl Iterator<Item = (u64, usize, usize)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let start = at % PAGE_BYTES;
            let piece = (PAGE_BYTES - start).min(end - at);
            let number = at / PAGE_BYTES;
            at += piece;
            (number, to_usize(start), to_usize(piece))
        })
    })
}

impl BlockDevice for MemoryDevice {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        let mut rest = buffer;
        for (number, start, length) in page_pieces(offset, rest.len() as u64) {
            let (piece, tail) = rest.split_at_mut(length);
            match pages.get(&number) {
                Some(page) => piece.copy_from_slice(&page[start..start + length]),
                None => piece.fill(0),
            }
            rest = tail;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.check_bounds(range.start, range_length(&range))?;
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        let mut list = ExtentList::new(range.start, extent_count_max);
        if range.is_empty() {
            return Ok(list);
        }
        let last = range.end.div_ceil(PAGE_BYTES);
        for (&number, _) in pages.range(range.start / PAGE_BYTES..last) {
            let start = (number * PAGE_BYTES).max(range.start);
            let end = ((number + 1) * PAGE_BYTES).min(range.end);
            if !list.push(start - list.end(), ExtentKind::Zero) || !list.push(end - start, ExtentKind::Data) {
                return Ok(list);
            }
        }
        list.push(range.end - list.end(), ExtentKind::Zero);
        Ok(list)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}

impl BlockDeviceMut for MemoryDevice {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        let mut pages = self.pages.write().unwrap_or_else(PoisonError::into_inner);
        let mut rest = data;
        for (number, start, length) in page_pieces(offset, data.len() as u64) {
            let (piece, tail) = rest.split_at(length);
            write_page(&mut pages, number, start, piece);
            rest = tail;
        }
        Ok(())
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        let mut pages = self.pages.write().unwrap_or_else(PoisonError::into_inner);
        for (number, start, length) in page_pieces(range.start, range_length(&range)) {
            if length == PAGE_LENGTH {
                pages.remove(&number);
            } else if let Some(page) = pages.get_mut(&number) {
                page[start..start + length].fill(0);
            }
        }
        Ok(())
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.write_zeroes(range)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::MemoryDevice;
    use crate::testing::conformance::Conformance;

    #[test]
    fn conforms() {
        let conformance = Conformance::new();
        conformance.check_mutable(MemoryDevice::new);
        let bytes = conformance.pattern(20_001);
        conformance.check_read_only(&MemoryDevice::from_bytes(&bytes), &bytes);
    }
}
