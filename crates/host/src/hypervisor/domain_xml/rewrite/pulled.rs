//! Disks that are pulled from an NBD server while the machine runs: their images have an export as backing file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_hardware::xml::{Edits, Element};
use roxmltree::Node;

use super::super::{child, children, document_of};
use super::served::{nbd_source, target_of};

/// A disk that is pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledDisk {
    /// Its target in the machine.
    pub target: String,
    /// Its image.
    pub path: PathBuf,
    /// The socket of the NBD server.
    pub socket: PathBuf,
    /// The name of the export.
    pub export: String,
}

impl PulledDisk {
    /// The name of the backing file in the image, as QEMU reads it.
    pub fn backing_name(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.export, self.socket.display())
    }
}

/// Attributes of a driver by which an I/O error pauses the machine, so that its guest never sees the error.
const POLICIES: [&str; 2] = ["error_policy", "rerror_policy"];

/// Gives the images of disks their exports as backing files. Requests wait for `patience` after a server is lost; libvirt before
/// 9.2 ignores this time, and the machine is paused immediately.
///
/// # Errors
/// A description of what is wrong with the XML.
pub fn with_pulled_disks(text: &str, pulled: &[PulledDisk], patience: Duration) -> Result<String, String> {
    if pulled.is_empty() {
        return Ok(text.to_owned());
    }
    let document = document_of(text)?;
    let devices = child(document.root_element(), "devices").ok_or("the machine has no devices")?;
    let mut edits = Edits::new(text);
    for wanted in pulled {
        let mut disks = children(devices, "disk");
        let disk = disks.find(|disk| target_of(*disk) == Some(&wanted.target));
        let disk = disk.ok_or_else(|| format!("there is no disk {}", wanted.target))?;
        let backing = Element::new("backingStore")
            .attribute("type", "network")
            .child(Element::new("format").attribute("type", "raw"))
            .child(nbd_source(&wanted.socket, &wanted.export, patience)?)
            .child(Element::new("backingStore"));
        for former in children(disk, "backingStore") {
            edits.remove_element(former);
        }
        edits.append(disk, &backing);
        let driver = child(disk, "driver").ok_or_else(|| format!("disk {} has no driver", wanted.target))?;
        for policy in POLICIES {
            edits.set_attribute(driver, policy, "stop");
        }
    }
    Ok(edits.apply())
}

/// The disks of a configuration whose images have an export of an NBD server at a Unix socket as backing file.
///
/// # Errors
/// A description of what is wrong with the XML.
pub fn pulled_disks(text: &str) -> Result<Vec<PulledDisk>, String> {
    let document = document_of(text)?;
    let devices = child(document.root_element(), "devices");
    let disks = devices.into_iter().flat_map(|devices| children(devices, "disk"));
    Ok(disks.filter_map(pulled_disk).collect())
}

fn pulled_disk(disk: Node<'_, '_>) -> Option<PulledDisk> {
    let source = child(child(disk, "backingStore")?, "source")?;
    let socket = child(source, "host")?.attribute("socket")?;
    (source.attribute("protocol") == Some("nbd")).then_some(())?;
    Some(PulledDisk {
        target: target_of(disk)?.to_owned(),
        path: child(disk, "source")?.attribute("file")?.into(),
        socket: Path::new(socket).to_owned(),
        export: source.attribute("name")?.to_owned(),
    })
}

/// Gives the disks the reactions to I/O errors that they have in `own`, by target. Everything else is kept.
///
/// # Errors
/// A description of what is wrong with one of the configurations.
pub fn with_own_policies(text: &str, own: &str) -> Result<String, String> {
    let (document, own_document) = (document_of(text)?, document_of(own)?);
    let own_devices = child(own_document.root_element(), "devices");
    let own_drivers = own_devices.into_iter().flat_map(|devices| children(devices, "disk"));
    let own_drivers = own_drivers.filter_map(|disk| Some((target_of(disk)?, child(disk, "driver")?)));
    let own_drivers: BTreeMap<&str, Node<'_, '_>> = own_drivers.collect();
    let mut edits = Edits::new(text);
    let devices = child(document.root_element(), "devices");
    for disk in devices.into_iter().flat_map(|devices| children(devices, "disk")) {
        let own_driver = target_of(disk).and_then(|target| own_drivers.get(target));
        if let Some((driver, own_driver)) = child(disk, "driver").zip(own_driver) {
            for policy in POLICIES {
                edits.put_attribute(driver, policy, own_driver.attribute(policy));
            }
        }
    }
    Ok(edits.apply())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{PulledDisk, pulled_disks, with_own_policies, with_pulled_disks};
    use crate::hypervisor::domain_xml::DomainXml;

    const TEXT: &str = "<domain><name>a</name><devices>\
        <disk type='file'><driver name='qemu' type='qcow2' error_policy='report'/><source file='/i'/><backingStore/>\
        <target dev='vda'/></disk>\
        <disk type='file'><driver name='qemu' type='raw'/><source file='/j'/><target dev='vdb'/></disk></devices></domain>";

    fn pulled() -> PulledDisk {
        PulledDisk {
            target: "vda".to_owned(),
            path: "/i".into(),
            socket: "/s/n<d".into(),
            export: "vda".to_owned(),
        }
    }

    #[test]
    fn a_disk_is_pulled_until_its_configuration_has_no_export() {
        assert_eq!(pulled_disks(TEXT), Ok(Vec::new()));
        let text = with_pulled_disks(TEXT, &[pulled()], Duration::from_secs(60)).unwrap();
        assert_eq!(pulled_disks(&text), Ok(vec![pulled()]));
        assert!(text.contains("error_policy='stop' rerror_policy='stop'"), "{text}");
        assert!(text.contains("<reconnect delay='60'/>"), "{text}");
        let disks = |text: &str| DomainXml::parse(text).unwrap().disks;
        assert_eq!(disks(&text)[0].source, disks(TEXT)[0].source);
        assert_eq!(disks(&text)[1], disks(TEXT)[1]);
        let other = PulledDisk {
            target: "vdz".to_owned(),
            ..pulled()
        };
        with_pulled_disks(TEXT, &[other], Duration::ZERO).unwrap_err();
    }

    #[test]
    fn the_own_reactions_to_errors_come_back() {
        let text = with_pulled_disks(TEXT, &[pulled()], Duration::ZERO).unwrap();
        let back = with_own_policies(&text, TEXT).unwrap();
        assert!(
            back.contains("error_policy='report'") && !back.contains("'stop'"),
            "{back}"
        );
        assert_eq!(pulled_disks(&back), Ok(vec![pulled()]));
        assert_eq!(with_own_policies(TEXT, TEXT).unwrap(), TEXT);
    }

    #[test]
    fn the_image_names_its_export() {
        let disk = PulledDisk {
            socket: "/run/a.disk0".into(),
            ..pulled()
        };
        assert_eq!(disk.backing_name(), "nbd+unix:///vda?socket=/run/a.disk0");
    }
}
