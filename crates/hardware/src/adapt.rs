//! A machine moves to another kind of hypervisor: its guest finds devices that it has drivers for.
//!
//! A guest from elsewhere may have no drivers for what is fastest here. It is given what every system since 2007 knows: SATA disks and Intel's
//! network card. Whoever knows the guest better changes it afterwards.

use crate::bus_address::AddressAllocator;
use crate::machine::PLACE_COUNT;
use crate::{Bus, CardModel, Disk, DiskKind, Firmware, Machine, Translated, Untranslated};

/// Where a machine goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Platform {
    /// QEMU, by libvirt.
    Qemu,
    /// QEMU, by Proxmox VE.
    Proxmox,
    /// XenServer and XCP-ng.
    Xen,
    /// Whoever reads OVF: VMware, VirtualBox.
    Ovf,
    /// VirtualBox by its own settings.
    VirtualBox,
}

/// The machine as it can be at `place`.
pub fn adapt(machine: &Machine, place: Platform) -> Translated<Machine> {
    let mut value = machine.clone();
    let mut dropped = Vec::new();
    for (number, disk) in value.disks.iter_mut().enumerate() {
        let bus = bus_at(disk.bus, place);
        if bus != disk.bus {
            let name = if disk.label.is_empty() { &disk.key } else { &disk.label };
            // Xen shows its disks to every guest twice, and who has no driver for one has one for the other.
            if place != Platform::Xen {
                dropped.push(Untranslated::new(
                    format!("disk {} ({name}) on {}", number + 1, disk.bus.name()),
                    format!("is on {} now", bus.name()),
                ));
            }
            disk.bus = bus;
        }
    }
    for (number, card) in value.cards.iter_mut().enumerate() {
        let model = card_at(&card.model, place);
        if model != card.model {
            if place != Platform::Xen {
                dropped.push(Untranslated::new(
                    format!("network card {} ({})", number + 1, card.model.name()),
                    format!("is an {} now", model.name()),
                ));
            }
            card.model = model;
        }
    }
    if value.firmware == Firmware::Paravirtual && place != Platform::Xen {
        dropped.push(Untranslated::new(
            "paravirtual mode of Xen",
            "the machine starts by a BIOS now, for which its disk needs a boot loader",
        ));
        value.firmware = Firmware::Bios;
    }
    if place == Platform::Qemu {
        without_ide(&mut value, &mut dropped);
    }
    settle(&machine.disks, &mut value.disks);
    Translated { value, dropped }
}

/// Gives those who came to one bus from several `before` places of their own there.
fn settle(before: &[Disk], disks: &mut [Disk]) {
    let mut pairs = before.iter().zip(&*disks);
    if pairs.all(|(before, disk)| before.bus == disk.bus) {
        return;
    }
    let buses: Vec<Bus> = disks.iter().map(|disk| disk.bus).collect();
    // Which disk it is: places are asked for by what was before.
    let number = |disk: &Disk| before.iter().position(|other| std::ptr::eq(other, disk));
    let wanted = |disk: &Disk| {
        let number = number(disk)?;
        (disk.position < PLACE_COUNT).then_some((buses[number], disk.position))
    };
    let seats = AddressAllocator::new(before, wanted, |_| 0..PLACE_COUNT);
    for (number, disk) in disks.iter_mut().enumerate() {
        if let Some(place) = seats.kept(number) {
            disk.position = place;
        }
    }
}

/// IDE is for systems that know no other: on the older board, which has no UEFI. A drive alone is no reason for that board.
fn without_ide(machine: &mut Machine, dropped: &mut Vec<Untranslated>) {
    let is_hard_disk = |disk: &Disk| disk.bus == Bus::Ide && disk.kind == DiskKind::Disk;
    if machine.firmware == Firmware::Bios && machine.disks.iter().any(is_hard_disk) {
        return;
    }
    for disk in machine.disks.iter_mut().filter(|disk| disk.bus == Bus::Ide) {
        if disk.kind == DiskKind::Disk {
            dropped.push(Untranslated::new(
                format!("disk {} on IDE", disk.label),
                "is on SATA now: UEFI knows no IDE here",
            ));
        }
        disk.bus = Bus::Sata;
    }
}

fn bus_at(bus: Bus, place: Platform) -> Bus {
    match (place, bus) {
        (_, Bus::Floppy) => Bus::Floppy,
        (Platform::Xen, _) => Bus::Xen,
        // It would need a USB controller beside.
        (Platform::VirtualBox, Bus::Usb) => Bus::Sata,
        (_, Bus::Ide | Bus::Sata | Bus::Usb)
        | (Platform::Qemu | Platform::Proxmox, Bus::Virtio | Bus::VirtioScsi)
        | (Platform::Ovf, Bus::Scsi | Bus::Nvme)
        | (Platform::VirtualBox, Bus::Scsi | Bus::Nvme | Bus::VirtioScsi) => bus,
        (Platform::Qemu | Platform::Proxmox | Platform::Ovf | Platform::VirtualBox, _) => Bus::Sata,
    }
}

fn card_at(model: &CardModel, place: Platform) -> CardModel {
    match (place, model) {
        (Platform::Xen, _) => CardModel::Xen,
        (
            Platform::Qemu | Platform::Proxmox,
            CardModel::Virtio | CardModel::E1000 | CardModel::E1000e | CardModel::Rtl8139 | CardModel::Pcnet,
        )
        | (Platform::Ovf, CardModel::E1000 | CardModel::E1000e | CardModel::Vmxnet3 | CardModel::Pcnet)
        | (Platform::VirtualBox, CardModel::Virtio | CardModel::E1000 | CardModel::Pcnet) => model.clone(),
        (Platform::Qemu | Platform::Proxmox, CardModel::Vmxnet3) => CardModel::E1000e,
        _ => CardModel::E1000,
    }
}
