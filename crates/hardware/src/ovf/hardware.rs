//! Reads the items of the hardware section by their CIM resource types.

use std::collections::{BTreeMap, BTreeSet};

use roxmltree::Node;

use super::package::{OvfDisk, OvfPackage, resource, section, text_of, unit_bytes, wrong};
use super::units::units_per_controller;
use crate::xml::{children, named};
use crate::{Bus, CardModel, Disk, DiskKind, NetworkCard, Result, Topology, Untranslated, identity};

/// Limit of items of a machine.
const ITEM_COUNT_MAX: usize = 2000;
/// Memory of a machine without a memory item.
const MEMORY_BYTES: u64 = 1 << 30;

#[derive(Debug, Clone, Copy)]
pub(super) struct Item<'a, 'input> {
    node: Node<'a, 'input>,
    kind: u32,
}

impl<'a> Item<'a, '_> {
    fn text(&self, name: &str) -> &'a str {
        text_of(self.node, name)
    }

    /// The instance id, whose element was spelled `InstanceId` before version 1.0.
    fn instance(&self) -> &'a str {
        let instance = self.text("InstanceID");
        if instance.is_empty() {
            self.text("InstanceId")
        } else {
            instance
        }
    }

    fn subtype(&self) -> String {
        self.text("ResourceSubType").to_ascii_lowercase()
    }

    fn label(&self) -> &'a str {
        let names = ["ElementName", "Caption", "Description"].map(|name| self.text(name));
        names.into_iter().find(|name| !name.is_empty()).unwrap_or_default()
    }

    /// Its quantity, called `what` in errors.
    fn quantity(&self, what: &str) -> Result<u64> {
        let text = self.text("VirtualQuantity");
        text.parse().map_err(|_| wrong(format!("{what} is {text:?}")))
    }
}

/// The items, with the context for reading them.
pub(super) struct Hardware<'a, 'input> {
    envelope: Node<'a, 'input>,
    disks: BTreeMap<&'a str, &'a OvfDisk>,
    /// oVirt's extensions by `fileRef` and by key: the key and the interface of the disk.
    of_ovirt: BTreeMap<&'a str, (&'a str, &'a str)>,
    items: Vec<Item<'a, 'input>>,
    /// Whether XenServer wrote the descriptor: it omits controllers and models.
    is_of_xen: bool,
}

impl<'a, 'input> Hardware<'a, 'input> {
    /// Selects the items of the default deployment configuration, without minimum and maximum items.
    pub(super) fn new(envelope: Node<'a, 'input>, hardware: Node<'a, 'input>, package: &'a OvfPackage) -> Result<Self> {
        let configuration = default_configuration(envelope);
        let mut items: Vec<Item<'a, 'input>> = Vec::new();
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        for node in hardware.children() {
            if !matches!(node.tag_name().name(), "Item" | "StorageItem" | "EthernetPortItem") {
                continue;
            }
            let of = named(node, "configuration");
            let is_chosen = of.is_none_or(|names| names.split_whitespace().any(|name| Some(name) == configuration));
            if !is_chosen || named(node, "bound").is_some_and(|bound| bound != "normal") {
                continue;
            }
            let kind = text_of(node, "ResourceType");
            let kind = kind
                .parse()
                .map_err(|_| wrong(format!("an item is of type {kind:?}")))?;
            let item = Item { node, kind };
            // Items of the configuration override those of all configurations.
            if let Some(place) = places.get(item.instance()).filter(|_| of.is_some()) {
                items[*place] = item;
            } else {
                places.insert(item.instance(), items.len());
                items.push(item);
            }
            if items.len() > ITEM_COUNT_MAX {
                return Err(wrong(format!("it has more than {ITEM_COUNT_MAX} items")));
            }
        }
        let kind = children(hardware, "System")
            .map(|system| text_of(system, "VirtualSystemType"))
            .next();
        let is_of_xen = kind.is_some_and(|kind| kind.starts_with("hvm-") || kind.starts_with("xen-"));
        Ok(Self {
            envelope,
            disks: package.disks.iter().map(|disk| (disk.key.as_str(), disk)).collect(),
            of_ovirt: of_ovirt(envelope),
            items,
            is_of_xen,
        })
    }

    fn of_kind(&self, kind: u32) -> impl Iterator<Item = &Item<'a, 'input>> {
        self.items.iter().filter(move |item| item.kind == kind)
    }

    /// Processor count and topology.
    pub(super) fn processors(&self) -> Result<(u32, Option<Topology>)> {
        let Some(item) = self.of_kind(3).next() else {
            return Ok((1, None));
        };
        let number = |name: &str| item.text(name).parse::<u32>().ok().filter(|count| *count > 0);
        // oVirt omits the total.
        if let (Some(sockets), Some(cores)) = (number("num_of_sockets"), number("cpu_per_socket")) {
            let threads = number("threads_per_cpu").unwrap_or(1);
            let count = sockets.checked_mul(cores).and_then(|count| count.checked_mul(threads));
            let count = count.ok_or_else(|| wrong("too many processors"))?;
            return Ok((count, Some(topology(sockets, cores, threads))));
        }
        let count = item.quantity("the number of processors")?;
        let count = u32::try_from(count).map_err(|_| wrong(format!("{count} processors")))?;
        let cores = number("CoresPerSocket").filter(|cores| count.is_multiple_of(*cores));
        Ok((count, cores.map(|cores| topology(count / cores, cores, 1))))
    }

    /// The memory in bytes. The item is optional, so that the deployer can choose.
    pub(super) fn memory(&self, dropped: &mut Vec<Untranslated>) -> Result<u64> {
        let Some(item) = self.of_kind(4).next() else {
            dropped.push(Untranslated::new(
                "the amount of memory",
                "it is not specified; the machine has 1 GiB",
            ));
            return Ok(MEMORY_BYTES);
        };
        let unit = match item.text("AllocationUnits") {
            "" => "byte * 2^20",
            unit => unit,
        };
        let bytes = unit_bytes(unit).ok_or_else(|| wrong(format!("memory is counted in {unit:?}")))?;
        let memory = item.quantity("the memory")?.checked_mul(bytes);
        memory.ok_or_else(|| wrong("too much memory"))
    }

    /// The network cards in the order of their items.
    pub(super) fn cards(&self) -> Vec<NetworkCard> {
        let items = self.items.iter().filter(|item| matches!(item.kind, 10 | 33));
        let card = |item: &Item<'_, '_>| {
            let address = [item.text("Address"), item.text("MACAddress")];
            NetworkCard {
                mac: address.into_iter().find_map(identity::mac),
                network: network(item.text("Connection")),
                model: card_model(&item.subtype(), self.is_of_xen),
            }
        };
        items.map(card).collect()
    }

    /// The disks and drives in the order of their items.
    pub(super) fn disks(&self, dropped: &mut Vec<Untranslated>) -> Result<Vec<Disk>> {
        let controllers = self.controllers();
        let order = self.boot_order();
        let mut disks: Vec<Disk> = Vec::new();
        for item in &self.items {
            let Some(kind) = disk_kind(item.kind) else { continue };
            let Some((key, size_bytes)) = self.content(item, kind)? else {
                dropped.push(Untranslated::new(item_name(item), "its content is not in the package"));
                continue;
            };
            if kind == DiskKind::Disk && disks.iter().any(|disk| disk.key == key) {
                dropped.push(Untranslated::new(
                    item_name(item),
                    "its content is already used by another disk",
                ));
                continue;
            }
            if kind != DiskKind::Disk && !item.text("HostResource").is_empty() {
                dropped.push(Untranslated::new(
                    format!("the medium in {}", item_name(item)),
                    "the drive is empty",
                ));
            }
            let parent = controllers.get(item.text("Parent"));
            let bus = match (kind, parent) {
                (DiskKind::Floppy, _) => Bus::Floppy,
                (_, Some((bus, _))) => *bus,
                (_, None) => self.bus_alone(&key),
            };
            let unit: u32 = item.text("AddressOnParent").parse().unwrap_or(0);
            let base = parent.map_or(0, |(_, number)| number.saturating_mul(units_per_controller(bus)));
            let boot = item.text("BootOrder").parse::<u32>().ok().filter(|place| *place > 0);
            disks.push(Disk {
                key,
                label: item.label().to_owned(),
                kind,
                bus,
                position: base.saturating_add(unit),
                size_bytes,
                boot_order: boot.or_else(|| order.get(item.instance()).copied()),
                is_read_only: kind == DiskKind::Cdrom,
            });
        }
        Ok(disks)
    }

    /// Key and size of the content; an empty key for an empty drive, `None` for a disk without content.
    fn content(&self, item: &Item<'_, '_>, kind: DiskKind) -> Result<Option<(String, Option<u64>)>> {
        let reference = match item.text("HostResource") {
            // A storage item of version 2 may use another element.
            "" => item.text("HostExtentName"),
            reference => reference,
        };
        let (_, id) = resource(reference);
        let find = |key: &str| self.disks.get(key).copied();
        let disk = find(id)
            .or_else(|| find(self.of_ovirt.get(reference)?.0))
            .or_else(|| id.rsplit('/').next().and_then(find));
        Ok(match (disk, kind) {
            (Some(disk), _) => Some((disk.key.clone(), disk.capacity_bytes)),
            (None, DiskKind::Disk) if reference.is_empty() => None,
            (None, DiskKind::Disk) => {
                return Err(wrong(format!(
                    "{} is {reference:?}, which is not there",
                    item_name(item)
                )));
            }
            (None, DiskKind::Cdrom | DiskKind::Floppy) => Some((String::new(), None)),
        })
    }

    /// Controllers by instance: the bus, and the number among the controllers of that bus.
    fn controllers(&self) -> BTreeMap<&'a str, (Bus, u32)> {
        let mut controllers = BTreeMap::new();
        let mut taken: BTreeSet<(&str, u32)> = BTreeSet::new();
        for item in &self.items {
            let subtype = item.subtype();
            let bus = match item.kind {
                5 => Bus::Ide,
                6 | 20 if subtype.contains("virtio") => Bus::VirtioScsi,
                6..=8 => Bus::Scsi,
                20 if subtype.contains("nvme") => Bus::Nvme,
                20 => Bus::Sata,
                23 => Bus::Usb,
                _ => continue,
            };
            let said = item.text("Address").parse().ok().filter(|number| *number < 16);
            let mut number = said.unwrap_or(0);
            while !taken.insert((bus.name(), number)) {
                number += 1;
            }
            controllers.insert(item.instance(), (bus, number));
        }
        controllers
    }

    /// The bus of a disk without a controller.
    fn bus_alone(&self, key: &str) -> Bus {
        let interface = self.of_ovirt.get(key).map_or("", |(_, interface)| *interface);
        match interface.to_ascii_lowercase().as_str() {
            "virtio" => Bus::Virtio,
            "virtio_scsi" => Bus::VirtioScsi,
            "ide" => Bus::Ide,
            "spapr_vscsi" => Bus::Scsi,
            _ if self.is_of_xen => Bus::Xen,
            _ => Bus::Sata,
        }
    }

    /// Positions in VMware's boot order by the instances of devices.
    fn boot_order(&self) -> BTreeMap<&'a str, u32> {
        let sections = self
            .envelope
            .descendants()
            .filter(|node| node.tag_name().name() == "BootOrderSection");
        let instances = sections.filter_map(|section| named(section, "instanceId"));
        (1..)
            .zip(instances)
            .map(|(place, instance)| (instance, place))
            .collect()
    }

    pub(super) fn has_tpm(&self) -> bool {
        let is_tpm = |item: &Item<'_, '_>| item.subtype().contains("tpm") || item.text("Type") == "tpm";
        self.items.iter().any(is_tpm)
    }

    /// Adds a note for each device that is dropped.
    pub(super) fn note_unsupported(&self, dropped: &mut Vec<Untranslated>) {
        for item in &self.items {
            let is_known = match item.kind {
                // Devices that every hypervisor provides itself. oVirt lists all of them; VMware lists the display, the
                // keyboard and the guest channel.
                0 | 3..=8 | 10 | 14..=17 | 19 | 20 | 24 | 26 | 31 | 33 => true,
                1 | 13 => {
                    let subtype = item.subtype();
                    ["vmci", "keyboard", "pointingdevice", "tpm", "watchdog"]
                        .iter()
                        .any(|name| subtype.contains(name))
                }
                _ => false,
            };
            if !is_known {
                dropped.push(Untranslated::new(item_name(item), "not a disk, drive or network card"));
            }
        }
    }
}

fn of_ovirt<'a>(envelope: Node<'a, '_>) -> BTreeMap<&'a str, (&'a str, &'a str)> {
    let mut found = BTreeMap::new();
    let nodes = section(envelope, "DiskSection");
    for node in nodes.into_iter().flat_map(|section| children(section, "Disk")) {
        let text = |name: &str| named(node, name).unwrap_or_default();
        let said = (text("diskId"), text("disk-interface"));
        // Blank disks and empty drives have no reference.
        let names = [text("fileRef"), text("diskId")].into_iter();
        found.extend(names.filter(|name| !name.is_empty()).map(|name| (name, said)));
    }
    found
}

fn topology(socket_count: u32, core_count: u32, thread_count: u32) -> Topology {
    Topology {
        socket_count,
        core_count,
        thread_count,
    }
}

/// The kind of a disk by its resource type; XenServer writes disks as storage extents.
fn disk_kind(kind: u32) -> Option<DiskKind> {
    match kind {
        17 | 19 | 31 => Some(DiskKind::Disk),
        15 | 16 => Some(DiskKind::Cdrom),
        14 => Some(DiskKind::Floppy),
        _ => None,
    }
}

/// The default of several deployment configurations.
fn default_configuration<'a>(envelope: Node<'a, '_>) -> Option<&'a str> {
    let section = section(envelope, "DeploymentOptionSection")?;
    let is_default = |node: &Node<'_, '_>| named(*node, "default").is_some_and(|text| matches!(text, "true" | "1"));
    let chosen = children(section, "Configuration").find(is_default);
    chosen
        .or_else(|| children(section, "Configuration").next())
        .and_then(|node| named(node, "id"))
}

/// The network's name, which XenServer writes within a list of settings.
fn network(connection: &str) -> Option<String> {
    let of_xen = connection
        .split([',', ';'])
        .find_map(|part| part.trim().strip_prefix("XenNetwork="));
    let name = of_xen.unwrap_or(connection);
    Some(name.to_owned()).filter(|name| !name.is_empty())
}

/// The model by its subtype, which may list several, the best first. oVirt writes numbers.
fn card_model(subtype: &str, is_of_xen: bool) -> CardModel {
    let known = subtype
        .split([' ', ',', ';'])
        .filter(|name| !name.is_empty())
        .find_map(|name| match name {
            "vmxnet3" => Some(CardModel::Vmxnet3),
            "e1000" | "82540em" | "82543gc" | "82545em" | "2" => Some(CardModel::E1000),
            "e1000e" | "82574l" | "82583v" => Some(CardModel::E1000e),
            "pcnet32" | "pcnet" | "flexible" | "vlance" | "am79c970a" | "am79c973" => Some(CardModel::Pcnet),
            "rtl8139" | "0" | "1" => Some(CardModel::Rtl8139),
            "virtio" | "virtionet" | "virtio-net" | "3" => Some(CardModel::Virtio),
            _ => None,
        });
    match known {
        Some(model) => model,
        None if is_of_xen => CardModel::Xen,
        // The importer chooses the model.
        None if subtype.is_empty() => CardModel::E1000,
        None => CardModel::Other(subtype.to_owned()),
    }
}

/// The kind of a device, with its display name.
fn item_name(item: &Item<'_, '_>) -> String {
    let kind = match item.kind {
        1 => "other device",
        7 => "Fibre Channel adapter",
        8 => "iSCSI adapter",
        9 => "InfiniBand adapter",
        11 => "other network adapter",
        12 => "slot for devices",
        13 => "input or output device",
        14 => "floppy drive",
        15 => "CD drive",
        16 => "DVD drive",
        17 | 31 => "disk",
        18 => "tape drive",
        19 => "storage extent",
        21 => "serial port",
        22 => "parallel port",
        23 => "USB controller",
        25 => "FireWire controller",
        30 => "port of a switch",
        32 => "storage volume",
        35 => "sound card",
        other => return format!("device of type {other} ({})", item.label()),
    };
    match item.label() {
        "" => kind.to_owned(),
        label => format!("{kind} ({label})"),
    }
}
