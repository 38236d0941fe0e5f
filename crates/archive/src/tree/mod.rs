//! tar archives of file trees: every kind of file, with owners, times in nanoseconds, extended attributes and holes.
//!
//! Sources: POSIX.1-2001 "pax Interchange Format"; GNU tar's manual, "Tar Internals" (long names, sparse formats, keywords
//! of extended attributes); `SCHILY.xattr.` and `SCHILY.acl.` of star(5).
//!
//! A reader accepts ustar, GNU and pax headers in any mixture; a writer produces pax. Names are bytes, as in Linux. A name
//! in an archive is untrusted: the caller has to resolve it so that it cannot leave the target.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::ops::Range;

mod acl;
mod attributes;
mod header;
#[cfg(feature = "hostile")]
pub(crate) mod hostile;
mod read;
mod sparse;
#[cfg(test)]
mod tests;
mod write;

pub use read::{EndMarker, TreeTarReader};
pub use write::TreeTarWriter;

/// A point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TreeTime {
    /// Seconds since 1970, rounded down.
    pub seconds: i64,
    /// Nanoseconds after them, below 1,000,000,000.
    pub nanoseconds: u32,
}

/// An extended attribute of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtendedAttribute {
    /// Its name with the namespace: `security.capability`. ACLs are `system.posix_acl_access` and
    /// `system.posix_acl_default`, with the kernel's binary form as value.
    pub name: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
}

/// The numbers of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceNumber {
    /// The driver.
    pub major: u32,
    /// The device of this driver.
    pub minor: u32,
}

/// The kind of a file in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeEntryKind {
    /// A regular file.
    File,
    /// Another name of a file that comes earlier in the archive, or exists already: its name, as stored.
    HardLink(Vec<u8>),
    /// A symbolic link: its target, which is not interpreted.
    SymbolicLink(Vec<u8>),
    /// A directory.
    Directory,
    /// A character device.
    CharacterDevice(DeviceNumber),
    /// A block device.
    BlockDevice(DeviceNumber),
    /// A named pipe.
    Fifo,
    /// A kind that only other systems have: its letter.
    Unknown(u8),
}

/// A file in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeEntry {
    /// The name as stored: it may be absolute, and may have `.` and `..`.
    pub path: Vec<u8>,
    /// The kind.
    pub kind: TreeEntryKind,
    /// Permissions with set-user-id, set-group-id and sticky: 12 bits.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The time of the last modification.
    pub modified: TreeTime,
    /// Extended attributes, ordered by name.
    pub attributes: Vec<ExtendedAttribute>,
    /// ACL entries with the names of users or groups, which have no meaning outside the system where the archive was
    /// made: they are not in `attributes`.
    pub unresolved_acl_count: u64,
    /// Length of a regular file in bytes, with holes; 0 for other kinds.
    pub size_bytes: u64,
    /// The ranges with data of a regular file, in order; the rest are holes.
    pub extents: Vec<Range<u64>>,
    /// The offset of its header in the archive, for messages.
    pub offset: u64,
}
