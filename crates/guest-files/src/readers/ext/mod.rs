//! ext2, ext3 and ext4.
//!
//! The journal is replayed into memory: blocks that it holds replace those of the file system, as after a mount.
//! Checksums of metadata are verified where the file system has them. Preallocated extents read as zero.

mod blocks;
mod directory;
mod inode;
mod journal;
mod mapping;
mod superblock;

use std::sync::Arc;

use holdfast_block::BlockDevice;

use self::blocks::BlockReader;
use self::inode::Inode;
use self::superblock::Superblock;
use crate::{DirectoryEntry, Error, FileKind, FilePiece, FileSystem, Metadata, NodeId, PIECE_BYTES_MAX, Result};

const ROOT_INODE: u64 = 2;
/// Linux limits targets of links to one page.
const LINK_BYTES_MAX: u64 = 4096;

/// CRC-32C as ext4 uses it: without inversion, from a seed.
fn crc32c_of(seed: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}

/// A file system of the ext family.
pub(crate) struct ExtFileSystem {
    superblock: Superblock,
    blocks: BlockReader,
    /// The inode that was used last: a file is read in many pieces.
    last: Option<Inode>,
}

impl ExtFileSystem {
    pub(crate) fn open(device: Arc<dyn BlockDevice>) -> Result<Self> {
        let first = Superblock::read(&*device)?;
        first.check_inside(device.size_bytes())?;
        let mut blocks = BlockReader::new(device, &first);
        let superblock = if first.needs_recovery() {
            let journal = first.journal_inode()?;
            let inode = Inode::read(&blocks, &first, journal)?;
            let copies = journal::replay(&blocks, &first, &inode)?;
            blocks.set_copies(copies);
            // The journal can hold a newer superblock.
            Superblock::parse(&blocks.range(superblock::OFFSET, superblock::LENGTH)?)?
        } else {
            first
        };
        superblock.check_inside(blocks.size_bytes())?;
        Ok(Self {
            superblock,
            blocks,
            last: None,
        })
    }

    fn inode(&mut self, node: NodeId) -> Result<Inode> {
        match &self.last {
            Some(inode) if inode.number == node.0 => Ok(inode.clone()),
            _ => {
                let inode = Inode::read(&self.blocks, &self.superblock, node.0)?;
                self.last = Some(inode.clone());
                Ok(inode)
            }
        }
    }

    /// The bytes of an inode of any kind at `offset`.
    fn piece(&self, inode: &Inode, offset: u64, length_max: usize) -> Result<FilePiece> {
        let left = inode.size_bytes.saturating_sub(offset);
        if left == 0 || length_max == 0 {
            return Ok(FilePiece::End);
        }
        let block_bytes = self.superblock.block_bytes;
        let mapped = mapping::map(&self.blocks, &self.superblock, inode, offset / block_bytes)?;
        let skipped = offset % block_bytes;
        let length = mapped
            .count
            .saturating_mul(block_bytes)
            .saturating_sub(skipped)
            .min(left);
        match mapped.first {
            None => Ok(FilePiece::Hole(length)),
            Some(first) => {
                let length = length.min(length_max.min(PIECE_BYTES_MAX) as u64);
                let at = first * block_bytes + skipped;
                self.blocks.range(at, length).map(FilePiece::Data)
            }
        }
    }
}

impl FileSystem for ExtFileSystem {
    fn root(&self) -> NodeId {
        NodeId(ROOT_INODE)
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
        inode.refuse_unreadable()?;
        directory::read(&self.blocks, &self.superblock, &inode, visit)
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        let inode = self.inode(node)?;
        if inode.kind != FileKind::File {
            return Err(Error::NotAFile);
        }
        inode.refuse_unreadable()?;
        self.piece(&inode, offset, length_max)
    }

    fn read_link(&mut self, node: NodeId) -> Result<Vec<u8>> {
        let inode = self.inode(node)?;
        if inode.kind != FileKind::Link {
            return Err(Error::NotAFile);
        }
        inode.refuse_unreadable()?;
        if let Some(target) = inode.inline_target()? {
            return Ok(target);
        }
        if inode.size_bytes > LINK_BYTES_MAX {
            return Err(inode.damaged("the target of a link is too long"));
        }
        match self.piece(&inode, 0, PIECE_BYTES_MAX)? {
            FilePiece::Data(target) if target.len() as u64 == inode.size_bytes => Ok(target),
            _ => Err(inode.damaged("the target of a link is incomplete")),
        }
    }
}
