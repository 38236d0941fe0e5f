//! Converts a machine to a descriptor for VMware and VirtualBox.
//!
//! The descriptor has version 1.0, the elements of each item in the order of the schema, and VMware's extensions marked
//! as not required.

use std::collections::{BTreeMap, BTreeSet};

use super::units::{DiskUnit, placed};
use crate::xml::Element;
use crate::{
    Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard, Platform, Topology, Translated,
    Untranslated, adapt,
};

/// The URI of the format of disks in an OVA.
pub const STREAM_OPTIMIZED: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";
/// The network of cards that have none.
const NETWORK: &str = "VM Network";
/// The granularity of memory in VMware.
const MEMORY_UNIT_BYTES: u64 = 4 << 20;

/// The files of the package besides the descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OvfOptions {
    /// The file of each disk, by the disk's key. Disks without a file are left out; drives are empty.
    pub disks: BTreeMap<String, DiskFile>,
}

/// The file of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskFile {
    /// The name in the package.
    pub href: String,
    /// The size in bytes, if already known.
    pub size_bytes: Option<u64>,
    /// The size of the disk for the guest in bytes.
    pub capacity_bytes: u64,
    /// Used bytes, if known.
    pub populated_bytes: Option<u64>,
}

/// Writes the descriptor of a machine, with all disks as stream-optimized VMDK.
///
/// Disks are named `vmdisk1`, `vmdisk2` and so on in the order of the machine, and their files `file1`, `file2`. An OVA
/// must have them in this order.
pub fn write(machine: &Machine, options: &OvfOptions) -> Translated<String> {
    let Translated { mut value, mut dropped } = adapt(machine, Platform::Ovf);
    let mut keys = BTreeSet::new();
    value.disks.retain(|disk| {
        // A file belongs to one disk only.
        let is_there =
            disk.kind != DiskKind::Disk || (options.disks.contains_key(&disk.key) && keys.insert(disk.key.clone()));
        if !is_there {
            dropped.push(Untranslated::new(
                format!("disk {}", disk.label),
                "its content is missing",
            ));
        }
        is_there
    });
    note_unsupported(&value, &mut dropped);
    let mut disks = std::mem::take(&mut value.disks);
    let disks = placed(&mut disks, &mut dropped);
    let files: Vec<&DiskFile> = disks
        .iter()
        .filter(|(disk, _)| disk.kind == DiskKind::Disk)
        .filter_map(|(disk, _)| options.disks.get(&disk.key))
        .collect();
    let name = match value.name.as_str() {
        "" => "machine",
        name => name,
    };
    let mut system = Element::new("VirtualSystem")
        .attribute("ovf:id", name)
        .child(info("A virtual machine"))
        .child(Element::new("Name").text(name));
    if !value.description.is_empty() {
        let annotation = Element::new("AnnotationSection")
            .child(info("What its owner wrote about it"))
            .child(Element::new("Annotation").text(&value.description));
        system = system.child(annotation);
    }
    let guest = Element::new("OperatingSystemSection")
        .attribute("ovf:id", 102)
        .attribute("vmw:osType", "otherGuest64")
        .child(info("The kind of guest operating system"));
    let (hardware, order) = hardware(&value, &disks);
    let order = order.into_iter().map(|(instance, kind)| {
        Element::new("vmw:BootOrderSection")
            .attribute("ovf:required", false)
            .attribute("vmw:instanceId", instance)
            .attribute("vmw:type", kind)
            .child(info("Virtual hardware device boot order"))
    });
    let envelope = envelope()
        .children(files_and_disks(&files))
        .child(networks(&value.cards))
        .child(system.child(guest).child(hardware).children(order));
    Translated {
        value: envelope.to_document(),
        dropped,
    }
}

fn info(text: &str) -> Element {
    Element::new("Info").text(text)
}

/// Collects the numbered items of the hardware.
#[derive(Default)]
struct Items {
    items: Vec<Element>,
}

impl Items {
    /// Adds an item with these elements, sorted by name; returns its instance. Empty elements are left out.
    fn add(&mut self, elements: &[(&'static str, &str)], beside: Option<Element>) -> usize {
        const INSTANCE: &str = "rasd:InstanceID";
        let number = self.items.len() + 1;
        let instance = number.to_string();
        let (before, after): (Vec<_>, Vec<_>) = elements.iter().partition(|(name, _)| *name < INSTANCE);
        let elements = before
            .into_iter()
            .chain([(INSTANCE, instance.as_str())])
            .chain(after)
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| Element::new(name).text(value));
        self.items
            .push(Element::new("Item").children(elements).children(beside));
        number
    }
}

/// Adds a note for each feature that not all importers have an element for.
fn note_unsupported(machine: &Machine, dropped: &mut Vec<Untranslated>) {
    let mut add = |what: &str, why: &str| dropped.push(Untranslated::new(what, why));
    if machine.uuid.is_some() {
        add("its UUID", "the importing hypervisor assigns a new one");
    }
    if machine.clock == Clock::LocalTime {
        add(
            "its clock in local time",
            "OVF has no element for it: set it after the import",
        );
    }
    if machine.has_tpm {
        add("its TPM", "add one after the import; it is empty");
    }
    if matches!(machine.firmware, Firmware::Uefi | Firmware::UefiSecure) {
        add(
            "UEFI",
            "VMware reads it from the descriptor; in VirtualBox, enable it after the import",
        );
    }
    if !machine.memory_bytes.is_multiple_of(MEMORY_UNIT_BYTES) {
        add("the exact memory size", "it is rounded up to whole 4 MiB");
    }
    let has_disc = |disk: &Disk| disk.kind != DiskKind::Disk && !disk.key.is_empty();
    for disk in machine.disks.iter().filter(|disk| has_disc(disk)) {
        add(
            &format!("the medium in drive {}", disk.label),
            "drives are empty in an OVF",
        );
    }
    if machine.topology.is_some_and(|topology| topology.thread_count > 1) {
        add("threads per core", "OVF has only sockets and cores");
    }
}

fn envelope() -> Element {
    const ENVELOPE: &str = "http://schemas.dmtf.org/ovf/envelope/1";
    Element::new("Envelope")
        .attribute("ovf:version", "1.0")
        .attribute("xml:lang", "en-US")
        .attribute("xmlns", ENVELOPE)
        .attribute("xmlns:ovf", ENVELOPE)
        .attribute(
            "xmlns:rasd",
            "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData",
        )
        .attribute(
            "xmlns:vssd",
            "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData",
        )
        .attribute("xmlns:vmw", "http://www.vmware.com/schema/ovf")
}

fn files_and_disks(files: &[&DiskFile]) -> [Element; 2] {
    let numbered = || (1..).zip(files);
    let references = numbered().map(|(number, file)| {
        Element::new("File")
            .attribute("ovf:href", &file.href)
            .attribute("ovf:id", format_args!("file{number}"))
            .attribute_if("ovf:size", file.size_bytes)
    });
    let disks = numbered().map(|(number, file)| {
        Element::new("Disk")
            .attribute("ovf:capacity", file.capacity_bytes)
            .attribute("ovf:capacityAllocationUnits", "byte")
            .attribute("ovf:diskId", format_args!("vmdisk{number}"))
            .attribute("ovf:fileRef", format_args!("file{number}"))
            .attribute("ovf:format", STREAM_OPTIMIZED)
            .attribute_if("ovf:populatedSize", file.populated_bytes)
    });
    let disks = Element::new("DiskSection").child(info("Virtual disks")).children(disks);
    [Element::new("References").children(references), disks]
}

fn network_of(card: &NetworkCard) -> &str {
    card.network.as_deref().unwrap_or(NETWORK)
}

fn networks(cards: &[NetworkCard]) -> Element {
    let mut names: Vec<&str> = cards.iter().map(network_of).collect();
    names.sort_unstable();
    names.dedup();
    let networks = names.into_iter().map(|name| {
        Element::new("Network")
            .attribute("ovf:name", name)
            .child(Element::new("Description").text(format_args!("The network {name}")))
    });
    Element::new("NetworkSection")
        .child(info("Logical networks"))
        .children(networks)
}

/// The hardware section, and the boot order: the instance of each device, and VMware's name of its kind.
fn hardware(machine: &Machine, disks: &[(&Disk, DiskUnit)]) -> (Element, Vec<(usize, &'static str)>) {
    let system = Element::new("System")
        .child(Element::new("vssd:ElementName").text("Virtual Hardware Family"))
        .child(Element::new("vssd:InstanceID").text(0))
        .child(Element::new("vssd:VirtualSystemIdentifier").text(&machine.name))
        .child(Element::new("vssd:VirtualSystemType").text("vmx-13"));
    let mut items = Items::default();
    processors_and_memory(&mut items, machine);
    let controllers = controllers(&mut items, disks);
    let mut order = Vec::new();
    let mut disk_count = 0_u32;
    for (disk, unit) in disks {
        let parent = controllers.get(&(disk.bus.name(), unit.controller));
        let parent = parent.map(usize::to_string).unwrap_or_default();
        let address = match disk.bus {
            Bus::Floppy => unit.controller.to_string(),
            _ => unit.unit.to_string(),
        };
        let (kind, name, boot) = match disk.kind {
            DiskKind::Disk => ("17", "Hard Disk", "disk"),
            DiskKind::Cdrom => ("15", "CD/DVD Drive", "cdrom"),
            DiskKind::Floppy => ("14", "Floppy Drive", "floppy"),
        };
        let resource = if disk.kind == DiskKind::Disk {
            disk_count += 1;
            format!("ovf:/disk/vmdisk{disk_count}")
        } else {
            String::new()
        };
        let allocation = if resource.is_empty() { "false" } else { "" };
        let label = match disk.label.as_str() {
            "" => name,
            label => label,
        };
        let elements = [
            ("rasd:AddressOnParent", address.as_str()),
            ("rasd:AutomaticAllocation", allocation),
            ("rasd:ElementName", label),
            ("rasd:HostResource", &resource),
            ("rasd:Parent", &parent),
            ("rasd:ResourceType", kind),
        ];
        let instance = items.add(&elements, None);
        order.extend(disk.boot_order.map(|place| (place, instance, boot)));
    }
    for (number, card) in (1..).zip(&machine.cards) {
        add_card(&mut items, card, number);
    }
    let section = Element::new("VirtualHardwareSection")
        .child(info("Virtual hardware"))
        .child(system)
        .children(items.items)
        .children(firmware_settings(machine.firmware));
    order.sort_unstable();
    let order = order.into_iter().map(|(_, instance, kind)| (instance, kind));
    (section, order.collect())
}

fn processors_and_memory(items: &mut Items, machine: &Machine) {
    let cores = machine
        .topology
        .and_then(|topology| cores_per_socket(topology, machine.processor_count))
        .map(|cores| {
            Element::new("vmw:CoresPerSocket")
                .attribute("ovf:required", false)
                .text(cores)
        });
    let count = machine.processor_count.to_string();
    let elements = [
        ("rasd:AllocationUnits", "hertz * 10^6"),
        ("rasd:Description", "Number of virtual CPUs"),
        ("rasd:ElementName", &format!("{count} virtual CPU(s)")),
        ("rasd:ResourceType", "3"),
        ("rasd:VirtualQuantity", &count),
    ];
    items.add(&elements, cores);
    let units = machine.memory_bytes.div_ceil(MEMORY_UNIT_BYTES);
    let mebibytes = (units * (MEMORY_UNIT_BYTES >> 20)).to_string();
    let elements = [
        ("rasd:AllocationUnits", "byte * 2^20"),
        ("rasd:Description", "Memory size"),
        ("rasd:ElementName", &format!("{mebibytes} MB of memory")),
        ("rasd:ResourceType", "4"),
        ("rasd:VirtualQuantity", &mebibytes),
    ];
    items.add(&elements, None);
}

/// Cores per socket; VMware counts threads as cores.
fn cores_per_socket(topology: Topology, processor_count: u32) -> Option<u32> {
    let cores = topology.core_count.checked_mul(topology.thread_count)?;
    (cores.checked_mul(topology.socket_count)? == processor_count).then_some(cores)
}

/// Adds the controllers of `disks`; returns their instances by bus and number.
fn controllers(items: &mut Items, disks: &[(&Disk, DiskUnit)]) -> BTreeMap<(&'static str, u32), usize> {
    let mut instances = BTreeMap::new();
    for (disk, unit) in disks {
        let key = (disk.bus.name(), unit.controller);
        let (kind, subtype) = match disk.bus {
            Bus::Ide => ("5", ""),
            Bus::Scsi => ("6", "lsilogic"),
            Bus::Nvme => ("20", "vmware.nvme.controller"),
            Bus::Floppy => continue,
            // Disks on other buses were already moved to SATA.
            _ => ("20", "vmware.sata.ahci"),
        };
        if instances.contains_key(&key) {
            continue;
        }
        let address = unit.controller.to_string();
        let elements = [
            ("rasd:Address", address.as_str()),
            ("rasd:Description", &format!("{} Controller", disk.bus.name())),
            ("rasd:ElementName", &format!("{} Controller {address}", disk.bus.name())),
            ("rasd:ResourceSubType", subtype),
            ("rasd:ResourceType", kind),
        ];
        instances.insert(key, items.add(&elements, None));
    }
    instances
}

fn add_card(items: &mut Items, card: &NetworkCard, number: u32) {
    let model = match &card.model {
        CardModel::E1000e => "E1000e",
        CardModel::Vmxnet3 => "VmxNet3",
        CardModel::Pcnet => "PCNet32",
        _ => "E1000",
    };
    let elements = [
        ("rasd:Address", card.mac.as_deref().unwrap_or_default()),
        ("rasd:AutomaticAllocation", "true"),
        ("rasd:Connection", network_of(card)),
        ("rasd:Description", &format!("{model} ethernet adapter")),
        ("rasd:ElementName", &format!("Network adapter {number}")),
        ("rasd:ResourceSubType", model),
        ("rasd:ResourceType", "10"),
    ];
    items.add(&elements, None);
}

fn firmware_settings(firmware: Firmware) -> Vec<Element> {
    let config = |key: &str, value: &str| {
        Element::new("vmw:Config")
            .attribute("ovf:required", false)
            .attribute("vmw:key", key)
            .attribute("vmw:value", value)
    };
    match firmware {
        Firmware::Bios | Firmware::Paravirtual => vec![config("firmware", "bios")],
        Firmware::Uefi => vec![config("firmware", "efi")],
        Firmware::UefiSecure => vec![
            config("firmware", "efi"),
            config("bootOptions.efiSecureBootEnabled", "true"),
        ],
    }
}
