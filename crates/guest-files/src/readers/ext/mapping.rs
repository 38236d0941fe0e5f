//! From a block of a file to a block of the file system: extent trees, and block maps of ext2 and ext3.

use super::blocks::BlockReader;
use super::crc32c_of;
use super::inode::Inode;
use super::superblock::Superblock;
use crate::fields::Fields;
use crate::{Error, Result};

const EXTENT_MAGIC: u16 = 0xf30a;
const EXTENT_DEPTH_MAX: u16 = 5;
const ENTRY_BYTES: usize = 12;
/// A length above this marks an extent that is allocated and not written: it reads as zero.
const WRITTEN_LENGTH_MAX: u16 = 32_768;
/// Direct blocks of a block map.
const DIRECT_COUNT: u64 = 12;
/// Files of ext4 have at most 2^32 blocks.
const BLOCK_NUMBER_END: u64 = 1 << 32;

/// Consecutive blocks of a file that are stored consecutively, or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MappedBlocks {
    /// The first block; none for a hole.
    pub(super) first: Option<u64>,
    /// Number of blocks, at least 1.
    pub(super) count: u64,
}

/// The mapping of the blocks of a file from `block` on.
pub(super) fn map(blocks: &BlockReader, superblock: &Superblock, inode: &Inode, block: u64) -> Result<MappedBlocks> {
    if block >= BLOCK_NUMBER_END {
        return Err(inode.damaged("the file is larger than any"));
    }
    let mapped = if inode.uses_extents() {
        map_extents(blocks, inode, block)?
    } else {
        map_indirect(blocks, superblock, inode, block)?
    };
    if let Some(first) = mapped.first {
        let end = first.saturating_add(mapped.count);
        if first == 0 || end > blocks.block_count() {
            return Err(inode.damaged(&format!("blocks {first} to {end} do not exist")));
        }
    }
    Ok(mapped)
}

/// A node of an extent tree.
struct ExtentNode<'a> {
    fields: Fields<'a>,
    depth: u16,
    entry_count: usize,
}

impl<'a> ExtentNode<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self> {
        let fields = Fields::new("extent tree", bytes);
        let (entry_count, entry_count_max) = (fields.u16(2)?, fields.u16(4)?);
        let depth = fields.u16(6)?;
        let room = (bytes.len() / ENTRY_BYTES).saturating_sub(1);
        let is_valid = fields.u16(0)? == EXTENT_MAGIC
            && depth <= EXTENT_DEPTH_MAX
            && entry_count <= entry_count_max
            && usize::from(entry_count_max) <= room;
        if !is_valid {
            return Err(fields.damaged("a node is invalid"));
        }
        Ok(Self {
            fields,
            depth,
            entry_count: usize::from(entry_count),
        })
    }

    fn entry(&self, index: usize) -> Result<Fields<'a>> {
        self.fields.from(ENTRY_BYTES * (index + 1))
    }

    /// First block of the file that an entry describes.
    fn first_block(&self, index: usize) -> Result<u64> {
        Ok(u64::from(self.entry(index)?.u32(0)?))
    }

    /// The number of entries that begin at or before `block`. Their order is checked.
    fn entries_before(&self, block: u64) -> Result<usize> {
        let mut count = 0;
        let mut last = None;
        for index in 0..self.entry_count {
            let first = self.first_block(index)?;
            if last.is_some_and(|last| first <= last) {
                return Err(self.fields.damaged("entries are not in order"));
            }
            last = Some(first);
            if first <= block {
                count = index + 1;
            }
        }
        Ok(count)
    }
}

fn map_extents(blocks: &BlockReader, inode: &Inode, block: u64) -> Result<MappedBlocks> {
    let mut bytes = inode.mapping.to_vec();
    // The first block behind the entries that were followed.
    let mut end = BLOCK_NUMBER_END;
    let mut depth = None;
    loop {
        let node = ExtentNode::parse(&bytes)?;
        if depth.is_some_and(|depth| node.depth != depth) {
            return Err(inode.damaged("its extent tree has a node of the wrong depth"));
        }
        let before = node.entries_before(block)?;
        if before < node.entry_count {
            end = end.min(node.first_block(before)?);
        }
        let Some(index) = before.checked_sub(1) else {
            return hole(inode, block, end);
        };
        let entry = node.entry(index)?;
        if node.depth == 0 {
            return of_extent(inode, entry, block, end);
        }
        depth = Some(node.depth - 1);
        let child = u64::from(entry.u32(4)?) | (u64::from(entry.u16(8)?) << 32);
        bytes = blocks.block(child)?;
        check_node(inode, &bytes)?;
    }
}

fn hole(inode: &Inode, block: u64, end: u64) -> Result<MappedBlocks> {
    if end <= block {
        return Err(inode.damaged("its extents are not in order"));
    }
    Ok(MappedBlocks {
        first: None,
        count: end - block,
    })
}

fn of_extent(inode: &Inode, entry: Fields<'_>, block: u64, end: u64) -> Result<MappedBlocks> {
    let start = u64::from(entry.u32(0)?);
    let raw_length = entry.u16(4)?;
    let is_written = raw_length <= WRITTEN_LENGTH_MAX;
    let length = u64::from(if is_written {
        raw_length
    } else {
        raw_length - WRITTEN_LENGTH_MAX
    });
    let inside = block - start;
    if start + length > end {
        return Err(inode.damaged("its extents overlap"));
    }
    if inside >= length {
        return hole(inode, block, end);
    }
    let stored = u64::from(entry.u32(8)?) | (u64::from(entry.u16(6)?) << 32);
    Ok(MappedBlocks {
        first: is_written.then_some(stored + inside),
        count: length - inside,
    })
}

/// Verifies the checksum behind the entries of a node.
fn check_node(inode: &Inode, bytes: &[u8]) -> Result<()> {
    let Some(seed) = inode.checksum_seed else {
        return Ok(());
    };
    let fields = Fields::new("extent tree", bytes);
    let at = ENTRY_BYTES * (usize::from(fields.u16(4)?) + 1);
    if crc32c_of(seed, fields.bytes(0, at)?) != fields.u32(at)? {
        return Err(inode.damaged("the checksum of a node of its extent tree differs"));
    }
    Ok(())
}

/// Maps by direct, indirect, doubly and triply indirect blocks. A pointer of zero anywhere is a hole of all blocks below
/// it.
fn map_indirect(blocks: &BlockReader, superblock: &Superblock, inode: &Inode, block: u64) -> Result<MappedBlocks> {
    let per_block = superblock.block_bytes / 4;
    let root = Fields::new("block map", &inode.mapping);
    if block < DIRECT_COUNT {
        return pointers(&root, block, DIRECT_COUNT);
    }
    let mut inside = block - DIRECT_COUNT;
    // Blocks of the file below one pointer of the root.
    let mut span = per_block;
    for level in 0..3u64 {
        if inside < span {
            let mut pointer = root.u32(holdfast_block::to_usize((DIRECT_COUNT + level) * 4))?;
            let mut below = span;
            for _ in 0..level {
                if pointer == 0 {
                    break;
                }
                below /= per_block;
                let table = blocks.block(u64::from(pointer))?;
                let index = inside / below;
                inside %= below;
                pointer = Fields::new("block map", &table).u32(holdfast_block::to_usize(index * 4))?;
            }
            if pointer == 0 {
                return Ok(MappedBlocks {
                    first: None,
                    count: below - inside,
                });
            }
            let table = blocks.block(u64::from(pointer))?;
            return pointers(&Fields::new("block map", &table), inside, per_block);
        }
        inside -= span;
        span = span.saturating_mul(per_block);
    }
    Err(Error::damaged(
        "block map",
        format!("block {block} of a file is past its end"),
    ))
}

/// Consecutive pointers from `index` on in a table of `count` pointers.
fn pointers(table: &Fields<'_>, index: u64, count: u64) -> Result<MappedBlocks> {
    let pointer = |index: u64| Ok::<_, Error>(u64::from(table.u32(holdfast_block::to_usize(index * 4))?));
    let first = pointer(index)?;
    let mut length = 1;
    while index + length < count {
        let expected = if first == 0 { 0 } else { first + length };
        if pointer(index + length)? != expected {
            break;
        }
        length += 1;
    }
    Ok(MappedBlocks {
        first: (first != 0).then_some(first),
        count: length,
    })
}
