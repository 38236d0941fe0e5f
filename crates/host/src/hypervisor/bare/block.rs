//! A machine's disks and firmware variables, from the answer to `query-block`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::hypervisor::machine::{DiskKind, DiskSource, MachineDisk};
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};
use crate::qemu::qom::{property, text};
use crate::qemu::{device_path, run_of};

/// Filter nodes, which show the bytes of another node. Their driver is not an image format.
const FILTERS: [&str; 6] = [
    "copy-before-write",
    "copy-on-read",
    "throttle",
    "preallocate",
    "compress",
    "blkdebug",
];

pub(super) struct Blocks {
    /// Drives that are devices of the guest.
    pub(super) disks: Vec<MachineDisk>,
    /// The file with the firmware's variables.
    pub(super) nvram: Option<PathBuf>,
}

/// Resolves a path of QEMU.
type Resolve<'a> = &'a dyn Fn(&Path) -> PathBuf;

impl Blocks {
    /// Queries QEMU.
    pub(super) fn query(monitor: &dyn Monitor, resolve: Resolve<'_>) -> Result<Self> {
        let answer = monitor.execute(&QmpCommand::new("query-block", Value::Null))?;
        let drives = answer.as_array().ok_or_else(|| MonitorError::Invalid {
            command: "query-block".to_owned(),
            detail: "not a list".to_owned(),
        })?;
        let mut blocks = Self {
            disks: Vec::new(),
            nvram: None,
        };
        for drive in drives {
            // A drive without a guest device is not a disk of the machine.
            let Some(device) = text(drive, "qdev").map(|qdev| device_path(&qdev)) else {
                continue;
            };
            // Every object has a type. Without the type, a drive of the firmware would be treated as a disk.
            let kind = property(monitor, &device, "type")?;
            let kind = kind.as_str().unwrap_or_default();
            if kind.starts_with("cfi.pflash") {
                let writable = drive.get("inserted").filter(|inserted| inserted["ro"] == false);
                let path = writable.and_then(|inserted| path_of(inserted, resolve));
                blocks.nvram = blocks.nvram.or(path);
                continue;
            }
            let shared = match property(monitor, &device, "share-rw") {
                // Not every device has this property.
                Err(error) if error.is_refusal() => false,
                shared => shared? == true,
            };
            let disk = disk(drive, device, kind, resolve);
            blocks.add(MachineDisk {
                is_shared: shared,
                ..disk
            });
        }
        Ok(blocks)
    }

    /// Adds a disk. Several disks of one name (the namespaces of an NVMe controller) are numbered.
    fn add(&mut self, mut disk: MachineDisk) {
        let stem = disk.target.clone();
        let mut number = 1;
        while self.disks.iter().any(|other| other.target == disk.target) {
            number += 1;
            disk.target = format!("{stem}-{number}");
        }
        self.disks.push(disk);
    }
}

/// Describes a disk that no other machine uses.
fn disk(drive: &Value, device: String, kind: &str, resolve: Resolve<'_>) -> MachineDisk {
    let inserted = drive.get("inserted");
    // A node that this or another run has inserted does not describe the image below it.
    let shown = inserted.filter(|inserted| text(inserted, "node-name").is_none_or(|name| run_of(&name).is_none()));
    let driver = shown.and_then(|inserted| text(inserted, "drv"));
    MachineDisk {
        target: target(&device, &text(drive, "device").unwrap_or_default()),
        kind: disk_kind(kind),
        source: inserted.map_or(DiskSource::Empty, |inserted| source(inserted, resolve)),
        format: driver.filter(|driver| !FILTERS.contains(&&driver[..])),
        is_read_only: inserted.is_some_and(|inserted| inserted["ro"] == true),
        is_shared: false,
        alias: Some(device),
    }
}

fn disk_kind(device_type: &str) -> DiskKind {
    match device_type {
        "floppy" => DiskKind::Floppy,
        "scsi-block" | "scsi-generic" => DiskKind::Lun,
        other if other.ends_with("-cd") => DiskKind::Cdrom,
        _ => DiskKind::Disk,
    }
}

/// The target name of a disk: the id of its device, else the name of its drive, else its index among the devices
/// without a name.
///
/// The node name is never used: it changes with a snapshot, and the next backup would not recognize the disk.
fn target(device: &str, drive: &str) -> String {
    let mut parts = device.split('/').skip(2);
    let (folder, part) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    if folder == "peripheral" && !part.is_empty() {
        return part.to_owned();
    }
    if !drive.is_empty() {
        return drive.to_owned();
    }
    let digits: String = part.chars().filter(char::is_ascii_digit).collect();
    match folder {
        "peripheral-anon" => format!("device{digits}"),
        other => format!("{other}{digits}"),
    }
}

fn source(inserted: &Value, resolve: Resolve<'_>) -> DiskSource {
    let driver = text(inserted, "drv").unwrap_or_default();
    match path_of(inserted, resolve) {
        Some(path) if driver == "host_device" || path.starts_with("/dev") => DiskSource::Device(path),
        Some(path) => DiskSource::File(path),
        None => DiskSource::Other(text(inserted, "file").unwrap_or_default()),
    }
}

/// The image file; none if it is not a file, or is described by JSON only.
fn path_of(inserted: &Value, resolve: Resolve<'_>) -> Option<PathBuf> {
    let name = text(inserted, "file").filter(|name| !name.is_empty())?;
    // QEMU's own rule: a colon before the first slash ends a protocol name.
    let first = name.split('/').next().unwrap_or_default();
    if first.contains(':') {
        return None;
    }
    Some(resolve(Path::new(&name)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::{disk, disk_kind, source, target};
    use crate::hypervisor::machine::{DiskKind, DiskSource};

    #[test]
    fn a_disk_is_named_by_a_stable_id() {
        assert_eq!(target("/machine/peripheral/disk0/virtio-backend", "drive0"), "disk0");
        assert_eq!(target("/machine/peripheral/stick/stick.0/legacy[0]", "us"), "stick");
        assert_eq!(
            target("/machine/peripheral-anon/device[6]/virtio-backend", "virtio0"),
            "virtio0"
        );
        assert_eq!(
            target("/machine/peripheral-anon/device[12]/virtio-backend", ""),
            "device12"
        );
        assert_eq!(target("/machine/unattached/device[16]", "ide0-hd0"), "ide0-hd0");
        assert_eq!(target("/machine/unattached/device[16]", ""), "unattached16");
    }

    #[test]
    fn the_kind_of_a_drive_follows_from_its_device() {
        let kinds = [
            "ide-cd",
            "scsi-cd",
            "floppy",
            "scsi-block",
            "scsi-hd",
            "virtio-blk-device",
            "nvme",
        ];
        let kinds = kinds.map(disk_kind);
        let (cd, disk) = (DiskKind::Cdrom, DiskKind::Disk);
        assert_eq!(kinds, [cd, cd, DiskKind::Floppy, DiskKind::Lun, disk, disk, disk]);
    }

    #[test]
    fn a_node_of_our_run_is_no_image_format() {
        let resolve = |path: &Path| path.to_owned();
        let format = |node: &str| {
            let drive = json!({ "inserted": { "node-name": node, "drv": "raw", "file": "/a", "ro": false } });
            disk(
                &drive,
                "/machine/peripheral/a".to_owned(),
                "virtio-blk-device",
                &resolve,
            )
            .format
        };
        assert_eq!(format("format0").as_deref(), Some("raw"));
        assert_eq!(format("hf-00abcdef-0-switch"), None);
    }

    #[test]
    fn protocols_and_json_are_not_taken_for_files() {
        let resolve = |path: &Path| Path::new("/cwd").join(path);
        let of = |file: &str| source(&json!({ "drv": "raw", "file": file }), &resolve);
        assert_eq!(of("/images/a"), DiskSource::File("/images/a".into()));
        assert_eq!(of("a:b/c"), DiskSource::Other("a:b/c".to_owned()));
        assert_eq!(of("sub/a:b"), DiskSource::File("/cwd/sub/a:b".into()));
        assert_eq!(of("/dev/vg/a"), DiskSource::Device("/dev/vg/a".into()));
        assert_eq!(of("nbd://host/a"), DiskSource::Other("nbd://host/a".to_owned()));
        let json = "json:{\"driver\": \"luks\"}";
        assert_eq!(of(json), DiskSource::Other(json.to_owned()));
    }
}
