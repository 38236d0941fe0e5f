//! Images over exports of the source.

use std::path::Path;

use holdfast_block::{BlockDevice as _, ExtentKind, for_each_extent};
use holdfast_engine::is_disk_socket;
use holdfast_host::domain_xml::PulledDisk;
use holdfast_image::{Backing, BackingFile, CreateOptions, Format, Image, OpenOptions};

use super::OverlayDisk;
use super::file_users::is_in_use;

pub(super) fn create_overlay(disk: &OverlayDisk) -> holdfast_image::Result<()> {
    let named = PulledDisk {
        target: String::new(),
        path: disk.path.clone(),
        socket: disk.socket.clone(),
        export: disk.export.clone(),
    };
    let mut options = CreateOptions::qcow2(disk.size_bytes).of_whole_sectors();
    options.qcow2.backing = Some(BackingFile {
        name: named.backing_name(),
        format: Format::Raw,
    });
    holdfast_image::create(&disk.path, &options)
}

/// Whether a file is an overlay over an export of a migration that has no data, and that no process has open.
pub(super) fn is_unused_overlay(path: &Path) -> bool {
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        backing: Backing::Ignore,
        ..OpenOptions::default()
    };
    let is_file = path.symlink_metadata().is_ok_and(|found| found.is_file());
    if !is_file || is_in_use(path) {
        return false;
    }
    holdfast_image::open(path, &options).is_ok_and(|image| is_over_export(&image) && is_empty(&image))
}

fn is_over_export(image: &Image) -> bool {
    let top = image.layers().first().and_then(|layer| layer.qcow2.as_ref());
    let backing = top.and_then(|qcow2| qcow2.backing_file.as_deref());
    let socket = backing.and_then(|name| name.split_once("?socket="));
    socket.is_some_and(|(_, socket)| is_disk_socket(Path::new(socket)))
}

fn is_empty(image: &Image) -> bool {
    let Some(top) = image.layer(0) else {
        return false;
    };
    let mut is_empty = true;
    let seen = for_each_extent(&*top, 0..top.size_bytes(), |extent| {
        is_empty &= extent.kind == ExtentKind::Absent;
        Ok(())
    });
    seen.is_ok() && is_empty
}

#[cfg(test)]
mod tests {
    use holdfast_block::BlockDeviceMut as _;
    use holdfast_image::{Backing, OpenOptions};

    use super::{OverlayDisk, create_overlay, is_unused_overlay};

    #[test]
    fn an_overlay_is_unused_until_it_has_data() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("web1.qcow2");
        assert!(!is_unused_overlay(&path));
        let disk = OverlayDisk {
            path: path.clone(),
            size_bytes: 1 << 20,
            socket: "/var/lib/libvirt/qemu/holdfast-00c0ffee.disk0".into(),
            export: "vda".to_owned(),
        };
        create_overlay(&disk).unwrap();
        assert!(is_unused_overlay(&path));
        create_overlay(&disk).unwrap_err();
        let alone = OpenOptions {
            backing: Backing::Ignore,
            ..OpenOptions::default()
        };
        let image = holdfast_image::open_mut(&path, &alone).unwrap();
        image.write_at(&[1; 512], 0).unwrap();
        image.flush().unwrap();
        drop(image);
        assert!(!is_unused_overlay(&path));
    }

    #[test]
    fn an_overlay_of_another_program_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("web1.qcow2");
        let disk = OverlayDisk {
            path: path.clone(),
            size_bytes: 1 << 20,
            socket: "/run/nbd".into(),
            export: "vda".to_owned(),
        };
        create_overlay(&disk).unwrap();
        assert!(!is_unused_overlay(&path));
    }
}
