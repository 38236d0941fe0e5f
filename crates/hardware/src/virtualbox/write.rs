//! Converts a machine to settings of VirtualBox.

use std::collections::BTreeMap;

use super::read::units_per_controller;
use crate::bus_address::{AddressAllocator, move_first};
use crate::xml::Element;
use crate::{
    Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard, Platform, Translated, Untranslated, adapt,
    identity,
};

/// The settings version of VirtualBox 5.1. All later versions of VirtualBox read it.
const VERSION: &str = "1.16-linux";
/// The settings version of VirtualBox 7.0, the first version with a TPM.
const VERSION_OF_TPM: &str = "1.19-linux";
/// Limit of processors.
const PROCESSOR_COUNT_MAX: u32 = 64;
/// Limits of network cards with the default chipset and with the larger one.
const CARD_COUNT_MAX: [usize; 2] = [8, 36];
/// The unit of the SCSI controller itself.
const SCSI_ITSELF: u32 = 7;

/// Settings of the target host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualBoxOptions {
    /// The UUID for a machine without one.
    pub uuid: String,
    /// The image of each disk, by the disk's key. Disks without an image are left out; drives are empty.
    pub disks: BTreeMap<String, Image>,
    /// The network that the machine's cards are connected to.
    pub network: NetworkAttachment,
}

/// The image of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The UUID in the image; VirtualBox refuses a different one.
    pub uuid: String,
    /// The file: a path, absolute or relative to the folder of the settings.
    pub location: String,
    /// `VDI`, `VMDK` or `VHD`.
    pub format: String,
}

/// The network that network cards are connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkAttachment {
    /// A private network of the machine, with address translation by the host.
    Nat,
    /// Bridged to the network card of the host with this name.
    Bridged(String),
    /// The internal network of the host with this name.
    Internal(String),
}

/// Writes the settings of a machine.
pub fn write(machine: &Machine, options: &VirtualBoxOptions) -> Translated<String> {
    let Translated { mut value, mut dropped } = adapt(machine, Platform::VirtualBox);
    let mut disks = std::mem::take(&mut value.disks);
    let disks = placed(&mut disks, options, &mut dropped);
    apply_limits(&mut value, &mut dropped);
    let version = if value.has_tpm { VERSION_OF_TPM } else { VERSION };
    let uuid = value.uuid.as_deref().and_then(identity::uuid);
    let uuid = uuid.unwrap_or_else(|| options.uuid.clone());
    let mut machine = Element::new("Machine")
        .attribute("uuid", braced(&uuid))
        .attribute("name", &value.name)
        .attribute("OSType", "Other_64")
        .attribute("snapshotFolder", "Snapshots");
    if !value.description.is_empty() {
        machine = machine.child(Element::new("Description").text(&value.description));
    }
    let images = disks.iter().filter_map(|(disk, _)| image_of(disk, options));
    let machine = machine
        .child(media_registry(images))
        .child(hardware(&value, &disks, options).child(storage(&disks, options)));
    let settings = Element::new("VirtualBox")
        .attribute("xmlns", "http://www.virtualbox.org/")
        .attribute("version", version)
        .child(machine);
    Translated {
        value: settings.to_document(),
        dropped,
    }
}

/// The list of the machine's images.
pub(super) fn media_registry<'i>(images: impl Iterator<Item = &'i Image>) -> Element {
    let images = images.map(|image| {
        Element::new("HardDisk")
            .attribute("uuid", braced(&image.uuid))
            .attribute("location", &image.location)
            .attribute("format", &image.format)
            .attribute("type", "Normal")
    });
    Element::new("MediaRegistry").child(Element::new("HardDisks").children(images))
}

/// A UUID in braces.
fn braced(uuid: &str) -> String {
    format!("{{{uuid}}}")
}

fn image_of<'w>(disk: &Disk, options: &'w VirtualBoxOptions) -> Option<&'w Image> {
    options.disks.get(&disk.key).filter(|_| disk.kind == DiskKind::Disk)
}

/// Reduces the machine to the limits of VirtualBox, with a note for each change.
fn apply_limits(machine: &mut Machine, dropped: &mut Vec<Untranslated>) {
    let mut add = |what: String, why: &str| dropped.push(Untranslated::new(what, why));
    if machine.processor_count > PROCESSOR_COUNT_MAX {
        add(
            format!("{} processors", machine.processor_count),
            "VirtualBox has 64 at most",
        );
        machine.processor_count = PROCESSOR_COUNT_MAX;
    }
    if machine.topology.is_some() {
        add("CPU topology".to_owned(), "VirtualBox has only their number");
    }
    if machine.cards.len() > CARD_COUNT_MAX[1] {
        add(format!("{} network cards", machine.cards.len()), "only 36 have a slot");
        machine.cards.truncate(CARD_COUNT_MAX[1]);
    }
    for (number, card) in machine.cards.iter_mut().enumerate() {
        let address = card.mac.take().and_then(|mac| identity::mac(&mac));
        let is_group = |mac: &String| mac.as_bytes().get(1).is_some_and(|digit| b"13579bdf".contains(digit));
        if address.as_ref().is_some_and(is_group) {
            add(
                format!("the address of network card {}", number + 1),
                "it is a multicast address, which VirtualBox refuses",
            );
        } else {
            card.mac = address;
        }
    }
    if !machine.memory_bytes.is_multiple_of(1 << 20) {
        add("the exact memory size".to_owned(), "it is rounded up to whole MiB");
    }
    if machine.firmware == Firmware::UefiSecure {
        add("Secure Boot".to_owned(), "enable it again in VirtualBox");
    }
    if machine.has_tpm {
        let why = "TPM state cannot move to another hypervisor; the new TPM is empty";
        add("the state of the TPM".to_owned(), why);
    }
}

/// Disks and drives with their units on the controller of their bus; each bus has one.
fn placed<'d>(
    disks: &'d mut [Disk],
    options: &VirtualBoxOptions,
    dropped: &mut Vec<Untranslated>,
) -> Vec<(&'d Disk, u32)> {
    let is_there = |disk: &Disk| disk.kind != DiskKind::Disk || options.disks.contains_key(&disk.key);
    let wanted = |disk: &Disk| {
        let [bus, ..] = buses(disk);
        is_there(disk).then_some((bus, disk.position))
    };
    let mut addresses = AddressAllocator::new(disks, wanted, units);
    let mut keys: Vec<&str> = Vec::new();
    let mut placed = Vec::new();
    for (number, disk) in disks.iter_mut().enumerate() {
        let is_disk = disk.kind == DiskKind::Disk;
        if is_disk && (!options.disks.contains_key(&disk.key) || keys.contains(&disk.key.as_str())) {
            dropped.push(Untranslated::new(
                format!("disk {}", disk.label),
                "its content is missing",
            ));
            continue;
        }
        if !is_disk && !disk.key.is_empty() {
            let what = format!("the medium in drive {}", disk.label);
            dropped.push(Untranslated::new(what, "the drive is empty"));
        }
        let found = buses(disk)
            .into_iter()
            .find_map(|bus| Some((bus, addresses.allocate(number, bus, units(bus))?)));
        let Some((bus, unit)) = found else {
            let what = format!("disk {}", disk.label);
            dropped.push(Untranslated::new(what, "no free position on its controllers"));
            continue;
        };
        if bus != disk.bus {
            let what = format!("disk {} on {}", disk.label, disk.bus.name());
            dropped.push(Untranslated::new(what, format!("is on {} now", bus.name())));
            disk.bus = bus;
        }
        let disk = &*disk;
        if is_disk {
            keys.push(&disk.key);
        }
        placed.push((disk, unit));
    }
    move_boot_disk_first(&mut placed, dropped);
    placed
}

/// The number of the boot disk, if the boot order names one.
fn first_of(placed: &[(&Disk, u32)]) -> Option<usize> {
    let ordered = placed.iter().enumerate().filter_map(|(number, (disk, _))| {
        let order = disk.boot_order.filter(|_| disk.kind == DiskKind::Disk)?;
        Some((order, number))
    });
    ordered.min().map(|(_, number)| number)
}

/// Moves the boot disk before the others on its controller: VirtualBox boots from the first one.
fn move_boot_disk_first(placed: &mut [(&Disk, u32)], dropped: &mut Vec<Untranslated>) {
    let Some(first) = first_of(placed) else { return };
    let (disk, _) = placed[first];
    let is_beside = |other: &Disk| other.bus == disk.bus && other.kind == DiskKind::Disk;
    let beside = (0..placed.len()).filter(|number| is_beside(placed[*number].0));
    let beside: Vec<usize> = beside.collect();
    let mut units: Vec<u32> = beside.iter().map(|number| placed[*number].1).collect();
    if let Some(place) = beside.iter().position(|number| *number == first)
        && move_first(&mut units, place)
    {
        let why = "it is the first disk on its controller now: VirtualBox boots from the first";
        dropped.push(Untranslated::new(format!("the place of disk {}", disk.label), why));
    }
    for (number, unit) in beside.into_iter().zip(units) {
        placed[number].1 = unit;
    }
    let is_before = |other: &Disk| other.bus == Bus::Ide && other.kind == DiskKind::Disk;
    if disk.bus != Bus::Ide && placed.iter().any(|(other, _)| is_before(other)) {
        let why = "VirtualBox tries IDE disks first: choose the disk at boot (F12), or move the IDE disks";
        dropped.push(Untranslated::new(format!("booting from disk {}", disk.label), why));
    }
}

/// The possible buses of a disk or drive, in order of preference.
fn buses(disk: &Disk) -> [Bus; 3] {
    match (disk.kind, disk.bus) {
        (DiskKind::Floppy, _) => [Bus::Floppy; 3],
        (DiskKind::Cdrom, Bus::Nvme) | (_, Bus::Floppy) => [Bus::Sata, Bus::Ide, Bus::Scsi],
        (_, bus) => [bus, Bus::Sata, Bus::Ide],
    }
}

/// The units of the controller of a bus.
fn units(bus: Bus) -> impl Iterator<Item = u32> + Clone {
    (0..units_per_controller(bus)).filter(move |unit| !(bus == Bus::Scsi && *unit == SCSI_ITSELF))
}

/// The hardware without storage.
fn hardware(machine: &Machine, disks: &[(&Disk, u32)], options: &VirtualBoxOptions) -> Element {
    let enabled = |name: &'static str| Element::new(name).attribute("enabled", true);
    let processors = Element::new("CPU").attribute("count", machine.processor_count);
    let has_many_cards = machine.cards.len() > CARD_COUNT_MAX[0];
    let order = (1..).zip(order(disks)).map(|(place, device)| {
        Element::new("Order")
            .attribute("position", place)
            .attribute("device", device)
    });
    let is_uefi = matches!(machine.firmware, Firmware::Uefi | Firmware::UefiSecure);
    let tpm = machine.has_tpm.then(|| {
        Element::new("TrustedPlatformModule")
            .attribute("type", "v2_0")
            .attribute("location", "")
    });
    let cards = machine.cards.iter().enumerate();
    let adapters = cards.map(|(slot, card)| adapter(card, slot, &options.network));
    let clock = match machine.clock {
        Clock::Utc => "UTC",
        Clock::LocalTime => "local",
    };
    Element::new("Hardware")
        .child(processors.children(["PAE", "LongMode"].map(enabled)))
        .child(Element::new("Memory").attribute("RAMSize", machine.memory_bytes.div_ceil(1 << 20)))
        .children(has_many_cards.then(|| Element::new("Chipset").attribute("type", "ICH9")))
        .child(Element::new("Boot").children(order))
        .child(Element::new("Display").attribute("VRAMSize", 16))
        .children(is_uefi.then(|| Element::new("Firmware").attribute("type", "EFI")))
        .child(Element::new("BIOS").child(enabled("IOAPIC")))
        .children(tpm)
        .child(Element::new("Network").children(adapters))
        .child(Element::new("RTC").attribute("localOrUTC", clock))
}

/// The boot order by kinds of devices.
fn order(disks: &[(&Disk, u32)]) -> [&'static str; 4] {
    let mut kinds: Vec<(u32, &'static str)> = disks
        .iter()
        .filter_map(|(disk, _)| {
            let kind = match disk.kind {
                DiskKind::Disk => "HardDisk",
                DiskKind::Cdrom => "DVD",
                DiskKind::Floppy => "Floppy",
            };
            Some((disk.boot_order?, kind))
        })
        .collect();
    kinds.sort_unstable();
    let mut order = ["None"; 4];
    let mut used = 0;
    for (_, kind) in kinds {
        if !order.contains(&kind) {
            order[used] = kind;
            used += 1;
        }
    }
    if used == 0 {
        order = ["HardDisk", "DVD", "None", "None"];
    }
    order
}

fn adapter(card: &NetworkCard, slot: usize, network: &NetworkAttachment) -> Element {
    let model = match &card.model {
        CardModel::Virtio => "virtio",
        CardModel::Pcnet => "Am79C973",
        _ => "82540EM",
    };
    // VirtualBox generates a missing MAC address.
    let mac = card.mac.as_deref().map(|mac| mac.replace(':', "").to_ascii_uppercase());
    let network = match network {
        NetworkAttachment::Nat => Element::new("NAT"),
        NetworkAttachment::Bridged(name) => Element::new("BridgedInterface").attribute("name", name),
        NetworkAttachment::Internal(name) => Element::new("InternalNetwork").attribute("name", name),
    };
    Element::new("Adapter")
        .attribute("slot", slot)
        .attribute("enabled", true)
        .attribute_if("MACAddress", mac)
        .attribute("cable", true)
        .attribute("type", model)
        .child(network)
}

fn storage(disks: &[(&Disk, u32)], options: &VirtualBoxOptions) -> Element {
    let mut controllers: Vec<Bus> = Vec::new();
    for (disk, _) in disks {
        if !controllers.contains(&disk.bus) {
            controllers.push(disk.bus);
        }
    }
    let starting = first_of(disks).map(|number| disks[number].0.bus);
    let controllers = controllers.into_iter().map(|bus| {
        let on_it = disks.iter().filter(|(disk, _)| disk.bus == bus);
        let last = on_it.clone().map(|(_, unit)| *unit).max().unwrap_or(0);
        let (kind, port_count) = match bus {
            Bus::Ide => ("PIIX4", 2),
            Bus::Scsi => ("LsiLogic", 16),
            Bus::VirtioScsi => ("VirtioSCSI", last + 1),
            Bus::Nvme => ("NVMe", last + 1),
            Bus::Floppy => ("I82078", 1),
            Bus::Sata | Bus::Usb | Bus::Virtio | Bus::Xen => ("AHCI", last + 1),
        };
        let is_cached = matches!(bus, Bus::Ide | Bus::Floppy);
        let has_disks = on_it.clone().any(|(disk, _)| disk.kind == DiskKind::Disk);
        let is_bootable = !has_disks || starting.is_none_or(|starting| starting == bus);
        Element::new("StorageController")
            .attribute("name", bus.name())
            .attribute("type", kind)
            .attribute("PortCount", port_count)
            .attribute("useHostIOCache", is_cached)
            .attribute("Bootable", is_bootable)
            .children(on_it.map(|(disk, unit)| attached(disk, *unit, options)))
    });
    Element::new("StorageControllers").children(controllers)
}

fn attached(disk: &Disk, unit: u32, options: &VirtualBoxOptions) -> Element {
    let (port, device) = match disk.bus {
        Bus::Ide | Bus::Floppy => (unit / 2, unit % 2),
        _ => (unit, 0),
    };
    let (passthrough, kind) = match disk.kind {
        DiskKind::Disk => (None, "HardDisk"),
        DiskKind::Cdrom => (Some(false), "DVD"),
        DiskKind::Floppy => (None, "Floppy"),
    };
    let image = image_of(disk, options).map(|image| Element::new("Image").attribute("uuid", braced(&image.uuid)));
    Element::new("AttachedDevice")
        .attribute_if("passthrough", passthrough)
        .attribute("type", kind)
        .attribute("hotpluggable", false)
        .attribute("port", port)
        .attribute("device", device)
        .children(image)
}
