//! Directories: a B-tree of names, whose root is in the record. All blocks of the tree that are in use are read in
//! their order, because every entry in them is a name.

use holdfast_block::to_usize;

use super::record::{FileRecord, restore_sector_ends};
use super::{NtfsFileSystem, kind};
use crate::fields::{Fields, utf8_of_utf16};
use crate::{DirectoryEntry, Error, NodeId, Result};

/// The name of the attributes of a directory.
const INDEX_NAME: &[u8] = b"$I30";
const ROOT_HEADER_AT: usize = 0x10;
const BLOCK_HEADER_AT: usize = 0x18;
const ENTRY_FLAG_LAST: u16 = 2;
/// The short name of a file that has a long one.
const NAMESPACE_DOS: u8 = 2;
const BITMAP_BYTES_MAX: u64 = 16 << 20;

/// Visits the entries of a directory.
pub(super) fn read(
    file_system: &NtfsFileSystem,
    record: &FileRecord,
    visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>,
) -> Result<()> {
    let root = file_system.stream(record, kind::INDEX_ROOT, INDEX_NAME)?;
    let root_bytes = root.bytes(&*file_system.device, 0, to_usize(root.size_bytes().min(65_536)))?;
    let root = Fields::new("NTFS directory", &root_bytes);
    entries(root.from(ROOT_HEADER_AT)?, visit)?;
    if record.attributes_of(kind::INDEX_ALLOCATION, INDEX_NAME).is_empty() {
        return Ok(());
    }
    let blocks = file_system.stream(record, kind::INDEX_ALLOCATION, INDEX_NAME)?;
    let bitmap = file_system.stream(record, kind::BITMAP, INDEX_NAME)?;
    if bitmap.size_bytes() > BITMAP_BYTES_MAX {
        return Err(root.damaged("its bitmap is too large"));
    }
    let bitmap = bitmap.bytes(&*file_system.device, 0, to_usize(bitmap.size_bytes()))?;
    let block_bytes = u64::from(root.u32(8)?);
    if block_bytes != file_system.geometry.index_bytes {
        return Err(root.damaged(format!("its blocks have {block_bytes} bytes")));
    }
    // Blocks are numbered in clusters, or in sectors if a cluster is larger than a block.
    let unit_bytes = if file_system.geometry.cluster_bytes <= block_bytes {
        file_system.geometry.cluster_bytes
    } else {
        512
    };
    let bits = bitmap
        .iter()
        .flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1));
    for (number, _) in (0u64..).zip(bits).filter(|(_, is_used)| *is_used) {
        let offset = number * block_bytes;
        let mut block = blocks.bytes(&*file_system.device, offset, to_usize(block_bytes))?;
        restore_sector_ends(&mut block, b"INDX", "NTFS directory")?;
        let fields = Fields::new("NTFS directory", &block);
        if fields.u64(0x10)? != offset / unit_bytes {
            return Err(fields.damaged(format!("block {number} of record {} is another one", record.number)));
        }
        entries(fields.from(BLOCK_HEADER_AT)?, visit)?;
    }
    Ok(())
}

/// Visits the entries after the header of a root or block.
fn entries(header: Fields<'_>, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
    let mut at = header.u32(0)? as usize;
    let end = header.u32(4)? as usize;
    while at < end {
        let entry = header.from(at)?;
        let length = usize::from(entry.u16(8)?);
        if length < 0x10 || at + length > end {
            return Err(header.damaged(format!("an entry of {length} bytes")));
        }
        if entry.u16(0xc)? & ENTRY_FLAG_LAST != 0 {
            return Ok(());
        }
        let key = Fields::new("NTFS directory", entry.bytes(0x10, usize::from(entry.u16(0xa)?))?);
        let name = key.bytes(0x42, usize::from(key.u8(0x40)?) * 2)?;
        if key.u8(0x41)? != NAMESPACE_DOS {
            let name = utf8_of_utf16(name);
            // The root directory is an entry of itself.
            if name != b"." {
                if !DirectoryEntry::is_valid_name(&name) {
                    return Err(Error::damaged("NTFS directory", "a name in it is invalid"));
                }
                visit(DirectoryEntry {
                    name,
                    node: NodeId(entry.u64(0)?),
                })?;
            }
        }
        at += length;
    }
    Err(header.damaged("its last entry is missing"))
}
