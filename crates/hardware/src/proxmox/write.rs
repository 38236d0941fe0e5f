//! Converts a machine to a configuration of Proxmox.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::bus_address::AddressAllocator;
use crate::{
    Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard, Platform, Translated, Untranslated, adapt,
    identity, percent,
};

/// Settings of the target host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxmoxOptions {
    /// The VM id. A restore of the archive can choose another one.
    pub vm_id: u32,
    /// The storage for the disks: `local-lvm`.
    pub storage: String,
    /// The bridge for the network cards: `vmbr0`.
    pub bridge: String,
    /// The size in bytes of each disk with content, by the disk's key. Other disks are left out; drives are empty.
    pub disks: BTreeMap<String, u64>,
}

/// A machine as `qemu-server.conf`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxmoxExport {
    /// The text, with the lines that name the devices of an archive.
    pub config: String,
    /// The disks whose content the archive must have: the key and the device name of each.
    pub disks: Vec<(String, String)>,
}

/// `net0` to `net31` (`MAX_NETS` in PVE::QemuServer).
const CARD_COUNT_MAX: usize = 32;

/// Writes the configuration of a machine for a VMA.
pub fn write(machine: &Machine, options: &ProxmoxOptions) -> Translated<ProxmoxExport> {
    let Translated { mut value, mut dropped } = adapt(machine, Platform::Proxmox);
    let mut disks = std::mem::take(&mut value.disks);
    let disks = placed(&mut disks, options, &mut dropped);
    let mut settings = settings(&value, &mut dropped);
    let mut order: Vec<(u32, &str)> = Vec::new();
    let mut contents = Vec::new();
    let mut maps = String::new();
    for (disk, name) in &disks {
        order.extend(disk.boot_order.map(|place| (place, name.as_str())));
        match options.disks.get(&disk.key).filter(|_| disk.kind == DiskKind::Disk) {
            Some(size_bytes) => {
                let (number, size) = (contents.len(), size(*size_bytes));
                let (storage, id) = (word(&options.storage), options.vm_id);
                let only = if disk.is_read_only { ",ro=1" } else { "" };
                settings.insert(
                    name.clone(),
                    format!("{storage}:vm-{id}-disk-{number}{only},size={size}"),
                );
                writeln!(maps, "#qmdump#map:{name}:drive-{name}:{storage}:raw:").expect("a string takes all");
                contents.push((disk.key.clone(), format!("drive-{name}")));
            }
            None => {
                settings.insert(name.clone(), "none,media=cdrom".to_owned());
            }
        }
    }
    if disks.iter().any(|(disk, _)| disk.bus == Bus::VirtioScsi) {
        settings.insert("scsihw".to_owned(), "virtio-scsi-single".to_owned());
    }
    order.sort_unstable();
    if !order.is_empty() {
        let names: Vec<&str> = order.into_iter().map(|(_, name)| name).collect();
        settings.insert("boot".to_owned(), format!("order={}", names.join(";")));
    }
    for (number, card) in value.cards.iter().enumerate() {
        if number >= CARD_COUNT_MAX {
            let what = format!("network card {}", number + 1);
            dropped.push(Untranslated::new(what, "Proxmox takes 32 of them"));
            continue;
        }
        settings.insert(format!("net{number}"), card_value(card, number, options, &mut dropped));
    }
    let mut config = String::new();
    for line in value.description.lines() {
        writeln!(config, "#{}", percent::encoded(line)).expect("a string takes all");
    }
    for (name, value) in settings {
        writeln!(config, "{name}: {value}").expect("a string takes all");
    }
    config.push_str(&maps);
    let value = ProxmoxExport {
        config,
        disks: contents,
    };
    Translated { value, dropped }
}

/// Disks and drives with their names, which consist of bus and position.
fn placed<'d>(
    disks: &'d mut [Disk],
    options: &ProxmoxOptions,
    dropped: &mut Vec<Untranslated>,
) -> Vec<(&'d Disk, String)> {
    let is_there = |disk: &Disk| match disk.kind {
        DiskKind::Disk => options.disks.contains_key(&disk.key),
        DiskKind::Cdrom => true,
        DiskKind::Floppy => false,
    };
    let wanted = |disk: &Disk| {
        let key = numbers(disk.bus).or_else(|| numbers(Bus::Sata));
        key.filter(|_| is_there(disk)).map(|key| (key, disk.position))
    };
    let mut addresses = AddressAllocator::new(disks, wanted, |(_, count)| 0..count);
    let mut keys: Vec<&str> = Vec::new();
    let mut placed = Vec::new();
    for (number, disk) in disks.iter_mut().enumerate() {
        if disk.kind == DiskKind::Floppy {
            dropped.push(Untranslated::new(
                format!("floppy drive {}", disk.label),
                "Proxmox has none",
            ));
            continue;
        }
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
        let found = [disk.bus, Bus::Sata, Bus::Ide, Bus::VirtioScsi]
            .into_iter()
            .filter(|bus| is_disk || *bus != Bus::Virtio)
            .find_map(|bus| {
                let (prefix, count) = numbers(bus)?;
                Some((bus, prefix, addresses.allocate(number, (prefix, count), 0..count)?))
            });
        let Some((bus, prefix, place)) = found else {
            dropped.push(Untranslated::new(
                format!("disk {}", disk.label),
                "no free position on its controllers",
            ));
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
        placed.push((disk, format!("{prefix}{place}")));
    }
    placed
}

/// The name prefix of a bus, and the limit of its disks.
fn numbers(bus: Bus) -> Option<(&'static str, u32)> {
    match bus {
        Bus::Ide => Some(("ide", 4)),
        Bus::Sata => Some(("sata", 6)),
        Bus::VirtioScsi => Some(("scsi", 31)),
        Bus::Virtio => Some(("virtio", 16)),
        Bus::Scsi | Bus::Nvme | Bus::Xen | Bus::Usb | Bus::Floppy => None,
    }
}

/// All settings except disks and network cards.
fn settings(machine: &Machine, dropped: &mut Vec<Untranslated>) -> BTreeMap<String, String> {
    let mut settings = BTreeMap::new();
    let mut set = |name: &str, value: String| settings.insert(name.to_owned(), value);
    let name = host_name(&machine.name);
    if name != machine.name {
        let what = format!("its name {:?}", machine.name);
        dropped.push(Untranslated::new(
            what,
            format!("it is {name} now, as Proxmox requires host names"),
        ));
    }
    set("name", name);
    let topology = machine.topology.and_then(|topology| {
        let cores = topology.core_count.checked_mul(topology.thread_count)?;
        (cores.checked_mul(topology.socket_count)? == machine.processor_count).then_some((topology.socket_count, cores))
    });
    if machine.topology.is_some_and(|topology| topology.thread_count > 1) {
        dropped.push(Untranslated::new(
            "threads per core",
            "Proxmox has only sockets and cores",
        ));
    }
    let (sockets, cores) = topology.unwrap_or((1, machine.processor_count));
    set("sockets", sockets.to_string());
    set("cores", cores.to_string());
    if !machine.memory_bytes.is_multiple_of(1 << 20) {
        dropped.push(Untranslated::new(
            "the exact memory size",
            "it is rounded up to whole MiB",
        ));
    }
    set("memory", machine.memory_bytes.div_ceil(1 << 20).to_string());
    set("ostype", "other".to_owned());
    if machine.clock == Clock::LocalTime {
        set("localtime", "1".to_owned());
    }
    if let Some(uuid) = machine.uuid.as_deref().and_then(identity::uuid) {
        set("smbios1", format!("uuid={uuid}"));
    }
    if matches!(machine.firmware, Firmware::Uefi | Firmware::UefiSecure) {
        set("bios", "ovmf".to_owned());
        set("machine", "q35".to_owned());
        dropped.push(Untranslated::new(
            "variables of UEFI",
            "they are lost at each shutdown until the machine has an EFI disk",
        ));
    }
    if machine.firmware == Firmware::UefiSecure {
        dropped.push(Untranslated::new("Secure Boot", "its keys need an EFI disk"));
    }
    if machine.has_tpm {
        dropped.push(Untranslated::new("its TPM", "add one after the restore; it is empty"));
    }
    settings
}

fn card_value(card: &NetworkCard, number: usize, options: &ProxmoxOptions, dropped: &mut Vec<Untranslated>) -> String {
    if let Some(network) = card.network.as_ref().filter(|network| **network != options.bridge) {
        dropped.push(Untranslated::new(
            format!("network {network} of card {}", number + 1),
            format!("is plugged into {} now", options.bridge),
        ));
    }
    let model = match &card.model {
        CardModel::Virtio => "virtio",
        CardModel::E1000e => "e1000e",
        CardModel::Rtl8139 => "rtl8139",
        CardModel::Pcnet => "pcnet",
        CardModel::E1000 | CardModel::Vmxnet3 | CardModel::Xen | CardModel::Other(_) => "e1000",
    };
    let mac = card.mac.as_deref().and_then(identity::mac);
    let mac = mac.map(|mac| format!("={}", mac.to_ascii_uppercase()));
    format!("{model}{},bridge={}", mac.unwrap_or_default(), word(&options.bridge))
}

/// A valid host name, which Proxmox requires as the name of a machine.
fn host_name(name: &str) -> String {
    let is_allowed = |character: char| character.is_ascii_alphanumeric() || matches!(character, '-' | '.');
    let name: String = name
        .chars()
        .map(|character| if is_allowed(character) { character } else { '-' })
        .take(63)
        .collect();
    let labels: Vec<&str> = name
        .split('.')
        .map(|label| label.trim_matches('-'))
        .filter(|label| !label.is_empty())
        .collect();
    if labels.is_empty() {
        "machine".to_owned()
    } else {
        labels.join(".")
    }
}

/// Returns `text` without separators of values.
fn word(text: &str) -> String {
    text.chars()
        .filter(|character| !character.is_whitespace() && !character.is_control() && !",=".contains(*character))
        .collect()
}

/// Formats a size like `32G`, in the largest unit that divides it.
fn size(bytes: u64) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units
        .iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    match unit {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}
