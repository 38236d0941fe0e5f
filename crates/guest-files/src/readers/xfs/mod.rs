//! XFS, versions 4 and 5, of which the log needs no replay.
//!
//! All numbers are big-endian; checksums are little-endian CRC-32C and are verified in version 5. A file system whose log
//! holds changes is refused: without them its metadata can be old. After an unmount, and while a guest has frozen the
//! file system for a snapshot, the log holds none.

mod directory;
mod inode;
mod log;
mod mapping;
mod superblock;

use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use self::inode::{ForkFormat, XfsInode};
use self::superblock::XfsSuperblock;
use crate::fields::Fields;
use crate::{DirectoryEntry, Error, FileKind, FilePiece, FileSystem, Metadata, NodeId, PIECE_BYTES_MAX, Result};

/// Linux limits targets of links in XFS to 1024 bytes.
const LINK_BYTES_MAX: u64 = 1024;

/// Reads blocks of the file system.
struct XfsBlocks {
    device: Arc<dyn BlockDevice>,
    superblock: XfsSuperblock,
}

impl XfsBlocks {
    fn range(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; to_usize(length)];
        self.device.read_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// `count` blocks from a block of the file system on, whose number contains its allocation group.
    fn blocks(&self, first: u64, count: u64) -> Result<Vec<u8>> {
        let at = self.superblock.position_of(first, count)?;
        self.range(at, count * self.superblock.block_bytes)
    }
}

/// Verifies a checksum, which is stored at `at` in the bytes that it covers.
fn check(what: &'static str, bytes: &[u8], at: usize) -> Result<()> {
    let fields = Fields::new(what, bytes);
    let stored = fields.u32(at)?;
    let before = fields.bytes(0, at)?;
    let after = fields.from(at + 4)?.as_slice();
    let actual = crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(before), &[0; 4]), after);
    if actual == stored {
        Ok(())
    } else {
        Err(Error::damaged(what, "its checksum differs"))
    }
}

/// A file system of the XFS family.
pub(crate) struct XfsFileSystem {
    blocks: XfsBlocks,
    /// The inode that was used last: a file is read in many pieces.
    last: Option<XfsInode>,
}

impl XfsFileSystem {
    pub(crate) fn open(device: Arc<dyn BlockDevice>) -> Result<Self> {
        let superblock = XfsSuperblock::read(&*device)?;
        let blocks = XfsBlocks { device, superblock };
        log::refuse_changes(&blocks)?;
        Ok(Self { blocks, last: None })
    }

    fn inode(&mut self, node: NodeId) -> Result<XfsInode> {
        match &self.last {
            Some(inode) if inode.number == node.0 => Ok(inode.clone()),
            _ => {
                let inode = XfsInode::read(&self.blocks, node.0)?;
                self.last = Some(inode.clone());
                Ok(inode)
            }
        }
    }

    /// The target of a link that has blocks. In version 5 each block begins with a header.
    fn stored_target(&self, inode: &XfsInode) -> Result<Vec<u8>> {
        const HEADER_BYTES: usize = 56;
        let superblock = &self.blocks.superblock;
        let header_bytes = if superblock.has_checksums { HEADER_BYTES } else { 0 };
        let length = to_usize(inode.size_bytes);
        let mut target = Vec::new();
        let mut block = 0;
        while target.len() < length {
            let mapped = mapping::map(&self.blocks, inode, block)?;
            let first = mapped
                .first
                .ok_or_else(|| inode.damaged("the target of a link has a hole"))?;
            // The blocks of one extent share a header.
            let count = mapped.count.min(inode.size_bytes.div_ceil(superblock.block_bytes) + 1);
            let bytes = self.blocks.blocks(first, count)?;
            let mut used = bytes.len();
            if superblock.has_checksums {
                let fields = Fields::new("XFS link", &bytes);
                used = HEADER_BYTES + fields.be_u32(8)? as usize;
                let is_valid = fields.bytes(0, 4)? == b"XSLM"
                    && fields.be_u64(32)? == inode.number
                    && fields.be_u32(4)? as usize == target.len();
                if !is_valid {
                    return Err(inode.damaged("the target of a link is another one's"));
                }
                check("XFS link", &bytes, 12)?;
            }
            let part = bytes.get(header_bytes..used).unwrap_or_default();
            if part.is_empty() {
                return Err(inode.damaged("the target of a link is incomplete"));
            }
            target.extend_from_slice(part);
            block += count;
        }
        target.truncate(length);
        Ok(target)
    }
}

impl FileSystem for XfsFileSystem {
    fn root(&self) -> NodeId {
        NodeId(self.blocks.superblock.root_inode)
    }

    fn metadata(&mut self, node: NodeId) -> Result<Metadata> {
        let inode = self.inode(node)?;
        let size_bytes = match inode.kind {
            FileKind::File | FileKind::Link => inode.size_bytes,
            FileKind::Directory | FileKind::Special => 0,
        };
        Ok(Metadata {
            kind: inode.kind,
            size_bytes,
            mode: Some(inode.mode),
            uid: Some(inode.uid),
            gid: Some(inode.gid),
            modified: Some(inode.modified),
            shared_id: inode.has_other_names.then_some(inode.number),
        })
    }

    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
        let inode = self.inode(node)?;
        if inode.kind != FileKind::Directory {
            return Err(Error::NotADirectory);
        }
        directory::read(&self.blocks, &inode, visit)
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        let inode = self.inode(node)?;
        if inode.kind != FileKind::File {
            return Err(Error::NotAFile);
        }
        inode.refuse_unreadable()?;
        let left = inode.size_bytes.saturating_sub(offset);
        if left == 0 || length_max == 0 {
            return Ok(FilePiece::End);
        }
        let block_bytes = self.blocks.superblock.block_bytes;
        let mapped = mapping::map(&self.blocks, &inode, offset / block_bytes)?;
        let skipped = offset % block_bytes;
        let length = mapped
            .count
            .saturating_mul(block_bytes)
            .saturating_sub(skipped)
            .min(left);
        match mapped.first {
            None => Ok(FilePiece::Hole(length)),
            Some(first) => {
                let at = self.blocks.superblock.position_of(first, mapped.count)?;
                let length = length.min(length_max.min(PIECE_BYTES_MAX) as u64);
                self.blocks.range(at + skipped, length).map(FilePiece::Data)
            }
        }
    }

    fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>> {
        let inode = self.inode(node)?;
        if inode.kind != FileKind::Link {
            return Err(Error::NotAFile);
        }
        if inode.size_bytes == 0 || inode.size_bytes > LINK_BYTES_MAX {
            return Err(inode.damaged("the length of its target is invalid"));
        }
        let target = if inode.format == ForkFormat::Local {
            let fields = Fields::new("XFS inode", &inode.fork);
            fields.bytes(0, to_usize(inode.size_bytes))?.to_vec()
        } else {
            self.stored_target(&inode)?
        };
        if target.contains(&0) {
            return Err(inode.damaged("the target of a link is invalid"));
        }
        Ok(target)
    }
}
