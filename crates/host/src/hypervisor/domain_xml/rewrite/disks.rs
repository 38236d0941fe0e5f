//! Changes where the disks of a configuration are stored.

use std::collections::BTreeMap;

use holdfast_hardware::xml::Element;
use roxmltree::Node;

use super::super::{child, children};
use super::{DiskChange, DiskPlace, Medium, Rewriter, utf8};

impl Medium {
    /// The `type` attribute of a disk of this medium, and the attribute of its `<source>`.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::File => ("file", "file"),
            Self::BlockDevice => ("block", "dev"),
        }
    }
}

impl Rewriter<'_> {
    pub(super) fn disks(
        &mut self,
        devices: Node<'_, '_>,
        changes: &BTreeMap<String, DiskChange>,
    ) -> Result<(), String> {
        for disk in children(devices, "disk") {
            let target = child(disk, "target").and_then(|target| target.attribute("dev"));
            let Some((target, change)) = target.and_then(|target| Some((target, changes.get(target)?))) else {
                continue;
            };
            match change {
                DiskChange::Place(place) => self.place(disk, target, place)?,
                DiskChange::Empty => self.empty(disk),
                DiskChange::Remove => self.edits.remove_element(disk),
            }
        }
        Ok(())
    }

    fn place(&mut self, disk: Node<'_, '_>, target: &str, place: &DiskPlace) -> Result<(), String> {
        let source = child(disk, "source");
        let is_encrypted = |node: Node<'_, '_>| child(node, "encryption").is_some();
        if is_encrypted(disk) || source.is_some_and(is_encrypted) {
            return Err(format!(
                "disk {target} is encrypted by its hypervisor, but the snapshot has its decrypted content"
            ));
        }
        let (kind, attribute) = place.medium.words();
        let path = utf8(&place.path)?;
        let before = disk.attribute("type");
        self.edits.set_attribute(disk, "type", kind);
        let is_plain = |source: &Node<'_, '_>| {
            before == Some(kind) && source.attribute(attribute).is_some() && !is_composed(*source)
        };
        match source {
            Some(source) if is_plain(&source) => {
                self.edits.set_attribute(source, attribute, path);
                self.edits.remove_attribute(source, "index");
            }
            Some(source) => {
                let new = Element::new("source").attribute(attribute, path);
                self.edits.replace_element(source, &new);
            }
            None => {
                let new = Element::new("source").attribute(attribute, path);
                self.edits.append(disk, &new);
            }
        }
        if let Some(driver) = child(disk, "driver") {
            self.edits.set_attribute(driver, "type", &place.format);
        } else {
            let driver = Element::new("driver")
                .attribute("name", "qemu")
                .attribute("type", &place.format);
            self.edits.append(disk, &driver);
        }
        // A restored image is complete: it has no backing file and no copy job, and needs no password.
        for name in ["backingStore", "mirror", "auth"] {
            for node in children(disk, name) {
                self.edits.remove_element(node);
            }
        }
        Ok(())
    }

    fn empty(&mut self, disk: Node<'_, '_>) {
        // An empty drive must have this type in all versions of libvirt.
        self.edits.set_attribute(disk, "type", "file");
        for name in ["source", "backingStore"] {
            for node in children(disk, name) {
                self.edits.remove_element(node);
            }
        }
    }
}

/// Whether a `<source>` has more than a path: a slice of the file, or a data file.
fn is_composed(source: Node<'_, '_>) -> bool {
    child(source, "slices").is_some() || child(source, "dataStore").is_some()
}
