//! What a volume holds, by the signatures in its first bytes and at its end.

use holdfast_block::BlockDevice;

use super::read_up_to;
use crate::Result;
use crate::fields::{Fields, label_of, utf8_of_utf16};

/// Bytes at the start of a volume that contain all signatures but those of ZFS and of md at the end.
const HEAD_BYTES: u64 = 68 << 10;
/// The uberblocks of the first label of ZFS.
const ZFS_UBERBLOCKS: std::ops::Range<u64> = 128 << 10..256 << 10;
const MD_MAGIC: u32 = 0xa92b_4efc;

/// What a volume holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Content {
    /// ext2, without a journal.
    Ext2,
    /// ext3.
    Ext3,
    /// ext4.
    Ext4,
    /// NTFS.
    Ntfs,
    /// FAT12, FAT16 or FAT32.
    Fat,
    /// exFAT.
    ExFat,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
    /// A member of a ZFS pool.
    Zfs,
    /// F2FS.
    F2fs,
    /// APFS.
    Apfs,
    /// Swap space of Linux.
    Swap,
    /// Encrypted by LUKS.
    Luks,
    /// Encrypted by BitLocker.
    BitLocker,
    /// ReFS.
    Refs,
    /// A physical volume of LVM; its logical volumes are volumes of their own.
    LvmMember,
    /// A member of a Linux software RAID.
    MdMember,
    /// squashfs.
    Squashfs,
    /// A CD image.
    Iso9660,
    /// UDF.
    Udf,
    /// ReiserFS.
    ReiserFs,
    /// JFS.
    Jfs,
    /// NILFS2.
    Nilfs2,
    /// EROFS.
    Erofs,
    /// HFS+ of macOS.
    HfsPlus,
    /// bcachefs.
    Bcachefs,
    /// A partition whose kind is refused whatever it holds.
    Refused(&'static str),
    /// Only zeroes at the start.
    Empty,
    /// None of these.
    Unknown,
}

impl Content {
    /// The word for it in output; it never changes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ext2 => "ext2",
            Self::Ext3 => "ext3",
            Self::Ext4 => "ext4",
            Self::Ntfs => "ntfs",
            Self::Fat => "fat",
            Self::ExFat => "exfat",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
            Self::Zfs => "zfs",
            Self::F2fs => "f2fs",
            Self::Apfs => "apfs",
            Self::Swap => "swap",
            Self::Luks => "luks",
            Self::BitLocker => "bitlocker",
            Self::Refs => "refs",
            Self::LvmMember => "lvm",
            Self::MdMember => "md",
            Self::Squashfs => "squashfs",
            Self::Iso9660 => "iso9660",
            Self::Udf => "udf",
            Self::ReiserFs => "reiserfs",
            Self::Jfs => "jfs",
            Self::Nilfs2 => "nilfs2",
            Self::Erofs => "erofs",
            Self::HfsPlus => "hfsplus",
            Self::Bcachefs => "bcachefs",
            Self::Refused(_) => "dynamic",
            Self::Empty => "empty",
            Self::Unknown => "unknown",
        }
    }

    /// Whether [`open_file_system`](crate::open_file_system) has a reader for it.
    pub const fn is_readable(self) -> bool {
        matches!(
            self,
            Self::Ext2 | Self::Ext3 | Self::Ext4 | Self::Ntfs | Self::Fat | Self::ExFat | Self::Xfs
        )
    }

    /// Whether the kernel of an appliance may have a driver for it, or can assemble what it belongs to.
    pub const fn is_for_appliance(self) -> bool {
        self.is_readable()
            || matches!(
                self,
                Self::Btrfs
                    | Self::F2fs
                    | Self::Luks
                    | Self::LvmMember
                    | Self::MdMember
                    | Self::Squashfs
                    | Self::Iso9660
                    | Self::Udf
                    | Self::ReiserFs
                    | Self::Jfs
                    | Self::Nilfs2
                    | Self::Erofs
                    | Self::HfsPlus
                    | Self::Bcachefs
            )
    }

    /// Whether it holds files that another program could read.
    pub const fn holds_files(self) -> bool {
        !matches!(self, Self::Swap | Self::LvmMember | Self::Empty)
    }
}

/// The content of a volume and the label of its file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Detected {
    pub(super) content: Content,
    pub(super) label: Option<String>,
}

impl Detected {
    fn new(content: Content, label: Option<String>) -> Self {
        Self { content, label }
    }
}

/// Detects what a volume holds.
pub(super) fn detect(device: &dyn BlockDevice) -> Result<Detected> {
    let head = read_up_to(device, 0, HEAD_BYTES)?;
    if is_md_member(device, &head)? {
        return Ok(Detected::new(Content::MdMember, None));
    }
    if let Some(detected) = of_head(&head) {
        return Ok(detected);
    }
    if is_zfs(device)? {
        return Ok(Detected::new(Content::Zfs, None));
    }
    let content = if head.iter().all(|byte| *byte == 0) {
        Content::Empty
    } else {
        Content::Unknown
    };
    Ok(Detected::new(content, None))
}

fn of_head(head: &[u8]) -> Option<Detected> {
    let has = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    let label = |at: usize, length: usize| head.get(at..at + length).and_then(label_of);
    let plain = |content| Some(Detected::new(content, None));
    if has(0, b"LUKS\xba\xbe") {
        return plain(Content::Luks);
    }
    if (0..4).any(|sector| has(sector * 512, b"LABELONE") && has(sector * 512 + 24, b"LVM2 001")) {
        return plain(Content::LvmMember);
    }
    if has(3, b"-FVE-FS-") {
        return plain(Content::BitLocker);
    }
    if has(3, b"ReFS\0\0\0\0") {
        return plain(Content::Refs);
    }
    if has(3, b"EXFAT   ") {
        return plain(Content::ExFat);
    }
    if has(3, b"NTFS    ") {
        return plain(Content::Ntfs);
    }
    if has(0, b"XFSB") {
        return Some(Detected::new(Content::Xfs, label(108, 12)));
    }
    if has(65_536 + 64, b"_BHRfS_M") {
        return Some(Detected::new(Content::Btrfs, label(65_536 + 0x12b, 256)));
    }
    if has(1080, &[0x53, 0xef]) {
        return of_ext(head);
    }
    if has(4086, b"SWAPSPACE2") || has(4086, b"SWAP-SPACE") {
        return Some(Detected::new(Content::Swap, label(1052, 16)));
    }
    if has(1024, &0xf2f5_2010_u32.to_le_bytes()) {
        let text = head.get(1024 + 124..1024 + 124 + 128).map(utf8_of_utf16);
        return Some(Detected::new(Content::F2fs, text.as_deref().and_then(label_of)));
    }
    if has(32, b"NXSB") {
        return plain(Content::Apfs);
    }
    if has(0, b"hsqs") {
        return plain(Content::Squashfs);
    }
    if let Some(content) = of_rare_magic(head) {
        return plain(content);
    }
    if has(32_769, b"CD001") && !is_udf(head) {
        return Some(Detected::new(Content::Iso9660, label(32_808, 32)));
    }
    if is_fat(head) {
        let is_fat32 = head.get(22..24) == Some(&[0, 0]);
        let text = label(if is_fat32 { 71 } else { 43 }, 11);
        return Some(Detected::new(Content::Fat, text.filter(|text| text != "NO NAME")));
    }
    None
}

/// ext2, ext3 and ext4 differ in their features.
fn of_ext(head: &[u8]) -> Option<Detected> {
    const COMPAT_JOURNAL: u32 = 4;
    /// Compressed, file types, recovery, journal device, meta block groups: known to ext3.
    const INCOMPAT_EXT3: u32 = 0x1f;
    /// Sparse superblocks, large files, directories as trees.
    const RO_COMPAT_EXT3: u32 = 0x7;
    let fields = Fields::new("superblock", head.get(1024..2048)?);
    let features = [0x5c, 0x60, 0x64].map(|at| fields.u32(at).unwrap_or(0));
    let [compatible, incompatible, read_only] = features;
    let content = if incompatible & !INCOMPAT_EXT3 != 0 || read_only & !RO_COMPAT_EXT3 != 0 {
        Content::Ext4
    } else if compatible & COMPAT_JOURNAL != 0 {
        Content::Ext3
    } else {
        Content::Ext2
    };
    let label = fields.bytes(0x78, 16).ok().and_then(label_of);
    Some(Detected::new(content, label))
}

/// File systems that only an appliance reads.
fn of_rare_magic(head: &[u8]) -> Option<Content> {
    const BCACHEFS: [u8; 16] = [
        0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9, 0xd9, 0x6a, 0x60, 0xcf, 0x80, 0x3d, 0xf7, 0xef,
    ];
    let has = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    let reiser = [&b"ReIsErFs"[..], b"ReIsEr2Fs", b"ReIsEr3Fs"];
    Some(match () {
        () if reiser.iter().any(|magic| has(65_536 + 52, magic)) => Content::ReiserFs,
        () if has(32_768, b"JFS1") => Content::Jfs,
        () if has(1024 + 6, &0x3434_u16.to_le_bytes()) && has(1024 + 4, &[0]) => Content::Nilfs2,
        () if has(1024, &0xe0f5_e1e2_u32.to_le_bytes()) => Content::Erofs,
        () if has(1024, b"H+\0\x04") || has(1024, b"HX\0\x05") => Content::HfsPlus,
        () if has(4096 + 24, &BCACHEFS) => Content::Bcachefs,
        () if is_udf(head) => Content::Udf,
        () => return None,
    })
}

/// Whether the volume recognition sequence, in sectors of 2048 bytes, names UDF (ECMA-167 and its third edition).
fn is_udf(head: &[u8]) -> bool {
    (0..16).any(|sector| {
        let name = head.get(32_769 + sector * 2048..).unwrap_or_default();
        name.starts_with(b"NSR02") || name.starts_with(b"NSR03")
    })
}

/// Whether a sector is the boot sector of a file system, which ends like a partition table.
pub(super) fn is_boot_sector(sector: &[u8]) -> bool {
    let has = |magic: &[u8]| sector.get(3..).is_some_and(|rest| rest.starts_with(magic));
    [&b"NTFS    "[..], b"EXFAT   ", b"-FVE-FS-", b"ReFS\0\0\0\0"]
        .iter()
        .any(|magic| has(magic))
        || is_fat(sector)
}

/// FAT has no signature of its own: a boot sector with plausible numbers.
fn is_fat(head: &[u8]) -> bool {
    let fields = Fields::new("boot sector", head);
    let is_plausible = || -> Result<bool> {
        let sector_bytes = fields.u16(11)?;
        let cluster_sectors = fields.u8(13)?;
        let has_fat = fields.u16(22)? != 0 || fields.u32(36)? != 0;
        let has_sectors = fields.u16(19)? != 0 || fields.u32(32)? != 0;
        Ok(fields.u16(510)? == 0xaa55
            && matches!(fields.u8(0)?, 0xeb | 0xe9)
            && matches!(sector_bytes, 512 | 1024 | 2048 | 4096)
            && cluster_sectors.is_power_of_two()
            && fields.u16(14)? != 0
            && matches!(fields.u8(16)?, 1 | 2)
            && fields.u8(21)? >= 0xf0
            && has_fat
            && has_sectors)
    };
    is_plausible().unwrap_or(false)
}

/// Whether a superblock of md is at one of its four places: at the start, at 4 KiB, or near the end (1.0 and 0.90).
fn is_md_member(device: &dyn BlockDevice, head: &[u8]) -> Result<bool> {
    let has_magic = |bytes: &[u8]| bytes.starts_with(&MD_MAGIC.to_le_bytes());
    let at_start = [0, 4096].iter().any(|at| head.get(*at..).is_some_and(has_magic));
    let size_bytes = device.size_bytes();
    let at_end = [
        (size_bytes.saturating_sub(8 << 10)) & !0xfff,
        (size_bytes & !0xffff).saturating_sub(64 << 10),
    ];
    let mut is_member = at_start;
    for offset in at_end.into_iter().filter(|offset| *offset > 0) {
        is_member |= has_magic(&read_up_to(device, offset, 4)?);
    }
    Ok(is_member)
}

fn is_zfs(device: &dyn BlockDevice) -> Result<bool> {
    const MAGIC: u64 = 0x00ba_b10c;
    let length = ZFS_UBERBLOCKS.end - ZFS_UBERBLOCKS.start;
    let bytes = read_up_to(device, ZFS_UBERBLOCKS.start, length)?;
    Ok(bytes
        .chunks(1024)
        .any(|block| block.starts_with(&MAGIC.to_le_bytes()) || block.starts_with(&MAGIC.to_be_bytes())))
}
