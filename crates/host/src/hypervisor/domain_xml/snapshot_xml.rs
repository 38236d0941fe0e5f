//! The files that descriptions of machines, snapshots and checkpoints name.
//!
//! Source: <https://libvirt.org/formatsnapshot.html>.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_hardware::xml::Edits;
use roxmltree::Node;

use super::{child, document_of};

/// The files that the XML of a libvirt snapshot names: the disks of the snapshot, and those of the machine at that
/// time.
///
/// # Errors
/// A description of what is wrong with the XML.
pub fn snapshot_sources(text: &str) -> Result<Vec<PathBuf>, String> {
    let document = document_of(text)?;
    let sources = document.descendants().filter(|node| node.has_tag_name("source"));
    let files = sources.filter_map(|node| node.attribute("file").or_else(|| node.attribute("dev")));
    Ok(files.map(PathBuf::from).collect())
}

/// A file that belongs to a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Its path.
    pub path: PathBuf,
    /// The name of its format.
    pub format: String,
}

/// The files that belong to a snapshot: images of disks that the machine can write, and its saved memory. A file may
/// be listed several times.
///
/// # Errors
/// A description of what is wrong with the XML.
pub fn files_of_snapshot(text: &str) -> Result<Vec<SnapshotFile>, String> {
    let document = document_of(text)?;
    let files = document.descendants().filter_map(|node| match node.tag_name().name() {
        "disk" => image_of(node),
        "memory" => node.attribute("file").map(|path| SnapshotFile {
            path: path.into(),
            format: "raw".to_owned(),
        }),
        _ => None,
    });
    Ok(files.collect())
}

/// The image of a disk of a snapshot or of its machine. Like libvirt, takes an image without a format as raw.
fn image_of(disk: Node<'_, '_>) -> Option<SnapshotFile> {
    let is_disk = matches!(disk.attribute("device"), None | Some("disk"));
    let is_private = child(disk, "readonly").is_none() && child(disk, "shareable").is_none();
    let format = child(disk, "driver").and_then(|driver| driver.attribute("type"));
    let path = child(disk, "source").and_then(|source| source.attribute("file"));
    path.filter(|_| is_disk && is_private).map(|path| SnapshotFile {
        path: path.into(),
        format: format.unwrap_or("raw").to_owned(),
    })
}

/// Changes the paths of files in the description of a machine, a snapshot or a checkpoint: images with their backing files,
/// saved memory, and variables of the firmware.
///
/// # Errors
/// A description of what is wrong with the XML, or a new path that is not UTF-8.
pub fn with_moved_files(text: &str, moved: &BTreeMap<PathBuf, PathBuf>) -> Result<String, String> {
    let document = document_of(text)?;
    let mut edits = Edits::new(text);
    let new_path = |old: &str| match moved.get(Path::new(old)) {
        Some(new) => super::rewrite::utf8(new).map(Some),
        None => Ok(None),
    };
    for node in document.descendants() {
        let name = node.tag_name().name();
        let attribute = node.attribute("file").filter(|_| ["source", "memory"].contains(&name));
        if let Some(new) = attribute.map_or(Ok(None), new_path)? {
            edits.set_attribute(node, "file", new);
        }
        let variables = node.text().filter(|_| name == "nvram");
        if let Some(new) = variables.map_or(Ok(None), |text| new_path(text.trim()))? {
            edits.set_text(node, new);
        }
    }
    Ok(edits.apply())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::{SnapshotFile, files_of_snapshot, with_moved_files};

    const SNAPSHOT: &str = "<domainsnapshot><name>s1</name><memory snapshot='external' file='/srv/s1.memory'/>\
        <disks><disk name='vda' snapshot='external' type='file'><driver type='qcow2'/><source file='/srv/web1.s1'/></disk>\
        <disk name='vdb' snapshot='no'/></disks>\
        <domain><os><nvram>/srv/web1.fd</nvram></os><devices>\
        <disk type='file' device='disk'><source file='/srv/a &amp; b'/><target dev='vda'/></disk>\
        <disk type='file' device='cdrom'><source file='/srv/cd.iso'/></disk>\
        <disk type='file'><driver type='raw'/><source file='/srv/shared'/><shareable/></disk>\
        <interface type='direct'><source dev='eth0'/></interface>\
        </devices></domain></domainsnapshot>";

    #[test]
    fn the_files_of_a_snapshot_are_its_memory_and_its_own_disks() {
        let file = |path: &str, format: &str| SnapshotFile {
            path: path.into(),
            format: format.to_owned(),
        };
        assert_eq!(
            files_of_snapshot(SNAPSHOT).unwrap(),
            [
                file("/srv/s1.memory", "raw"),
                file("/srv/web1.s1", "qcow2"),
                file("/srv/a & b", "raw")
            ]
        );
        files_of_snapshot("<domainsnapshot>").unwrap_err();
    }

    #[test]
    fn only_the_paths_of_moved_files_change() {
        let moved = [
            ("/srv/s1.memory", "/vm/s1.memory"),
            ("/srv/a & b", "/vm/a & c"),
            ("/srv/web1.fd", "/vm/web1.fd"),
            ("eth0", "/vm/eth0"),
        ];
        let moved: BTreeMap<PathBuf, PathBuf> = moved.map(|(old, new)| (old.into(), new.into())).into();
        let expected = SNAPSHOT
            .replace("/srv/s1.memory", "/vm/s1.memory")
            .replace("/srv/a &amp; b", "/vm/a &amp; c")
            .replace("/srv/web1.fd", "/vm/web1.fd");
        assert_eq!(with_moved_files(SNAPSHOT, &moved).unwrap(), expected);
    }
}
