//! Kernel and file system features that make Holdfast faster or its files smaller.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use holdfast_block::to_usize;
use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};

/// A feature of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct FileFeature {
    /// Its name in the kernel.
    pub name: &'static str,
    /// What Holdfast uses it for.
    pub purpose: &'static str,
    /// Whether it is supported; `None` if that could not be tested.
    pub present: Option<bool>,
}

/// The kernel's release, as in `uname -r`.
pub fn release() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    Some(text.trim().to_owned())
}

/// This host's name.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Tests the features of the file system of `folder`, with unnamed temporary files.
pub fn file_features(folder: &Path) -> Vec<FileFeature> {
    let feature = |name, purpose, present| FileFeature { name, purpose, present };
    let scratch = scratch_file(folder);
    let tried = |look: fn(&File) -> bool| scratch.as_ref().map(look);
    let clone = || {
        let target = unnamed(folder, OFlags::RDWR)?;
        Some(rustix::fs::ioctl_ficlone(&target, scratch.as_ref()?).is_ok())
    };
    let direct = scratch
        .as_ref()
        .map(|_| unnamed(folder, OFlags::RDWR | OFlags::DIRECT).is_some());
    vec![
        feature("FICLONE", "copies that share their bytes", clone()),
        feature("O_DIRECT", "large copies past the page cache", direct),
        feature("FALLOC_FL_PUNCH_HOLE", "giving back what is zero", tried(punches_holes)),
        feature("SEEK_HOLE", "not reading holes", tried(finds_holes)),
    ]
}

const BLOCK: u64 = 64 << 10;

/// An unnamed file: a block of data, then a hole.
fn scratch_file(folder: &Path) -> Option<File> {
    let mut file = unnamed(folder, OFlags::RDWR)?;
    file.write_all(&vec![1; to_usize(BLOCK)]).ok()?;
    file.set_len(4 * BLOCK).ok()?;
    Some(file)
}

fn unnamed(folder: &Path, flags: OFlags) -> Option<File> {
    let flags = flags | OFlags::TMPFILE | OFlags::CLOEXEC;
    rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)
        .ok()
        .map(File::from)
}

fn finds_holes(file: &File) -> bool {
    rustix::fs::seek(file, SeekFrom::Hole(0)).is_ok_and(|hole| hole < 4 * BLOCK)
}

fn punches_holes(file: &File) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, 2 * BLOCK, BLOCK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::{file_features, release};

    #[test]
    fn trying_leaves_nothing_and_what_cannot_be_tried_is_not_known() {
        let folder = tempfile::tempdir().unwrap();
        let features = file_features(folder.path());
        assert_eq!(features.len(), 4);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let unknown = file_features(&folder.path().join("missing"));
        assert!(unknown.iter().all(|feature| feature.present.is_none()), "{unknown:?}");
        assert!(release().is_some_and(|release| release.contains('.')));
    }
}
