//! The superblock, and the position of blocks and inodes.
//!
//! The file system is divided into allocation groups. The number of a block is that of its group and that in the group,
//! which has as many bits as the largest number in a group needs.

use holdfast_block::BlockDevice;

use super::check;
use crate::fields::Fields;
use crate::{Error, Result};

const MAGIC: &[u8] = b"XFSB";
const CHECKSUM_AT: usize = 224;
const VERSION_MASK: u16 = 0xf;
/// Directories of version 2, which all file systems since 2002 have.
const VERSION_DIRECTORIES_2: u16 = 0x2000;
/// Kinds in directory entries of version 4.
const FEATURES2_FILE_TYPES: u32 = 0x200;
const INCOMPAT_FILE_TYPES: u32 = 0x1;
/// File types, sparse inodes, another identity, times after 2038, many extents, exchanged ranges, parent pointers. A file
/// system that needs a repair, and one with a directory of metadata, are refused.
const INCOMPAT_KNOWN: u32 = INCOMPAT_FILE_TYPES | 0x2 | 0x4 | 0x8 | 0x20 | 0x40 | 0x80;
const INCOMPAT_NEEDS_REPAIR: u32 = 0x10;

/// The superblock, as far as reading needs it.
#[derive(Debug, Clone)]
pub(super) struct XfsSuperblock {
    pub(super) block_bytes: u64,
    pub(super) inode_bytes: u64,
    pub(super) root_inode: u64,
    pub(super) directory_block_bytes: u64,
    /// Version 5.
    pub(super) has_checksums: bool,
    pub(super) has_file_types: bool,
    /// First block of the log.
    pub(super) log_start: u64,
    pub(super) log_blocks: u64,
    group_blocks: u64,
    group_count: u64,
    block_count: u64,
    group_bits: u32,
    inodes_per_block_bits: u32,
}

impl XfsSuperblock {
    pub(super) fn read(device: &dyn BlockDevice) -> Result<Self> {
        let mut sector = vec![0; 512];
        device.read_at(&mut sector, 0)?;
        let sector_bytes = usize::from(Fields::new("XFS superblock", &sector).be_u16(102)?);
        if !sector_bytes.is_power_of_two() || !(512..=32_768).contains(&sector_bytes) {
            return Err(Error::damaged(
                "XFS superblock",
                format!("sectors of {sector_bytes} bytes"),
            ));
        }
        sector.resize(sector_bytes, 0);
        device.read_at(&mut sector, 0)?;
        Self::parse(&sector, device.size_bytes())
    }

    fn parse(sector: &[u8], volume_bytes: u64) -> Result<Self> {
        let fields = Fields::new("XFS superblock", sector);
        if fields.bytes(0, 4)? != MAGIC {
            return Err(fields.damaged("its magic number is missing"));
        }
        let version = fields.be_u16(100)?;
        let has_checksums = match version & VERSION_MASK {
            5 => true,
            4 if version & VERSION_DIRECTORIES_2 != 0 => false,
            other => return Err(Error::unsupported(format!("XFS of version {other}"))),
        };
        if has_checksums {
            check("XFS superblock", sector, CHECKSUM_AT)?;
        }
        let incompatible = if has_checksums { fields.be_u32(216)? } else { 0 };
        if incompatible & INCOMPAT_NEEDS_REPAIR != 0 {
            return Err(Error::unsupported("an XFS that needs xfs_repair"));
        }
        let unknown = incompatible & !INCOMPAT_KNOWN;
        if unknown != 0 {
            return Err(Error::unsupported(format!("feature {unknown:#x} of XFS")));
        }
        let block_shift = u32::from(fields.u8(120)?);
        let directory_shift = block_shift + u32::from(fields.u8(192)?);
        let superblock = Self {
            block_bytes: u64::from(fields.be_u32(4)?),
            inode_bytes: u64::from(fields.be_u16(104)?),
            root_inode: fields.be_u64(56)?,
            directory_block_bytes: 1u64.checked_shl(directory_shift).unwrap_or(0),
            has_checksums,
            has_file_types: if has_checksums {
                incompatible & INCOMPAT_FILE_TYPES != 0
            } else {
                fields.be_u32(200)? & FEATURES2_FILE_TYPES != 0
            },
            log_start: fields.be_u64(48)?,
            log_blocks: u64::from(fields.be_u32(96)?),
            group_blocks: u64::from(fields.be_u32(84)?),
            group_count: u64::from(fields.be_u32(88)?),
            block_count: fields.be_u64(8)?,
            group_bits: u32::from(fields.u8(124)?),
            inodes_per_block_bits: u32::from(fields.u8(123)?),
        };
        let is_valid = (512..=65_536).contains(&superblock.block_bytes)
            && 1u64.checked_shl(block_shift) == Some(superblock.block_bytes)
            && (512..=65_536).contains(&superblock.directory_block_bytes)
            && superblock.inode_bytes.is_power_of_two()
            && (256..=2048).contains(&superblock.inode_bytes)
            && superblock.inode_bytes << superblock.inodes_per_block_bits.min(32) == superblock.block_bytes
            && superblock.group_bits < 32
            && superblock.group_blocks > 0
            && superblock.group_blocks <= 1 << superblock.group_bits
            && superblock.block_count <= volume_bytes / superblock.block_bytes;
        if !is_valid {
            return Err(fields.damaged("its sizes contradict one another"));
        }
        Ok(superblock)
    }

    /// Position in bytes of `count` blocks, which lie in one allocation group.
    pub(super) fn position_of(&self, first: u64, count: u64) -> Result<u64> {
        let group = first >> self.group_bits;
        let inside = first & ((1 << self.group_bits) - 1);
        let end = inside.saturating_add(count);
        let start = group.saturating_mul(self.group_blocks).saturating_add(inside);
        if group >= self.group_count || end > self.group_blocks || start.saturating_add(count) > self.block_count {
            return Err(Error::damaged(
                "XFS",
                format!("blocks {first} and following are used, and do not exist"),
            ));
        }
        Ok(start * self.block_bytes)
    }

    /// Position in bytes of an inode.
    pub(super) fn position_of_inode(&self, number: u64) -> Result<u64> {
        let block = self.position_of(number >> self.inodes_per_block_bits, 1)?;
        let index = number & ((1 << self.inodes_per_block_bits) - 1);
        Ok(block + index * self.inode_bytes)
    }
}
