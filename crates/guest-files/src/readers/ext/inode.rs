//! Inodes.

use holdfast_block::to_usize;

use super::blocks::BlockReader;
use super::crc32c_of;
use super::superblock::Superblock;
use crate::fields::Fields;
use crate::{Error, FileKind, ModifiedTime, Result};

const CHECKSUM_LOW_AT: usize = 0x7c;
const CHECKSUM_HIGH_AT: usize = 0x82;
/// Bytes that every inode has.
const OLD_INODE_BYTES: u64 = 128;

const FLAG_ENCRYPTED: u32 = 0x800;
const FLAG_INDEXED: u32 = 0x1000;
const FLAG_EXTENTS: u32 = 0x8_0000;
const FLAG_INLINE_DATA: u32 = 0x1000_0000;

/// An inode.
#[derive(Debug, Clone)]
pub(super) struct Inode {
    pub(super) number: u64,
    pub(super) kind: FileKind,
    /// Permissions, without the kind.
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) size_bytes: u64,
    pub(super) modified: ModifiedTime,
    /// Whether a file has several names.
    pub(super) has_other_names: bool,
    /// The root of the extent tree or of the block map, or a short target of a link.
    pub(super) mapping: [u8; 60],
    /// The seed of checksums of blocks that belong to it; none if there are no checksums.
    pub(super) checksum_seed: Option<u32>,
    flags: u32,
}

impl Inode {
    pub(super) fn read(blocks: &BlockReader, superblock: &Superblock, number: u64) -> Result<Self> {
        let damaged = |detail: String| Error::damaged("inode", detail);
        if number == 0 || number > superblock.inode_count {
            return Err(damaged(format!("{number} does not exist")));
        }
        let group = (number - 1) / superblock.inodes_per_group;
        let index = (number - 1) % superblock.inodes_per_group;
        let descriptor = blocks.range(superblock.descriptor_at(group), superblock.descriptor_bytes)?;
        let descriptor = Fields::new("group descriptor", &descriptor);
        let high = if superblock.descriptor_bytes >= 64 {
            u64::from(descriptor.u32(0x28)?)
        } else {
            0
        };
        let table = u64::from(descriptor.u32(8)?) | (high << 32);
        let at = index * superblock.inode_bytes;
        let block = table.saturating_add(at / superblock.block_bytes);
        if table == 0 || block >= blocks.block_count() {
            return Err(damaged(format!("{number} lies in block {block}, which does not exist")));
        }
        let at = block * superblock.block_bytes + at % superblock.block_bytes;
        let bytes = blocks.range(at, superblock.inode_bytes)?;
        let fields = Fields::new("inode", &bytes);
        let extra = if superblock.inode_bytes > OLD_INODE_BYTES {
            fields.u16(0x80)?
        } else {
            0
        };
        let checksum_seed = match superblock.checksum_seed {
            None => None,
            Some(seed) => Some(check(&fields, seed, number, extra)?),
        };
        let mut inode = Self::parse(&fields, number, extra, checksum_seed)?;
        // Old directories have another field in place of the upper half of the size.
        if inode.kind == FileKind::File || (inode.kind == FileKind::Directory && superblock.has_large_directories) {
            inode.size_bytes |= u64::from(fields.u32(0x6c)?) << 32;
        }
        Ok(inode)
    }

    /// All but the upper half of the size.
    fn parse(fields: &Fields<'_>, number: u64, extra: u16, checksum_seed: Option<u32>) -> Result<Self> {
        let mode = fields.u16(0)?;
        let kind = match mode >> 12 {
            0x8 => FileKind::File,
            0x4 => FileKind::Directory,
            0xa => FileKind::Link,
            0x1 | 0x2 | 0x6 | 0xc => FileKind::Special,
            _ => return Err(fields.damaged(format!("{number} is used, and has no kind"))),
        };
        let mut mapping = [0; 60];
        mapping.copy_from_slice(fields.bytes(0x28, 60)?);
        let modified_extra = if extra >= 12 { fields.u32(0x88)? } else { 0 };
        Ok(Self {
            number,
            kind,
            mode: u32::from(mode & 0o7777),
            uid: u32::from(fields.u16(2)?) | (u32::from(fields.u16(0x78)?) << 16),
            gid: u32::from(fields.u16(0x18)?) | (u32::from(fields.u16(0x7a)?) << 16),
            size_bytes: u64::from(fields.u32(4)?),
            modified: modified(fields.u32(0x10)?, modified_extra),
            has_other_names: kind == FileKind::File && fields.u16(0x1a)? > 1,
            mapping,
            checksum_seed,
            flags: fields.u32(0x20)?,
        })
    }

    /// Whether some blocks of the directory are an index.
    pub(super) fn is_indexed(&self) -> bool {
        self.flags & FLAG_INDEXED != 0
    }

    pub(super) fn uses_extents(&self) -> bool {
        self.flags & FLAG_EXTENTS != 0
    }

    /// An error if the content is stored in a way that is not understood.
    pub(super) fn refuse_unreadable(&self) -> Result<()> {
        let refused = |what: &str| {
            Err(Error::Unsupported {
                what: what.to_owned(),
                detail: format!("inode {}", self.number),
            })
        };
        if self.flags & FLAG_ENCRYPTED != 0 {
            return refused("encryption of ext4");
        }
        if self.flags & FLAG_INLINE_DATA != 0 {
            return refused("inline data of ext4");
        }
        Ok(())
    }

    /// The target of a link that is stored in the inode; none if it has a block.
    pub(super) fn inline_target(&self) -> Result<Option<Vec<u8>>> {
        if self.uses_extents() || self.size_bytes >= self.mapping.len() as u64 {
            return Ok(None);
        }
        let target = self.mapping.get(..to_usize(self.size_bytes)).unwrap_or_default();
        if target.is_empty() || target.contains(&0) {
            return Err(self.damaged("the target of a link is invalid"));
        }
        Ok(Some(target.to_vec()))
    }

    pub(super) fn damaged(&self, detail: &str) -> Error {
        Error::damaged("inode", format!("{}: {detail}", self.number))
    }
}

/// Verifies the checksum of an inode; returns the seed of the blocks that belong to it.
fn check(fields: &Fields<'_>, seed: u32, number: u64, extra: u16) -> Result<u32> {
    let number_low = u32::try_from(number).unwrap_or(u32::MAX);
    let seed = crc32c_of(seed, &number_low.to_le_bytes());
    let seed = crc32c_of(seed, fields.bytes(0x64, 4)?);
    let mut bytes = fields.as_slice().to_vec();
    let mut clear = |at: usize| bytes.iter_mut().skip(at).take(2).for_each(|byte| *byte = 0);
    clear(CHECKSUM_LOW_AT);
    // The high half exists if the fields behind the old inode reach that far.
    let has_high = extra >= 4;
    if has_high {
        clear(CHECKSUM_HIGH_AT);
    }
    let actual = crc32c_of(seed, &bytes);
    let low = u32::from(fields.u16(CHECKSUM_LOW_AT)?);
    let differs = if has_high {
        actual != low | (u32::from(fields.u16(CHECKSUM_HIGH_AT)?) << 16)
    } else {
        actual & 0xffff != low
    };
    if differs {
        return Err(fields.damaged(format!("the checksum of {number} differs")));
    }
    Ok(seed)
}

/// The time in an inode: 34 bits of seconds from 1901 on, 30 bits of nanoseconds.
fn modified(seconds: u32, extra: u32) -> ModifiedTime {
    ModifiedTime {
        seconds: i64::from(seconds.cast_signed()) + (i64::from(extra & 3) << 32),
        nanoseconds: (extra >> 2).min(999_999_999),
    }
}
