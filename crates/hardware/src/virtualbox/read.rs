//! Converts settings of VirtualBox to a machine.

use roxmltree::Node;

use super::media::{FORM, machine, uuid, wrong};
use super::settings::snapshots_of;
use crate::machine::bound;
use crate::xml::{self, attribute, child, children};
use crate::{
    Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard, Result, Translated, Untranslated, identity,
};

/// Number of positions in the boot order.
const ORDER_COUNT_MAX: u32 = 4;

/// Reads the settings of a machine. The key of a disk is the UUID of its image, as in [`super::media`].
pub fn read(text: &str) -> Result<Translated<Machine>> {
    let document = xml::parse(text, FORM)?;
    let machine = machine(&document)?;
    read_from(machine, machine)
}

/// Reads the settings in the snapshot with this UUID. The key of a disk is the UUID of the image that has not changed
/// since the snapshot.
pub fn read_at(text: &str, snapshot: &str) -> Result<Translated<Machine>> {
    let document = xml::parse(text, FORM)?;
    let machine = machine(&document)?;
    let found =
        snapshots_of(machine).find(|node| node.attribute("uuid").and_then(identity::uuid).as_deref() == Some(snapshot));
    read_from(
        machine,
        found.ok_or_else(|| wrong(format!("it has no snapshot {snapshot}")))?,
    )
}

/// Reads a machine from `state`: the machine's element or that of a snapshot.
fn read_from(machine: Node<'_, '_>, state: Node<'_, '_>) -> Result<Translated<Machine>> {
    let hardware = child(state, "Hardware").ok_or_else(|| wrong("its machine has no hardware"))?;
    let platform = platform(state, hardware);
    let mut dropped = Vec::new();
    let mut value = Machine {
        name: machine.attribute("name").unwrap_or_default().to_owned(),
        uuid: machine.attribute("uuid").and_then(identity::uuid),
        description: xml::text(machine, "Description").unwrap_or_default().to_owned(),
        processor_count: number(attribute(platform, "CPU", "count"), 1, "the number of processors")?,
        topology: None,
        memory_bytes: memory(hardware)?,
        firmware: firmware(hardware),
        clock: clock(platform),
        disks: disks(state, hardware, &mut dropped)?,
        cards: cards(hardware),
        has_tpm: has_tpm(hardware),
    };
    order(hardware, &mut value.disks);
    note_unsupported(state, hardware, &mut dropped);
    let value = value.checked(FORM)?;
    Ok(Translated { value, dropped })
}

/// Adds the settings that an OVF descriptor of VirtualBox has only in its element `vbox:Machine`: UUID, firmware,
/// clock, TPM, MAC addresses, boot order.
pub(crate) fn read_ovf_extension(machine: &mut Machine, extension: Node<'_, '_>) {
    let Some(hardware) = child(extension, "Hardware") else {
        return;
    };
    machine.uuid = extension
        .attribute("uuid")
        .and_then(identity::uuid)
        .or(machine.uuid.take());
    machine.clock = clock(platform(extension, hardware));
    if machine.firmware == Firmware::Bios {
        machine.firmware = firmware(hardware);
    }
    machine.has_tpm |= has_tpm(hardware);
    let cards = cards(hardware);
    if cards.len() == machine.cards.len() {
        for (card, found) in machine.cards.iter_mut().zip(cards) {
            card.mac = card.mac.take().or(found.mac);
        }
    }
    if machine.disks.iter().all(|disk| disk.boot_order.is_none()) {
        order(hardware, &mut machine.disks);
    }
}

/// The element with processors and clock: `Platform` since version 1.20.
fn platform<'a, 'input>(machine: Node<'a, 'input>, hardware: Node<'a, 'input>) -> Node<'a, 'input> {
    child(hardware, "Platform")
        .or_else(|| child(machine, "Platform"))
        .unwrap_or(hardware)
}

/// A number, or `default` if it is missing.
fn number<T: std::str::FromStr>(text: Option<&str>, default: T, what: &str) -> Result<T> {
    match text {
        Some(text) => text.trim().parse().map_err(|_| wrong(format!("{what} is {text:?}"))),
        None => Ok(default),
    }
}

/// The memory in bytes; the settings have MiB.
fn memory(hardware: Node<'_, '_>) -> Result<u64> {
    let mebibytes: u64 = number(attribute(hardware, "Memory", "RAMSize"), 0, "the memory")?;
    mebibytes.checked_mul(1 << 20).ok_or_else(|| wrong("too much memory"))
}

/// Secure Boot is not detected: its state is only in the UEFI variables.
fn firmware(hardware: Node<'_, '_>) -> Firmware {
    match attribute(hardware, "Firmware", "type") {
        Some(kind) if kind.starts_with("EFI") => Firmware::Uefi,
        _ => Firmware::Bios,
    }
}

fn clock(platform: Node<'_, '_>) -> Clock {
    match attribute(platform, "RTC", "localOrUTC") {
        Some("UTC") => Clock::Utc,
        _ => Clock::LocalTime,
    }
}

fn has_tpm(hardware: Node<'_, '_>) -> bool {
    attribute(hardware, "TrustedPlatformModule", "type").is_some_and(|kind| kind != "None")
}

/// The note about an unknown storage controller with disks.
pub const UNKNOWN_CONTROLLER: &str = "disks on the storage controller";

fn disks(machine: Node<'_, '_>, hardware: Node<'_, '_>, dropped: &mut Vec<Untranslated>) -> Result<Vec<Disk>> {
    // Since version 1.17, the controllers are inside the hardware element.
    let controllers = child(hardware, "StorageControllers").or_else(|| child(machine, "StorageControllers"));
    let mut taken: Vec<Bus> = Vec::new();
    let mut disks = Vec::new();
    for controller in controllers.iter().flat_map(|node| children(*node, "StorageController")) {
        let kind = controller.attribute("type").unwrap_or_default();
        let Some(bus) = bus(kind) else {
            let is_used = children(controller, "AttachedDevice").any(|device| child(device, "Image").is_some());
            let what = if is_used {
                UNKNOWN_CONTROLLER
            } else {
                "an empty controller"
            };
            dropped.push(Untranslated::new(format!("{what} {kind:?}"), "it is not known"));
            continue;
        };
        let before = taken.iter().filter(|other| **other == bus).count();
        let before = u32::try_from(before).unwrap_or(u32::MAX);
        taken.push(bus);
        if taken.len() > bound::DISKS {
            return Err(wrong("it has too many storage controllers"));
        }
        let name = controller.attribute("name").unwrap_or(kind);
        for device in children(controller, "AttachedDevice") {
            let port: u32 = number(device.attribute("port"), 0, "the port of a disk")?;
            let unit: u32 = number(device.attribute("device"), 0, "the number of a disk")?;
            if disks.len() == bound::DISKS {
                return Err(wrong("it has too many disks"));
            }
            let place = port.saturating_mul(units_per_port(bus)).saturating_add(unit);
            let base = before.saturating_mul(units_per_controller(bus));
            disks.extend(attached(device, bus, name, base.saturating_add(place), dropped)?);
        }
    }
    Ok(disks)
}

/// A device of a controller, with its bus and name; `None` for a disk without an image.
fn attached(
    device: Node<'_, '_>,
    bus: Bus,
    controller: &str,
    position: u32,
    dropped: &mut Vec<Untranslated>,
) -> Result<Option<Disk>> {
    let kind = match device.attribute("type").unwrap_or("HardDisk") {
        "DVD" => DiskKind::Cdrom,
        "Floppy" => DiskKind::Floppy,
        _ => DiskKind::Disk,
    };
    let label = format!("{controller} {position}");
    let key = child(device, "Image").map(uuid).transpose()?;
    if key.is_none() && kind == DiskKind::Disk {
        dropped.push(Untranslated::new(format!("disk {label}"), "it has no image"));
        return Ok(None);
    }
    if let Some(drive) = attribute(device, "HostDrive", "src") {
        dropped.push(Untranslated::new(
            format!("the drive {drive}"),
            "is specific to the source host",
        ));
    }
    Ok(Some(Disk {
        key: key.unwrap_or_default(),
        label,
        kind,
        bus,
        position,
        size_bytes: None,
        boot_order: None,
        is_read_only: kind == DiskKind::Cdrom,
    }))
}

fn bus(kind: &str) -> Option<Bus> {
    match kind {
        "AHCI" => Some(Bus::Sata),
        "PIIX3" | "PIIX4" | "ICH6" => Some(Bus::Ide),
        "LsiLogic" | "BusLogic" | "LsiLogicSas" => Some(Bus::Scsi),
        "VirtioSCSI" => Some(Bus::VirtioScsi),
        "NVMe" => Some(Bus::Nvme),
        "USB" => Some(Bus::Usb),
        "I82078" => Some(Bus::Floppy),
        _ => None,
    }
}

/// IDE has two units per port; a floppy controller has two drives.
fn units_per_port(bus: Bus) -> u32 {
    match bus {
        Bus::Ide | Bus::Floppy => 2,
        _ => 1,
    }
}

/// Disks per controller.
pub(super) fn units_per_controller(bus: Bus) -> u32 {
    match bus {
        Bus::Ide => 4,
        Bus::Sata => 30,
        Bus::Scsi => 16,
        Bus::VirtioScsi => 256,
        Bus::Nvme => 255,
        Bus::Usb => 8,
        Bus::Floppy => 2,
        Bus::Virtio | Bus::Xen => 0,
    }
}

/// Sets the boot order, which means the first device of each kind.
fn order(hardware: Node<'_, '_>, disks: &mut [Disk]) {
    let mut kinds: Vec<(u32, &str)> = vec![(1, "Floppy"), (2, "DVD"), (3, "HardDisk")];
    if let Some(boot) = child(hardware, "Boot") {
        let place = |order: Node<'_, '_>| order.attribute("position")?.parse::<u32>().ok();
        kinds = children(boot, "Order")
            .filter_map(|order| Some((place(order)?, order.attribute("device")?)))
            .filter(|(place, _)| (1..=ORDER_COUNT_MAX).contains(place))
            .collect();
        kinds.sort_unstable();
        kinds.dedup_by_key(|(place, _)| *place);
    }
    for (place, kind) in kinds {
        let kind = match kind {
            "Floppy" => DiskKind::Floppy,
            "DVD" => DiskKind::Cdrom,
            "HardDisk" => DiskKind::Disk,
            _ => continue,
        };
        if let Some(disk) = disks.iter_mut().find(|disk| disk.kind == kind) {
            disk.boot_order = disk.boot_order.or(Some(place));
        }
    }
}

/// The enabled network cards, by slot.
fn cards(hardware: Node<'_, '_>) -> Vec<NetworkCard> {
    let network = child(hardware, "Network");
    let adapters = network.iter().flat_map(|network| children(*network, "Adapter"));
    let slot = |adapter: &Node<'_, '_>| adapter.attribute("slot").and_then(|slot| slot.parse::<u32>().ok());
    let mut adapters: Vec<Node<'_, '_>> = adapters
        .filter(|adapter| adapter.attribute("enabled") == Some("true"))
        .collect();
    adapters.sort_by_key(|adapter| slot(adapter).unwrap_or(u32::MAX));
    let card = |adapter: Node<'_, '_>| NetworkCard {
        mac: adapter.attribute("MACAddress").and_then(identity::mac),
        network: network_of(adapter),
        model: match adapter.attribute("type").unwrap_or("Am79C973") {
            "virtio" => CardModel::Virtio,
            "82540EM" | "82543GC" | "82545EM" => CardModel::E1000,
            "82574" | "82574L" | "82583V" => CardModel::E1000e,
            name if name.starts_with("Am79C97") => CardModel::Pcnet,
            name => CardModel::Other(name.to_owned()),
        },
    };
    adapters.into_iter().map(card).collect()
}

/// The network that a card is connected to; NAT has no name.
fn network_of(adapter: Node<'_, '_>) -> Option<String> {
    let attachment = adapter.children().find(|node| {
        matches!(
            node.tag_name().name(),
            "NAT"
                | "BridgedInterface"
                | "InternalNetwork"
                | "HostOnlyInterface"
                | "HostOnlyNetwork"
                | "NATNetwork"
                | "GenericInterface"
                | "CloudNetwork"
        )
    })?;
    let name = attachment.attribute("name");
    Some(name.unwrap_or(attachment.tag_name().name()).to_owned())
}

/// Adds a note for each setting that is dropped.
fn note_unsupported(machine: Node<'_, '_>, hardware: Node<'_, '_>, dropped: &mut Vec<Untranslated>) {
    let mut add = |what: String, why: &str| dropped.push(Untranslated::new(what, why));
    if let Some(kind) = platform(machine, hardware)
        .attribute("architecture")
        .filter(|kind| *kind != "x86")
    {
        add(format!("processors of {kind}"), "others are x86_64");
    }
    for folder in child(hardware, "SharedFolders")
        .iter()
        .flat_map(|node| children(*node, "SharedFolder"))
    {
        let name = folder.attribute("name").unwrap_or("unnamed");
        add(format!("a shared folder ({name})"), "is specific to the source host");
    }
    let below = |name: &str, inner: &str| {
        let outer = child(hardware, name);
        outer.is_some_and(|outer| outer.descendants().any(|node| node.tag_name().name() == inner))
    };
    if below("HostPci", "Device") {
        add("a host device (PCI)".to_owned(), "is specific to the source host");
    }
    if below("USB", "DeviceFilter") {
        add("host devices (USB)".to_owned(), "are specific to the source host");
    }
    let forwarded = child(hardware, "Network").map_or(0, |network| {
        let rules = network.descendants();
        rules.filter(|node| node.tag_name().name() == "Forwarding").count()
    });
    if forwarded > 0 {
        add(
            format!("{forwarded} forwarded ports"),
            "are specific to the source network",
        );
    }
    if below("Firmware", "NVRAM") || below("BIOS", "NVRAM") {
        add("variables of UEFI".to_owned(), "the machine starts with defaults");
    }
    let snapshots = snapshots_of(machine).count();
    if snapshots > 0 {
        add(
            format!("{snapshots} snapshots"),
            "only the current state is carried over",
        );
    }
    if machine.attribute("stateFile").is_some_and(|file| !file.is_empty()) {
        add("its memory".to_owned(), "another hypervisor cannot resume from it");
    }
}
