//! The blocks of the file system, with those that the journal replaces.

use std::collections::BTreeMap;
use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use super::superblock::Superblock;
use crate::{Error, Result};

/// The magic number of journal blocks: a copy of a block that begins with it has zeroes there.
pub(super) const JOURNAL_MAGIC: [u8; 4] = [0xc0, 0x3b, 0x39, 0x98];

/// Where the journal has the newest copy of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JournalCopy {
    /// The block that holds the copy.
    pub(super) block: u64,
    /// Whether the first four bytes are replaced by zeroes.
    pub(super) is_escaped: bool,
}

/// Reads ranges of the file system.
pub(super) struct BlockReader {
    device: Arc<dyn BlockDevice>,
    block_bytes: u64,
    block_count: u64,
    copies: BTreeMap<u64, JournalCopy>,
}

impl BlockReader {
    pub(super) fn new(device: Arc<dyn BlockDevice>, superblock: &Superblock) -> Self {
        Self {
            device,
            block_bytes: superblock.block_bytes,
            block_count: superblock.block_count,
            copies: BTreeMap::new(),
        }
    }

    pub(super) fn set_copies(&mut self, copies: BTreeMap<u64, JournalCopy>) {
        self.copies = copies;
    }

    pub(super) fn block_count(&self) -> u64 {
        self.block_count
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    /// A whole block.
    pub(super) fn block(&self, number: u64) -> Result<Vec<u8>> {
        if number == 0 || number >= self.block_count {
            return Err(Error::damaged(
                "ext file system",
                format!("block {number} is used, and does not exist"),
            ));
        }
        self.range(number.saturating_mul(self.block_bytes), self.block_bytes)
    }

    /// The bytes of a range, which may cross blocks.
    pub(super) fn range(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; to_usize(length)];
        self.device.read_at(&mut bytes, offset)?;
        if self.copies.is_empty() || length == 0 {
            return Ok(bytes);
        }
        let end = offset + length;
        for (number, copy) in self
            .copies
            .range(offset / self.block_bytes..end.div_ceil(self.block_bytes))
        {
            let block = self.copied_block(*copy)?;
            let start = number.saturating_mul(self.block_bytes);
            let from = start.max(offset);
            let until = (start + self.block_bytes).min(end);
            let source = block.get(to_usize(from - start)..to_usize(until - start));
            let target = bytes.get_mut(to_usize(from - offset)..to_usize(until - offset));
            if let (Some(source), Some(target)) = (source, target) {
                target.copy_from_slice(source);
            }
        }
        Ok(bytes)
    }

    fn copied_block(&self, copy: JournalCopy) -> Result<Vec<u8>> {
        let mut block = vec![0; to_usize(self.block_bytes)];
        self.device
            .read_at(&mut block, copy.block.saturating_mul(self.block_bytes))?;
        if copy.is_escaped {
            block
                .iter_mut()
                .zip(JOURNAL_MAGIC)
                .for_each(|(byte, magic)| *byte = magic);
        }
        Ok(block)
    }
}
