//! What images are based on.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_host::{Description, DiskSource};
use holdfast_image::{Backing, Format, OpenOptions};

/// Images below an image that are looked at; QEMU takes 200.
const CHAIN_LENGTH_MAX: usize = 200;

/// An image and the files that it is based on, as far as they can be read. Nothing of them is changed.
pub(super) fn chain_of(path: &Path, format: Option<&str>) -> Vec<PathBuf> {
    let mut chain = vec![path.to_owned()];
    let mut format = format.and_then(Format::from_name);
    // The content of a raw disk is its guest's.
    while format != Some(Format::Raw) && chain.len() < CHAIN_LENGTH_MAX {
        let above = &chain[chain.len() - 1];
        let options = OpenOptions {
            format,
            backing: Backing::Ignore,
            ..OpenOptions::default()
        };
        let Ok(image) = holdfast_image::open(above, &options) else {
            break;
        };
        let qcow2 = image.layers().first().and_then(|layer| layer.qcow2.as_ref());
        let Some(qcow2) = qcow2 else { break };
        let folder = above.parent().unwrap_or(Path::new("/"));
        let Some(below) = qcow2.backing_file.as_ref().map(|below| folder.join(below)) else {
            break;
        };
        format = qcow2.backing_format.as_deref().and_then(Format::from_name);
        chain.push(below);
    }
    chain
}

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
