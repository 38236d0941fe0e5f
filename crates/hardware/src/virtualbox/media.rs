//! Reads the images that a machine lists.

use roxmltree::Node;

use crate::xml::{self, child, children};
use crate::{Error, Result, identity};

pub(super) const FORM: &str = "settings of VirtualBox";
/// Limit of images of a machine.
const MEDIUM_COUNT_MAX: usize = 4096;

/// An image of a disk, a CD or a floppy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Medium {
    /// The UUID by which disks refer to it, in lower case.
    pub uuid: String,
    /// The file: a path, absolute or relative to the folder of the settings. The path is not validated.
    pub location: String,
    /// `VDI`, `VMDK`, `VHD` and others; empty for an image of a CD or a floppy.
    pub format: String,
    /// The UUID of the parent of a difference image.
    pub parent: Option<String>,
    /// Whether VirtualBox has encrypted the image.
    pub is_encrypted: bool,
    /// How VirtualBox handles writes to the image.
    pub kind: MediumKind,
}

/// How VirtualBox handles writes to an image. The kind of the base applies to all its difference images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MediumKind {
    /// Writable, and included in snapshots.
    #[default]
    Normal,
    /// Writes are discarded at the next start of the machine.
    Immutable,
    /// Writable, and excluded from snapshots.
    Writethrough,
    /// Like `Writethrough`, and several machines can use the image at the same time.
    Shareable,
    /// Read-only.
    ReadOnly,
    /// The base of separate difference images of several machines.
    MultiAttach,
}

impl MediumKind {
    /// Whether snapshots of the machine include it.
    pub fn has_snapshots(self) -> bool {
        !matches!(self, Self::Writethrough | Self::Shareable)
    }

    /// The name of the kind in the settings.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Immutable => "Immutable",
            Self::Writethrough => "Writethrough",
            Self::Shareable => "Shareable",
            Self::ReadOnly => "Readonly",
            Self::MultiAttach => "MultiAttach",
        }
    }

    /// The kind with this name in the settings.
    fn of(name: Option<&str>) -> Self {
        match name {
            Some("Immutable") => Self::Immutable,
            Some("Writethrough") => Self::Writethrough,
            Some("Shareable") => Self::Shareable,
            Some("Readonly") => Self::ReadOnly,
            Some("MultiAttach") => Self::MultiAttach,
            _ => Self::Normal,
        }
    }
}

/// The images that the settings of a machine list, parents before their children.
pub fn media(text: &str) -> Result<Vec<Medium>> {
    let document = xml::parse(text, FORM)?;
    listed(machine(&document)?)
}

/// The images in the element `MediaRegistry` of `owner`.
pub(super) fn listed(owner: Node<'_, '_>) -> Result<Vec<Medium>> {
    let mut media = Vec::new();
    let Some(registry) = child(owner, "MediaRegistry") else {
        return Ok(media);
    };
    // Difference images are nested in their parents: iterate in document order, not by recursion.
    let images = registry
        .descendants()
        .filter(|node| matches!(node.tag_name().name(), "HardDisk" | "Image") && node.attribute("uuid").is_some());
    for node in images {
        if media.len() == MEDIUM_COUNT_MAX {
            return Err(wrong(format!("it has more than {MEDIUM_COUNT_MAX} images")));
        }
        media.push(Medium {
            uuid: uuid(node)?,
            location: node.attribute("location").unwrap_or_default().to_owned(),
            format: node.attribute("format").unwrap_or_default().to_owned(),
            parent: node
                .parent()
                .filter(|parent| parent.tag_name().name() == "HardDisk")
                .map(uuid)
                .transpose()?,
            is_encrypted: children(node, "Property").any(|property| {
                property
                    .attribute("name")
                    .is_some_and(|name| name.starts_with("CRYPT/"))
            }),
            kind: MediumKind::of(node.attribute("type")),
        });
    }
    Ok(media)
}

/// The machine element of a settings file.
pub(super) fn machine<'a, 'input>(document: &'a roxmltree::Document<'input>) -> Result<Node<'a, 'input>> {
    let root = document.root_element();
    if root.tag_name().name() != "VirtualBox" {
        return Err(wrong(format!("the root element is {:?}", root.tag_name().name())));
    }
    if child(root, "MachineEncrypted").is_some() {
        return Err(Error::Encrypted { form: FORM });
    }
    child(root, "Machine").ok_or_else(|| wrong("it has no machine"))
}

pub(super) fn uuid(node: Node<'_, '_>) -> Result<String> {
    let text = node.attribute("uuid").unwrap_or_default();
    identity::uuid(text).ok_or_else(|| wrong(format!("{text:?} is no UUID of an image")))
}

pub(super) fn wrong(detail: impl Into<String>) -> Error {
    Error::Malformed {
        form: FORM,
        detail: detail.into(),
    }
}
