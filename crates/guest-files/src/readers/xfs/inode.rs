//! Inodes.

use super::{XfsBlocks, check};
use crate::fields::Fields;
use crate::{Error, FileKind, ModifiedTime, Result};

const MAGIC: &[u8] = b"IN";
const CHECKSUM_AT: usize = 100;
/// Where the data fork begins, in version 2 and in version 3.
const CORE_BYTES_2: usize = 100;
const CORE_BYTES_3: usize = 176;
const FLAG_REALTIME: u16 = 1;
const FLAG2_LARGE_TIMES: u64 = 0x8;
const FLAG2_MANY_EXTENTS: u64 = 0x10;

/// What the data fork of an inode contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForkFormat {
    /// A device number, or nothing.
    Device,
    /// The data itself.
    Local,
    /// A list of extents.
    Extents,
    /// The root of a tree of extents.
    Tree,
}

/// An inode.
#[derive(Debug, Clone)]
pub(super) struct XfsInode {
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
    pub(super) format: ForkFormat,
    /// Extents in the fork.
    pub(super) extent_count: u64,
    /// The data fork.
    pub(super) fork: Vec<u8>,
    flags: u16,
}

impl XfsInode {
    pub(super) fn read(blocks: &XfsBlocks, number: u64) -> Result<Self> {
        let superblock = &blocks.superblock;
        let bytes = blocks.range(superblock.position_of_inode(number)?, superblock.inode_bytes)?;
        let fields = Fields::new("XFS inode", &bytes);
        let damaged = |detail: &str| Error::damaged("XFS inode", format!("{number}: {detail}"));
        if fields.bytes(0, 2)? != MAGIC {
            return Err(damaged("its magic number is missing"));
        }
        let is_version_3 = fields.u8(4)? == 3;
        if is_version_3 != superblock.has_checksums {
            return Err(damaged("its version is that of another file system"));
        }
        if is_version_3 {
            check("XFS inode", &bytes, CHECKSUM_AT)?;
            if fields.be_u64(152)? != number {
                return Err(damaged("it is another inode"));
            }
        }
        let mode = fields.be_u16(2)?;
        let kind = match mode >> 12 {
            0x8 => FileKind::File,
            0x4 => FileKind::Directory,
            0xa => FileKind::Link,
            0x1 | 0x2 | 0x6 | 0xc => FileKind::Special,
            _ => return Err(damaged("it is used, and has no kind")),
        };
        let flags2 = if is_version_3 { fields.be_u64(120)? } else { 0 };
        let core_bytes = if is_version_3 { CORE_BYTES_3 } else { CORE_BYTES_2 };
        let fork_end = match usize::from(fields.u8(82)?) * 8 {
            0 => bytes.len() - core_bytes,
            attributes_at => attributes_at,
        };
        Ok(Self {
            number,
            kind,
            mode: u32::from(mode & 0o7777),
            uid: fields.be_u32(8)?,
            gid: fields.be_u32(12)?,
            size_bytes: fields.be_u64(56)?,
            modified: modified(&fields, flags2)?,
            has_other_names: kind == FileKind::File && fields.be_u32(16)? > 1,
            format: match fields.u8(5)? {
                0 => ForkFormat::Device,
                1 => ForkFormat::Local,
                2 => ForkFormat::Extents,
                3 => ForkFormat::Tree,
                other => return Err(damaged(&format!("its data has the unknown format {other}"))),
            },
            extent_count: if flags2 & FLAG2_MANY_EXTENTS != 0 {
                fields.be_u64(24)?
            } else {
                u64::from(fields.be_u32(76)?)
            },
            fork: fields.bytes(core_bytes, fork_end)?.to_vec(),
            flags: fields.be_u16(90)?,
        })
    }

    /// An error if the content is stored in a way that is not understood.
    pub(super) fn refuse_unreadable(&self) -> Result<()> {
        if self.flags & FLAG_REALTIME != 0 {
            return Err(Error::unsupported("a file on the realtime device of XFS"));
        }
        Ok(())
    }

    pub(super) fn damaged(&self, detail: &str) -> Error {
        Error::damaged("XFS inode", format!("{}: {detail}", self.number))
    }
}

/// The time of the last change: 32 bits of seconds, or nanoseconds since 1901.
fn modified(fields: &Fields<'_>, flags2: u64) -> Result<ModifiedTime> {
    const NANOSECONDS: u64 = 1_000_000_000;
    const SECONDS_TO_1970: i64 = 1 << 31;
    if flags2 & FLAG2_LARGE_TIMES != 0 {
        let time = fields.be_u64(40)?;
        return Ok(ModifiedTime {
            seconds: i64::try_from(time / NANOSECONDS).unwrap_or(0) - SECONDS_TO_1970,
            nanoseconds: u32::try_from(time % NANOSECONDS).unwrap_or(0),
        });
    }
    Ok(ModifiedTime {
        seconds: i64::from(fields.be_u32(40)?.cast_signed()),
        nanoseconds: fields.be_u32(44)?.min(999_999_999),
    })
}
