//! Disks of a configuration that a server gives while their images are being filled.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::edits::{Edits, escaped};
use super::super::{MARK_NAMESPACE, child, children, document_of};
use super::{DiskPlace, Medium, utf8};

/// Where the disks of a machine come from for the time being.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedDisks {
    /// The socket of the NBD server.
    pub socket: PathBuf,
    /// How long requests wait for a server that is gone. libvirt before 9.2 does not know such a thing: there the machine stands
    /// still at once.
    pub patience: Duration,
    /// The server's names of disks, by target.
    pub exports: BTreeMap<String, String>,
    /// The folder with everything that is to be known of it; kept in the configuration.
    pub folder: PathBuf,
}

/// Has disks come from a server. A disk that fails stops the machine: its guest never sees an error.
///
/// # Errors
/// What is wrong with the configuration, in words.
pub fn with_served_disks(text: &str, served: &ServedDisks) -> Result<String, String> {
    let document = document_of(text)?;
    let domain = document.root_element();
    let devices = child(domain, "devices").ok_or("the machine has no devices")?;
    let mut edits = Edits::new(text);
    let mut left: Vec<&str> = served.exports.keys().map(String::as_str).collect();
    for disk in children(devices, "disk") {
        let target = child(disk, "target").and_then(|target| target.attribute("dev"));
        let Some((target, export)) = target.and_then(|target| Some((target, served.exports.get(target)?))) else {
            continue;
        };
        left.retain(|name| *name != target);
        let source = format!(
            "<source protocol='nbd' name='{}'><host transport='unix' socket='{}'/><reconnect delay='{}'/></source>",
            escaped(export),
            escaped(utf8(&served.socket)?),
            served.patience.as_secs()
        );
        edits.set_attribute(disk, "type", "network");
        let before = child(disk, "source").ok_or_else(|| format!("disk {target} has no source"))?;
        edits.replace_element(before, source);
        let driver = child(disk, "driver").ok_or_else(|| format!("disk {target} has no driver"))?;
        for (name, value) in [("type", "raw"), ("error_policy", "stop"), ("rerror_policy", "stop")] {
            edits.set_attribute(driver, name, value);
        }
        // It is about files of the host.
        edits.remove_attribute(driver, "io");
    }
    if let Some(name) = left.first() {
        return Err(format!("there is no disk {name}"));
    }
    let mark = format!(
        "<holdfast:live xmlns:holdfast='{MARK_NAMESPACE}' folder='{}'/>",
        escaped(utf8(&served.folder)?)
    );
    match child(domain, "metadata") {
        Some(metadata) if metadata.has_children() => edits.append(metadata, &mark),
        Some(metadata) => edits.replace_element(metadata, format!("<metadata>{mark}</metadata>")),
        None => edits.append(domain, &format!("<metadata>{mark}</metadata>")),
    }
    Ok(edits.apply())
}

/// The folder that a configuration was marked with by [`with_served_disks`].
pub fn served_folder(text: &str) -> Option<PathBuf> {
    let document = document_of(text).ok()?;
    let metadata = child(document.root_element(), "metadata")?;
    let mut marks = metadata
        .children()
        .filter(|node| node.has_tag_name((MARK_NAMESPACE, "live")));
    marks.next()?.attribute("folder").map(PathBuf::from)
}

/// The element of a disk at a place.
///
/// # Errors
/// Its path is no text.
pub fn disk_element(target: &str, place: &DiskPlace) -> Result<String, String> {
    let (kind, attribute) = match place.medium {
        Medium::File => ("file", "file"),
        Medium::BlockDevice => ("block", "dev"),
    };
    let path: &Path = &place.path;
    Ok(format!(
        "<disk type='{kind}' device='disk'><driver name='qemu' type='{}'/><source {attribute}='{}'/><target dev='{}'/></disk>",
        escaped(&place.format),
        escaped(utf8(path)?),
        escaped(target)
    ))
}

/// What libvirt is asked for to put disks on overlays, and to leave `others` as they are.
///
/// # Errors
/// A path is no text.
pub fn overlays_document(overlays: &[(String, PathBuf)], others: &[String]) -> Result<String, String> {
    let mut disks = Vec::new();
    for (target, overlay) in overlays {
        disks.push(format!(
            "<disk name='{}' snapshot='external' type='file'><driver type='qcow2'/><source file='{}'/></disk>",
            escaped(target),
            escaped(utf8(overlay)?)
        ));
    }
    let others = others.iter().map(|target| escaped(target));
    disks.extend(others.map(|target| format!("<disk name='{target}' snapshot='no'/>")));
    let disks = disks.concat();
    Ok(format!("<domainsnapshot><disks>{disks}</disks></domainsnapshot>"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ServedDisks, served_folder, with_served_disks};
    use crate::DiskSource;
    use crate::domain_xml::DomainXml;

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
}
