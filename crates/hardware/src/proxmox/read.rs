//! Converts a configuration of Proxmox to a machine.

use super::conf::{Conf, FORM, Parts, numbered_name, wrong};
use crate::machine::bound;
use crate::{
    Bus, CardModel, Clock, Disk, DiskKind, Firmware, Machine, NetworkCard, Result, Topology, Translated, Untranslated,
    identity,
};

/// Default memory in MiB.
const MEMORY_MEBIBYTES: u64 = 512;
/// Limit of devices in the boot order.
const ORDER_COUNT_MAX: usize = 100;

/// Settings without effect on the hardware, or for devices that every hypervisor provides itself.
const HARMLESS: &[&str] = &[
    "acpi",
    "agent",
    "allow-ksm",
    "audio",
    "autostart",
    "balloon",
    "bios",
    "boot",
    "bootdisk",
    "cdrom",
    "cores",
    "cpu",
    "digest",
    "efidisk",
    "freeze",
    "hotplug",
    "ide",
    "import-working-storage",
    "keyboard",
    "kvm",
    "localtime",
    "lock",
    "machine",
    "memory",
    "meta",
    "migrate_downtime",
    "migrate_speed",
    "name",
    "net",
    "numa",
    "onboot",
    "ostype",
    "parallel",
    "parent",
    "protection",
    "reboot",
    "rng",
    "running-nets-host-mtu",
    "sata",
    "scsi",
    "scsihw",
    "serial",
    "smbios",
    "smp",
    "snaptime",
    "sockets",
    "spice_enhancements",
    "startdate",
    "startup",
    "tablet",
    "tags",
    "tdf",
    "template",
    "tpmstate",
    "vcpus",
    "vga",
    "virtio",
    "vmgenid",
    "vmstatestorage",
    "watchdog",
];
/// Host-specific settings, with their descriptions.
const OF_THE_HOST: &[(&str, &str)] = &[
    ("affinity", "CPU pinning"),
    ("args", "QEMU arguments"),
    ("cpulimit", "CPU limits"),
    ("cpuunits", "CPU weight"),
    ("hookscript", "a hook script"),
    ("hostpci", "a host device (PCI)"),
    ("hugepages", "memory in huge pages"),
    ("ivshmem", "memory shared with the host"),
    ("keephugepages", "memory in huge pages"),
    ("shares", "memory weight"),
    ("usb", "a host device (USB)"),
    ("virtiofs", "a shared folder"),
    ("amd-sev", "memory encryption"),
    ("intel-tdx", "memory encryption"),
];
/// Settings of cloud-init.
const OF_CLOUD_INIT: &[&str] = &[
    "cicustom",
    "cipassword",
    "citype",
    "ciupgrade",
    "ciuser",
    "ipconfig",
    "nameserver",
    "searchdomain",
    "sshkeys",
];

/// Reads the configuration of a machine.
///
/// If a backup has added the device names of its archive, disks without one are left out.
pub fn read(text: &str) -> Result<Translated<Machine>> {
    let conf = Conf::parse(text)?;
    let mut dropped = Vec::new();
    let (processor_count, topology) = processors(&conf)?;
    let machine = Machine {
        name: conf.settings.get("name").copied().unwrap_or_default().to_owned(),
        uuid: conf.parts("smbios1").get("uuid").and_then(identity::uuid),
        description: conf.description.clone(),
        processor_count,
        topology,
        memory_bytes: memory(&conf)?,
        firmware: firmware(&conf),
        clock: clock(&conf),
        disks: disks(&conf, &mut dropped)?,
        cards: cards(&conf, &mut dropped),
        has_tpm: conf.settings.contains_key("tpmstate0"),
    };
    note_unsupported(&conf, &mut dropped);
    let value = machine.checked(FORM)?;
    Ok(Translated { value, dropped })
}

fn processors(conf: &Conf<'_>) -> Result<(u32, Option<Topology>)> {
    let sockets = conf.number("sockets", 1)?;
    let cores = conf.number("cores", 1)?;
    let all = sockets
        .checked_mul(cores)
        .ok_or_else(|| wrong(format!("{sockets} sockets of {cores} cores")))?;
    let is_said = conf.settings.contains_key("sockets") || conf.settings.contains_key("cores");
    let topology = is_said.then_some(Topology {
        socket_count: sockets,
        core_count: cores,
        thread_count: 1,
    });
    // The processors that are plugged in; the maximum may be higher.
    Ok((conf.number("vcpus", all)?, topology))
}

fn memory(conf: &Conf<'_>) -> Result<u64> {
    let parts = conf.parts("memory");
    let mebibytes = match parts.get("current").unwrap_or(parts.first) {
        "" => MEMORY_MEBIBYTES,
        text => text.parse().map_err(|_| wrong(format!("the memory is {text:?}")))?,
    };
    mebibytes.checked_mul(1 << 20).ok_or_else(|| wrong("too much memory"))
}

fn firmware(conf: &Conf<'_>) -> Firmware {
    let has_keys = conf.parts("efidisk0").get("pre-enrolled-keys") == Some("1");
    match (conf.settings.get("bios").copied(), has_keys) {
        (Some("ovmf"), true) => Firmware::UefiSecure,
        (Some("ovmf"), false) => Firmware::Uefi,
        _ => Firmware::Bios,
    }
}

/// Windows guests have local time by default.
fn clock(conf: &Conf<'_>) -> Clock {
    let system = conf.settings.get("ostype").copied().unwrap_or_default();
    match (conf.settings.get("localtime").copied(), system.starts_with('w')) {
        (Some("1"), _) | (None, true) => Clock::LocalTime,
        _ => Clock::Utc,
    }
}

fn disks(conf: &Conf<'_>, dropped: &mut Vec<Untranslated>) -> Result<Vec<Disk>> {
    let controller = conf.settings.get("scsihw").copied().unwrap_or("lsi");
    let scsi = if controller.starts_with("virtio") {
        Bus::VirtioScsi
    } else {
        Bus::Scsi
    };
    let buses = [
        ("ide", Bus::Ide),
        ("sata", Bus::Sata),
        ("scsi", scsi),
        ("virtio", Bus::Virtio),
    ];
    let mut disks = Vec::new();
    for (prefix, bus) in buses {
        for (number, value) in conf.numbered(prefix) {
            let name = format!("{prefix}{number}");
            let parts = Parts::of(value);
            let volume = parts.get("file").unwrap_or(parts.first);
            let is_drive = parts.get("media") == Some("cdrom");
            let kind = if is_drive { DiskKind::Cdrom } else { DiskKind::Disk };
            if volume.ends_with("cloudinit") || volume.contains("-cloudinit.") {
                dropped.push(Untranslated::new(
                    format!("the drive of cloud-init ({name})"),
                    "Proxmox creates it itself",
                ));
                continue;
            }
            let device = conf.devices.get(name.as_str()).copied();
            let key = match (device, kind) {
                (Some(device), _) => device.to_owned(),
                (None, DiskKind::Disk) if !conf.devices.is_empty() => {
                    let what = format!("disk {name} ({volume})");
                    dropped.push(Untranslated::new(what, "the archive does not have it"));
                    continue;
                }
                (None, DiskKind::Disk) => format!("drive-{name}"),
                (None, _) if matches!(volume, "none" | "cdrom" | "") || !conf.devices.is_empty() => String::new(),
                (None, _) => format!("drive-{name}"),
            };
            if disks.len() == bound::DISKS {
                return Err(wrong("it has too many disks"));
            }
            disks.push(Disk {
                key,
                label: name,
                kind,
                bus,
                position: number,
                size_bytes: parts.get("size").map(size).transpose()?,
                boot_order: None,
                is_read_only: is_drive || matches!(parts.get("ro"), Some("1" | "on")),
            });
        }
    }
    order(conf, &mut disks);
    Ok(disks)
}

/// Parses a size such as `32G`, `528K` or `540672` to bytes.
fn size(text: &str) -> Result<u64> {
    let number = text.trim_end_matches(|character: char| character.is_ascii_alphabetic());
    let unit = match text.strip_prefix(number) {
        Some("") => Some(1_u64),
        Some("K" | "k") => Some(1 << 10),
        Some("M" | "m") => Some(1 << 20),
        Some("G" | "g") => Some(1 << 30),
        Some("T" | "t") => Some(1 << 40),
        _ => None,
    };
    let bytes = unit.and_then(|unit| number.parse::<u64>().ok()?.checked_mul(unit));
    let bytes = bytes.filter(|bytes| i64::try_from(*bytes).is_ok());
    bytes.ok_or_else(|| wrong(format!("the size of a disk is {text:?}")))
}

/// Sets the boot order: `order=scsi0;ide2;net0`, or in older configurations letters for kinds of devices.
fn order(conf: &Conf<'_>, disks: &mut [Disk]) {
    let boot = conf.parts("boot");
    if let Some(order) = boot.get("order") {
        for (place, name) in (1..).zip(order.split(';').take(ORDER_COUNT_MAX)) {
            if let Some(disk) = disks.iter_mut().find(|disk| disk.label == name.trim()) {
                disk.boot_order = Some(place);
            }
        }
        return;
    }
    // The default of Proxmox.
    let letters = boot.get("legacy").unwrap_or(boot.first);
    let letters = if letters.is_empty() { "cdn" } else { letters };
    let named = conf.settings.get("bootdisk").copied();
    for (place, letter) in (1..).zip(letters.chars().take(ORDER_COUNT_MAX)) {
        let disk = match letter {
            'c' => {
                let of_name = disks.iter().position(|disk| Some(disk.label.as_str()) == named);
                of_name.or_else(|| first_disk(disks))
            }
            'd' => disks.iter().position(|disk| disk.kind == DiskKind::Cdrom),
            _ => None,
        };
        if let Some(disk) = disk.and_then(|number| disks.get_mut(number)) {
            disk.boot_order = disk.boot_order.or(Some(place));
        }
    }
}

/// The default boot disk: the first in the order of `valid_drive_names` in qemu-server.
fn first_disk(disks: &[Disk]) -> Option<usize> {
    let rank = |disk: &Disk| {
        let mut prefixes = ["ide", "scsi", "virtio", "sata"].iter();
        prefixes.position(|prefix| disk.label.starts_with(prefix))
    };
    let hard_disks = disks.iter().enumerate().filter(|(_, disk)| disk.kind == DiskKind::Disk);
    let first = hard_disks.min_by_key(|(_, disk)| (rank(disk).unwrap_or(usize::MAX), disk.position));
    first.map(|(number, _)| number)
}

fn cards(conf: &Conf<'_>, dropped: &mut Vec<Untranslated>) -> Vec<NetworkCard> {
    let mut cards = Vec::new();
    for (number, value) in conf.numbered("net") {
        let parts = Parts::of(value);
        // The model is a name with the MAC address as its value, or else a part of its own.
        let known = parts
            .iter()
            .find_map(|(name, value)| Some((name, identity::mac(value)?)).filter(|(name, _)| *name != "macaddr"));
        let (model, mac) = match known {
            Some((model, mac)) => (model, Some(mac)),
            None => (
                parts.get("model").unwrap_or(parts.first),
                parts.get("macaddr").and_then(identity::mac),
            ),
        };
        if let Some(tag) = parts.get("tag") {
            let what = format!("VLAN {tag} of network card {number}");
            dropped.push(Untranslated::new(what, "is specific to the source network"));
        }
        cards.push(NetworkCard {
            mac,
            network: parts.get("bridge").map(str::to_owned),
            model: match model {
                "" => CardModel::Rtl8139,
                model if model.starts_with("e1000-") => CardModel::E1000,
                model => CardModel::from_name(model),
            },
        });
    }
    cards
}

/// Adds a note for each setting that is dropped.
fn note_unsupported(conf: &Conf<'_>, dropped: &mut Vec<Untranslated>) {
    if let Some(device) = conf.settings.get("efidisk0") {
        let device = Parts::of(device);
        dropped.push(Untranslated::new(
            format!("variables of UEFI ({})", device.get("file").unwrap_or(device.first)),
            "the machine starts with defaults",
        ));
    }
    let mut is_cloud_init = false;
    for (name, value) in &conf.settings {
        let bare = numbered_name(name).map_or(*name, |(prefix, _)| prefix);
        if bare == "unused" {
            dropped.push(Untranslated::new(
                format!("disk {value}"),
                "it is not attached to the machine",
            ));
        } else if bare == "usb" && value.starts_with("spice") || bare == "numa" {
            // A channel of the SPICE display, without effect on the guest's data.
        } else if let Some((_, what)) = OF_THE_HOST.iter().find(|(known, _)| known == &bare) {
            dropped.push(Untranslated::new(*what, "is specific to the source host"));
        } else if OF_CLOUD_INIT.contains(&bare) {
            is_cloud_init = true;
        } else if *name == "arch" && *value != "x86_64" {
            dropped.push(Untranslated::new(format!("processors of {value}"), "others are x86_64"));
        } else if !HARMLESS.contains(&bare) && *name != "arch" {
            dropped.push(Untranslated::new(format!("the setting {name}"), "it is not known"));
        }
    }
    if is_cloud_init {
        dropped.push(Untranslated::new(
            "settings of cloud-init",
            "the guest keeps what it already applied",
        ));
    }
    if !conf.snapshots.is_empty() {
        dropped.push(Untranslated::new(
            format!("{} snapshots", conf.snapshots.len()),
            "only the current state is carried over",
        ));
    }
    if conf.has_pending {
        dropped.push(Untranslated::new(
            "pending changes",
            "only the current state is carried over",
        ));
    }
}
