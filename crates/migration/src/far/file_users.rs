//! Which processes and machines of this host use a file.

use std::path::{Path, PathBuf};

use holdfast_host::{DiskSource, MachineDisk, users_of_file};
use holdfast_image::{Format, Image, OpenOptions};

pub(super) fn is_in_use(path: &Path) -> bool {
    let users = users_of_file(path);
    !users.found.is_empty() || !users.is_complete
}

/// Whether a disk is this file, or its image depends on it. An image that cannot be read may.
pub(super) fn needs_file(disk: &MachineDisk, found: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let (DiskSource::File(path) | DiskSource::Device(path)) = &disk.source else {
        return false;
    };
    let Ok(image) = open_disk(path, disk.format.as_deref().and_then(Format::from_name)) else {
        return true;
    };
    let is_it = |file: &PathBuf| {
        let file = file.metadata();
        file.is_ok_and(|file| (file.dev(), file.ino()) == (found.dev(), found.ino()))
    };
    image.layers().iter().any(|layer| layer.files().iter().any(is_it))
}

pub(super) fn open_disk(path: &Path, format: Option<Format>) -> holdfast_image::Result<Image> {
    let options = OpenOptions {
        format,
        ..OpenOptions::default()
    };
    holdfast_image::open(path, &options)
}
