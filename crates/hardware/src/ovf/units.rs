//! Assigns a controller and a unit to each disk.

use crate::bus_address::AddressAllocator;
use crate::{Bus, Disk, DiskKind, Untranslated};

/// The unit of the SCSI controller itself.
const SCSI_ITSELF: u32 = 7;

/// The controller of a disk, and its unit there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DiskUnit {
    pub(super) controller: u32,
    pub(super) unit: u32,
}

/// Units per controller of each bus: positions of disks are numbered across controllers.
pub(super) fn units_per_controller(bus: Bus) -> u32 {
    match bus {
        Bus::Ide => 2,
        Bus::Sata => 30,
        Bus::Scsi | Bus::VirtioScsi => 16,
        Bus::Nvme => 15,
        Bus::Virtio | Bus::Xen | Bus::Usb | Bus::Floppy => 1,
    }
}

/// Limit of controllers of a VMware machine.
fn controller_count_max(bus: Bus) -> u32 {
    match bus {
        Bus::Ide | Bus::Floppy => 2,
        Bus::Sata | Bus::Scsi | Bus::Nvme => 4,
        Bus::VirtioScsi | Bus::Virtio | Bus::Xen | Bus::Usb => 0,
    }
}

/// Assigns a supported bus and a unit to each of `disks`: the current unit if it is free. Disks without a free unit are
/// left out.
pub(super) fn placed<'d>(disks: &'d mut [Disk], dropped: &mut Vec<Untranslated>) -> Vec<(&'d Disk, DiskUnit)> {
    let mut addresses = AddressAllocator::new(disks, |disk| Some((preferred_bus(disk), disk.position)), units);
    let mut placed = Vec::new();
    for (number, disk) in disks.iter_mut().enumerate() {
        let wanted = preferred_bus(disk);
        let buses = [wanted, Bus::Sata];
        let buses = if wanted == Bus::Floppy { &buses[..1] } else { &buses[..] };
        let found = buses
            .iter()
            .find_map(|bus| Some((*bus, addresses.allocate(number, *bus, units(*bus))?)));
        let name = if disk.label.is_empty() { &disk.key } else { &disk.label };
        let Some((bus, position)) = found else {
            let what = format!("disk {} ({name})", number + 1);
            dropped.push(Untranslated::new(what, "no free position on its controllers"));
            continue;
        };
        if bus != disk.bus && bus != Bus::Floppy {
            let what = format!("disk {} ({name}) on {}", number + 1, disk.bus.name());
            dropped.push(Untranslated::new(what, format!("is on {} now", bus.name())));
        }
        disk.bus = bus;
        let per_controller = units_per_controller(bus);
        let place = DiskUnit {
            controller: position / per_controller,
            unit: position % per_controller,
        };
        placed.push((&*disk, place));
    }
    placed
}

/// The bus that fits a disk best.
fn preferred_bus(disk: &Disk) -> Bus {
    match (disk.kind, disk.bus) {
        (DiskKind::Floppy, _) => Bus::Floppy,
        (DiskKind::Disk, bus @ (Bus::Ide | Bus::Scsi | Bus::Nvme))
        | (DiskKind::Cdrom, bus @ (Bus::Ide | Bus::Scsi)) => bus,
        _ => Bus::Sata,
    }
}

/// The units of all controllers of a bus.
fn units(bus: Bus) -> impl Iterator<Item = u32> + Clone {
    let per_controller = units_per_controller(bus);
    let is_controller = move |unit: u32| bus == Bus::Scsi && unit % per_controller == SCSI_ITSELF;
    (0..per_controller * controller_count_max(bus)).filter(move |unit| !is_controller(*unit))
}
