//! Settings of domain XML that are not translated for other hypervisors.

use roxmltree::Node;

use crate::Untranslated;
use crate::xml::{attribute, child, children};

/// The reason for dropping host-specific settings.
pub const OF_ITS_HOST: &str = "is specific to the source host";

/// Devices that are translated, that every hypervisor provides itself, or that have no effect on the guest's data.
const HARMLESS_DEVICES: &[&str] = &[
    "emulator",
    "controller",
    "input",
    "graphics",
    "video",
    "console",
    "serial",
    "parallel",
    "channel",
    "memballoon",
    "rng",
    "panic",
    "redirdev",
    "hub",
    "audio",
    "sound",
    "watchdog",
    "iommu",
    "disk",
    "interface",
    "tpm",
];
const PINNED: &str = "CPU pinning and weights";
const STRINGS: &str = "SMBIOS strings";
/// Host-specific elements of a domain, with their descriptions.
const OF_THE_HOST: &[(&str, &str)] = &[
    ("cputune", PINNED),
    ("numatune", "NUMA placement"),
    ("blkiotune", "disk I/O weights"),
    ("memtune", "memory limits"),
    ("memoryBacking", "memory backing"),
    ("launchSecurity", "memory encryption"),
    ("resource", "its resource group"),
    ("sysinfo", STRINGS),
    ("idmap", "a user ID mapping"),
];
/// Host-specific elements of a network card, with their descriptions.
const OF_CARDS: &[(&str, &str)] = &[
    ("vlan", "VLAN tags"),
    ("virtualport", "the port of a virtual switch"),
    ("mtu", "the MTU"),
    ("bandwidth", "limits"),
    ("filterref", "a filter"),
];

/// Lists all settings that are not translated.
pub(super) fn unsupported_features(domain: Node<'_, '_>) -> Vec<Untranslated> {
    let mut dropped = Vec::new();
    note_processors(domain, &mut dropped);
    note_boot_and_clock(domain, &mut dropped);
    if let Some(devices) = child(domain, "devices") {
        for disk in children(devices, "disk") {
            note_disk(disk, &mut dropped);
        }
        for (number, card) in (1..).zip(children(devices, "interface")) {
            note_card(card, number, &mut dropped);
        }
    }
    for (name, what) in OF_THE_HOST {
        if child(domain, name).is_some() {
            dropped.push(Untranslated::new(*what, OF_ITS_HOST));
        }
    }
    let devices = child(domain, "devices").into_iter();
    for device in devices.flat_map(|devices| devices.children()).filter(Node::is_element) {
        let name = device.tag_name().name();
        if !HARMLESS_DEVICES.contains(&name) {
            dropped.push(Untranslated::new(device_name(device), OF_ITS_HOST));
        }
    }
    if domain
        .children()
        .any(|node| node.tag_name().namespace().is_some_and(|space| space.contains("qemu")))
    {
        dropped.push(Untranslated::new("QEMU arguments", "no other hypervisor supports them"));
    }
    dropped
}

fn note_processors(domain: Node<'_, '_>, dropped: &mut Vec<Untranslated>) {
    let vcpu = child(domain, "vcpu");
    if let (Some(now), Some(most)) = (
        vcpu.and_then(|vcpu| vcpu.attribute("current")),
        vcpu.and_then(|vcpu| vcpu.text()),
    ) && now.trim() != most.trim()
    {
        let what = format!("up to {} processors", most.trim());
        dropped.push(Untranslated::new(what, "it has those that are plugged in now"));
    }
    if vcpu.is_some_and(|vcpu| vcpu.attribute("cpuset").is_some()) && child(domain, "cputune").is_none() {
        dropped.push(Untranslated::new(PINNED, OF_ITS_HOST));
    }
    let kind = child(domain, "os").and_then(|os| child(os, "type"));
    let kind = kind.and_then(|kind| kind.attribute("arch")).unwrap_or("x86_64");
    if kind != "x86_64" {
        let why = match kind {
            "i686" => "it has x86_64 processors, which run i686 code",
            _ => "it has x86_64 processors, on which this system does not run",
        };
        dropped.push(Untranslated::new(format!("processors of {kind}"), why));
    }
    let features = child(domain, "features");
    if features.is_some_and(|features| child(features, "hyperv").is_some()) {
        let why = "the target hypervisor has its own set";
        dropped.push(Untranslated::new("Hyper-V enlightenments", why));
    }
    if features.is_some_and(|features| child(features, "acpi").is_none()) {
        dropped.push(Untranslated::new("disabled ACPI", "ACPI is enabled there"));
    }
    let topology = child(domain, "cpu").and_then(|cpu| child(cpu, "topology"));
    for part in ["dies", "clusters"] {
        let count = topology.and_then(|topology| topology.attribute(part)).unwrap_or("1");
        if count.trim() != "1" {
            dropped.push(Untranslated::new(
                format!("{count} {part} in each socket"),
                "other hypervisors support only sockets and cores: their cores are added up",
            ));
        }
    }
}

fn note_boot_and_clock(domain: Node<'_, '_>, dropped: &mut Vec<Untranslated>) {
    let os = child(domain, "os");
    if os.is_some_and(|os| child(os, "kernel").is_some()) {
        dropped.push(Untranslated::new("direct kernel boot", OF_ITS_HOST));
    }
    let mode = os.and_then(|os| attribute(os, "smbios", "mode"));
    if mode == Some("host") && child(domain, "sysinfo").is_none() {
        dropped.push(Untranslated::new(STRINGS, OF_ITS_HOST));
    }
    let cards = child(domain, "devices").into_iter();
    let mut cards = cards.flat_map(|devices| children(devices, "interface"));
    let is_network = |boot: Node<'_, '_>| boot.attribute("dev") == Some("network");
    if os.is_some_and(|os| children(os, "boot").any(is_network)) || cards.any(|card| child(card, "boot").is_some()) {
        dropped.push(Untranslated::new("booting from the network", "it boots from its disks"));
    }
    let clock = child(domain, "clock");
    let of_clock = |name: &str| clock.and_then(|clock| clock.attribute(name));
    let offset = of_clock("adjustment").filter(|offset| offset.trim() != "0");
    let is_elsewhere = match of_clock("offset") {
        Some("absolute") => Some("with an absolute start time".to_owned()),
        Some("variable") => offset.map(|seconds| format!("that is {} seconds off", seconds.trim())),
        Some("timezone") => of_clock("timezone").map(|zone| format!("in the time zone {zone}")),
        _ => None,
    };
    if let Some(what) = is_elsewhere {
        let where_it_is = match of_clock("basis") {
            Some("localtime") => "it is in local time there: set it in the guest",
            _ => "it is in UTC there: set it in the guest",
        };
        dropped.push(Untranslated::new(format!("its clock {what}"), where_it_is));
    }
}

fn note_disk(disk: Node<'_, '_>, dropped: &mut Vec<Untranslated>) {
    let target = attribute(disk, "target", "dev").unwrap_or_default();
    let sector = attribute(disk, "blockio", "logical_block_size").unwrap_or("512");
    if sector.trim() != "512" {
        dropped.push(Untranslated::new(
            format!("sectors of {sector} bytes of disk {target}"),
            "it has sectors of 512 bytes there: the guest may not find its partitions",
        ));
    }
    if child(disk, "transient").is_some() {
        dropped.push(Untranslated::new(
            format!("disk {target} is transient"),
            "it is persistent there: writes survive a shutdown",
        ));
    }
    if child(disk, "iotune").is_some() {
        dropped.push(Untranslated::new(format!("limits of disk {target}"), OF_ITS_HOST));
    }
    let has_text = |name: &str| child(disk, name).is_some_and(|node| node.text().is_some_and(|text| !text.is_empty()));
    if has_text("serial") || has_text("wwn") {
        dropped.push(Untranslated::new(
            format!("the serial number of disk {target}"),
            "it gets another one: a guest that identifies its disks by serial number does not find this one",
        ));
    }
}

fn note_card(card: Node<'_, '_>, number: usize, dropped: &mut Vec<Untranslated>) {
    if is_host_device(card) {
        let what = format!("a host device as network card {number}");
        dropped.push(Untranslated::new(what, OF_ITS_HOST));
    }
    if attribute(card, "link", "state") == Some("down") {
        let what = format!("network card {number} with its link down");
        dropped.push(Untranslated::new(what, "its link is up now"));
    }
    for (name, what) in OF_CARDS {
        if child(card, name).is_some() {
            dropped.push(Untranslated::new(
                format!("{what} of network card {number}"),
                OF_ITS_HOST,
            ));
        }
    }
}

/// Whether a network card is a host device that the machine was given.
fn is_host_device(interface: Node<'_, '_>) -> bool {
    matches!(interface.attribute("type"), Some("hostdev" | "vdpa"))
}

/// The description of a dropped device.
fn device_name(device: Node<'_, '_>) -> String {
    let name = device.tag_name().name();
    match name {
        "hostdev" => format!("a host device ({})", device.attribute("type").unwrap_or("unknown")),
        "filesystem" => {
            let target = attribute(device, "target", "dir").unwrap_or("unnamed");
            format!("a shared folder ({target})")
        }
        "lease" | "shmem" | "vsock" | "nvram" | "memory" | "smartcard" => format!("a device <{name}>"),
        _ => format!("a device <{name}> that is unknown"),
    }
}
