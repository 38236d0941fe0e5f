//! The disks of a running QEMU.

use serde_json::{Value, json};

use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// A disk of a running QEMU: a guest device, and its block node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuDisk {
    /// The QOM path of the device: "/machine/peripheral/virtio-disk0/virtio-backend".
    pub device: String,
    /// The name of the block node.
    pub node: String,
    /// The driver of that node: "qcow2", "raw"...
    pub driver: String,
    /// The path of the image.
    pub filename: String,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// Whether the guest cannot write the disk.
    pub is_read_only: bool,
    /// Whether bitmaps can be stored in the image when QEMU ends, which needs a qcow2 of version 3. An image with
    /// internal snapshots must not store any, because QEMU cannot revert to an internal snapshot of an image with a
    /// bitmap.
    pub keeps_bitmaps: bool,
    /// Dirty bitmaps of the node.
    pub bitmaps: Vec<Bitmap>,
}

/// A dirty bitmap of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "QEMU's own flags, each on its own")]
pub struct Bitmap {
    /// The name.
    pub name: String,
    /// Bytes per bit.
    pub granularity_bytes: u64,
    /// Number of bytes that are marked as dirty.
    pub dirty_bytes: u64,
    /// Whether writes are recorded.
    pub is_recording: bool,
    /// Whether the bitmap is stored in the image when QEMU ends.
    pub is_persistent: bool,
    /// Whether QEMU reports the bitmap as inconsistent: the image was not closed properly.
    pub is_inconsistent: bool,
    /// Whether a job uses the bitmap.
    pub is_busy: bool,
}

const COMMAND: &str = "query-block";

/// The disks of a running QEMU that have a medium, in QEMU's order.
pub fn disks(monitor: &dyn Monitor) -> Result<Vec<QemuDisk>> {
    let answer = monitor.execute(&QmpCommand::new(COMMAND, Value::Null))?;
    let invalid = |detail: &str| MonitorError::Invalid {
        command: COMMAND.to_owned(),
        detail: detail.to_owned(),
    };
    let devices = answer.as_array().ok_or_else(|| invalid("not a list"))?;
    let with_medium = devices.iter().filter(|device| device.get("inserted").is_some());
    with_medium
        .filter_map(|device| {
            // A drive without a guest device is not a disk of the machine.
            let path = device_path(device.get("qdev")?.as_str()?);
            Some(disk(path, &device["inserted"]).ok_or_else(|| invalid("a disk has no name or no size")))
        })
        .collect()
}

impl QemuDisk {
    /// Whether the hypervisor's name `alias` refers to this device: the QOM path, or the id in it.
    pub fn is_called(&self, alias: &str) -> bool {
        self.device == alias || self.device.split('/').any(|part| part == alias)
    }
}

/// QEMU reports only the id of a device that has one, unless a child object of the device has the disk.
pub(crate) fn device_path(qdev: &str) -> String {
    if qdev.starts_with('/') {
        qdev.to_owned()
    } else {
        format!("/machine/peripheral/{qdev}")
    }
}

fn disk(device: String, inserted: &Value) -> Option<QemuDisk> {
    let text = |key: &str| Some(inserted.get(key)?.as_str()?.to_owned());
    Some(QemuDisk {
        device,
        node: text("node-name")?,
        driver: text("drv")?,
        filename: text("file").unwrap_or_default(),
        size_bytes: inserted.get("image")?.get("virtual-size")?.as_u64()?,
        is_read_only: inserted.get("ro")?.as_bool()?,
        keeps_bitmaps: keeps_bitmaps(inserted) && !has_snapshots(inserted),
        bitmaps: bitmaps_of(inserted),
    })
}

/// Whether the image of a node, as QEMU describes it, can store bitmaps.
pub(super) fn keeps_bitmaps(node: &Value) -> bool {
    let compat = node
        .pointer("/image/format-specific/data/compat")
        .and_then(Value::as_str);
    node.get("drv").is_some_and(|driver| driver == "qcow2") && compat.is_some_and(|compat| compat != "0.10")
}

/// Whether the image of a node, as QEMU describes it, has internal snapshots.
fn has_snapshots(node: &Value) -> bool {
    let snapshots = node.pointer("/image/snapshots").and_then(Value::as_array);
    snapshots.is_some_and(|snapshots| !snapshots.is_empty())
}

/// The bitmaps of a node, as QEMU describes it.
pub(super) fn bitmaps_of(node: &Value) -> Vec<Bitmap> {
    let bitmaps = node.get("dirty-bitmaps").and_then(Value::as_array);
    bitmaps.into_iter().flatten().filter_map(bitmap).collect()
}

/// A bitmap without a name belongs to a job.
fn bitmap(value: &Value) -> Option<Bitmap> {
    let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or_default();
    Some(Bitmap {
        name: value.get("name")?.as_str()?.to_owned(),
        granularity_bytes: value.get("granularity")?.as_u64()?,
        dirty_bytes: value.get("count")?.as_u64()?,
        is_recording: flag("recording"),
        is_persistent: flag("persistent"),
        is_inconsistent: flag("inconsistent"),
        is_busy: flag("busy"),
    })
}

/// Fails if the device of a disk has another node now. A snapshot by another client replaces the nodes of its disks.
pub(super) fn check_nodes(monitor: &dyn Monitor, named: &[QemuDisk]) -> Result<()> {
    if named.is_empty() {
        return Ok(());
    }
    let present = disks(monitor)?;
    let is_present = |disk: &QemuDisk| {
        let now = present.iter().find(|now| now.device == disk.device);
        now.is_some_and(|now| now.node == disk.node)
    };
    named
        .iter()
        .find(|disk| !is_present(disk))
        .map_or(Ok(()), |disk| Err(moved(&disk.device)))
}

/// The error for a disk whose device has another node now.
pub(super) fn moved(device: &str) -> MonitorError {
    MonitorError::Busy {
        with: format!("the disk {device}, which was switched to another image in the meantime"),
    }
}

/// Sets the node of a guest device. It must differ from the current node: see [`Danger::SameNodeAgain`](super::Danger).
pub(crate) fn set_drive(monitor: &dyn Monitor, device: &str, node: &str) -> Result<()> {
    let arguments = json!({ "path": device, "property": "drive", "value": node });
    monitor.execute(&QmpCommand::new("qom-set", arguments)).map(drop)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::disk;

    fn keeps_bitmaps(driver: &str, compat: &str, snapshots: &Value) -> bool {
        let inserted = json!({
            "node-name": "node", "drv": driver, "ro": false,
            "image": {
                "virtual-size": 512, "snapshots": snapshots, "format-specific": { "data": { "compat": compat } },
            },
        });
        disk("device".to_owned(), &inserted).unwrap().keeps_bitmaps
    }

    #[test]
    fn only_version_3_images_without_internal_snapshots_store_bitmaps() {
        let (none, one) = (json!([]), json!([{ "id": "1", "name": "before" }]));
        assert!(keeps_bitmaps("qcow2", "1.1", &Value::Null) && keeps_bitmaps("qcow2", "1.1", &none));
        assert!(!keeps_bitmaps("qcow2", "1.1", &one));
        assert!(!keeps_bitmaps("qcow2", "0.10", &none) && !keeps_bitmaps("raw", "1.1", &none));
    }
}
