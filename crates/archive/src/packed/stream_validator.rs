//! Validates a packed stream, which is read in order, against the index at its end.
//!
//! Each block is valid by itself, so only the index shows that a block is missing, duplicated or misplaced. A *run* is
//! the sequence of blocks since the last index that may belong to one stream of Holdfast: blocks of full length, and
//! perhaps a shorter one at its end. This bounds the memory: each kept summary stands for a full block of input.
//! Recorded lengths and checksums are trusted here; they are verified when the block is unpacked.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::io;

use super::index::{ENTRY_BYTES, ENTRY_COUNT_MAX, ZSTD_FOOTER_BYTES, entry_of, gzip_footer, zstd_footer};
use super::{gzip, zstd_frame};
use crate::packed::frame::{GZIP_BLOCK_BYTES, Input, ZSTD_BLOCK_BYTES};

/// Entries of a seek table per read.
const ENTRIES_AT_ONCE: usize = 4096;

/// Lengths and checksum of a block, as recorded in the block or in an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockSummary {
    packed_bytes: u32,
    bytes: u32,
    /// `None` if a frame of zstd has none.
    checksum: Option<u32>,
}

impl BlockSummary {
    fn new(packed: &[u8], bytes: usize, checksum: Option<u32>) -> Self {
        // An index cannot describe longer frames, so they never match an entry.
        let length = |length| u32::try_from(length).unwrap_or(u32::MAX);
        Self {
            packed_bytes: length(packed.len()),
            bytes: length(bytes),
            checksum,
        }
    }

    /// The block of an entry.
    fn of_entry(entry: &[u8; ENTRY_BYTES]) -> Self {
        let (packed_bytes, bytes, checksum) = entry_of(entry);
        Self {
            packed_bytes,
            bytes,
            checksum: Some(checksum),
        }
    }

    fn is_full(&self, full_bytes: usize) -> bool {
        usize::try_from(self.bytes) == Ok(full_bytes)
    }

    /// Whether it matches an entry, as far as both have the fields.
    fn matches_entry(&self, entry: &Self) -> bool {
        (self.packed_bytes, self.bytes) == (entry.packed_bytes, entry.bytes)
            && (self.checksum.is_none() || self.checksum == entry.checksum)
    }
}

/// Validates members of gzip: those of Holdfast have a size field, and each of them must be in an index.
#[derive(Debug, Default)]
pub(crate) struct GzipValidator {
    run: Vec<BlockSummary>,
    /// Number of entries and length of the unfinished index, if one has begun.
    index: Option<(usize, u64)>,
}

impl GzipValidator {
    /// Adds a member of Holdfast, which contains `unpacked_bytes`.
    ///
    /// # Errors
    /// It is an index member that contradicts the blocks, or an index member was expected.
    pub(crate) fn member(&mut self, member: &[u8], unpacked_bytes: usize) -> io::Result<()> {
        if let Some(content) = gzip::index_of(member) {
            gzip::check_index(member).map_err(index_mismatch)?;
            return match gzip_footer(content) {
                Some((count, length)) => self.end(count, length),
                None => self.entries(content, member.len() as u64),
            };
        }
        let is_finished = self.run.last().is_some_and(|last| !last.is_full(GZIP_BLOCK_BYTES));
        if is_finished || self.index.is_some() || self.run.len() as u64 == ENTRY_COUNT_MAX {
            return Err(without_index());
        }
        let checksum = gzip::checksum_of(member);
        self.run.push(BlockSummary::new(member, unpacked_bytes, checksum));
        Ok(())
    }

    /// Checks that the stream may end here, or continue with blocks of another program.
    ///
    /// # Errors
    /// The index is missing.
    pub(crate) fn check_end(&self) -> io::Result<()> {
        if self.run.is_empty() && self.index.is_none() {
            Ok(())
        } else {
            Err(without_index())
        }
    }

    fn entries(&mut self, content: &[u8], member_bytes: u64) -> io::Result<()> {
        let (mut number, length) = self.index.unwrap_or_default();
        if !content.len().is_multiple_of(ENTRY_BYTES) {
            return Err(index_mismatch("a part of it is cut off"));
        }
        for entry in content.as_chunks().0 {
            let came = self.run.get(number);
            if !came.is_some_and(|block| block.matches_entry(&BlockSummary::of_entry(entry))) {
                return Err(index_mismatch(&at_place(number)));
            }
            number += 1;
        }
        self.index = Some((number, length + member_bytes));
        Ok(())
    }

    fn end(&mut self, count: u64, length: u64) -> io::Result<()> {
        let (named, named_bytes) = self.index.unwrap_or_default();
        let came = self.run.len();
        if count != came as u64 {
            return Err(index_mismatch(&at_number(count, came)));
        }
        if (named, named_bytes) != (came, length) {
            return Err(index_mismatch("a part of it is missing"));
        }
        *self = Self::default();
        Ok(())
    }
}

/// Validates frames of zstd. Frames of Holdfast cannot be distinguished from those of other programs, which may precede
/// them and may have other seek tables.
#[derive(Debug, Default)]
pub(crate) struct ZstdValidator {
    run: Vec<BlockSummary>,
    /// Whether, since the last index, there were frames that cannot belong to the run's stream.
    has_others: bool,
    /// Whether blocks of full length preceded a complete stream of Holdfast.
    has_surplus: bool,
}

impl ZstdValidator {
    /// Adds a frame, which contains `unpacked_bytes`.
    pub(crate) fn frame(&mut self, frame: &[u8], unpacked_bytes: usize) {
        let is_finished = self.run.last().is_some_and(|last| !last.is_full(ZSTD_BLOCK_BYTES));
        if is_finished || self.run.len() as u64 == ENTRY_COUNT_MAX {
            self.run.clear();
            self.has_others = true;
        }
        let checksum = zstd_frame::checksum_of(frame);
        self.run.push(BlockSummary::new(frame, unpacked_bytes, checksum));
    }

    /// Whether all frames since the last index have Holdfast's full block length, so that the stream may be truncated:
    /// the last frame of Holdfast is usually shorter.
    pub(crate) fn may_be_cut(&self) -> bool {
        let is_full = self.run.last().is_some_and(|last| last.is_full(ZSTD_BLOCK_BYTES));
        self.has_surplus || is_full && !self.has_others
    }

    /// Reads a skippable frame of `length` bytes with the magic number of seek tables.
    ///
    /// # Errors
    /// It is a seek table that contradicts the blocks. Reading.
    pub(crate) fn skippable(&mut self, input: &mut Input, length: u32) -> io::Result<()> {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let table_bytes = length.saturating_sub(ZSTD_FOOTER_BYTES);
        let count = table_bytes / ENTRY_BYTES;
        let mut table = SeekTable::new(&self.run, count);
        let mut bytes = Vec::new();
        let mut left = count;
        while left > 0 {
            let entries = left.min(ENTRIES_AT_ONCE);
            bytes.clear();
            input.append(&mut bytes, entries * ENTRY_BYTES)?;
            for entry in bytes.as_chunks().0 {
                table.entry(BlockSummary::of_entry(entry));
            }
            left -= entries;
        }
        bytes.clear();
        // A frame that is no table may leave a remainder of any length below 21.
        input.append(&mut bytes, length - count * ENTRY_BYTES)?;
        let is_table = zstd_footer(&bytes).is_some_and(|named| named == count as u64);
        if !is_table || !table.is_of_run || self.has_others && !table.is_cut_as_ours {
            return Ok(());
        }
        if let Some(number) = table.difference {
            let came = self.run.len();
            return Err(index_mismatch(&if count > came {
                at_number(count as u64, came)
            } else {
                at_place(number)
            }));
        }
        if table.is_doubled {
            return Err(index_mismatch("its first block came twice"));
        }
        self.has_surplus |= count < self.run.len() && !self.has_others;
        self.run.clear();
        self.has_others = false;
        Ok(())
    }
}

/// A seek table, compared with the preceding run while it is read.
struct SeekTable<'a> {
    run: &'a [BlockSummary],
    count: usize,
    number: usize,
    /// The first entry that differs from its block.
    difference: Option<usize>,
    /// Whether the first block also precedes the blocks of the table.
    is_doubled: bool,
    /// Whether all of its blocks except the last have full length.
    is_cut_as_ours: bool,
    /// Whether it has no entries of empty frames: other programs list skippable frames as well.
    is_of_run: bool,
}

impl<'a> SeekTable<'a> {
    fn new(run: &'a [BlockSummary], count: usize) -> Self {
        Self {
            run,
            count,
            number: 0,
            difference: None,
            is_doubled: false,
            is_cut_as_ours: true,
            is_of_run: true,
        }
    }

    fn entry(&mut self, entry: BlockSummary) {
        let before = self.run.len().checked_sub(self.count);
        let came = before.and_then(|before| self.run.get(before + self.number));
        if self.difference.is_none() && !came.is_some_and(|block| block.matches_entry(&entry)) {
            self.difference = Some(self.number);
        }
        if self.number == 0 {
            self.is_doubled = before.is_some_and(|before| self.run.iter().take(before).any(|known| *known == entry));
        }
        self.number += 1;
        self.is_cut_as_ours &= self.number == self.count || entry.is_full(ZSTD_BLOCK_BYTES);
        self.is_of_run &= entry.bytes > 0;
    }
}

/// The error of a stream of Holdfast without an index.
fn without_index() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "the packed stream does not end with the index that holdfast writes behind it: it was cut off",
    )
}

fn index_mismatch(detail: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the packed stream is damaged: it contradicts its index: {detail}"),
    )
}

fn at_number(count: u64, came: usize) -> String {
    format!("the index has {count} blocks, and the stream {came}")
}

fn at_place(number: usize) -> String {
    format!("block {number} is replaced by another block")
}
