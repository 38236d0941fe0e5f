//! From a machine to a descriptor in the form that VMware and VirtualBox read.
//!
//! It is of version 1.0, with the elements of each item in the order of its schema, and what only VMware knows marked as not required.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::units::{Place as Unit, placed};
use crate::xml::escaped;
use crate::{
    Bus, Card, CardModel, Clock, Disk, DiskKind, Dropped, Firmware, Machine, Place, Topology, Translated, adapt,
};

/// The format of disks in an OVA, by the URI that everybody knows it by.
pub const STREAM_OPTIMIZED: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";
/// The network of cards that are in none.
const NETWORK: &str = "VM Network";
/// VMware's memory comes in units of as many bytes.
const MEMORY_UNIT_BYTES: u64 = 4 << 20;

/// What is in the package beside the descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wish {
    /// The file of each disk, by the disk's key. A disk that is not among them is left out; drives are empty.
    pub disks: BTreeMap<String, DiskFile>,
}

/// The file that a disk is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskFile {
    /// Its name, beside the descriptor.
    pub href: String,
    /// Its size in bytes, where it is known already.
    pub size_bytes: Option<u64>,
    /// The size of the disk for the guest in bytes.
    pub capacity_bytes: u64,
    /// The bytes of it that are in use, where they are known.
    pub populated_bytes: Option<u64>,
}

/// Writes the descriptor of a machine, with all disks as VMDK for streams.
///
/// In it they are called `vmdisk1`, `vmdisk2` and so on, in the order of the machine, and their files `file1`, `file2`; that is the order
/// in which an OVA has to have them.
pub fn write(machine: &Machine, wish: &Wish) -> Translated<String> {
    let Translated { mut value, mut dropped } = adapt(machine, Place::Ovf);
    let mut keys = BTreeSet::new();
    value.disks.retain(|disk| {
        // A file belongs to one disk, if two of the machine have the same content.
        let is_there =
            disk.kind != DiskKind::Disk || (wish.disks.contains_key(&disk.key) && keys.insert(disk.key.clone()));
        if !is_there {
            dropped.push(Dropped::new(format!("disk {}", disk.label), "its content is not there"));
        }
        is_there
    });
    name_what_stays(&value, &mut dropped);
    let mut disks = std::mem::take(&mut value.disks);
    let disks = placed(&mut disks, &mut dropped);
    let files: Vec<&DiskFile> = disks
        .iter()
        .filter(|(disk, _)| disk.kind == DiskKind::Disk)
        .filter_map(|(disk, _)| wish.disks.get(&disk.key))
        .collect();
    let mut text = Text::default();
    head(&mut text, &files);
    networks(&mut text, &value.cards);
    let name = match value.name.as_str() {
        "" => "machine".to_owned(),
        name => escaped(name),
    };
    text.line(format_args!("  <VirtualSystem ovf:id=\"{name}\">"));
    text.line(format_args!(
        "    <Info>A virtual machine</Info>\n    <Name>{name}</Name>"
    ));
    if !value.description.is_empty() {
        text.line(format_args!(
            "    <AnnotationSection>\n      <Info>What its owner wrote about it</Info>\n      \
             <Annotation>{}</Annotation>\n    </AnnotationSection>",
            escaped(&value.description)
        ));
    }
    text.line(format_args!(
        "    <OperatingSystemSection ovf:id=\"102\" vmw:osType=\"otherGuest64\">\n      \
         <Info>The kind of guest operating system</Info>\n    </OperatingSystemSection>"
    ));
    let order = hardware(&mut text, &value, &disks);
    for (instance, kind) in order {
        text.line(format_args!(
            "    <vmw:BootOrderSection ovf:required=\"false\" vmw:instanceId=\"{instance}\" vmw:type=\"{kind}\">\n      \
             <Info>Virtual hardware device boot order</Info>\n    </vmw:BootOrderSection>"
        ));
    }
    text.line(format_args!("  </VirtualSystem>\n</Envelope>"));
    let Text { text, .. } = text;
    Translated { value: text, dropped }
}

/// Text, and the number of the last item in it.
#[derive(Default)]
struct Text {
    text: String,
    instance: u32,
}

impl Text {
    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        self.text.write_fmt(text).expect("a string takes all");
        self.text.push('\n');
    }

    /// One item with these elements, which are in the order of their names; tells its instance. An empty element is left out.
    fn item(&mut self, elements: &[(&str, &str)], beside: &str) -> u32 {
        self.instance += 1;
        let instance = self.instance.to_string();
        let (before, after): (Vec<_>, Vec<_>) = elements.iter().partition(|(name, _)| *name < "InstanceID");
        let elements = before
            .into_iter()
            .chain([("InstanceID", instance.as_str())])
            .chain(after);
        self.line(format_args!("      <Item>"));
        for (name, value) in elements.filter(|(_, value)| !value.is_empty()) {
            self.line(format_args!("        <rasd:{name}>{}</rasd:{name}>", escaped(value)));
        }
        if !beside.is_empty() {
            self.line(format_args!("        {beside}"));
        }
        self.line(format_args!("      </Item>"));
        self.instance
    }
}

/// What a descriptor has no word for that all readers understand.
fn name_what_stays(machine: &Machine, dropped: &mut Vec<Dropped>) {
    let mut add = |what: &str, why: &str| dropped.push(Dropped::new(what, why));
    if machine.uuid.is_some() {
        add("its UUID", "whoever imports the machine gives it one of its own");
    }
    if machine.clock == Clock::LocalTime {
        add(
            "its clock in local time",
            "an OVF does not say it: to be set after the import",
        );
    }
    if machine.has_tpm {
        add("its TPM", "to be added after the import; the new one is empty");
    }
    if matches!(machine.firmware, Firmware::Uefi | Firmware::UefiSecure) {
        add(
            "UEFI",
            "VMware takes it from the descriptor; in VirtualBox it is switched on after the import",
        );
    }
    if !machine.memory_bytes.is_multiple_of(MEMORY_UNIT_BYTES) {
        add("the last bytes of its memory", "it is rounded up to whole 4 MiB");
    }
    let has_disc = |disk: &Disk| disk.kind != DiskKind::Disk && !disk.key.is_empty();
    for disk in machine.disks.iter().filter(|disk| has_disc(disk)) {
        add(
            &format!("what is in the drive {}", disk.label),
            "drives are empty in an OVF",
        );
    }
    if machine.topology.is_some_and(|topology| topology.thread_count > 1) {
        add("threads of its cores", "an OVF knows sockets and cores only");
    }
}

fn head(text: &mut Text, files: &[&DiskFile]) {
    text.line(format_args!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <Envelope ovf:version=\"1.0\" xml:lang=\"en-US\" xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" \
         xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\" \
         xmlns:rasd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData\" \
         xmlns:vssd=\"http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData\" \
         xmlns:vmw=\"http://www.vmware.com/schema/ovf\">\n  <References>"
    ));
    let attribute = |name: &str, number: Option<u64>| match number {
        Some(number) => format!(" ovf:{name}=\"{number}\""),
        None => String::new(),
    };
    for (number, file) in (1..).zip(files) {
        text.line(format_args!(
            "    <File ovf:href=\"{}\" ovf:id=\"file{number}\"{}/>",
            escaped(&file.href),
            attribute("size", file.size_bytes)
        ));
    }
    text.line(format_args!(
        "  </References>\n  <DiskSection>\n    <Info>Virtual disks</Info>"
    ));
    for (number, file) in (1..).zip(files) {
        text.line(format_args!(
            "    <Disk ovf:capacity=\"{}\" ovf:capacityAllocationUnits=\"byte\" ovf:diskId=\"vmdisk{number}\" \
             ovf:fileRef=\"file{number}\" ovf:format=\"{STREAM_OPTIMIZED}\"{}/>",
            file.capacity_bytes,
            attribute("populatedSize", file.populated_bytes)
        ));
    }
    text.line(format_args!("  </DiskSection>"));
}

fn network_of(card: &Card) -> &str {
    card.network.as_deref().unwrap_or(NETWORK)
}

fn networks(text: &mut Text, cards: &[Card]) {
    let mut names: Vec<&str> = cards.iter().map(network_of).collect();
    names.sort_unstable();
    names.dedup();
    text.line(format_args!("  <NetworkSection>\n    <Info>Logical networks</Info>"));
    for name in names {
        let name = escaped(name);
        text.line(format_args!(
            "    <Network ovf:name=\"{name}\">\n      <Description>The network {name}</Description>\n    </Network>"
        ));
    }
    text.line(format_args!("  </NetworkSection>"));
}

/// Writes the hardware section; tells the devices that the machine is started from in their order, each by its instance and VMware's name
/// of its kind.
fn hardware(text: &mut Text, machine: &Machine, disks: &[(&Disk, Unit)]) -> Vec<(u32, &'static str)> {
    text.line(format_args!(
        "    <VirtualHardwareSection>\n      <Info>Virtual hardware</Info>\n      <System>\n        \
         <vssd:ElementName>Virtual Hardware Family</vssd:ElementName>\n        \
         <vssd:InstanceID>0</vssd:InstanceID>\n        \
         <vssd:VirtualSystemIdentifier>{}</vssd:VirtualSystemIdentifier>\n        \
         <vssd:VirtualSystemType>vmx-13</vssd:VirtualSystemType>\n      </System>",
        escaped(&machine.name)
    ));
    processors_and_memory(text, machine);
    let controllers = controllers(text, disks);
    let mut order = Vec::new();
    let mut disk_count = 0_u32;
    for (disk, unit) in disks {
        let parent = controllers.get(&(disk.bus.name(), unit.controller));
        let parent = parent.map(u32::to_string).unwrap_or_default();
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
            ("AddressOnParent", address.as_str()),
            ("AutomaticAllocation", allocation),
            ("ElementName", label),
            ("HostResource", &resource),
            ("Parent", &parent),
            ("ResourceType", kind),
        ];
        let instance = text.item(&elements, "");
        order.extend(disk.boot_order.map(|place| (place, instance, boot)));
    }
    for (number, card) in (1..).zip(&machine.cards) {
        write_card(text, card, number);
    }
    write_firmware(text, machine.firmware);
    text.line(format_args!("    </VirtualHardwareSection>"));
    order.sort_unstable();
    order.into_iter().map(|(_, instance, kind)| (instance, kind)).collect()
}

fn processors_and_memory(text: &mut Text, machine: &Machine) {
    let cores = machine
        .topology
        .and_then(|topology| cores_per_socket(topology, machine.processor_count))
        .map(|cores| format!("<vmw:CoresPerSocket ovf:required=\"false\">{cores}</vmw:CoresPerSocket>"))
        .unwrap_or_default();
    let count = machine.processor_count.to_string();
    let elements = [
        ("AllocationUnits", "hertz * 10^6"),
        ("Description", "Number of virtual CPUs"),
        ("ElementName", &format!("{count} virtual CPU(s)")),
        ("ResourceType", "3"),
        ("VirtualQuantity", &count),
    ];
    text.item(&elements, &cores);
    let units = machine.memory_bytes.div_ceil(MEMORY_UNIT_BYTES);
    let mebibytes = (units * (MEMORY_UNIT_BYTES >> 20)).to_string();
    let elements = [
        ("AllocationUnits", "byte * 2^20"),
        ("Description", "Memory size"),
        ("ElementName", &format!("{mebibytes} MB of memory")),
        ("ResourceType", "4"),
        ("VirtualQuantity", &mebibytes),
    ];
    text.item(&elements, "");
}

/// VMware counts threads as cores.
fn cores_per_socket(topology: Topology, processor_count: u32) -> Option<u32> {
    let cores = topology.core_count.checked_mul(topology.thread_count)?;
    (cores.checked_mul(topology.socket_count)? == processor_count).then_some(cores)
}

/// Writes the controllers that `disks` hang on; tells their instances by bus and number.
fn controllers(text: &mut Text, disks: &[(&Disk, Unit)]) -> BTreeMap<(&'static str, u32), u32> {
    let mut instances = BTreeMap::new();
    for (disk, unit) in disks {
        let key = (disk.bus.name(), unit.controller);
        let (kind, subtype) = match disk.bus {
            Bus::Ide => ("5", ""),
            Bus::Scsi => ("6", "lsilogic"),
            Bus::Nvme => ("20", "vmware.nvme.controller"),
            Bus::Floppy => continue,
            // What hangs on others was moved.
            _ => ("20", "vmware.sata.ahci"),
        };
        if instances.contains_key(&key) {
            continue;
        }
        let address = unit.controller.to_string();
        let elements = [
            ("Address", address.as_str()),
            ("Description", &format!("{} Controller", disk.bus.name())),
            ("ElementName", &format!("{} Controller {address}", disk.bus.name())),
            ("ResourceSubType", subtype),
            ("ResourceType", kind),
        ];
        instances.insert(key, text.item(&elements, ""));
    }
    instances
}

fn write_card(text: &mut Text, card: &Card, number: u32) {
    let model = match &card.model {
        CardModel::E1000e => "E1000e",
        CardModel::Vmxnet3 => "VmxNet3",
        CardModel::Pcnet => "PCNet32",
        _ => "E1000",
    };
    let elements = [
        ("Address", card.mac.as_deref().unwrap_or_default()),
        ("AutomaticAllocation", "true"),
        ("Connection", network_of(card)),
        ("Description", &format!("{model} ethernet adapter")),
        ("ElementName", &format!("Network adapter {number}")),
        ("ResourceSubType", model),
        ("ResourceType", "10"),
    ];
    text.item(&elements, "");
}

fn write_firmware(text: &mut Text, firmware: Firmware) {
    let mut config = |key: &str, value: &str| {
        text.line(format_args!(
            "      <vmw:Config ovf:required=\"false\" vmw:key=\"{key}\" vmw:value=\"{value}\"/>"
        ));
    };
    match firmware {
        Firmware::Bios | Firmware::Paravirtual => config("firmware", "bios"),
        Firmware::Uefi => config("firmware", "efi"),
        Firmware::UefiSecure => {
            config("firmware", "efi");
            config("bootOptions.efiSecureBootEnabled", "true");
        }
    }
}
