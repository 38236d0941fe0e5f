//! Adapts a configuration for the place to which a machine is restored or moved: from text to text.
//!
//! Only the necessary parts are changed. Everything else is preserved byte for byte, including parts that Holdfast
//! does not know: comments, metadata, elements of later versions of libvirt, arguments of QEMU.

mod conflicts;
mod disks;
mod hypervisor;
mod pulled;
mod served;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use holdfast_hardware::xml::{Edits, Element};
use roxmltree::Node;

use super::{DomainXml, child, children, document_of, nvram_path};
use conflicts::Renaming;
pub use conflicts::with_name;
pub use pulled::{PulledDisk, pulled_disks, with_own_policies, with_pulled_disks};
pub use served::{ServedDisks, disk_element, overlays_document, served_folder, with_own_disks, with_served_disks};

use crate::system::identity::{MacAddress, Uuid};

/// The changes to make to a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rewrite {
    /// The identity of the machine.
    pub identity: Identity,
    /// The new generation ID, which informs a guest that supports it that its state was rolled back; none to keep the
    /// current one.
    pub generation: Option<Uuid>,
    /// Changes of disks, by target. Other disks are unchanged.
    pub disks: BTreeMap<String, DiskChange>,
    /// The new path of the firmware's variables; none to keep the current one.
    pub nvram: Option<PathBuf>,
    /// The new path of the TPM's state, if the configuration has a path for it; none to keep the current one.
    pub tpm: Option<PathBuf>,
    /// The new domain type, "kvm" or "qemu"; none to keep the current one.
    pub domain_type: Option<String>,
    /// The emulator that runs the machine.
    pub emulator: Emulator,
}

impl Rewrite {
    /// Changes the identity and the generation ID, and keeps everything else.
    pub fn new(identity: Identity, generation: Uuid) -> Self {
        Self {
            generation: Some(generation),
            ..Self::moved(identity)
        }
    }

    /// Keeps everything except for the identity, for a machine that runs on at another place.
    pub fn moved(identity: Identity) -> Self {
        Self {
            identity,
            generation: None,
            disks: BTreeMap::new(),
            nvram: None,
            tpm: None,
            domain_type: None,
            emulator: Emulator::Keep,
        }
    }
}

/// Which emulator runs a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Emulator {
    /// The configured one.
    #[default]
    Keep,
    /// The hypervisor's default for such a machine.
    OfHypervisor,
}

/// The identity of a machine after the change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// Unchanged.
    Keep,
    /// Unchanged, except for the name.
    Named(String),
    /// A new identity: the machine may run at the same time as the original.
    New(NewIdentity),
}

/// The identifiers of a new machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIdentity {
    /// The name.
    pub name: String,
    /// The UUID.
    pub uuid: Uuid,
    /// MAC addresses, at least one for each network card; none to keep the current addresses.
    pub macs: Option<Vec<MacAddress>>,
}

/// The change of a disk in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskChange {
    /// The disk is at this place, without a backing file.
    Place(DiskPlace),
    /// The drive becomes empty.
    Empty,
    /// The disk is removed.
    Remove,
}

/// Where the bytes of a disk are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlace {
    /// The path of the file or block device.
    pub path: PathBuf,
    /// Whether the path is a file or a block device.
    pub medium: Medium,
    /// The image format: "raw", "qcow2".
    pub format: String,
}

/// The kind of storage of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Medium {
    /// A file.
    File,
    /// A block device.
    BlockDevice,
}

/// The result of a rewrite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rewritten {
    /// The new text.
    pub text: String,
    /// Changes worth reporting to the user.
    pub notes: Vec<String>,
    /// Settings that were kept although they may conflict with another machine.
    pub warnings: Vec<String>,
}

/// Sets the link of all network cards to down.
///
/// # Errors
/// A description of what is wrong with the XML.
pub fn with_links_down(text: &str) -> Result<String, String> {
    let document = document_of(text)?;
    let mut edits = Edits::new(text);
    let devices = child(document.root_element(), "devices");
    for card in devices.into_iter().flat_map(|devices| children(devices, "interface")) {
        match child(card, "link") {
            Some(link) => edits.set_attribute(link, "state", "down"),
            None => edits.append(card, &Element::new("link").attribute("state", "down")),
        }
    }
    Ok(edits.apply())
}

/// Changes a configuration.
///
/// # Errors
/// A description of what is wrong, or cannot be changed.
pub fn rewrite(text: &str, request: &Rewrite) -> Result<Rewritten, String> {
    // A configuration that cannot be parsed cannot be changed reliably.
    DomainXml::parse(text)?;
    let document = document_of(text)?;
    let domain = document.root_element();
    let mut rewriter = Rewriter {
        edits: Edits::new(text),
        notes: Vec::new(),
        warnings: Vec::new(),
    };
    rewriter.edits.remove_attribute(domain, "id");
    rewriter.identity(domain, &request.identity)?;
    if let (Some(generation), Some(new)) = (child(domain, "genid"), &request.generation) {
        rewriter.edits.set_text(generation, &new.to_string());
    }
    if let Some(kind) = &request.domain_type {
        rewriter.domain_type(domain, kind);
    }
    if let Some(path) = &request.nvram {
        rewriter.nvram(domain, utf8(path)?)?;
    }
    if let Some(devices) = child(domain, "devices") {
        rewriter.disks(devices, &request.disks)?;
        rewriter.emulator(devices, request.emulator);
        if let Some(path) = &request.tpm {
            rewriter.tpm(devices, utf8(path)?);
        }
    }
    // A serial port and the console that libvirt derives from it produce the same message.
    for messages in [&mut rewriter.notes, &mut rewriter.warnings] {
        let mut seen = BTreeSet::new();
        messages.retain(|line| seen.insert(line.clone()));
    }
    Ok(Rewritten {
        text: rewriter.edits.apply(),
        notes: rewriter.notes,
        warnings: rewriter.warnings,
    })
}

pub(super) fn utf8(path: &std::path::Path) -> Result<&str, String> {
    path.to_str()
        .ok_or_else(|| format!("the path {} is not UTF-8", path.display()))
}

struct Rewriter<'t> {
    edits: Edits<'t>,
    notes: Vec<String>,
    warnings: Vec<String>,
}

impl Rewriter<'_> {
    fn identity(&mut self, domain: Node<'_, '_>, identity: &Identity) -> Result<(), String> {
        let name = child(domain, "name").ok_or("the machine has no name")?;
        let new = match identity {
            Identity::Keep => return Ok(()),
            Identity::Named(new) => {
                self.edits.set_text(name, new);
                return Ok(());
            }
            Identity::New(new) => new,
        };
        let old_name = name.text().unwrap_or_default().trim().to_owned();
        self.edits.set_text(name, &new.name);
        let uuid = new.uuid.to_string();
        match child(domain, "uuid") {
            Some(node) => self.edits.set_text(node, &uuid),
            None => self.edits.append(domain, &Element::new("uuid").text(&uuid)),
        }
        self.system_information(domain, &uuid);
        if let Some(devices) = child(domain, "devices") {
            if let Some(macs) = &new.macs {
                self.network_cards(devices, macs)?;
            }
            let renaming = Renaming {
                old: &old_name,
                new: &new.name,
            };
            self.conflicts(domain, devices, renaming);
        }
        Ok(())
    }

    /// Changes the SMBIOS data that the guest sees: libvirt refuses a UUID that differs from the machine's, and some
    /// programs use the UUID as serial number as well.
    fn system_information(&mut self, domain: Node<'_, '_>, uuid: &str) {
        let old = child(domain, "uuid").and_then(|node| node.text()).map(str::trim);
        let blocks = children(domain, "sysinfo").flat_map(|sysinfo| sysinfo.children());
        for entry in blocks.flat_map(|block| children(block, "entry")) {
            let is_uuid = entry.attribute("name") == Some("uuid");
            if is_uuid || old.is_some_and(|old| entry.text().map(str::trim) == Some(old)) {
                self.edits.set_text(entry, uuid);
            }
        }
    }

    fn network_cards(&mut self, devices: Node<'_, '_>, macs: &[MacAddress]) -> Result<(), String> {
        let mut macs = macs.iter();
        for card in children(devices, "interface") {
            if let Some(mac) = child(card, "mac") {
                let new = macs.next().ok_or("there are more network cards than addresses")?;
                self.edits.set_attribute(mac, "address", &new.to_string());
            }
            // Open vSwitch identifies ports by this id. libvirt generates a new one.
            if let Some(port) = child(card, "virtualport")
                && port.attribute("type") == Some("openvswitch")
                && let Some(parameters) = child(port, "parameters")
            {
                self.edits.remove_attribute(parameters, "interfaceid");
            }
        }
        Ok(())
    }

    /// The path is the text of the element, or in a `<source>` child.
    fn nvram(&mut self, domain: Node<'_, '_>, path: &str) -> Result<(), String> {
        let os = child(domain, "os").ok_or("the machine has no <os>")?;
        let Some(nvram) = child(os, "nvram") else {
            self.edits.append(os, &Element::new("nvram").text(path));
            return Ok(());
        };
        match child(nvram, "source") {
            Some(source) if nvram_path(nvram).is_some() => self.edits.set_attribute(source, "file", path),
            Some(_) => return Err("the firmware's variables are not in a file".to_owned()),
            None => self.edits.set_text(nvram, path),
        }
        Ok(())
    }

    /// Changes the path only if the configuration contains one. Otherwise libvirt derives the path from the machine's
    /// UUID.
    fn tpm(&mut self, devices: Node<'_, '_>, path: &str) {
        let backends = children(devices, "tpm").filter_map(|tpm| child(tpm, "backend"));
        let emulated = backends.filter(|backend| backend.attribute("type") == Some("emulator"));
        for source in emulated.filter_map(|backend| child(backend, "source")) {
            self.edits.set_attribute(source, "path", path);
        }
    }
}
