//! Connects the disks of a configuration to an NBD server while their images are filled, and then to the images
//! again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_hardware::xml::{Edits, Element};
use roxmltree::Node;

use super::super::{MARK_NAMESPACE, child, children, document_of};
use super::{DiskPlace, Medium, utf8};

/// The NBD server that provides a machine's disks during an instant restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedDisks {
    /// The socket of the NBD server.
    pub socket: PathBuf,
    /// How long requests wait after the server is lost. libvirt before 9.2 ignores this time, and the machine is
    /// paused immediately.
    pub patience: Duration,
    /// NBD export names, by disk target.
    pub exports: BTreeMap<String, String>,
    /// The folder of the instant restore's state; its path is stored in the configuration.
    pub folder: PathBuf,
}

/// Changes of a disk's driver: QEMU does not read the image itself, and `io` applies only to files of the host.
const DRIVER_CHANGES: [(&str, Option<&str>); 4] = [
    ("type", Some("raw")),
    ("error_policy", Some("stop")),
    ("rerror_policy", Some("stop")),
    ("io", None),
];

/// Connects disks to a server. An I/O error pauses the machine, so that its guest never sees the error.
///
/// # Errors
/// A description of what is wrong with the XML.
pub fn with_served_disks(text: &str, served: &ServedDisks) -> Result<String, String> {
    let document = document_of(text)?;
    let domain = document.root_element();
    let devices = child(domain, "devices").ok_or("the machine has no devices")?;
    let mut edits = Edits::new(text);
    let mut left: Vec<&str> = served.exports.keys().map(String::as_str).collect();
    for disk in children(devices, "disk") {
        let Some((target, export)) = target_of(disk).and_then(|target| Some((target, served.exports.get(target)?)))
        else {
            continue;
        };
        left.retain(|name| *name != target);
        let source = nbd_source(&served.socket, export, served.patience)?;
        edits.set_attribute(disk, "type", "network");
        let before = child(disk, "source").ok_or_else(|| format!("disk {target} has no source"))?;
        edits.replace_element(before, &source);
        let driver = child(disk, "driver").ok_or_else(|| format!("disk {target} has no driver"))?;
        for (name, value) in DRIVER_CHANGES {
            edits.put_attribute(driver, name, value);
        }
    }
    if let Some(name) = left.first() {
        return Err(format!("there is no disk {name}"));
    }
    let mark = Element::new("holdfast:live")
        .attribute("xmlns:holdfast", MARK_NAMESPACE)
        .attribute("folder", utf8(&served.folder)?);
    match child(domain, "metadata") {
        Some(metadata) if metadata.has_children() => edits.append(metadata, &mark),
        Some(metadata) => edits.replace_element(metadata, &Element::new("metadata").child(mark)),
        None => edits.append(domain, &Element::new("metadata").child(mark)),
    }
    Ok(edits.apply())
}

/// Reverts only the changes of [`with_served_disks`]. Later changes of the configuration are kept.
///
/// Each disk is connected to its image in `own` again, by target, unless it has got another image in the meantime.
///
/// # Errors
/// A description of what is wrong with one of the configurations.
pub fn with_own_disks(text: &str, own: &str, socket: &Path) -> Result<String, String> {
    let (document, own_document) = (document_of(text)?, document_of(own)?);
    let own_disks = child(own_document.root_element(), "devices");
    let own_disks: BTreeMap<&str, Node<'_, '_>> = own_disks
        .into_iter()
        .flat_map(|devices| children(devices, "disk"))
        .filter_map(|disk| Some((target_of(disk)?, disk)))
        .collect();
    let domain = document.root_element();
    let mut edits = Edits::new(text);
    let devices = child(domain, "devices");
    for disk in devices.into_iter().flat_map(|devices| children(devices, "disk")) {
        let own_disk = target_of(disk).and_then(|target| own_disks.get(target).copied());
        let Some((own_disk, own_source)) = own_disk.and_then(|disk| Some((disk, child(disk, "source")?))) else {
            continue;
        };
        let Some(source) = child(disk, "source") else {
            continue;
        };
        if image_of(source) != image_of(own_source) && !is_served(source, socket) {
            continue;
        }
        edits.put_attribute(disk, "type", own_disk.attribute("type"));
        edits.replace_with_copy(source, own_source);
        if let Some(driver) = child(disk, "driver") {
            for (name, _) in DRIVER_CHANGES {
                let before = child(own_disk, "driver").and_then(|driver| driver.attribute(name));
                edits.put_attribute(driver, name, before);
            }
        }
    }
    if let Some(metadata) = child(domain, "metadata") {
        let (marks, others): (Vec<_>, Vec<_>) = metadata.children().filter(Node::is_element).partition(is_live_mark);
        if others.is_empty() && !marks.is_empty() {
            edits.remove_element(metadata);
        } else {
            for mark in marks {
                edits.remove_element(mark);
            }
        }
    }
    Ok(edits.apply())
}

/// The `<source>` of an export of an NBD server at a socket. Requests wait for `patience` after the server is lost; libvirt
/// before 9.2 ignores this time.
///
/// # Errors
/// The path of the socket is not UTF-8.
pub(super) fn nbd_source(socket: &Path, export: &str, patience: Duration) -> Result<Element, String> {
    let host = Element::new("host")
        .attribute("transport", "unix")
        .attribute("socket", utf8(socket)?);
    Ok(Element::new("source")
        .attribute("protocol", "nbd")
        .attribute("name", export)
        .child(host)
        .child(Element::new("reconnect").attribute("delay", patience.as_secs())))
}

/// The folder that [`with_served_disks`] stored in the configuration.
pub fn served_folder(text: &str) -> Option<PathBuf> {
    let document = document_of(text).ok()?;
    let metadata = child(document.root_element(), "metadata")?;
    let mark = metadata.children().find(is_live_mark)?;
    mark.attribute("folder").map(PathBuf::from)
}

fn is_live_mark(node: &Node<'_, '_>) -> bool {
    node.has_tag_name((MARK_NAMESPACE, "live"))
}

pub(super) fn target_of<'a>(disk: Node<'a, '_>) -> Option<&'a str> {
    child(disk, "target")?.attribute("dev")
}

/// The path of a file or block device in a disk's `<source>`.
fn image_of<'a>(source: Node<'a, '_>) -> Option<&'a str> {
    source.attribute("file").or_else(|| source.attribute("dev"))
}

/// Whether a disk's `<source>` is the NBD server at this socket.
fn is_served(source: Node<'_, '_>, socket: &Path) -> bool {
    let named = child(source, "host").and_then(|host| host.attribute("socket"));
    source.attribute("protocol") == Some("nbd") && named.map(Path::new) == Some(socket)
}

/// The `<disk>` element for a disk at `place`.
///
/// # Errors
/// The path is not UTF-8.
pub fn disk_element(target: &str, place: &DiskPlace) -> Result<Element, String> {
    let (kind, attribute) = match place.medium {
        Medium::File => ("file", "file"),
        Medium::BlockDevice => ("block", "dev"),
    };
    let path: &Path = &place.path;
    let driver = Element::new("driver")
        .attribute("name", "qemu")
        .attribute("type", &place.format);
    Ok(Element::new("disk")
        .attribute("type", kind)
        .attribute("device", "disk")
        .child(driver)
        .child(Element::new("source").attribute(attribute, utf8(path)?))
        .child(Element::new("target").attribute("dev", target)))
}

/// The `<domainsnapshot>` document that creates overlays on disks. The disks in `others` are unchanged.
///
/// # Errors
/// A path is not UTF-8.
pub fn overlays_document(overlays: &[(String, PathBuf)], others: &[String]) -> Result<Element, String> {
    let mut disks = Vec::new();
    for (target, overlay) in overlays {
        let disk = Element::new("disk")
            .attribute("name", target)
            .attribute("snapshot", "external")
            .attribute("type", "file")
            .child(Element::new("driver").attribute("type", "qcow2"))
            .child(Element::new("source").attribute("file", utf8(overlay)?));
        disks.push(disk);
    }
    disks.extend(others.iter().map(|target| {
        Element::new("disk")
            .attribute("name", target)
            .attribute("snapshot", "no")
    }));
    Ok(Element::new("domainsnapshot").child(Element::new("disks").children(disks)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ServedDisks, served_folder, with_own_disks, with_served_disks};
    use crate::DiskSource;
    use crate::hypervisor::domain_xml::DomainXml;

    fn served(target: &str) -> ServedDisks {
        ServedDisks {
            socket: "/s/n<d".into(),
            patience: Duration::from_secs(60),
            exports: [(target.to_owned(), "web1/vda".to_owned())].into(),
            folder: "/s".into(),
        }
    }

    #[test]
    fn a_disk_comes_from_the_server_and_stops_the_machine_when_it_fails() {
        let text = "<domain><name>a</name><devices>\
            <disk type='file'><driver name='qemu' type='qcow2' io='native' cache='none'/><source file='/i'/><target dev='vda'/></disk>\
            <disk type='file'><driver name='qemu' type='raw'/><source file='/j'/><target dev='vdb'/></disk></devices></domain>";
        for text in [text.to_owned(), text.replace("<devices>", "<metadata/><devices>")] {
            assert_eq!(served_folder(&text), None);
            let changed = with_served_disks(&text, &served("vda")).unwrap();
            let xml = DomainXml::parse(&changed).unwrap();
            assert_eq!(
                xml.disks[0].source,
                DiskSource::Other("network nbd web1/vda".to_owned())
            );
            assert_eq!(xml.disks[1].source, DiskSource::File("/j".into()));
            assert_eq!(served_folder(&changed), Some("/s".into()));
            assert!(
                changed.contains("type='raw' cache='none' error_policy='stop' rerror_policy='stop'"),
                "{changed}"
            );
            assert!(
                changed.contains("socket='/s/n&lt;d'") && changed.contains("<reconnect delay='60'/>"),
                "{changed}"
            );
        }
        assert!(with_served_disks(text, &served("vdz")).is_err());
    }

    const OWN: &str = "<domain>
  <name>a</name>
  <memory>1</memory>
  <devices>
    <disk type='block'><driver name='qemu' type='qcow2' io='native'/><source dev='/i'/><target dev='vda'/></disk>
    <disk type='file'><driver name='qemu' type='raw'/><source file='/j'/><target dev='vdb'/></disk>
  </devices>
</domain>";

    #[test]
    fn reverting_restores_the_original_configuration() {
        let with_metadata = OWN.replace("  <memory>", "  <metadata>\n    <a/>\n  </metadata>\n  <memory>");
        for own in [OWN, &with_metadata] {
            let served = with_served_disks(own, &served("vda")).unwrap();
            let back = with_own_disks(&served, own, "/s/n<d".as_ref()).unwrap();
            assert_eq!(served_folder(&back), None);
            assert_eq!(DomainXml::parse(&back), DomainXml::parse(own));
            assert!(!back.contains("error_policy") && back.contains("io='native'"), "{back}");
            assert_eq!(back.contains("<metadata>"), own.contains("<metadata>"), "{back}");
            assert_eq!(with_own_disks(&back, own, "/s/n<d".as_ref()).unwrap(), back);
        }
    }

    #[test]
    fn changes_by_others_in_the_meantime_are_kept() {
        let served = with_served_disks(OWN, &served("vda")).unwrap();
        // The disk as libvirt writes it after the pivot to its image, and an edited machine.
        let copied = "<source dev='/i' index='3'/>";
        let from = served.find("<source protocol").unwrap();
        let to = served.find("</source>").unwrap() + "</source>".len();
        let gone_over = served
            .replace(&served[from..to], copied)
            .replace("'network'", "'block'");
        let edited = |text: &str| text.replace("<memory>1<", "<memory>2<").replace("'/j'", "'/k'");
        for text in [edited(&served), edited(&gone_over)] {
            let back = with_own_disks(&text, OWN, "/s/n<d".as_ref()).unwrap();
            let disks = DomainXml::parse(&back).unwrap().disks;
            assert_eq!(disks[0].source, DiskSource::Device("/i".into()));
            assert_eq!(disks[1].source, DiskSource::File("/k".into()));
            assert!(back.contains("<memory>2<") && !back.contains("error_policy"), "{back}");
        }
        // Another image, and a removed disk.
        let other = served.replace(&served[from..to], "<source dev='/x'/>");
        let back = with_own_disks(&other, OWN, "/s/n<d".as_ref()).unwrap();
        assert!(back.contains("<source dev='/x'/>"), "{back}");
        let none = "<domain><name>a</name></domain>";
        assert_eq!(with_own_disks(none, OWN, "/s/n<d".as_ref()).unwrap(), none);
    }
}
