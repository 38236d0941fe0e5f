//! Directories. Small ones are in their inode; others have blocks of entries, then blocks of an index behind 32 GiB,
//! which is not needed to list them.

use holdfast_block::to_usize;

use super::inode::{ForkFormat, XfsInode};
use super::{XfsBlocks, check, mapping};
use crate::fields::Fields;
use crate::{DirectoryEntry, Error, NodeId, Result};

/// The index begins here.
const DATA_END_BYTES: u64 = 32 << 30;
const HEADER_BYTES_4: usize = 16;
const HEADER_BYTES_5: usize = 64;
const UNUSED: u16 = 0xffff;

/// Visits the entries of a directory.
pub(super) fn read(
    blocks: &XfsBlocks,
    inode: &XfsInode,
    visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>,
) -> Result<()> {
    if inode.format == ForkFormat::Local {
        return in_inode(blocks, inode, visit);
    }
    let superblock = &blocks.superblock;
    let directory_block_bytes = superblock.directory_block_bytes;
    let block_count = directory_block_bytes / superblock.block_bytes;
    if block_count == 0 || inode.size_bytes > DATA_END_BYTES.min(blocks.device.size_bytes()) {
        return Err(inode.damaged("a directory of this size is impossible"));
    }
    let end = inode.size_bytes.div_ceil(directory_block_bytes) * block_count;
    let mut at = 0;
    while at < end {
        let mapped = mapping::map(blocks, inode, at)?;
        if mapped.first.is_none() {
            // Blocks without entries are given back.
            at = at.saturating_add(mapped.count).next_multiple_of(block_count);
            continue;
        }
        let mut bytes = Vec::with_capacity(to_usize(directory_block_bytes));
        while bytes.len() < to_usize(directory_block_bytes) {
            let index = at + bytes.len() as u64 / superblock.block_bytes;
            let mapped = mapping::map(blocks, inode, index)?;
            let first = mapped.first.ok_or_else(|| inode.damaged("a directory has a hole"))?;
            let left = block_count - (index - at);
            bytes.extend(blocks.blocks(first, mapped.count.min(left))?);
        }
        in_block(blocks, inode, &bytes, visit)?;
        at += block_count;
    }
    Ok(())
}

fn add(inode: &XfsInode, name: &[u8], number: u64, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
    if name == b"." || name == b".." {
        return Ok(());
    }
    if !DirectoryEntry::is_valid_name(name) {
        return Err(Error::damaged(
            "XFS directory",
            format!("inode {} has an invalid name", inode.number),
        ));
    }
    visit(DirectoryEntry {
        name: name.to_vec(),
        node: NodeId(number),
    })
}

/// A directory in its inode: number of entries, number of those with 8 bytes for an inode, parent, entries.
fn in_inode(blocks: &XfsBlocks, inode: &XfsInode, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
    let fields = Fields::new("XFS directory", &inode.fork);
    let is_wide = fields.u8(1)? > 0;
    let count = fields.u8(0)?;
    let width = if is_wide { 8 } else { 4 };
    let mut at = 2 + width;
    for _ in 0..count {
        let length = usize::from(fields.u8(at)?);
        let name = fields.bytes(at + 3, length)?;
        at += 3 + length + usize::from(blocks.superblock.has_file_types);
        let number = if is_wide {
            fields.be_u64(at)?
        } else {
            u64::from(fields.be_u32(at)?)
        };
        at += width;
        add(inode, name, number, visit)?;
    }
    Ok(())
}

fn in_block(
    blocks: &XfsBlocks,
    inode: &XfsInode,
    bytes: &[u8],
    visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>,
) -> Result<()> {
    let fields = Fields::new("XFS directory", bytes);
    let has_checksums = blocks.superblock.has_checksums;
    // A directory of one block has the index at the end of the block.
    let has_index = match (fields.bytes(0, 4)?, has_checksums) {
        (b"XD2B", false) | (b"XDB3", true) => true,
        (b"XD2D", false) | (b"XDD3", true) => false,
        _ => return Err(inode.damaged("a block of its directory is invalid")),
    };
    let mut at = HEADER_BYTES_4;
    if has_checksums {
        check("XFS directory", bytes, 4)?;
        if fields.be_u64(40)? != inode.number {
            return Err(inode.damaged("a block of its directory belongs to another one"));
        }
        at = HEADER_BYTES_5;
    }
    let mut end = bytes.len();
    if has_index {
        let count = fields.be_u32(end - 8)? as usize;
        let index_bytes = count.saturating_mul(8).saturating_add(8);
        end = end
            .checked_sub(index_bytes)
            .ok_or_else(|| inode.damaged("the index of its directory is too long"))?;
    }
    while at < end {
        let entry = fields.from(at)?;
        let length = if entry.be_u16(0)? == UNUSED {
            usize::from(entry.be_u16(2)?)
        } else {
            let name_length = usize::from(entry.u8(8)?);
            let length = 8 + 1 + name_length + usize::from(blocks.superblock.has_file_types) + 2;
            add(inode, entry.bytes(9, name_length)?, entry.be_u64(0)?, visit)?;
            length.next_multiple_of(8)
        };
        if length == 0 || length % 8 != 0 || at + length > end {
            return Err(inode.damaged("an entry of its directory is invalid"));
        }
        at += length;
    }
    Ok(())
}
