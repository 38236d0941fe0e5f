//! Checks of the files and folders of this host before a machine comes.

use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::HostNeeds;
use holdfast_live_copy::{interrupted_bytes, is_named_early};

use super::overlay_files::is_unused_overlay;
use super::{CheckRequest, CheckedDisk, DiskForm};

/// Files that the machine needs besides the disks that come.
pub(super) fn missing_files(needs: &HostNeeds, request: &CheckRequest) -> Vec<String> {
    let comes = |path: &Path| request.disks.iter().any(|disk| disk.path == path);
    let missing = needs.files.iter().filter(|(_, path)| !comes(path) && !path.exists());
    let mut missing: Vec<String> = missing
        .map(|(what, path)| format!("{} ({what}) does not exist there", path.display()))
        .collect();
    let folders = needs.made_files.iter().filter_map(|path| path.parent());
    let absent = folders.filter(|folder| !folder.is_dir());
    missing.extend(absent.map(|folder| format!("the folder {} does not exist there", folder.display())));
    let links = needs
        .links
        .iter()
        .filter(|link| !Path::new("/sys/class/net").join(link).exists());
    missing.extend(links.map(|link| format!("the network device {link} does not exist there")));
    missing
}

pub(super) fn no_place(disk: &CheckedDisk) -> Option<String> {
    let path = &disk.path;
    if !path.is_absolute() {
        return Some(format!("{} is not an absolute path", path.display()));
    }
    if is_taken_for(path, disk.form) {
        return Some(format!("{} exists there", path.display()));
    }
    let folder = path.parent()?;
    (!folder.is_dir()).then(|| format!("the folder {} does not exist there", folder.display()))
}

/// Whether a file has this path that a disk which comes in this form would not replace: an interrupted copy, or an overlay that
/// nothing has used.
pub(super) fn is_taken_for(path: &Path, form: DiskForm) -> bool {
    let is_replaced = match form {
        DiskForm::Copy => is_named_early(path),
        DiskForm::Overlay => is_unused_overlay(path),
    };
    path.symlink_metadata().is_ok() && !is_replaced
}

/// The disks that come share the space of their file systems.
pub(super) fn no_space(request: &CheckRequest) -> Option<String> {
    use std::os::unix::fs::MetadataExt as _;
    let mut wanted: Vec<(u64, PathBuf, u64)> = Vec::new();
    for disk in &request.disks {
        let folder = disk.path.parent()?;
        let device = folder.metadata().ok()?.dev();
        let missing = disk.expected_bytes.saturating_sub(interrupted_bytes(&disk.path));
        match wanted.iter_mut().find(|(known, ..)| *known == device) {
            Some((.., bytes)) => *bytes += missing,
            None => wanted.push((device, folder.to_owned(), missing)),
        }
    }
    wanted.iter().find_map(|(_, folder, bytes)| {
        let room = rustix::fs::statvfs(folder).ok()?;
        let available = room.f_bavail.saturating_mul(room.f_frsize);
        (available < *bytes).then(|| {
            format!(
                "{} has {available} bytes of space there; the disks take {bytes}",
                folder.display()
            )
        })
    })
}
