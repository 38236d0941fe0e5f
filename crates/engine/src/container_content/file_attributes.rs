//! Owner, permissions, extended attributes and time of one file.
//!
//! A file is opened without following links, and named by its descriptor in /proc: so its attributes are changed even if the
//! descriptor permits neither reading nor writing, and never those of another file.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use holdfast_archive::{ExtendedAttribute, TreeEntry, TreeEntryKind, TreeTime};
use rustix::fs::{AtFlags, CWD, Gid, Mode, Stat, Timespec, Timestamps, UTIME_OMIT, Uid};
use rustix::io::Errno;

/// The kernel's limit of a list of names, and of a value.
const XATTR_BYTES_MAX: usize = 64 << 10;
pub(super) const ACL_ACCESS: &[u8] = b"system.posix_acl_access";
pub(super) const ACL_DEFAULT: &[u8] = b"system.posix_acl_default";

/// The device and number that identify a file while it exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct FileIdentity {
    pub(super) device: u64,
    pub(super) number: u64,
}

impl FileIdentity {
    pub(super) fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            number: stat.st_ino,
        }
    }
}

/// What the process may restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    /// Owners, devices, and programs that run with the rights of their owner.
    Root,
    /// Files of the user.
    User,
}

impl Rights {
    pub(super) fn of_process() -> Self {
        if rustix::process::geteuid().is_root() {
            Self::Root
        } else {
            Self::User
        }
    }
}

/// The path of an open file, which follows no link.
pub(super) fn proc_path(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

pub(super) fn timestamps(modified: TreeTime) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: modified.seconds,
            tv_nsec: modified.nanoseconds.into(),
        },
    }
}

/// The names and values of extended attributes, ordered by name. Those of `system.` other than ACLs are views of other
/// fields.
pub(super) fn read_xattrs(file: &OwnedFd) -> io::Result<Vec<ExtendedAttribute>> {
    let path = proc_path(file);
    let mut list = vec![0_u8; XATTR_BYTES_MAX];
    let length = match rustix::fs::listxattr(&path, &mut list[..]) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error.into()),
    };
    let names = list.get(..length).unwrap_or_default().split(|byte| *byte == 0);
    let mut attributes = Vec::new();
    for name in names.filter(|name| !name.is_empty()) {
        if name.starts_with(b"system.") && name != ACL_ACCESS && name != ACL_DEFAULT {
            continue;
        }
        let mut value = vec![0_u8; XATTR_BYTES_MAX];
        match rustix::fs::getxattr(&path, OsStr::from_bytes(name), &mut value[..]) {
            Ok(length) => value.truncate(length),
            // It was removed meanwhile.
            Err(Errno::NODATA) => continue,
            Err(error) => return Err(error.into()),
        }
        value.shrink_to_fit();
        attributes.push(ExtendedAttribute {
            name: name.to_vec(),
            value,
        });
    }
    attributes.sort_unstable_by(|left, right| left.name.cmp(&right.name));
    Ok(attributes)
}

/// What could not be set.
pub(super) struct UnsetAttribute {
    pub(super) name: String,
    pub(super) error: Errno,
}

/// Sets everything but the time. The order matters: a new owner removes capabilities and set-user-id, and an ACL contains the
/// permissions.
///
/// # Errors
/// Owner and permissions; attributes that cannot be set are returned.
pub(super) fn set_attributes(
    file: &OwnedFd,
    entry: &TreeEntry,
    mode: u32,
    rights: Rights,
) -> io::Result<Vec<UnsetAttribute>> {
    if rights == Rights::Root {
        let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
        rustix::fs::chownat(file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
    }
    let path = proc_path(file);
    if !matches!(entry.kind, TreeEntryKind::SymbolicLink(_)) {
        rustix::fs::chmodat(CWD, &path, Mode::from_raw_mode(mode), AtFlags::empty())?;
    }
    let mut unset = Vec::new();
    for attribute in &entry.attributes {
        let flags = rustix::fs::XattrFlags::empty();
        let name = OsStr::from_bytes(&attribute.name);
        if let Err(error) = rustix::fs::setxattr(&path, name, &attribute.value, flags) {
            let name = String::from_utf8_lossy(&attribute.name).into_owned();
            unset.push(UnsetAttribute { name, error });
        }
    }
    Ok(unset)
}

/// Removes an inherited ACL that the entry does not have.
pub(super) fn remove_inherited_acls(file: &OwnedFd, entry: &TreeEntry) {
    for name in [ACL_ACCESS, ACL_DEFAULT] {
        if !entry.attributes.iter().any(|attribute| attribute.name == name) {
            // It has none, or its kind cannot have one.
            rustix::fs::removexattr(proc_path(file), OsStr::from_bytes(name)).ok();
        }
    }
}

/// Whether files in this folder inherit an ACL.
pub(super) fn has_default_acl(folder: &OwnedFd) -> bool {
    rustix::fs::getxattr_query(proc_path(folder), OsStr::from_bytes(ACL_DEFAULT)).is_ok()
}

impl std::fmt::Display for UnsetAttribute {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "the attribute {}: {}",
            self.name,
            io::Error::from(self.error)
        )
    }
}
