//! A set of marked ranges to which many threads add at the same time, without a lock.
//!
//! The bits are in pages of atomic words. A page takes memory from the first mark that covers a part of it; a mark that
//! covers whole pages takes none. So a disk of 16 TiB with a bit for each 4 KiB takes 16 MiB without marks, also if it
//! is trimmed as a whole, and at most 512 MiB more.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::DirtyBitmap;
use super::pages::{BitPages, PAGE_BITS, PAGE_WORDS, WORD_BITS, mask};
use crate::device::range_length;
use crate::{Result, to_usize};

type AtomicPage = [AtomicU64; PAGE_WORDS];

/// Like a [`DirtyBitmap`], but marked through a shared reference. Marks cannot be cleared.
///
/// A mark that is added while the marks are read may or may not be seen.
#[derive(Debug)]
pub(crate) struct SharedMarks {
    size_bytes: u64,
    granularity_bytes: u64,
    bit_count: u64,
    pages: Box<[OnceLock<Box<AtomicPage>>]>,
    /// A bit for each page that was marked as a whole.
    whole: Box<[AtomicU64]>,
    is_marked: AtomicBool,
}

impl SharedMarks {
    /// No marks, for a device of `size_bytes`; the limits of `granularity_bytes` are those of [`DirtyBitmap::new`].
    pub(crate) fn new(size_bytes: u64, granularity_bytes: u64) -> Result<Self> {
        let bit_count = super::bit_count(size_bytes, granularity_bytes)?;
        let page_count = bit_count.div_ceil(PAGE_BITS);
        Ok(Self {
            size_bytes,
            granularity_bytes,
            bit_count,
            pages: (0..page_count).map(|_| OnceLock::new()).collect(),
            whole: (0..page_count.div_ceil(WORD_BITS)).map(|_| AtomicU64::new(0)).collect(),
            is_marked: AtomicBool::new(false),
        })
    }

    /// No marks, for the same device.
    pub(crate) fn fresh(&self) -> Self {
        Self::new(self.size_bytes, self.granularity_bytes).expect("these parameters were valid before")
    }

    /// Marks `range`, rounded outwards; the part after the end of the device is ignored.
    pub(crate) fn mark(&self, range: Range<u64>) {
        if range_length(&range) == 0 || range.start >= self.size_bytes {
            return;
        }
        let bits = super::outer_bits(&range, self.size_bytes, self.granularity_bytes);
        let mut at = bits.start;
        while at < bits.end {
            let page = at / PAGE_BITS;
            let base = page * PAGE_BITS;
            let end = bits.end.min(base + PAGE_BITS);
            if (at, end) == (base, base + PAGE_BITS) {
                set_bits(&self.whole[to_usize(page / WORD_BITS)], 1 << (page % WORD_BITS));
            } else if !self.is_whole(page) {
                self.mark_in_page(page, &(at - base..end - base));
            }
            at = end;
        }
        if !self.is_marked.load(Ordering::Relaxed) {
            self.is_marked.store(true, Ordering::Relaxed);
        }
    }

    fn mark_in_page(&self, page: u64, bits: &Range<u64>) {
        let words = self.pages[to_usize(page)].get_or_init(|| Box::new([const { AtomicU64::new(0) }; PAGE_WORDS]));
        for index in bits.start / WORD_BITS..bits.end.div_ceil(WORD_BITS) {
            let base = index * WORD_BITS;
            let wanted = mask(bits.start.saturating_sub(base), bits.end - base);
            set_bits(&words[to_usize(index)], wanted);
        }
    }

    fn is_whole(&self, page: u64) -> bool {
        self.whole[to_usize(page / WORD_BITS)].load(Ordering::Relaxed) & 1 << (page % WORD_BITS) != 0
    }

    /// Whether nothing is marked.
    pub(crate) fn is_clean(&self) -> bool {
        !self.is_marked.load(Ordering::Relaxed)
    }

    /// A copy of the marks.
    pub(crate) fn to_bitmap(&self) -> DirtyBitmap {
        let words = |index: usize| {
            let words = self.pages[index].get()?;
            Some(std::array::from_fn(|word| words[word].load(Ordering::Relaxed)))
        };
        self.bitmap_of((0..self.pages.len()).map(words))
    }

    /// The marks. Releases the memory of each page when it is converted.
    pub(crate) fn into_bitmap(mut self) -> DirtyBitmap {
        let pages = std::mem::take(&mut self.pages).into_iter();
        self.bitmap_of(pages.map(|page| page.into_inner().map(|words| words.map(AtomicU64::into_inner))))
    }

    /// The bitmap of the pages that were marked in part, `pages`, and of those that were marked as a whole.
    fn bitmap_of(&self, pages: impl Iterator<Item = Option<[u64; PAGE_WORDS]>>) -> DirtyBitmap {
        let pages = (0..).zip(pages).map(|(page, words)| {
            if self.is_whole(page) {
                Some([u64::MAX; PAGE_WORDS])
            } else {
                words
            }
        });
        DirtyBitmap {
            size_bytes: self.size_bytes,
            granularity_bytes: self.granularity_bytes,
            pages: BitPages::from_pages(self.bit_count, pages),
        }
    }
}

/// Sets bits of a word; writes to memory that other threads use only if it changes.
fn set_bits(word: &AtomicU64, bits: u64) {
    if word.load(Ordering::Relaxed) & bits != bits {
        word.fetch_or(bits, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::SharedMarks;
    use crate::testing::conformance::test_seed;
    use crate::{DirtyBitmap, SeededRandom};

    #[test]
    fn marks_are_those_of_a_bitmap() {
        let mut random = SeededRandom::new(test_seed());
        for size in [1, 512, 70_000, 2_097_152, 20_000_001] {
            let marks = SharedMarks::new(size, 512).unwrap();
            let mut bitmap = DirtyBitmap::new(size, 512).unwrap();
            assert!(marks.is_clean());
            assert_eq!(marks.to_bitmap(), bitmap);
            for _ in 0..60 {
                let mut range = random.range_within(size, size);
                if random.one_in(2) {
                    range.end = range.end.min(range.start + 3000);
                }
                marks.mark(range.clone());
                bitmap.set(range);
                assert_eq!(marks.to_bitmap(), bitmap);
                assert_eq!(marks.is_clean(), bitmap.is_clean());
            }
            marks.mark(size..u64::MAX);
            assert_eq!(marks.to_bitmap(), bitmap, "past the end");
            assert!(marks.fresh().is_clean());
            assert_eq!(marks.into_bitmap(), bitmap);
        }
    }

    #[test]
    fn marks_of_a_whole_disk_take_no_memory() {
        let marks = SharedMarks::new(16 << 40, 4096).unwrap();
        marks.mark(0..16 << 40);
        assert!(marks.pages.iter().all(|page| page.get().is_none()));
        marks.mark(5 << 40..(5 << 40) + 1);
        assert!(
            marks.pages.iter().all(|page| page.get().is_none()),
            "it is marked already"
        );
        assert_eq!(marks.to_bitmap().dirty_bytes(), 16 << 40);
    }
}
