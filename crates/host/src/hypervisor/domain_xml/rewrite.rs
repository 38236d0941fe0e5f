//! A configuration for the place that a machine is brought to: from text to text.
//!
//! Only what must change does. Everything else stays byte for byte, also what this program does not know: comments,
//! metadata, elements of later versions of libvirt, arguments of QEMU.

mod disks;
mod hypervisor;
mod neighbours;
mod served;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use holdfast_hardware::xml::{Edits, Element};
use roxmltree::Node;

use super::{DomainXml, child, children, document_of, nvram_path};
pub use neighbours::with_name;
pub use served::{ServedDisks, disk_element, overlays_document, served_folder, with_own_disks, with_served_disks};

use crate::system::identity::{MacAddress, Uuid};

/// What becomes of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rewrite {
    /// Who the machine is.
    pub identity: Identity,
    /// Tells the guest, where its configuration has such a thing, that it has gone back in time.
    pub generation: Uuid,
    /// Its disks, by target; those that are not named stay as they are.
    pub disks: BTreeMap<String, DiskChange>,
    /// Where the firmware's variables are; none where that stays as it is.
    pub nvram: Option<PathBuf>,
    /// Where the state of its TPM is, in a configuration that says where; none where that stays as it is.
    pub tpm: Option<PathBuf>,
    /// What accelerates it: "kvm", "qemu"; none where that stays as it is.
    pub domain_type: Option<String>,
    /// In which program it runs.
    pub emulator: Emulator,
}

impl Rewrite {
    /// Another identity, and a new generation; everything else stays.
    pub fn new(identity: Identity, generation: Uuid) -> Self {
        Self {
            identity,
            generation,
            disks: BTreeMap::new(),
            nvram: None,
            tpm: None,
            domain_type: None,
            emulator: Emulator::Keep,
        }
    }
}

/// In which program a machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Emulator {
    /// The one that its configuration names.
    #[default]
    Keep,
    /// The one that its hypervisor has for such machines.
    OfHypervisor,
}

/// Who a machine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The one that it was.
    Keep,
    /// The one that it was, which is called otherwise today.
    Named(String),
    /// Another one, which may run beside the first.
    New(NewIdentity),
}

/// What tells a new machine from the one that it was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIdentity {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// Addresses of its network cards, at least as many as it has; none where they stay.
    pub macs: Option<Vec<MacAddress>>,
}

/// What becomes of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskChange {
    /// Its bytes are there, without anything that they are based on.
    Place(DiskPlace),
    /// The drive becomes empty.
    Empty,
    /// The machine has no such disk any more.
    Remove,
}

/// Where the bytes of a disk are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlace {
    /// The file or block device.
    pub path: PathBuf,
    /// Which of the two it is.
    pub medium: Medium,
    /// How it holds them: "raw", "qcow2".
    pub format: String,
}

/// What a disk is kept on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Medium {
    /// A file.
    File,
    /// A block device.
    BlockDevice,
}

/// A configuration that was changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rewritten {
    /// The new text.
    pub text: String,
    /// What a person may want to know of the changes.
    pub notes: Vec<String>,
    /// What was left as it is although it may get into the way of another machine.
    pub warnings: Vec<String>,
}

/// Takes all network cards of a configuration off their networks.
///
/// # Errors
/// What is wrong with it, in words.
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
/// What is wrong with it, or cannot be changed, in words.
pub fn rewrite(text: &str, wish: &Rewrite) -> Result<Rewritten, String> {
    // What cannot be read cannot be trusted to be changed right.
    DomainXml::parse(text)?;
    let document = document_of(text)?;
    let domain = document.root_element();
    let mut rewriter = Rewriter {
        edits: Edits::new(text),
        notes: Vec::new(),
        warnings: Vec::new(),
    };
    rewriter.edits.remove_attribute(domain, "id");
    rewriter.identity(domain, &wish.identity)?;
    if let Some(generation) = child(domain, "genid") {
        rewriter.edits.set_text(generation, &wish.generation.to_string());
    }
    if let Some(kind) = &wish.domain_type {
        rewriter.domain_type(domain, kind);
    }
    if let Some(path) = &wish.nvram {
        rewriter.nvram(domain, utf8(path)?)?;
    }
    if let Some(devices) = child(domain, "devices") {
        rewriter.disks(devices, &wish.disks)?;
        rewriter.emulator(devices, wish.emulator);
        if let Some(path) = &wish.tpm {
            rewriter.tpm(devices, utf8(path)?);
        }
    }
    // A serial port and the console that libvirt makes of it say the same.
    for said in [&mut rewriter.notes, &mut rewriter.warnings] {
        let mut seen = BTreeSet::new();
        said.retain(|line| seen.insert(line.clone()));
    }
    Ok(Rewritten {
        text: rewriter.edits.apply(),
        notes: rewriter.notes,
        warnings: rewriter.warnings,
    })
}

/// XML is text.
fn utf8(path: &std::path::Path) -> Result<&str, String> {
    path.to_str()
        .ok_or_else(|| format!("{} is no text, and a configuration is", path.display()))
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
            self.neighbours(domain, devices, (&old_name, &new.name));
        }
        Ok(())
    }

    /// What the guest's firmware shows: libvirt refuses a UUID there that is not the machine's, and some programs put the UUID
    /// into the serial number as well.
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
            // Open vSwitch tells ports apart by it; libvirt makes a new one.
            if let Some(port) = child(card, "virtualport")
                && port.attribute("type") == Some("openvswitch")
                && let Some(parameters) = child(port, "parameters")
            {
                self.edits.remove_attribute(parameters, "interfaceid");
            }
        }
        Ok(())
    }

    /// The path stands in the element, or in a `<source>` of its own.
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

    /// Only where the configuration has a place; otherwise libvirt chooses it, by the machine's UUID.
    fn tpm(&mut self, devices: Node<'_, '_>, path: &str) {
        let backends = children(devices, "tpm").filter_map(|tpm| child(tpm, "backend"));
        let emulated = backends.filter(|backend| backend.attribute("type") == Some("emulator"));
        for source in emulated.filter_map(|backend| child(backend, "source")) {
            self.edits.set_attribute(source, "path", path);
        }
    }
}
