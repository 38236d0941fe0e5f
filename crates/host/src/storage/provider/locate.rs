//! Finds the dataset of a file or a device.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use super::btrfs::is_subvolume;
use super::lvm::{Found, find_device};
use super::mounts::Mounts;
use super::probe::why_not;
use super::{Dataset, ProviderError, ProviderKind, ProviderResult};
use crate::storage::file_system;

/// The folder of udev's links to ZFS volumes.
const VOLUMES: &str = "/dev/zvol";
/// The mount point of sysfs.
const SYSTEM: &str = "/sys";
/// Limit on the depth of folders below `/dev/zvol`: ZFS permits no deeper nesting of datasets.
const DEPTH_MAX: u32 = 50;

/// A file in a dataset, or a volume.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DatasetPath {
    /// The dataset.
    pub dataset: Dataset,
    /// The path of the file in the dataset's folder; empty for a volume.
    pub path: PathBuf,
}

/// The dataset of a file or a device, if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Located {
    /// The file or device is in a dataset.
    In(DatasetPath),
    /// The file or device is in no dataset, for this reason.
    Nowhere(String),
}

/// Finds the dataset of a file, folder or device. Symbolic links and bind mounts are resolved. Whether files can be
/// cloned is determined by trying it. If the trial needs named files, their names contain `label`.
pub fn locate(path: &Path, label: &str) -> ProviderResult<Located> {
    let failed = |source| ProviderError::File {
        action: "inspect",
        path: path.to_owned(),
        source,
    };
    let whole = path.canonicalize().map_err(failed)?;
    let metadata = whole.metadata().map_err(failed)?;
    if metadata.file_type().is_block_device() {
        return Ok(volume(path, metadata.rdev()));
    }
    let mounts = Mounts::read()?;
    let Some(mount) = mounts.of_path(&whole) else {
        return Ok(Located::Nowhere(format!(
            "{} is not on a mounted file system",
            whole.display()
        )));
    };
    let inside = whole.strip_prefix(&mount.point).unwrap_or(&whole);
    let place = |provider, name: String, path: PathBuf| {
        Located::In(DatasetPath {
            dataset: Dataset { provider, name },
            path,
        })
    };
    if mount.is_zfs() {
        let root = mount.root.strip_prefix("/").unwrap_or(&mount.root);
        return Ok(place(ProviderKind::Zfs, mount.source.clone(), root.join(inside)));
    }
    if file_system::is_on(&whole, &[file_system::BTRFS])
        && let Some((subvolume, path)) = subvolume_of(&whole, &mount.point)
    {
        return Ok(place(ProviderKind::Btrfs, subvolume, path));
    }
    let folder = if metadata.is_dir() {
        &whole
    } else {
        whole.parent().unwrap_or(&whole)
    };
    Ok(match why_not(folder, label) {
        None => {
            let path = whole.strip_prefix(folder).unwrap_or(&whole).to_owned();
            place(ProviderKind::Reflink, folder.display().to_string(), path)
        }
        Some(reason) => Located::Nowhere(format!("{reason}; {} is on {}", whole.display(), mount.kind)),
    })
}

/// The subvolume of a file, if its root is accessible and is not the root of the whole system. A snapshot of the
/// system's root would keep all of its data because of one disk.
fn subvolume_of(whole: &Path, mount_point: &Path) -> Option<(String, PathBuf)> {
    let inside = |folder: &&Path| folder.starts_with(mount_point);
    let root = whole
        .ancestors()
        .take_while(inside)
        .find(|folder| is_subvolume(folder))?;
    if root == Path::new("/") {
        return None;
    }
    let path = whole.strip_prefix(root).ok()?.to_owned();
    Some((root.display().to_string(), path))
}

fn volume(path: &Path, device: u64) -> Located {
    let place = |provider, name| {
        Located::In(DatasetPath {
            dataset: Dataset { provider, name },
            path: PathBuf::new(),
        })
    };
    let shown = path.display();
    match find_device(Path::new(SYSTEM), major(device), minor(device)) {
        Found::Thin(name) => return place(ProviderKind::Lvm, name),
        Found::Thick(name) => {
            return Located::Nowhere(format!(
                "{shown} is the volume {name} of LVM, which is not in a thin pool: it cannot have lasting snapshots"
            ));
        }
        Found::Other => {}
    }
    let named = path.strip_prefix(VOLUMES).ok().map(Path::to_owned);
    match named.or_else(|| volume_below(Path::new(VOLUMES), device, DEPTH_MAX)) {
        Some(name) => place(ProviderKind::Zfs, name.display().to_string()),
        None => Located::Nowhere(format!("{shown} is a device, but not a volume of ZFS or LVM")),
    }
}

/// The name of the volume with this device number.
fn volume_below(folder: &Path, device: u64, depth_max: u32) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    for entry in entries {
        let path = entry.path();
        let kind = entry.file_type().ok()?;
        if kind.is_dir() && depth_max > 0 {
            if let Some(found) = volume_below(&path, device, depth_max - 1) {
                return Some(found);
            }
        } else if path.metadata().is_ok_and(|metadata| metadata.rdev() == device) {
            return path.strip_prefix(VOLUMES).ok().map(Path::to_owned);
        }
    }
    None
}
