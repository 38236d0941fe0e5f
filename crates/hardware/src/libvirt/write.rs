//! From a machine to domain XML.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::read::position;
use crate::xml::escaped;
use crate::{Bus, Card, Clock, Disk, DiskKind, Dropped, Firmware, Machine, Place, Translated, adapt};

/// What the machine's host has for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// `kvm`, or `qemu` where processors are emulated.
    pub domain_type: String,
    /// Where the content of each disk is, by the disk's key; a drive that is not among them is empty, and a disk is left out.
    pub disks: BTreeMap<String, DiskPlace>,
    /// The network that its cards are plugged into.
    pub network: String,
}

/// Where a disk's content is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlace {
    /// Its file, by its whole path.
    pub path: String,
    /// `raw` or `qcow2`.
    pub format: String,
}

/// Writes domain XML for a machine of QEMU. Disks are called as [`Machine::targets`] of the adapted machine says.
///
/// Its UUID and addresses are written as they are, and left to libvirt where there are none.
pub fn write(machine: &Machine, wish: &Wish) -> Translated<String> {
    let Translated { mut value, mut dropped } = adapt(machine, Place::Qemu);
    check_topology(&mut value, &mut dropped);
    check_name(&mut value, &mut dropped);
    number_starts(&mut value);
    let board = board(&value);
    let mut xml = String::new();
    head(&mut xml, &value, (wish, board));
    xml.push_str("  <devices>\n");
    for (disk, target) in value.disks.iter().zip(value.targets()) {
        match (wish.disks.get(&disk.key), disk.kind) {
            (None, DiskKind::Disk) => {
                dropped.push(Dropped::new(format!("disk {}", disk.label), "its content is not there"));
            }
            (place, _) => write_disk(&mut xml, disk, place, &target),
        }
    }
    write_scsi_controllers(&mut xml, &value);
    for (number, card) in value.cards.iter().enumerate() {
        write_card(&mut xml, card, wish);
        if let Some(network) = card.network.as_ref().filter(|network| **network != wish.network) {
            dropped.push(Dropped::new(
                format!("network {network} of card {}", number + 1),
                format!("is plugged into {} now", wish.network),
            ));
        }
    }
    if value.has_tpm {
        xml.push_str("    <tpm model='tpm-crb'>\n      <backend type='emulator' version='2.0'/>\n    </tpm>\n");
        dropped.push(Dropped::new(
            "what the TPM holds",
            "a TPM does not leave its hypervisor; the new one is empty",
        ));
    }
    xml.push_str(
        "    <serial type='pty'/>\n    <console type='pty'/>\n    <input type='tablet' bus='usb'/>\n\
         \x20   <channel type='unix'>\n      <target type='virtio' name='org.qemu.guest_agent.0'/>\n    </channel>\n\
         \x20   <graphics type='vnc' autoport='yes'/>\n    <video>\n      <model type='vga'/>\n    </video>\n  </devices>\n</domain>\n",
    );
    Translated { value: xml, dropped }
}

/// The board that has what the machine needs. IDE is on the older one only.
fn board(machine: &Machine) -> &'static str {
    if machine.disks.iter().any(|disk| disk.bus == Bus::Ide) {
        "pc"
    } else {
        "q35"
    }
}

/// No two devices may have one place in the order of starting. Where that comes from two lists, disks are before drives.
fn number_starts(machine: &mut Machine) {
    let disks = machine.disks.iter().enumerate();
    let mut wishes: Vec<(u32, bool, usize)> = disks
        .filter_map(|(number, disk)| Some((disk.boot_order?, disk.kind != DiskKind::Disk, number)))
        .collect();
    wishes.sort_unstable();
    for (place, (_, _, number)) in (1..).zip(wishes) {
        machine.disks[number].boot_order = Some(place);
    }
}

/// libvirt names files after machines, so their names have neither slashes nor ends of lines (`virXMLCheckIllegalChars` in `domain_conf.c`), and are not
/// empty, nor blank.
fn check_name(machine: &mut Machine, dropped: &mut Vec<Dropped>) {
    let is_illegal = |character: char| character == '/' || character.is_control();
    let mut name = machine.name.replace(is_illegal, "-");
    if matches!(name.trim(), "" | "." | "..") {
        "machine".clone_into(&mut name);
    }
    if name != machine.name {
        dropped.push(Dropped::new(
            format!("its name {:?}", machine.name),
            format!("libvirt takes no such name: it is called {name:?}"),
        ));
        machine.name = name;
    }
}

/// libvirt wants a topology of as many processors as there are.
fn check_topology(machine: &mut Machine, dropped: &mut Vec<Dropped>) {
    if let Some(topology) = machine.topology {
        let count =
            u64::from(topology.socket_count) * u64::from(topology.core_count) * u64::from(topology.thread_count);
        if count != u64::from(machine.processor_count) {
            dropped.push(Dropped::new(
                format!("a topology of {count} processors"),
                format!("the machine has {}", machine.processor_count),
            ));
            machine.topology = None;
        }
    }
}

fn head(xml: &mut String, machine: &Machine, (wish, board): (&Wish, &str)) {
    let mut line = |text: std::fmt::Arguments<'_>| {
        xml.write_fmt(text).expect("a string takes all");
        xml.push('\n');
    };
    line(format_args!("<domain type='{}'>", escaped(&wish.domain_type)));
    line(format_args!("  <name>{}</name>", escaped(&machine.name)));
    if let Some(uuid) = &machine.uuid {
        line(format_args!("  <uuid>{}</uuid>", escaped(uuid)));
    }
    if !machine.description.is_empty() {
        line(format_args!(
            "  <description>{}</description>",
            escaped(&machine.description)
        ));
    }
    line(format_args!(
        "  <memory unit='KiB'>{}</memory>",
        machine.memory_bytes.div_ceil(1024)
    ));
    line(format_args!("  <vcpu>{}</vcpu>", machine.processor_count));
    let (attribute, is_secure) = match machine.firmware {
        Firmware::Bios | Firmware::Paravirtual => ("", false),
        Firmware::Uefi => (" firmware='efi'", false),
        Firmware::UefiSecure => (" firmware='efi'", true),
    };
    line(format_args!("  <os{attribute}>"));
    line(format_args!("    <type arch='x86_64' machine='{board}'>hvm</type>"));
    if is_secure {
        line(format_args!(
            "    <firmware>\n      <feature enabled='yes' name='enrolled-keys'/>\n      \
             <feature enabled='yes' name='secure-boot'/>\n    </firmware>\n    <loader secure='yes'/>"
        ));
    }
    line(format_args!("  </os>"));
    let system_management = if is_secure { "<smm state='on'/>" } else { "" };
    line(format_args!("  <features><acpi/><apic/>{system_management}</features>"));
    match machine.topology {
        Some(topology) => line(format_args!(
            "  <cpu mode='host-model'>\n    <topology sockets='{}' cores='{}' threads='{}'/>\n  </cpu>",
            topology.socket_count, topology.core_count, topology.thread_count
        )),
        None => line(format_args!("  <cpu mode='host-model'/>")),
    }
    let offset = match machine.clock {
        Clock::Utc => "utc",
        Clock::LocalTime => "localtime",
    };
    line(format_args!("  <clock offset='{offset}'/>"));
}

fn write_disk(xml: &mut String, disk: &Disk, place: Option<&DiskPlace>, target: &str) {
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
    let mut lines = vec![format!("    <disk type='file' device='{device}'>")];
    let format = place.map_or("raw", |place| place.format.as_str());
    lines.push(format!("      <driver name='qemu' type='{}'/>", escaped(format)));
    lines.extend(place.map(|place| format!("      <source file='{}'/>", escaped(&place.path))));
    lines.push(format!("      <target dev='{target}' bus='{bus}'/>"));
    if disk.is_read_only || disk.kind == DiskKind::Cdrom {
        lines.push("      <readonly/>".to_owned());
    }
    lines.extend(disk.boot_order.map(|order| format!("      <boot order='{order}'/>")));
    lines.push("    </disk>\n".to_owned());
    xml.push_str(&lines.join("\n"));
}

/// The controllers that libvirt hangs SCSI disks on, seven on each by their letters: it would make others than the first of another model.
fn write_scsi_controllers(xml: &mut String, machine: &Machine) {
    let targets = machine.targets();
    let disks = machine
        .disks
        .iter()
        .zip(&targets)
        .filter(|(disk, _)| disk.bus == Bus::VirtioScsi);
    let last = disks.map(|(_, target)| position(target) / 7).max();
    for index in 0..last.map_or(0, |last| last + 1) {
        writeln!(xml, "    <controller type='scsi' index='{index}' model='virtio-scsi'/>").expect("a string takes all");
    }
}

fn write_card(xml: &mut String, card: &Card, wish: &Wish) {
    xml.push_str("    <interface type='network'>\n");
    if let Some(mac) = &card.mac {
        writeln!(xml, "      <mac address='{}'/>", escaped(mac)).expect("a string takes all");
    }
    let (network, model) = (escaped(&wish.network), escaped(card.model.name()));
    writeln!(
        xml,
        "      <source network='{network}'/>\n      <model type='{model}'/>\n    </interface>"
    )
    .expect("a string takes all");
}
