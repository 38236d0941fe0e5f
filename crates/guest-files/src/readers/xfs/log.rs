//! Whether the log holds changes that a mount would apply.
//!
//! The log is a ring of blocks of 512 bytes. A record has a header, and a body whose blocks begin with the number of the
//! pass through the ring (the cycle) instead of their first four bytes, which are in the header. The head of the log is
//! where the cycle changes. The body is a sequence of operations; some of them are the parts of a transaction.
//!
//! An unmount ends the log with a record of its own. A freeze writes everything, and then logs the superblock alone, so
//! that a crash is noticed. Both leave nothing to apply; everything else does.

use super::XfsBlocks;
use crate::fields::Fields;
use crate::{Error, Result};

const BLOCK_BYTES: u64 = 512;
const RECORD_MAGIC: u32 = 0xfeed_babe;
/// A record holds the first words of 64 blocks in its header, and of further ones in more headers.
const WORDS_PER_HEADER: usize = 64;
const HEADER_COVERS_BYTES: u64 = 32 << 10;
const RECORD_BYTES_MAX: u64 = 256 << 10;
/// Log writes that can be under way at the same time: a record header is not farther from the head.
const LOOK_BACK_BLOCKS: u64 = 8 * (RECORD_BYTES_MAX / BLOCK_BYTES) + 64;
/// Records between the tail and the head of a log without changes: a freeze writes one or two.
const RECORD_COUNT_MAX: u32 = 64;

const OPERATION_BYTES: usize = 12;
const OPERATION_START: u8 = 0x01;
const OPERATION_COMMIT: u8 = 0x02;
const OPERATION_UNMOUNT: u8 = 0x20;
const TRANSACTION_MAGIC: u32 = 0x5452_414e;
const TRANSACTION_HEADER_BYTES: usize = 16;
const ITEM_BUFFER: u16 = 0x123c;

/// An error if a mount would change the file system by its log.
pub(super) fn refuse_changes(blocks: &XfsBlocks) -> Result<()> {
    let superblock = &blocks.superblock;
    if superblock.log_start == 0 {
        return Err(Error::unsupported("an XFS whose log is on another device"));
    }
    let ring = LogRing {
        blocks,
        start: superblock.position_of(superblock.log_start, superblock.log_blocks)?,
        count: superblock.log_blocks * superblock.block_bytes / BLOCK_BYTES,
    };
    if ring.count == 0 {
        return Err(Error::damaged("XFS log", "it is empty"));
    }
    if ring.has_changes()? {
        return Err(Error::unsupported(
            "an XFS whose log must be replayed (the guest was running, and its file systems were not frozen)",
        ));
    }
    Ok(())
}

struct LogRing<'a> {
    blocks: &'a XfsBlocks,
    start: u64,
    /// Blocks of the ring.
    count: u64,
}

/// A record of the log.
struct LogRecord {
    tail_block: u64,
    operation_count: u32,
    /// The block after the record.
    end: u64,
    /// The body, with the original first words of its blocks.
    body: Vec<u8>,
}

impl LogRing<'_> {
    fn block(&self, number: u64) -> Result<Vec<u8>> {
        self.blocks
            .range(self.start + number % self.count * BLOCK_BYTES, BLOCK_BYTES)
    }

    fn cycle(&self, number: u64) -> Result<u32> {
        let block = self.block(number)?;
        let fields = Fields::new("XFS log", &block);
        let first = fields.be_u32(0)?;
        if first == RECORD_MAGIC {
            fields.be_u32(4)
        } else {
            Ok(first)
        }
    }

    /// The block after the last one that was written; none if nothing was written.
    fn head(&self) -> Result<Option<u64>> {
        let (first, last) = (self.cycle(0)?, self.cycle(self.count - 1)?);
        if first == 0 {
            return Ok(None);
        }
        if first == last {
            return Ok(Some(0));
        }
        // Blocks of the newest pass come first.
        let (mut new, mut old) = (0, self.count - 1);
        while new + 1 < old {
            let middle = u64::midpoint(new, old);
            if self.cycle(middle)? == last {
                old = middle;
            } else {
                new = middle;
            }
        }
        Ok(Some(old))
    }

    fn has_changes(&self) -> Result<bool> {
        let Some(head) = self.head()? else {
            return Ok(false);
        };
        let Some(last) = self.last_record(head)? else {
            return Ok(true);
        };
        if last.is_unmount()? {
            return Ok(false);
        }
        let mut at = last.tail_block;
        for _ in 0..RECORD_COUNT_MAX {
            let Some(record) = self.record(at)? else {
                return Ok(true);
            };
            if record.has_changes()? {
                return Ok(true);
            }
            at = record.end;
            if at == head % self.count {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The record that ends at the head; none if there is none, as after a torn write.
    fn last_record(&self, head: u64) -> Result<Option<LogRecord>> {
        for distance in 1..=LOOK_BACK_BLOCKS.min(self.count) {
            let at = (head + self.count - distance) % self.count;
            let block = self.block(at)?;
            if Fields::new("XFS log", &block).be_u32(0)? == RECORD_MAGIC {
                let record = self.record(at)?;
                return Ok(record.filter(|record| record.end == head % self.count));
            }
        }
        Ok(None)
    }

    /// The record whose header is in a block; none if there is no valid one.
    fn record(&self, at: u64) -> Result<Option<LogRecord>> {
        if at >= self.count {
            return Ok(None);
        }
        let header = self.block(at)?;
        let fields = Fields::new("XFS log", &header);
        let (length, size) = (u64::from(fields.be_u32(12)?), u64::from(fields.be_u32(320)?));
        if fields.be_u32(0)? != RECORD_MAGIC || length > RECORD_BYTES_MAX || size > RECORD_BYTES_MAX {
            return Ok(None);
        }
        let is_version_2 = fields.be_u32(8)? & 2 != 0;
        let header_count = if is_version_2 {
            size.div_ceil(HEADER_COVERS_BYTES).max(1)
        } else {
            1
        };
        let body_count = length.div_ceil(BLOCK_BYTES);
        let mut words = Vec::new();
        for number in 0..header_count {
            let block = self.block(at + number)?;
            let words_at = if number == 0 { 44 } else { 4 };
            words.extend_from_slice(Fields::new("XFS log", &block).bytes(words_at, WORDS_PER_HEADER * 4)?);
        }
        let mut body = Vec::new();
        let mut words = words.chunks_exact(4);
        for number in 0..body_count {
            let mut block = self.block(at + header_count + number)?;
            let Some(word) = words.next() else {
                return Ok(None);
            };
            block
                .iter_mut()
                .zip(word)
                .for_each(|(byte, original)| *byte = *original);
            body.extend(block);
        }
        body.truncate(holdfast_block::to_usize(length));
        let tail_block = fields.be_u64(24)? & u64::from(u32::MAX);
        Ok(Some(LogRecord {
            tail_block,
            operation_count: fields.be_u32(40)?,
            end: (at + header_count + body_count) % self.count,
            body,
        }))
    }
}

/// A part of a record.
struct LogOperation<'a> {
    flags: u8,
    data: Fields<'a>,
}

impl LogRecord {
    /// Whether an operation of this record is meant.
    fn any(&self, mut is_meant: impl FnMut(&LogOperation<'_>) -> Result<bool>) -> Result<bool> {
        let fields = Fields::new("XFS log", &self.body);
        let mut at = 0;
        for _ in 0..self.operation_count {
            let length = fields.be_u32(at + 4)? as usize;
            let operation = LogOperation {
                flags: fields.u8(at + 9)?,
                data: Fields::new("XFS log", fields.bytes(at + OPERATION_BYTES, length)?),
            };
            if is_meant(&operation)? {
                return Ok(true);
            }
            at += OPERATION_BYTES + length;
        }
        Ok(false)
    }

    fn is_unmount(&self) -> Result<bool> {
        let is_unmount = self.any(|operation| Ok(operation.flags & OPERATION_UNMOUNT != 0))?;
        Ok(self.operation_count == 1 && is_unmount)
    }

    /// Whether a transaction in this record changes more than the superblock.
    fn has_changes(&self) -> Result<bool> {
        let mut expected = LogPart::Nothing;
        let has_other = self.any(|operation| {
            let data = &operation.data;
            expected = match (operation.flags, expected) {
                (OPERATION_UNMOUNT, LogPart::Nothing) => LogPart::Nothing,
                (OPERATION_START, LogPart::Nothing) if data.len() == 0 => LogPart::Header,
                (OPERATION_COMMIT, LogPart::Item) if data.len() == 0 => LogPart::Nothing,
                (0, LogPart::Header) if is_transaction_header(data)? => LogPart::Item,
                (0, LogPart::Item) => match superblock_regions(data)? {
                    None => return Ok(true),
                    Some(0) => LogPart::Item,
                    Some(count) => LogPart::Regions(count),
                },
                (0, LogPart::Regions(1)) => LogPart::Item,
                (0, LogPart::Regions(count)) => LogPart::Regions(count - 1),
                _ => return Ok(true),
            };
            Ok(false)
        })?;
        Ok(has_other || expected != LogPart::Nothing)
    }
}

/// What follows in a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LogPart {
    Nothing,
    Header,
    Item,
    /// Changed parts of a buffer, by their number.
    Regions(u16),
}

fn is_transaction_header(data: &Fields<'_>) -> Result<bool> {
    // Items are stored in the order of bytes of the guest's processor; those with another one are refused.
    Ok(data.len() == TRANSACTION_HEADER_BYTES && data.u32(0)? == TRANSACTION_MAGIC)
}

/// The number of parts of the superblock that follow; none if an item is about something else.
fn superblock_regions(data: &Fields<'_>) -> Result<Option<u16>> {
    let is_superblock = data.len() >= 16 && data.u16(0)? == ITEM_BUFFER && data.u64(8)? == 0;
    Ok(if is_superblock {
        Some(data.u16(2)?.saturating_sub(1))
    } else {
        None
    })
}
