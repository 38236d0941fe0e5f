//! What domain XML says, and no other hypervisor is told.

use roxmltree::Node;

use crate::Untranslated;
use crate::xml::{attribute, child, children};

/// Why what is the host's does not come along.
pub const OF_ITS_HOST: &str = "belongs to the host that it was on";

/// Devices that every hypervisor has in its own way, or that hold no data and are not missed.
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
/// What is said of processors that have their places.
const PINNED: &str = "processors that are pinned or weighted";
/// What is said of strings that a firmware tells.
const STRINGS: &str = "strings of its firmware";
/// Elements that tie a machine to its host, and what they are.
const OF_THE_HOST: &[(&str, &str)] = &[
    ("cputune", PINNED),
    ("numatune", "memory of chosen nodes"),
    ("blkiotune", "weights of its disks"),
    ("memtune", "limits of its memory"),
    ("memoryBacking", "the way in which its memory is backed"),
    ("launchSecurity", "encryption of its memory"),
    ("resource", "its group of resources"),
    ("sysinfo", STRINGS),
    ("idmap", "a mapping of users"),
];
/// What of a network card is its host's, and what that is.
const OF_CARDS: &[(&str, &str)] = &[
    ("vlan", "tags of virtual networks"),
    ("virtualport", "the port of a virtual switch"),
    ("mtu", "the largest size of packets"),
    ("bandwidth", "limits"),
    ("filterref", "a filter"),
];

/// All of it, in the order of its parts.
pub(super) fn what_is_lost(domain: Node<'_, '_>) -> Vec<Untranslated> {
    let mut dropped = Vec::new();
    processors(domain, &mut dropped);
    starting(domain, &mut dropped);
    if let Some(devices) = child(domain, "devices") {
        for disk in children(devices, "disk") {
            of_disk(disk, &mut dropped);
        }
        for (number, card) in (1..).zip(children(devices, "interface")) {
            of_card(card, number, &mut dropped);
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
        dropped.push(Untranslated::new(
            "arguments for QEMU",
            "no other hypervisor knows them",
        ));
    }
    dropped
}

fn processors(domain: Node<'_, '_>, dropped: &mut Vec<Untranslated>) {
    let vcpu = child(domain, "vcpu");
    if let (Some(now), Some(most)) = (
        vcpu.and_then(|vcpu| vcpu.attribute("current")),
        vcpu.and_then(|vcpu| vcpu.text()),
    ) && now.trim() != most.trim()
    {
        let what = format!("up to {} processors", most.trim());
        dropped.push(Untranslated::new(what, "it has those that are plugged in"));
    }
    if vcpu.is_some_and(|vcpu| vcpu.attribute("cpuset").is_some()) && child(domain, "cputune").is_none() {
        dropped.push(Untranslated::new(PINNED, OF_ITS_HOST));
    }
    let kind = child(domain, "os").and_then(|os| child(os, "type"));
    let kind = kind.and_then(|kind| kind.attribute("arch")).unwrap_or("x86_64");
    if kind != "x86_64" {
        let why = match kind {
            "i686" => "it has those of x86_64, which do all that those can",
            _ => "it has those of x86_64, on which this system does not run",
        };
        dropped.push(Untranslated::new(format!("processors of {kind}"), why));
    }
    let features = child(domain, "features");
    if features.is_some_and(|features| child(features, "hyperv").is_some()) {
        let why = "it has what its hypervisor gives to every guest";
        dropped.push(Untranslated::new("what it finds of Hyper-V", why));
    }
    if features.is_some_and(|features| child(features, "acpi").is_none()) {
        dropped.push(Untranslated::new("that it has no ACPI", "it has one there"));
    }
    let topology = child(domain, "cpu").and_then(|cpu| child(cpu, "topology"));
    for part in ["dies", "clusters"] {
        let count = topology.and_then(|topology| topology.attribute(part)).unwrap_or("1");
        if count.trim() != "1" {
            dropped.push(Untranslated::new(
                format!("{count} {part} in each socket"),
                "other hypervisors know sockets and cores: it has the cores of all of them",
            ));
        }
    }
}

/// By what it is started, and its clock.
fn starting(domain: Node<'_, '_>, dropped: &mut Vec<Untranslated>) {
    let os = child(domain, "os");
    if os.is_some_and(|os| child(os, "kernel").is_some()) {
        dropped.push(Untranslated::new("the kernel that it is started with", OF_ITS_HOST));
    }
    let mode = os.and_then(|os| attribute(os, "smbios", "mode"));
    if mode == Some("host") && child(domain, "sysinfo").is_none() {
        dropped.push(Untranslated::new(STRINGS, OF_ITS_HOST));
    }
    let cards = child(domain, "devices").into_iter();
    let mut cards = cards.flat_map(|devices| children(devices, "interface"));
    let is_network = |boot: Node<'_, '_>| boot.attribute("dev") == Some("network");
    if os.is_some_and(|os| children(os, "boot").any(is_network)) || cards.any(|card| child(card, "boot").is_some()) {
        dropped.push(Untranslated::new(
            "starting from the network",
            "it starts from its disks",
        ));
    }
    let clock = child(domain, "clock");
    let of_clock = |name: &str| clock.and_then(|clock| clock.attribute(name));
    let offset = of_clock("adjustment").filter(|offset| offset.trim() != "0");
    let is_elsewhere = match of_clock("offset") {
        Some("absolute") => Some("that begins at a moment of its own".to_owned()),
        Some("variable") => offset.map(|seconds| format!("that is {} seconds off", seconds.trim())),
        Some("timezone") => of_clock("timezone").map(|zone| format!("in the time of {zone}")),
        _ => None,
    };
    if let Some(what) = is_elsewhere {
        let where_it_is = match of_clock("basis") {
            Some("localtime") => "it is in local time there: the guest is to set it",
            _ => "it is in UTC there: the guest is to set it",
        };
        dropped.push(Untranslated::new(format!("its clock {what}"), where_it_is));
    }
}

fn of_disk(disk: Node<'_, '_>, dropped: &mut Vec<Untranslated>) {
    let target = attribute(disk, "target", "dev").unwrap_or_default();
    let sector = attribute(disk, "blockio", "logical_block_size").unwrap_or("512");
    if sector.trim() != "512" {
        dropped.push(Untranslated::new(
            format!("sectors of {sector} bytes of disk {target}"),
            "it has those of 512 bytes there, by which a guest does not find its partitions",
        ));
    }
    if child(disk, "transient").is_some() {
        dropped.push(Untranslated::new(
            format!("that disk {target} forgets what is written to it when the machine stops"),
            "what is written to it stays there",
        ));
    }
    if child(disk, "iotune").is_some() {
        dropped.push(Untranslated::new(format!("limits of disk {target}"), OF_ITS_HOST));
    }
    let has_text = |name: &str| child(disk, name).is_some_and(|node| node.text().is_some_and(|text| !text.is_empty()));
    if has_text("serial") || has_text("wwn") {
        dropped.push(Untranslated::new(
            format!("the serial number of disk {target}"),
            "it gets another one: a guest that knows its disks by that does not find this one",
        ));
    }
}

fn of_card(card: Node<'_, '_>, number: usize, dropped: &mut Vec<Untranslated>) {
    if is_of_the_host(card) {
        let what = format!("a device of the host as network card {number}");
        dropped.push(Untranslated::new(what, OF_ITS_HOST));
    }
    if attribute(card, "link", "state") == Some("down") {
        let what = format!("network card {number}, which was unplugged");
        dropped.push(Untranslated::new(what, "is plugged in now"));
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

/// Whether a network card is a device of the host that the machine was given.
fn is_of_the_host(interface: Node<'_, '_>) -> bool {
    matches!(interface.attribute("type"), Some("hostdev" | "vdpa"))
}

/// A device that is dropped, as a person knows it.
fn device_name(device: Node<'_, '_>) -> String {
    let name = device.tag_name().name();
    match name {
        "hostdev" => format!(
            "a device of the host ({})",
            device.attribute("type").unwrap_or("unknown")
        ),
        "filesystem" => {
            let target = attribute(device, "target", "dir").unwrap_or("unnamed");
            format!("a shared folder ({target})")
        }
        "lease" | "shmem" | "vsock" | "nvram" | "memory" | "smartcard" => format!("a device <{name}>"),
        _ => format!("a device <{name}> that is not known"),
    }
}
