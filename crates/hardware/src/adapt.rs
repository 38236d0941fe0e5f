//! Adapts a machine to another hypervisor, with devices that its guest has drivers for.
//!
//! A guest of another hypervisor may lack drivers for the fastest devices. It gets devices that every operating system
//! since 2007 supports: SATA disks and Intel's network card. The user can change them afterwards.

use crate::bus_address::AddressAllocator;
use crate::machine::POSITION_COUNT;
use crate::xml_characters::remove_unrepresentable;
use crate::{Bus, CardModel, Disk, DiskKind, Firmware, Machine, Platform, Translated, Untranslated};

/// The machine with the devices that `platform` supports.
pub fn adapt(machine: &Machine, platform: Platform) -> Translated<Machine> {
    let mut value = machine.clone();
    let mut dropped = Vec::new();
    remove_unrepresentable(&mut value, platform, &mut dropped);
    for (number, disk) in value.disks.iter_mut().enumerate() {
        let bus = bus_at(disk.bus, platform);
        if bus != disk.bus {
            let name = if disk.label.is_empty() { &disk.key } else { &disk.label };
            // Xen presents each disk twice, emulated and paravirtual: a guest without a driver for one has a driver for
            // the other.
            if platform != Platform::Xen {
                dropped.push(Untranslated::new(
                    format!("disk {} ({name}) on {}", number + 1, disk.bus.name()),
                    format!("is on {} now", bus.name()),
                ));
            }
            disk.bus = bus;
        }
    }
    for (number, card) in value.cards.iter_mut().enumerate() {
        let model = card_at(&card.model, platform);
        if model != card.model {
            if platform != Platform::Xen {
                dropped.push(Untranslated::new(
                    format!("network card {} ({})", number + 1, card.model.name()),
                    format!("is an {} now", model.name()),
                ));
            }
            card.model = model;
        }
    }
    if value.firmware == Firmware::Paravirtual && platform != Platform::Xen {
        dropped.push(Untranslated::new(
            "paravirtual mode of Xen",
            "the machine boots with a BIOS now: its disk needs a boot loader",
        ));
        value.firmware = Firmware::Bios;
    }
    if platform == Platform::Qemu {
        move_ide_to_sata(&mut value, &mut dropped);
    }
    assign_positions(&machine.disks, &mut value.disks);
    Translated { value, dropped }
}

/// Assigns distinct positions to disks that moved to one bus from several.
fn assign_positions(before: &[Disk], disks: &mut [Disk]) {
    let mut pairs = before.iter().zip(&*disks);
    if pairs.all(|(before, disk)| before.bus == disk.bus) {
        return;
    }
    let buses: Vec<Bus> = disks.iter().map(|disk| disk.bus).collect();
    // The allocator passes disks from `before`: find the disk's number by its address.
    let number = |disk: &Disk| before.iter().position(|other| std::ptr::eq(other, disk));
    let wanted = |disk: &Disk| {
        let number = number(disk)?;
        (disk.position < POSITION_COUNT).then_some((buses[number], disk.position))
    };
    let addresses = AddressAllocator::new(before, wanted, |_| 0..POSITION_COUNT);
    for (number, disk) in disks.iter_mut().enumerate() {
        if let Some(place) = addresses.kept(number) {
            disk.position = place;
        }
    }
}

/// Keeps IDE only for machines that boot by a BIOS and have a hard disk on IDE: they may have no other driver. IDE
/// needs the older board, which has no UEFI; a CD drive alone does not justify it.
fn move_ide_to_sata(machine: &mut Machine, dropped: &mut Vec<Untranslated>) {
    let is_hard_disk = |disk: &Disk| disk.bus == Bus::Ide && disk.kind == DiskKind::Disk;
    if machine.firmware == Firmware::Bios && machine.disks.iter().any(is_hard_disk) {
        return;
    }
    for disk in machine.disks.iter_mut().filter(|disk| disk.bus == Bus::Ide) {
        if disk.kind == DiskKind::Disk {
            dropped.push(Untranslated::new(
                format!("disk {} on IDE", disk.label),
                "is on SATA now: UEFI has no IDE here",
            ));
        }
        disk.bus = Bus::Sata;
    }
}

fn bus_at(bus: Bus, platform: Platform) -> Bus {
    match (platform, bus) {
        (_, Bus::Floppy) => Bus::Floppy,
        (Platform::Xen, _) => Bus::Xen,
        // A USB disk would need a USB controller, which the writer does not create.
        (Platform::VirtualBox, Bus::Usb) => Bus::Sata,
        (_, Bus::Ide | Bus::Sata | Bus::Usb)
        | (Platform::Qemu | Platform::Proxmox, Bus::Virtio | Bus::VirtioScsi)
        | (Platform::Ovf, Bus::Scsi | Bus::Nvme)
        | (Platform::VirtualBox, Bus::Scsi | Bus::Nvme | Bus::VirtioScsi) => bus,
        (Platform::Qemu | Platform::Proxmox | Platform::Ovf | Platform::VirtualBox, _) => Bus::Sata,
    }
}

fn card_at(model: &CardModel, platform: Platform) -> CardModel {
    match (platform, model) {
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
