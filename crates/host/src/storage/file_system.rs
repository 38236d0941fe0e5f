//! The type of the file system of a file, by `statfs`, and clones of files.
//!
//! Source: statfs(2); include/uapi/linux/magic.h.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::{StatFs, ioctl_ficlone};

pub(crate) const XFS: u64 = 0x5846_5342;
pub(crate) const BTRFS: u64 = 0x9123_683e;

/// The type of a file system. The field is a signed integer, of which only 32 bits are used.
pub(crate) fn number_of(found: &StatFs) -> u64 {
    u64::try_from(found.f_type & 0xffff_ffff).unwrap_or_default()
}

/// Whether a file or folder is on a file system of one of these types.
pub(crate) fn is_on(path: &Path, numbers: &[u64]) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| numbers.contains(&number_of(&found)))
}

/// Clones a file to a new file, which must not exist.
pub fn clone_file(from: &Path, to: &Path) -> std::io::Result<()> {
    // Until its permissions are set, the clone is as confidential as the original.
    let clone = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    Ok(ioctl_ficlone(clone, File::open(from)?)?)
}
