//! From a block of a file to a block of the file system: lists and trees of extents.
//!
//! An extent has 128 bits: whether it is unwritten (1), first block of the file (54), first block of the file system (52),
//! number of blocks (21).

use super::inode::{ForkFormat, XfsInode};
use super::{XfsBlocks, check};
use crate::fields::Fields;
use crate::{Error, Result};

const EXTENT_BYTES: usize = 16;
const ROOT_HEADER_BYTES: usize = 4;
const NODE_HEADER_BYTES_4: usize = 24;
const NODE_HEADER_BYTES_5: usize = 72;
const NODE_CHECKSUM_AT: usize = 64;
const DEPTH_MAX: u16 = 8;
/// Files have less than 2^54 blocks.
const BLOCK_NUMBER_END: u64 = 1 << 54;

/// Consecutive blocks of a file that are stored consecutively, or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct XfsMapped {
    /// The first block; none for a hole.
    pub(super) first: Option<u64>,
    /// Number of blocks, at least 1.
    pub(super) count: u64,
}

/// The mapping of the blocks of a file from `block` on.
pub(super) fn map(blocks: &XfsBlocks, inode: &XfsInode, block: u64) -> Result<XfsMapped> {
    if block >= BLOCK_NUMBER_END {
        return Err(inode.damaged("the file is larger than any"));
    }
    match inode.format {
        ForkFormat::Extents => {
            let length = inode.extent_count.saturating_mul(EXTENT_BYTES as u64);
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let list = Fields::new("XFS extents", &inode.fork).bytes(0, length)?;
            in_list(inode, list, block, BLOCK_NUMBER_END)
        }
        ForkFormat::Tree => in_tree(blocks, inode, block),
        ForkFormat::Device | ForkFormat::Local => Err(inode.damaged("its data has no blocks")),
    }
}

/// Finds a block in a list of extents, whose last hole ends at `end`.
fn in_list(inode: &XfsInode, list: &[u8], block: u64, end: u64) -> Result<XfsMapped> {
    let mut hole_end = end;
    let mut last_end = 0;
    for extent in list.chunks_exact(EXTENT_BYTES) {
        let fields = Fields::new("XFS extent", extent);
        let (high, low) = (fields.be_u64(0)?, fields.be_u64(8)?);
        let start = (high & (u64::MAX >> 1)) >> 9;
        let stored = ((high & 0x1ff) << 43) | (low >> 21);
        let count = low & 0x1f_ffff;
        if start < last_end || count == 0 {
            return Err(inode.damaged("its extents are not in order"));
        }
        last_end = start + count;
        if block < start {
            hole_end = start;
            break;
        }
        if block < last_end {
            let inside = block - start;
            let is_unwritten = high >> 63 == 1;
            return Ok(XfsMapped {
                first: (!is_unwritten).then_some(stored + inside),
                count: count - inside,
            });
        }
    }
    if hole_end <= block {
        return Err(inode.damaged("its extents are not in order"));
    }
    Ok(XfsMapped {
        first: None,
        count: hole_end - block,
    })
}

fn in_tree(blocks: &XfsBlocks, inode: &XfsInode, block: u64) -> Result<XfsMapped> {
    let root = Fields::new("XFS extent tree", &inode.fork);
    let mut level = root.be_u16(0)?;
    if level == 0 || level > DEPTH_MAX {
        return Err(inode.damaged("the depth of its extent tree is invalid"));
    }
    let mut end = BLOCK_NUMBER_END;
    let mut count = usize::from(root.be_u16(2)?);
    let mut node = inode.fork.clone();
    let mut header_bytes = ROOT_HEADER_BYTES;
    loop {
        let fields = Fields::new("XFS extent tree", &node);
        let Some(child) = child_of(inode, fields.from(header_bytes)?, count, block, &mut end)? else {
            return Ok(XfsMapped {
                first: None,
                count: end - block,
            });
        };
        level -= 1;
        node = blocks.blocks(child, 1)?;
        header_bytes = check_node(blocks, inode, &node, level)?;
        let fields = Fields::new("XFS extent tree", &node);
        count = usize::from(fields.be_u16(6)?);
        if level == 0 {
            let list = fields.bytes(header_bytes, count * EXTENT_BYTES)?;
            return in_list(inode, list, block, end);
        }
    }
}

/// Verifies the header of a node; returns its length.
fn check_node(blocks: &XfsBlocks, inode: &XfsInode, node: &[u8], level: u16) -> Result<usize> {
    let fields = Fields::new("XFS extent tree", node);
    let has_checksums = blocks.superblock.has_checksums;
    let magic: &[u8] = if has_checksums { b"BMA3" } else { b"BMAP" };
    if fields.bytes(0, 4)? != magic || fields.be_u16(4)? != level {
        return Err(inode.damaged("a node of its extent tree is invalid"));
    }
    if !has_checksums {
        return Ok(NODE_HEADER_BYTES_4);
    }
    check("XFS extent tree", node, NODE_CHECKSUM_AT)?;
    if fields.be_u64(56)? != inode.number {
        return Err(inode.damaged("a node of its extent tree belongs to another file"));
    }
    Ok(NODE_HEADER_BYTES_5)
}

/// The child that covers `block`; none if all children begin after it. `end` becomes the start of the next child.
///
/// Keys and pointers are two arrays with room for the same number of entries, which fill the node.
fn child_of(inode: &XfsInode, entries: Fields<'_>, count: usize, block: u64, end: &mut u64) -> Result<Option<u64>> {
    let room = entries.len() / 16;
    if count == 0 || count > room {
        return Err(inode.damaged("a node of its extent tree has an impossible number of entries"));
    }
    let mut found = None;
    for index in 0..count {
        let key = entries.be_u64(index * 8)?;
        if key > block {
            if key > *end {
                return Err(Error::damaged("XFS extent tree", "its keys are not in order"));
            }
            *end = key;
            break;
        }
        found = Some(entries.be_u64((room + index) * 8)?);
    }
    Ok(found)
}
