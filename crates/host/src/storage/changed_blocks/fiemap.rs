//! System calls that report the extents of a file.
#![expect(unsafe_code, reason = "ioctl; the contract stands beside each use")]

use std::fs::File;

use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, Updater, ioctl, opcode};

/// Extents per query: 14 KiB.
pub(super) const EXTENT_COUNT_MAX: usize = 256;

/// Write cached data before the answer.
const FLAG_SYNC: u32 = 1;

pub(super) const FLAG_LAST: u32 = 1;
/// Other files share the extent.
pub(super) const FLAG_SHARED: u32 = 0x2000;

/// `struct fiemap_extent` of linux/fiemap.h.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Extent {
    /// Offset in the file.
    pub(super) logical: u64,
    /// Offset on the device, or in the address space of the file system.
    pub(super) physical: u64,
    pub(super) length: u64,
    reserved_words: [u64; 2],
    pub(super) flags: u32,
    reserved: [u32; 3],
}

/// The fixed part of `struct fiemap`; its size is part of the ioctl number.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct FiemapHead {
    start: u64,
    length: u64,
    flags: u32,
    mapped_count: u32,
    extent_count: u32,
    reserved: u32,
}

#[repr(C)]
struct FiemapRequest {
    head: FiemapHead,
    extents: [Extent; EXTENT_COUNT_MAX],
}

/// `struct fsxattr` of linux/fs.h.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Attributes {
    flags: u32,
    rest: [u32; 6],
}

/// `struct btrfs_ioctl_fs_info_args` of linux/btrfs.h.
#[repr(C)]
struct BtrfsInfo {
    max_id: u64,
    device_count: u64,
    fsid: [u8; 16],
    rest: [u64; 124],
}

const FIEMAP: Opcode = opcode::read_write::<FiemapHead>(b'f', 11);
const GET_ATTRIBUTES: Opcode = opcode::read::<Attributes>(b'X', 31);
const BTRFS_INFO: Opcode = opcode::read::<BtrfsInfo>(0x94, 31);
const ATTRIBUTE_REALTIME: u32 = 1;

const _: () = {
    assert!(size_of::<Extent>() == 56 && size_of::<FiemapHead>() == 32);
    assert!(size_of::<FiemapRequest>() == 32 + 56 * EXTENT_COUNT_MAX);
    assert!(size_of::<Attributes>() == 28 && size_of::<BtrfsInfo>() == 1024);
};

impl Extent {
    #[cfg(test)]
    pub(super) fn new(logical: u64, physical: u64, length: u64, flags: u32) -> Self {
        Self {
            logical,
            physical,
            length,
            flags,
            ..Self::default()
        }
    }
}

/// The first extents of `file` that end after `start`, at most [`EXTENT_COUNT_MAX`]; the first may begin before it.
pub(super) fn extents(file: &File, start: u64) -> Result<Vec<Extent>, Errno> {
    let mut request = Box::new(FiemapRequest {
        head: FiemapHead {
            start,
            length: u64::MAX - start,
            flags: FLAG_SYNC,
            mapped_count: 0,
            extent_count: u32::try_from(EXTENT_COUNT_MAX).expect("some hundreds"),
            reserved: 0,
        },
        extents: [Extent::default(); EXTENT_COUNT_MAX],
    });
    loop {
        // SAFETY: the number is that of FS_IOC_FIEMAP, which reads and writes a `struct fiemap` followed by space for
        // `extent_count` extents: that is `FiemapRequest`, of integers for which every bit pattern is valid.
        let result = unsafe { ioctl(file, Updater::<FIEMAP, FiemapRequest>::new(&mut request)) };
        match result {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    let count = (request.head.mapped_count as usize).min(EXTENT_COUNT_MAX);
    Ok(request.extents[..count].to_vec())
}

/// Whether `file` is on the realtime device of XFS, whose addresses start at 0 again.
pub(super) fn is_realtime(file: &File) -> Result<bool, Errno> {
    // SAFETY: the number is that of FS_IOC_FSGETXATTR, which fills a `struct fsxattr`: `Attributes`, of integers.
    let attributes = unsafe { ioctl(file, Getter::<GET_ATTRIBUTES, Attributes>::new()) }?;
    Ok(attributes.flags & ATTRIBUTE_REALTIME != 0)
}

/// The UUID of the btrfs that contains `file`. Other identifiers differ between subvolumes of one file system.
pub(super) fn btrfs_id(file: &File) -> Result<[u8; 16], Errno> {
    let mut info = BtrfsInfo {
        max_id: 0,
        device_count: 0,
        fsid: [0; 16],
        rest: [0; 124],
    };
    // SAFETY: the number is that of BTRFS_IOC_FS_INFO, which reads and fills a `struct btrfs_ioctl_fs_info_args`:
    // `BtrfsInfo`, of integers.
    unsafe { ioctl(file, Updater::<BTRFS_INFO, BtrfsInfo>::new(&mut info)) }?;
    Ok(info.fsid)
}
