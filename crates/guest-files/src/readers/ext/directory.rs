//! Directories. The index of a large directory hides in entries without an inode, so all blocks are read in order.

use super::blocks::BlockReader;
use super::inode::Inode;
use super::superblock::Superblock;
use super::{crc32c_of, mapping};
use crate::fields::Fields;
use crate::{DirectoryEntry, Error, NodeId, Result};

const HEADER_BYTES: usize = 8;
/// The kind of the entry that holds the checksum of its block.
const KIND_CHECKSUM: u8 = 0xde;
const CHECKSUM_ENTRY_BYTES: usize = 12;

/// Visits the entries of a directory.
pub(super) fn read(
    blocks: &BlockReader,
    superblock: &Superblock,
    inode: &Inode,
    visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>,
) -> Result<()> {
    if !inode.size_bytes.is_multiple_of(superblock.block_bytes) || inode.size_bytes > blocks.size_bytes() {
        return Err(inode.damaged("a directory of this size is impossible"));
    }
    let count = inode.size_bytes / superblock.block_bytes;
    let mut at = 0;
    while at < count {
        let mapped = mapping::map(blocks, superblock, inode, at)?;
        let Some(first) = mapped.first else {
            return Err(inode.damaged("a directory has a hole"));
        };
        let numbers = (first..first + mapped.count).take(holdfast_block::to_usize(count - at));
        for (index, number) in (at..).zip(numbers) {
            let block = blocks.block(number)?;
            if !is_index(inode, index, &block)? {
                check(inode, &block)?;
            }
            entries(inode, superblock.has_file_types, &block, visit)?;
        }
        at += mapped.count;
    }
    Ok(())
}

/// Whether a block belongs to the index of a large directory: the first block, and blocks that are one unused entry. What
/// is behind the index in them is left over.
fn is_index(inode: &Inode, index: u64, block: &[u8]) -> Result<bool> {
    if !inode.is_indexed() {
        return Ok(false);
    }
    let entry = Fields::new("directory", block);
    Ok(index == 0 || (entry.u32(0)? == 0 && entry_length(entry.u16(4)?, block.len()) == block.len()))
}

/// Verifies the checksum of a block of entries.
fn check(inode: &Inode, block: &[u8]) -> Result<()> {
    let (Some(seed), Some(at)) = (inode.checksum_seed, block.len().checked_sub(CHECKSUM_ENTRY_BYTES)) else {
        return Ok(());
    };
    let tail = Fields::new("directory", block).from(at)?;
    let is_tail = tail.u32(0)? == 0 && tail.u16(4)? == 12 && tail.u8(6)? == 0 && tail.u8(7)? == KIND_CHECKSUM;
    if is_tail && crc32c_of(seed, block.get(..at).unwrap_or_default()) != tail.u32(8)? {
        return Err(inode.damaged("the checksum of a block of its directory differs"));
    }
    Ok(())
}

fn entries(
    inode: &Inode,
    has_file_types: bool,
    block: &[u8],
    visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>,
) -> Result<()> {
    let fields = Fields::new("directory", block);
    let mut at = 0;
    while at < fields.len() {
        let entry = fields.from(at)?;
        let number = entry.u32(0)?;
        let length = entry_length(entry.u16(4)?, fields.len());
        // Without file types the length of the name has 16 bits.
        let name_length = if has_file_types {
            usize::from(entry.u8(6)?)
        } else {
            usize::from(entry.u16(6)?)
        };
        let is_valid = length >= HEADER_BYTES && length.is_multiple_of(4) && at + length <= fields.len();
        if !is_valid || (number != 0 && HEADER_BYTES + name_length > length) {
            return Err(inode.damaged("an entry of its directory is invalid"));
        }
        if number != 0 {
            let name = entry.bytes(HEADER_BYTES, name_length)?;
            if name != b"." && name != b".." {
                if !DirectoryEntry::is_valid_name(name) {
                    return Err(Error::damaged(
                        "directory",
                        format!("inode {} has an invalid name", inode.number),
                    ));
                }
                visit(DirectoryEntry {
                    name: name.to_vec(),
                    node: NodeId(u64::from(number)),
                })?;
            }
        }
        at += length;
    }
    Ok(())
}

/// The length of an entry. In blocks of 64 KiB the lowest two bits stand for the highest.
fn entry_length(raw: u16, block_bytes: usize) -> usize {
    const WHOLE: u16 = u16::MAX;
    if block_bytes < 65_536 {
        usize::from(raw)
    } else if matches!(raw, 0 | WHOLE) {
        block_bytes
    } else {
        usize::from(raw & 0xfffc) | (usize::from(raw & 3) << 16)
    }
}
