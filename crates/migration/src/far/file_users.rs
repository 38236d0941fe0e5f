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

/// Whether the QEMU of a machine has a file open. A copy into a file that it does not use would be of no use.
pub(super) fn verify(uuid: &str, path: &Path) -> Result<(), String> {
    let users = users_of_file(path);
    let is_its = |arguments: &[String]| arguments.iter().any(|word| word == uuid);
    if users.found.iter().any(|process| is_its(&process.arguments)) {
        return Ok(());
    }
    let reason = if users.is_complete {
        "its hypervisor has another file open"
    } else {
        "which files its hypervisor has open is not visible: holdfast must run as root there"
    };
    Err(format!("{}: {reason}", path.display()))
}
