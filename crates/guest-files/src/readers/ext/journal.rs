//! The journal (jbd2): which blocks its committed transactions replace.
//!
//! All numbers are big-endian. Each block of the journal itself begins with the magic number, a kind and the number of
//! its transaction. A descriptor block lists the blocks whose new content follows it; a revocation block lists blocks
//! whose older copies must not be used; a commit block ends a transaction. A transaction without one never happened.

use std::collections::BTreeMap;

use super::blocks::{BlockReader, JOURNAL_MAGIC, JournalCopy};
use super::inode::Inode;
use super::superblock::Superblock;
use super::{crc32c_of, mapping};
use crate::fields::Fields;
use crate::{Error, Result};

const HEADER_BYTES: usize = 12;
const KIND_DESCRIPTOR: u32 = 1;
const KIND_COMMIT: u32 = 2;
const KIND_REVOCATION: u32 = 5;

const FEATURE_64BIT: u32 = 0x2;
const FEATURE_CHECKSUM_V2: u32 = 0x8;
const FEATURE_CHECKSUM_V3: u32 = 0x10;
/// Revocations, 64 bits, asynchronous commits, checksums. Fast commits hold changes that only a mount can apply.
const FEATURES_KNOWN: u32 = 0x1 | FEATURE_64BIT | 0x4 | FEATURE_CHECKSUM_V2 | FEATURE_CHECKSUM_V3;
const FEATURE_FAST_COMMIT: u32 = 0x20;

const TAG_ESCAPED: u32 = 1;
const TAG_SAME_UUID: u32 = 2;
const TAG_LAST: u32 = 8;
/// Blocks of a journal: 16 GiB in blocks of 4 KiB.
const JOURNAL_BLOCKS_MAX: u64 = 1 << 22;

/// The journal as a ring of blocks.
struct JournalRing<'a> {
    blocks: &'a BlockReader,
    superblock: &'a Superblock,
    inode: &'a Inode,
    first: u64,
    end: u64,
    features: u32,
    seed: u32,
}

/// A committed block and the transaction that wrote it.
struct CommittedCopy {
    sequence: u32,
    copy: JournalCopy,
}

#[derive(Default)]
struct ScannedJournal {
    copies: BTreeMap<u64, CommittedCopy>,
    revocations: BTreeMap<u64, u32>,
    /// A block whose copy does not have the checksum in its tag.
    torn: Option<u64>,
}

/// The blocks that a mount would replace.
pub(super) fn replay(
    blocks: &BlockReader,
    superblock: &Superblock,
    inode: &Inode,
) -> Result<BTreeMap<u64, JournalCopy>> {
    let header_block = stored_block(blocks, superblock, inode, 0)?;
    let header_bytes = blocks.block(header_block)?;
    let header = Fields::new("journal", &header_bytes);
    if header.bytes(0, 4)? != JOURNAL_MAGIC || !matches!(header.be_u32(4)?, 3 | 4) {
        return Err(header.damaged("its superblock is invalid"));
    }
    let features = if header.be_u32(4)? == 4 {
        header.be_u32(0x28)?
    } else {
        0
    };
    if features & FEATURE_FAST_COMMIT != 0 {
        return Err(Error::unsupported(
            "a journal of ext4 with fast commits, which must be replayed,",
        ));
    }
    if features & !FEATURES_KNOWN != 0 {
        return Err(Error::unsupported(format!(
            "a journal of ext4 with features {features:#x}"
        )));
    }
    let ring = JournalRing {
        blocks,
        superblock,
        inode,
        first: u64::from(header.be_u32(0x14)?),
        end: u64::from(header.be_u32(0x10)?),
        features,
        seed: crc32c_of(u32::MAX, header.bytes(0x30, 16)?),
    };
    let is_valid = u64::from(header.be_u32(0xc)?) == superblock.block_bytes
        && ring.first > 0
        && ring.first < ring.end
        && ring.end <= JOURNAL_BLOCKS_MAX;
    if !is_valid {
        return Err(header.damaged("its superblock is invalid"));
    }
    let start = u64::from(header.be_u32(0x1c)?);
    if start == 0 {
        return Ok(BTreeMap::new());
    }
    ring.scan(start, header.be_u32(0x18)?)
}

fn stored_block(blocks: &BlockReader, superblock: &Superblock, inode: &Inode, number: u64) -> Result<u64> {
    let mapped = mapping::map(blocks, superblock, inode, number)?;
    mapped.first.ok_or_else(|| inode.damaged("the journal has a hole"))
}

impl JournalRing<'_> {
    fn has_checksums(&self) -> bool {
        self.features & (FEATURE_CHECKSUM_V2 | FEATURE_CHECKSUM_V3) != 0
    }

    fn after(&self, number: u64) -> u64 {
        if number + 1 >= self.end { self.first } else { number + 1 }
    }

    /// Follows the transactions from block `start`, whose first has the number `sequence`.
    fn scan(&self, start: u64, mut sequence: u32) -> Result<BTreeMap<u64, JournalCopy>> {
        if start < self.first || start >= self.end {
            return Err(self.inode.damaged("the journal starts outside itself"));
        }
        let mut scanned = ScannedJournal::default();
        let mut transaction = ScannedJournal::default();
        let mut at = start;
        let mut block_count = 0;
        while block_count < self.end {
            let block = self.blocks.block(self.stored(at)?)?;
            let fields = Fields::new("journal", &block);
            if fields.bytes(0, 4)? != JOURNAL_MAGIC || fields.be_u32(8)? != sequence {
                break;
            }
            at = self.after(at);
            block_count += 1;
            match fields.be_u32(4)? {
                KIND_DESCRIPTOR => {
                    if !self.is_tail_valid(&block)? {
                        break;
                    }
                    let tags = self.tags(&fields, sequence)?;
                    block_count += tags.len() as u64;
                    self.add_copies(&tags, sequence, &mut at, &mut transaction)?;
                }
                KIND_REVOCATION => {
                    if !self.is_tail_valid(&block)? {
                        break;
                    }
                    self.add_revocations(&fields, sequence, &mut transaction)?;
                }
                KIND_COMMIT => {
                    if !self.is_commit_valid(&block)? {
                        break;
                    }
                    if let Some(torn) = transaction.torn {
                        return Err(fields.damaged(format!("the checksum of the copy of block {torn} differs")));
                    }
                    scanned.copies.append(&mut transaction.copies);
                    scanned.revocations.append(&mut transaction.revocations);
                    sequence = sequence.wrapping_add(1);
                }
                _ => break,
            }
        }
        Ok(scanned.valid_copies())
    }

    fn stored(&self, number: u64) -> Result<u64> {
        stored_block(self.blocks, self.superblock, self.inode, number)
    }

    /// Whether the checksum in the last four bytes of a descriptor or revocation block is right.
    fn is_tail_valid(&self, block: &[u8]) -> Result<bool> {
        if !self.has_checksums() {
            return Ok(true);
        }
        let fields = Fields::new("journal", block);
        let at = fields.len().saturating_sub(4);
        let mut bytes = fields.bytes(0, at)?.to_vec();
        bytes.extend_from_slice(&[0; 4]);
        Ok(crc32c_of(self.seed, &bytes) == fields.be_u32(at)?)
    }

    fn is_commit_valid(&self, block: &[u8]) -> Result<bool> {
        const CHECKSUM_AT: usize = 16;
        if !self.has_checksums() {
            return Ok(true);
        }
        let expected = Fields::new("journal", block).be_u32(CHECKSUM_AT)?;
        let mut bytes = block.to_vec();
        bytes.iter_mut().skip(CHECKSUM_AT).take(4).for_each(|byte| *byte = 0);
        Ok(crc32c_of(self.seed, &bytes) == expected)
    }

    /// The tags of a descriptor block.
    fn tags(&self, fields: &Fields<'_>, sequence: u32) -> Result<Vec<JournalTag>> {
        const UUID_BYTES: usize = 16;
        let is_64bit = self.features & FEATURE_64BIT != 0;
        let is_v3 = self.features & FEATURE_CHECKSUM_V3 != 0;
        let is_v2 = self.features & FEATURE_CHECKSUM_V2 != 0;
        let tag_bytes = match (is_v3, is_v2, is_64bit) {
            (true, ..) => 16,
            (false, true, true) => 14,
            (false, true, false) => 10,
            (false, false, true) => 12,
            (false, false, false) => 8,
        };
        let end = fields.len() - if self.has_checksums() { 4 } else { 0 };
        let mut at = HEADER_BYTES;
        let mut tags = Vec::new();
        while at + tag_bytes <= end {
            let tag = fields.from(at)?;
            let raw_flags = tag.be_u32(4)?;
            let flags = if is_v3 { raw_flags } else { raw_flags & 0xffff };
            let high = if is_64bit { u64::from(tag.be_u32(8)?) } else { 0 };
            let checksum = if is_v3 {
                Some(TagChecksum::Whole(tag.be_u32(12)?))
            } else {
                is_v2.then_some(TagChecksum::Low(raw_flags >> 16))
            };
            tags.push(JournalTag {
                block: u64::from(tag.be_u32(0)?) | (high << 32),
                is_escaped: flags & TAG_ESCAPED != 0,
                checksum,
            });
            at += tag_bytes;
            if flags & TAG_SAME_UUID == 0 {
                at += UUID_BYTES;
            }
            if flags & TAG_LAST != 0 {
                return Ok(tags);
            }
        }
        Err(fields.damaged(format!("a descriptor of transaction {sequence} does not end")))
    }

    /// Adds the blocks behind a descriptor, from block `at` of the journal on.
    fn add_copies(
        &self,
        tags: &[JournalTag],
        sequence: u32,
        at: &mut u64,
        transaction: &mut ScannedJournal,
    ) -> Result<()> {
        for tag in tags {
            let stored = self.stored(*at)?;
            *at = self.after(*at);
            let copy = JournalCopy {
                block: stored,
                is_escaped: tag.is_escaped,
            };
            // Torn copies are expected only in a last transaction without a commit, which is dropped.
            let is_valid = tag.checksum.is_none_or(|checksum| {
                let block = self.blocks.block(stored).unwrap_or_default();
                let seed = crc32c_of(self.seed, &sequence.to_be_bytes());
                let actual = crc32c_of(seed, &block);
                match checksum {
                    TagChecksum::Whole(expected) => actual == expected,
                    TagChecksum::Low(expected) => actual & 0xffff == expected,
                }
            });
            if !is_valid {
                transaction.torn.get_or_insert(tag.block);
            }
            transaction.copies.insert(tag.block, CommittedCopy { sequence, copy });
        }
        Ok(())
    }

    fn add_revocations(&self, fields: &Fields<'_>, sequence: u32, transaction: &mut ScannedJournal) -> Result<()> {
        const FIRST_AT: usize = 16;
        let is_64bit = self.features & FEATURE_64BIT != 0;
        let width = if is_64bit { 8 } else { 4 };
        let used = fields.be_u32(HEADER_BYTES)? as usize;
        let mut at = FIRST_AT;
        while at + width <= used {
            let block = if is_64bit {
                (u64::from(fields.be_u32(at)?) << 32) | u64::from(fields.be_u32(at + 4)?)
            } else {
                u64::from(fields.be_u32(at)?)
            };
            transaction.revocations.insert(block, sequence);
            at += width;
        }
        Ok(())
    }
}

/// A block that a descriptor lists.
struct JournalTag {
    block: u64,
    is_escaped: bool,
    checksum: Option<TagChecksum>,
}

#[derive(Clone, Copy)]
enum TagChecksum {
    Whole(u32),
    /// The lower 16 bits.
    Low(u32),
}

impl ScannedJournal {
    /// The newest copies that no later transaction revokes.
    fn valid_copies(self) -> BTreeMap<u64, JournalCopy> {
        let revocations = self.revocations;
        let is_valid = |block: u64, sequence: u32| {
            // Numbers of transactions wrap.
            let revoked = revocations.get(&block);
            revoked.is_none_or(|revoked| revoked.wrapping_sub(sequence).cast_signed() < 0)
        };
        let copies = self.copies.into_iter();
        copies
            .filter(|(block, committed)| is_valid(*block, committed.sequence))
            .map(|(block, committed)| (block, committed.copy))
            .collect()
    }
}
