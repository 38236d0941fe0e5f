//! Checks for plans whether new files fit on their file systems.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::atomic_file::folder_of;
use crate::job::Progress;

/// Warns of each file system that has less free space than new files need. `job` names their writer: "the restore".
pub(crate) fn warn_of_missing_room<'p>(
    files: impl IntoIterator<Item = (&'p Path, u64)>,
    job: &str,
    progress: &dyn Progress,
) {
    let mut needed_by_device: BTreeMap<u64, (u64, &Path)> = BTreeMap::new();
    for (path, needed_bytes) in files {
        // A block device needs no free space.
        if path.exists() && !path.is_file() {
            continue;
        }
        let folder = folder_of(path);
        if let Ok(found) = folder.metadata() {
            needed_by_device.entry(found.dev()).or_insert((0, folder)).0 += needed_bytes;
        }
    }
    for (needed_bytes, folder) in needed_by_device.into_values() {
        let Ok(space) = rustix::fs::statvfs(folder) else {
            continue;
        };
        let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        if needed_bytes > free_bytes {
            progress.warning(&format!(
                "the file system of {} has {free_bytes} bytes free, and {job} would write {needed_bytes}",
                folder.display()
            ));
        }
    }
}
