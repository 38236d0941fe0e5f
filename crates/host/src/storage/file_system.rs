//! Which file system something is on, by the number that `statfs` tells.
//!
//! Source: statfs(2); include/uapi/linux/magic.h.

use std::path::Path;

use rustix::fs::StatFs;

pub(crate) const XFS: u64 = 0x5846_5342;
pub(crate) const BTRFS: u64 = 0x9123_683e;

/// The number of a file system. Its type is a signed one, of which 32 bits count.
pub(crate) fn number_of(found: &StatFs) -> u64 {
    u64::try_from(found.f_type & 0xffff_ffff).unwrap_or_default()
}

/// Whether a file or folder is on one of these.
pub(crate) fn is_on(path: &Path, numbers: &[u64]) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| numbers.contains(&number_of(&found)))
}
