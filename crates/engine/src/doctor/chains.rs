//! What images are based on.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_host::{Description, DiskSource};

pub(super) use crate::machine_restore::chain_of;

/// The chain of each disk of a machine that is a file or a device, with its target.
pub(super) fn chains_of(description: &Description) -> Vec<(String, Vec<PathBuf>)> {
    let disks = description.disks.iter().filter_map(|disk| match &disk.source {
        DiskSource::File(path) | DiskSource::Device(path) => {
            Some((disk.target.clone(), chain_of(path, disk.format.as_deref())))
        }
        DiskSource::Other(_) | DiskSource::Empty => None,
    });
    disks.collect()
}

/// Whether two paths mean one file.
pub(super) fn is_same(left: &Path, right: &Path) -> bool {
    let identity = |path: &Path| path.metadata().ok().map(|found| (found.dev(), found.ino()));
    left == right || identity(left).is_some_and(|left| identity(right) == Some(left))
}

/// Whether nobody may write a file, by its permissions.
pub(super) fn is_write_protected(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.mode() & 0o222 == 0)
}
