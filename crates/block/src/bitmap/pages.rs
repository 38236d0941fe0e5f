//! A bit vector that is mostly all clear or all set.
//!
//! The vector is divided into pages of 4096 bits. A page takes 512 bytes only if its bits differ.

use std::ops::Range;

use crate::to_usize;

pub(super) const WORD_BITS: u64 = 64;
pub(super) const PAGE_WORDS: usize = 64;
pub(super) const PAGE_BITS: u64 = WORD_BITS * PAGE_WORDS as u64;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Page {
    Clear,
    Set,
    Mixed(Box<[u64; PAGE_WORDS]>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bit {
    Clear,
    Set,
}

/// A bit vector. Bits past the end are always clear, so that equal vectors compare equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BitPages {
    bit_count: u64,
    pages: Vec<Page>,
}

/// The bits of a word from `start` to `end` (at most 64).
pub(super) fn mask(start: u64, end: u64) -> u64 {
    let below = |bit: u64| if bit >= WORD_BITS { u64::MAX } else { (1 << bit) - 1 };
    below(end) & !below(start)
}

impl Page {
    fn of_words(words: &[u64; PAGE_WORDS]) -> Self {
        if *words == [0; PAGE_WORDS] {
            Self::Clear
        } else if *words == [u64::MAX; PAGE_WORDS] {
            Self::Set
        } else {
            Self::Mixed(Box::new(*words))
        }
    }

    /// The 64 bits of word `index`.
    fn word(&self, index: usize) -> u64 {
        match self {
            Self::Clear => 0,
            Self::Set => u64::MAX,
            Self::Mixed(words) => words[index],
        }
    }

    /// Sets the bits of `range`, which lies in the page, to the value `bit`.
    fn put(&mut self, range: &Range<u64>, bit: Bit) {
        let uniform = match bit {
            Bit::Clear => Self::Clear,
            Bit::Set => Self::Set,
        };
        if *self == uniform {
            return;
        }
        if *range == (0..PAGE_BITS) {
            *self = uniform;
            return;
        }
        if !matches!(self, Self::Mixed(_)) {
            *self = Self::Mixed(Box::new([self.word(0); PAGE_WORDS]));
        }
        let Self::Mixed(words) = self else { return };
        let first = range.start / WORD_BITS;
        let last = range.end.div_ceil(WORD_BITS);
        for index in first..last {
            let base = index * WORD_BITS;
            let bits = mask(range.start.saturating_sub(base), range.end - base);
            let word = &mut words[to_usize(index)];
            *word = if bit == Bit::Set { *word | bits } else { *word & !bits };
        }
        let target = uniform.word(0);
        if words.iter().all(|word| *word == target) {
            *self = uniform;
        }
    }
}

impl BitPages {
    /// `bit_count` bits, all clear.
    pub(super) fn new(bit_count: u64) -> Self {
        Self {
            bit_count,
            pages: vec![Page::Clear; to_usize(bit_count.div_ceil(PAGE_BITS))],
        }
    }

    /// `bit_count` bits, in pages; a page that is `None` is all clear. Bits past the end must be clear.
    pub(super) fn from_pages(bit_count: u64, pages: impl Iterator<Item = Option<[u64; PAGE_WORDS]>>) -> Self {
        Self {
            bit_count,
            pages: pages
                .map(|words| words.map_or(Page::Clear, |words| Page::of_words(&words)))
                .collect(),
        }
    }

    pub(super) fn bit_count(&self) -> u64 {
        self.bit_count
    }

    /// Sets the bits of `range`, which lies in the vector.
    pub(super) fn set(&mut self, range: Range<u64>) {
        self.put(range, Bit::Set);
    }

    /// Clears the bits of `range`, which lies in the vector.
    pub(super) fn clear(&mut self, range: Range<u64>) {
        self.put(range, Bit::Clear);
    }

    fn put(&mut self, range: Range<u64>, bit: Bit) {
        assert!(range.end <= self.bit_count, "bits past the end of the bitmap");
        let mut at = range.start;
        while at < range.end {
            let base = at / PAGE_BITS * PAGE_BITS;
            let end = range.end.min(base + PAGE_BITS);
            self.pages[to_usize(at / PAGE_BITS)].put(&(at - base..end - base), bit);
            at = end;
        }
    }

    pub(super) fn is_set(&self, bit: u64) -> bool {
        self.word(bit / WORD_BITS) & (1 << (bit % WORD_BITS)) != 0
    }

    /// Number of set bits.
    pub(super) fn count(&self) -> u64 {
        self.pages
            .iter()
            .map(|page| match page {
                Page::Clear => 0,
                Page::Set => PAGE_BITS,
                Page::Mixed(words) => words.iter().map(|word| u64::from(word.count_ones())).sum(),
            })
            .sum()
    }

    /// The first set bit at or after `from`.
    pub(super) fn next_set(&self, from: u64) -> Option<u64> {
        let found = self.find(from..self.bit_count, Bit::Set);
        (found < self.bit_count).then_some(found)
    }

    /// The first clear bit at or after `from`, or the end of the vector.
    pub(super) fn next_clear(&self, from: u64) -> u64 {
        self.find(from..self.bit_count, Bit::Clear)
    }

    /// The first clear bit in `bits`, or their end. The cost does not depend on what follows them.
    pub(super) fn next_clear_within(&self, bits: Range<u64>) -> u64 {
        self.find(bits.start..bits.end.min(self.bit_count), Bit::Clear)
    }

    /// The 64 bits from bit `index * 64` on.
    pub(super) fn word(&self, index: u64) -> u64 {
        self.pages[to_usize(index * WORD_BITS / PAGE_BITS)].word(to_usize(index) % PAGE_WORDS)
    }

    fn find(&self, bits: Range<u64>, wanted: Bit) -> u64 {
        let skip = if wanted == Bit::Set { Page::Clear } else { Page::Set };
        let mut at = bits.start;
        while at < bits.end {
            let page = &self.pages[to_usize(at / PAGE_BITS)];
            if *page == skip {
                at = (at / PAGE_BITS + 1) * PAGE_BITS;
                continue;
            }
            let word = self.word(at / WORD_BITS);
            let wanted_bits = if wanted == Bit::Set { word } else { !word };
            let rest = wanted_bits & mask(at % WORD_BITS, WORD_BITS);
            if rest != 0 {
                let found = at / WORD_BITS * WORD_BITS + u64::from(rest.trailing_zeros());
                return found.min(bits.end);
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        bits.end
    }
}
