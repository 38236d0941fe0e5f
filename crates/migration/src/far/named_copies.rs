//! The copies of disks that have their names before they are complete.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_live_copy::is_named_early;

/// The copies that this migration has given their names: path, device and inode.
#[derive(Default)]
pub(super) struct NamedCopies(Vec<(PathBuf, u64, u64)>);

impl NamedCopies {
    /// Notes the copy at `path`, unless another file has this name.
    pub(super) fn note(&mut self, path: &Path) {
        if is_named_early(path) {
            self.0.extend(identity_of(path));
        }
    }

    /// Whether the file at `path` is such a copy, and became complete.
    pub(super) fn is_complete(&self, path: &Path) -> bool {
        !is_named_early(path) && identity_of(path).is_some_and(|file| self.0.contains(&file))
    }
}

fn identity_of(path: &Path) -> Option<(PathBuf, u64, u64)> {
    let found = path.symlink_metadata().ok()?;
    Some((path.to_owned(), found.dev(), found.ino()))
}
