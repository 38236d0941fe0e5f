//! The superblock, and the place of group descriptors.

use holdfast_block::BlockDevice;

use super::crc32c_of;
use crate::fields::Fields;
use crate::{Error, Result};

/// Position of the superblock in bytes.
pub(super) const OFFSET: u64 = 1024;
/// Length of the superblock in bytes.
pub(super) const LENGTH: u64 = 1024;

const MAGIC: u16 = 0xef53;
const CHECKSUM_AT: usize = 0x3fc;

const COMPAT_SPARSE_SUPER2: u32 = 0x200;

const INCOMPAT_FILE_TYPE: u32 = 0x2;
const INCOMPAT_RECOVER: u32 = 0x4;
const INCOMPAT_META_BG: u32 = 0x10;
const INCOMPAT_64BIT: u32 = 0x80;
const INCOMPAT_LARGE_DIRECTORIES: u32 = 0x4000;
const INCOMPAT_CHECKSUM_SEED: u32 = 0x2000;
/// Features that a reader must know, with their names. Encryption, inline data and folded case are refused or handled
/// per file.
const INCOMPAT_KNOWN: u32 = INCOMPAT_FILE_TYPE
    | INCOMPAT_RECOVER
    | INCOMPAT_META_BG
    | 0x40 // extents
    | INCOMPAT_64BIT
    | 0x100 // multiple mount protection
    | 0x200 // flexible block groups
    | 0x400 // extended attributes in inodes
    | INCOMPAT_CHECKSUM_SEED
    | INCOMPAT_LARGE_DIRECTORIES
    | 0x8000 // inline data
    | 0x1_0000 // encryption
    | 0x2_0000; // folded case

const RO_COMPAT_SPARSE_SUPER: u32 = 0x1;
const RO_COMPAT_METADATA_CHECKSUMS: u32 = 0x400;

/// The superblock, as far as reading needs it.
#[derive(Debug, Clone)]
pub(super) struct Superblock {
    pub(super) block_bytes: u64,
    pub(super) block_count: u64,
    pub(super) inode_count: u64,
    pub(super) inode_bytes: u64,
    pub(super) inodes_per_group: u64,
    pub(super) descriptor_bytes: u64,
    /// Whether entries of directories have the kind of their node.
    pub(super) has_file_types: bool,
    /// Whether directories can have 4 GiB and more.
    pub(super) has_large_directories: bool,
    /// The seed of all checksums; none if there are no checksums.
    pub(super) checksum_seed: Option<u32>,
    blocks_per_group: u64,
    first_data_block: u64,
    first_meta_group: u64,
    backup_groups: [u64; 2],
    compatible: u32,
    incompatible: u32,
    read_only: u32,
    journal: u64,
}

impl Superblock {
    pub(super) fn read(device: &dyn BlockDevice) -> Result<Self> {
        let mut bytes = vec![0; holdfast_block::to_usize(LENGTH)];
        device.read_at(&mut bytes, OFFSET)?;
        Self::parse(&bytes)
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let fields = Fields::new("ext superblock", bytes);
        if fields.u16(0x38)? != MAGIC {
            return Err(fields.damaged("its magic number is missing"));
        }
        let incompatible = fields.u32(0x60)?;
        let unknown = incompatible & !INCOMPAT_KNOWN;
        if unknown != 0 {
            return Err(Error::unsupported(format!(
                "feature {unknown:#x} of ext4 ({})",
                feature_names(unknown)
            )));
        }
        let read_only = fields.u32(0x64)?;
        let has_checksums = read_only & RO_COMPAT_METADATA_CHECKSUMS != 0;
        if has_checksums && crc32c_of(u32::MAX, fields.bytes(0, CHECKSUM_AT)?) != fields.u32(CHECKSUM_AT)? {
            return Err(fields.damaged("its checksum differs"));
        }
        let seed = if incompatible & INCOMPAT_CHECKSUM_SEED != 0 {
            fields.u32(0x270)?
        } else {
            crc32c_of(u32::MAX, fields.bytes(0x68, 16)?)
        };
        let is_64bit = incompatible & INCOMPAT_64BIT != 0;
        let high = if is_64bit { u64::from(fields.u32(0x150)?) } else { 0 };
        let is_old = fields.u32(0x4c)? == 0;
        let size_shift = fields.u32(0x18)?;
        if size_shift > 6 {
            return Err(fields.damaged(format!("blocks of 2^{} bytes", u64::from(size_shift) + 10)));
        }
        let superblock = Self {
            block_bytes: 1024 << size_shift,
            block_count: u64::from(fields.u32(4)?) | (high << 32),
            inode_count: u64::from(fields.u32(0)?),
            inode_bytes: if is_old { 128 } else { u64::from(fields.u16(0x58)?) },
            inodes_per_group: u64::from(fields.u32(0x28)?),
            descriptor_bytes: if is_64bit { u64::from(fields.u16(0xfe)?) } else { 32 },
            has_file_types: incompatible & INCOMPAT_FILE_TYPE != 0,
            has_large_directories: incompatible & INCOMPAT_LARGE_DIRECTORIES != 0,
            checksum_seed: has_checksums.then_some(seed),
            blocks_per_group: u64::from(fields.u32(0x20)?),
            first_data_block: u64::from(fields.u32(0x14)?),
            first_meta_group: u64::from(fields.u32(0x104)?),
            backup_groups: [u64::from(fields.u32(0x24c)?), u64::from(fields.u32(0x250)?)],
            compatible: fields.u32(0x5c)?,
            incompatible,
            read_only,
            journal: u64::from(fields.u32(0xe0)?),
        };
        superblock.check(&fields)?;
        Ok(superblock)
    }

    fn check(&self, fields: &Fields<'_>) -> Result<()> {
        let inode_bytes_valid =
            self.inode_bytes.is_power_of_two() && (128..=self.block_bytes).contains(&self.inode_bytes);
        let descriptor_bytes_valid =
            self.descriptor_bytes.is_power_of_two() && (32..=self.block_bytes).contains(&self.descriptor_bytes);
        if !inode_bytes_valid || !descriptor_bytes_valid || self.inodes_per_group == 0 || self.blocks_per_group == 0 {
            return Err(fields.damaged(format!(
                "inodes of {} bytes, descriptors of {} bytes, {} inodes and {} blocks in a group",
                self.inode_bytes, self.descriptor_bytes, self.inodes_per_group, self.blocks_per_group
            )));
        }
        Ok(())
    }

    /// An error if the file system is larger than its volume.
    pub(super) fn check_inside(&self, volume_bytes: u64) -> Result<()> {
        if self.block_count > volume_bytes / self.block_bytes {
            let detail = format!(
                "{} blocks of {} bytes do not fit on a volume of {volume_bytes} bytes",
                self.block_count, self.block_bytes
            );
            return Err(Error::damaged("ext superblock", detail));
        }
        Ok(())
    }

    pub(super) fn needs_recovery(&self) -> bool {
        self.incompatible & INCOMPAT_RECOVER != 0
    }

    /// The inode of the journal, which must be inside the file system.
    pub(super) fn journal_inode(&self) -> Result<u64> {
        if self.journal == 0 {
            return Err(Error::unsupported(
                "an ext journal on another device, which must be replayed,",
            ));
        }
        Ok(self.journal)
    }

    /// Position in bytes of the descriptor of a group.
    pub(super) fn descriptor_at(&self, group: u64) -> u64 {
        let per_block = self.block_bytes / self.descriptor_bytes;
        let block = group / per_block;
        // The superblock is in block 1 if blocks have 1 KiB.
        let superblock_block = OFFSET / self.block_bytes;
        let has_meta_groups = self.incompatible & INCOMPAT_META_BG != 0;
        let place = if !has_meta_groups || block < self.first_meta_group {
            superblock_block + 1 + block
        } else {
            let holder = per_block * block;
            let first = self.first_data_block + holder * self.blocks_per_group;
            let shifted = self.block_bytes == 1024 && holder == 0 && self.first_data_block == 0;
            first + u64::from(self.has_superblock(holder)) + u64::from(shifted)
        };
        place
            .saturating_mul(self.block_bytes)
            .saturating_add(group % per_block * self.descriptor_bytes)
    }

    /// Whether a group begins with a copy of the superblock.
    fn has_superblock(&self, group: u64) -> bool {
        let is_power_of = |base: u64| {
            let mut power = base;
            while power < group {
                power *= base;
            }
            power == group
        };
        if self.compatible & COMPAT_SPARSE_SUPER2 != 0 {
            return group == 0 || self.backup_groups.contains(&group);
        }
        group <= 1 || self.read_only & RO_COMPAT_SPARSE_SUPER == 0 || is_power_of(3) || is_power_of(5) || is_power_of(7)
    }
}

/// Names of features that are refused.
fn feature_names(features: u32) -> String {
    let known = [
        (0x1, "compression"),
        (0x8, "journal device"),
        (0x1000, "data in directory entries"),
    ];
    let names = known
        .iter()
        .filter(|(bit, _)| features & bit != 0)
        .map(|(_, name)| *name);
    let names: Vec<&str> = names.collect();
    if names.is_empty() {
        "unknown".to_owned()
    } else {
        names.join(", ")
    }
}
