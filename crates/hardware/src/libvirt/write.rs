//! Converts a machine to domain XML.

use std::collections::BTreeMap;

use super::read::position;
use crate::xml::{Element, Quote, is_representable};
use crate::{Bus, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard, Platform, Translated, Untranslated, adapt};

/// Settings of the target host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibvirtOptions {
    /// `kvm`, or `qemu` for emulated processors.
    pub domain_type: String,
    /// The file of each disk, by the disk's key. A disk without a file is left out, a drive without one is empty.
    pub disks: BTreeMap<String, DiskPlace>,
    /// The network that the machine's cards are connected to.
    pub network: String,
}

/// The image file of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlace {
    /// Its absolute path.
    pub path: String,
    /// `raw` or `qcow2`.
    pub format: String,
}

/// Writes domain XML for QEMU. Disks have the names of [`Machine::targets`] of the adapted machine.
///
/// UUID and MAC addresses are written unchanged; libvirt assigns missing ones.
pub fn write(machine: &Machine, options: &LibvirtOptions) -> Translated<String> {
    let Translated { mut value, mut dropped } = adapt(machine, Platform::Qemu);
    check_topology(&mut value, &mut dropped);
    check_name(&mut value, &mut dropped);
    renumber_boot_order(&mut value);
    let mut devices = Vec::new();
    for (disk, target) in value.disks.iter().zip(value.targets()) {
        match (options.disks.get(&disk.key), disk.kind) {
            (None, DiskKind::Disk) => {
                dropped.push(Untranslated::new(
                    format!("disk {}", disk.label),
                    "its content is missing",
                ));
            }
            (place, _) => devices.push(disk_element(disk, place, &target)),
        }
    }
    devices.extend(scsi_controllers(&value));
    for (number, card) in value.cards.iter().enumerate() {
        devices.push(card_element(card, options));
        if let Some(network) = card.network.as_ref().filter(|network| **network != options.network) {
            dropped.push(Untranslated::new(
                format!("network {network} of card {}", number + 1),
                format!("is plugged into {} now", options.network),
            ));
        }
    }
    if value.has_tpm {
        let backend = Element::new("backend")
            .attribute("type", "emulator")
            .attribute("version", "2.0");
        devices.push(Element::new("tpm").attribute("model", "tpm-crb").child(backend));
        dropped.push(Untranslated::new(
            "the state of the TPM",
            "TPM state cannot move to another hypervisor; the new TPM is empty",
        ));
    }
    devices.extend(fixed_devices());
    let domain = domain(&value, options).child(Element::new("devices").children(devices));
    Translated {
        value: domain.to_lines(Quote::Single),
        dropped,
    }
}

/// The devices that every machine has.
fn fixed_devices() -> [Element; 6] {
    let agent = Element::new("target")
        .attribute("type", "virtio")
        .attribute("name", "org.qemu.guest_agent.0");
    [
        Element::new("serial").attribute("type", "pty"),
        Element::new("console").attribute("type", "pty"),
        Element::new("input")
            .attribute("type", "tablet")
            .attribute("bus", "usb"),
        Element::new("channel").attribute("type", "unix").child(agent),
        Element::new("graphics")
            .attribute("type", "vnc")
            .attribute("autoport", "yes"),
        Element::new("video").child(Element::new("model").attribute("type", "vga")),
    ]
}

/// The machine type: only the older one has IDE.
fn board(machine: &Machine) -> &'static str {
    if machine.disks.iter().any(|disk| disk.bus == Bus::Ide) {
        "pc"
    } else {
        "q35"
    }
}

/// Makes the boot order unique, as libvirt requires. Of two devices with the same number, a disk comes before a drive.
fn renumber_boot_order(machine: &mut Machine) {
    let disks = machine.disks.iter().enumerate();
    let mut requests: Vec<(u32, bool, usize)> = disks
        .filter_map(|(number, disk)| Some((disk.boot_order?, disk.kind != DiskKind::Disk, number)))
        .collect();
    requests.sort_unstable();
    for (place, (_, _, number)) in (1..).zip(requests) {
        machine.disks[number].boot_order = Some(place);
    }
}

/// Replaces characters that libvirt refuses in names of machines, since it names files after them: slashes and line
/// ends (`virXMLCheckIllegalChars` in `domain_conf.c`). Empty and blank names are refused, too.
fn check_name(machine: &mut Machine, dropped: &mut Vec<Untranslated>) {
    let is_illegal = |character: char| character == '/' || character.is_control() || !is_representable(character);
    let mut name = machine.name.replace(is_illegal, "-");
    if matches!(name.trim(), "" | "." | "..") {
        "machine".clone_into(&mut name);
    }
    if name != machine.name {
        dropped.push(Untranslated::new(
            format!("its name {:?}", machine.name),
            format!("libvirt refuses this name: it is renamed to {name:?}"),
        ));
        machine.name = name;
    }
}

/// Drops a topology whose processor count differs from the machine's, which libvirt refuses.
fn check_topology(machine: &mut Machine, dropped: &mut Vec<Untranslated>) {
    if let Some(topology) = machine.topology {
        let count =
            u64::from(topology.socket_count) * u64::from(topology.core_count) * u64::from(topology.thread_count);
        if count != u64::from(machine.processor_count) {
            dropped.push(Untranslated::new(
                format!("a topology of {count} processors"),
                format!("the machine has {}", machine.processor_count),
            ));
            machine.topology = None;
        }
    }
}

/// The domain element without its devices.
fn domain(machine: &Machine, options: &LibvirtOptions) -> Element {
    let mut domain = Element::new("domain")
        .attribute("type", &options.domain_type)
        .child(Element::new("name").text(&machine.name));
    if let Some(uuid) = &machine.uuid {
        domain = domain.child(Element::new("uuid").text(uuid));
    }
    if !machine.description.is_empty() {
        domain = domain.child(Element::new("description").text(&machine.description));
    }
    let memory = Element::new("memory").attribute("unit", "KiB");
    let is_secure = machine.firmware == Firmware::UefiSecure;
    let system_management = is_secure.then(|| Element::new("smm").attribute("state", "on"));
    let features = [Element::new("acpi"), Element::new("apic")].into_iter();
    let topology = machine.topology.map(|topology| {
        Element::new("topology")
            .attribute("sockets", topology.socket_count)
            .attribute("cores", topology.core_count)
            .attribute("threads", topology.thread_count)
    });
    let offset = match machine.clock {
        Clock::Utc => "utc",
        Clock::LocalTime => "localtime",
    };
    domain
        .child(memory.text(machine.memory_bytes.div_ceil(1024)))
        .child(Element::new("vcpu").text(machine.processor_count))
        .child(os(machine))
        .child(Element::new("features").children(features.chain(system_management)))
        .child(Element::new("cpu").attribute("mode", "host-model").children(topology))
        .child(Element::new("clock").attribute("offset", offset))
}

fn os(machine: &Machine) -> Element {
    let (firmware, is_secure) = match machine.firmware {
        Firmware::Bios | Firmware::Paravirtual => (None, false),
        Firmware::Uefi => (Some("efi"), false),
        Firmware::UefiSecure => (Some("efi"), true),
    };
    let kind = Element::new("type")
        .attribute("arch", "x86_64")
        .attribute("machine", board(machine));
    let os = Element::new("os")
        .attribute_if("firmware", firmware)
        .child(kind.text("hvm"));
    if !is_secure {
        return os;
    }
    let feature = |name: &str| {
        Element::new("feature")
            .attribute("enabled", "yes")
            .attribute("name", name)
    };
    os.child(Element::new("firmware").children(["enrolled-keys", "secure-boot"].map(feature)))
        .child(Element::new("loader").attribute("secure", "yes"))
}

fn disk_element(disk: &Disk, place: Option<&DiskPlace>, target: &str) -> Element {
    let device = match disk.kind {
        DiskKind::Disk => "disk",
        DiskKind::Cdrom => "cdrom",
        DiskKind::Floppy => "floppy",
    };
    let bus = match disk.bus {
        Bus::Ide => "ide",
        Bus::Scsi | Bus::VirtioScsi => "scsi",
        Bus::Virtio => "virtio",
        Bus::Usb => "usb",
        Bus::Floppy => "fdc",
        Bus::Sata | Bus::Nvme | Bus::Xen => "sata",
    };
    let format = place.map_or("raw", |place| place.format.as_str());
    let is_read_only = disk.is_read_only || disk.kind == DiskKind::Cdrom;
    Element::new("disk")
        .attribute("type", "file")
        .attribute("device", device)
        .child(
            Element::new("driver")
                .attribute("name", "qemu")
                .attribute("type", format),
        )
        .children(place.map(|place| Element::new("source").attribute("file", &place.path)))
        .child(Element::new("target").attribute("dev", target).attribute("bus", bus))
        .children(is_read_only.then(|| Element::new("readonly")))
        .children(
            disk.boot_order
                .map(|order| Element::new("boot").attribute("order", order)),
        )
}

/// The controllers for SCSI disks. libvirt puts seven disks on each by their letters, and would create all but the
/// first with another model.
fn scsi_controllers(machine: &Machine) -> impl Iterator<Item = Element> {
    let targets = machine.targets();
    let disks = machine
        .disks
        .iter()
        .zip(&targets)
        .filter(|(disk, _)| disk.bus == Bus::VirtioScsi);
    let last = disks.map(|(_, target)| position(target) / 7).max();
    (0..last.map_or(0, |last| last + 1)).map(|index| {
        Element::new("controller")
            .attribute("type", "scsi")
            .attribute("index", index)
            .attribute("model", "virtio-scsi")
    })
}

fn card_element(card: &NetworkCard, options: &LibvirtOptions) -> Element {
    let mac = card
        .mac
        .as_ref()
        .map(|mac| Element::new("mac").attribute("address", mac));
    Element::new("interface")
        .attribute("type", "network")
        .children(mac)
        .child(Element::new("source").attribute("network", &options.network))
        .child(Element::new("model").attribute("type", card.model.name()))
}
