//! The names of disks in a machine: `vda`, `sdb`, `hdc`.

use crate::bus_address::AddressAllocator;
use crate::machine::{Bus, Disk, Machine, POSITION_COUNT};

impl Machine {
    /// The device name of each disk: `vda`, `sdb`, `hdc`. The prefix says the bus and the letter the position, unless
    /// another disk has that name: a guest may refer to its disks by these names.
    pub fn targets(&self) -> Vec<String> {
        let naming = |disk: &Disk| {
            // IDE and floppy controllers have few positions, and a machine has one of each.
            match disk.bus {
                Bus::Virtio => ("vd", POSITION_COUNT),
                Bus::Ide => ("hd", 4),
                Bus::Floppy => ("fd", 2),
                Bus::Xen => ("xvd", POSITION_COUNT),
                Bus::Sata | Bus::Scsi | Bus::VirtioScsi | Bus::Nvme | Bus::Usb => ("sd", POSITION_COUNT),
            }
        };
        let wanted = |disk: &Disk| {
            let (prefix, place_count) = naming(disk);
            (disk.position < place_count).then_some((prefix, disk.position))
        };
        let mut addresses = AddressAllocator::new(&self.disks, wanted, |_| 0..u32::MAX);
        let named = self.disks.iter().enumerate().map(|(number, disk)| {
            let (prefix, _) = naming(disk);
            // There are more positions than disks.
            let place = addresses.allocate(number, prefix, 0..u32::MAX).unwrap_or(u32::MAX);
            format!("{prefix}{}", letters(place))
        });
        named.collect()
    }
}

/// 0 is a, 25 is z, 26 is aa.
fn letters(number: u32) -> String {
    let mut rest = number;
    let mut letters = Vec::new();
    loop {
        letters.insert(0, char::from(b'a' + (rest % 26) as u8));
        if rest < 26 {
            return letters.into_iter().collect();
        }
        rest = rest / 26 - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::letters;
    use crate::machine::{Bus, Disk, DiskKind, Machine};

    #[test]
    fn disks_are_named_by_their_buses() {
        assert_eq!((letters(0), letters(25)), ("a".to_owned(), "z".to_owned()));
        assert_eq!((letters(26), letters(701)), ("aa".to_owned(), "zz".to_owned()));
        let disk = |bus| Disk {
            key: String::new(),
            label: String::new(),
            kind: DiskKind::Disk,
            bus,
            position: 0,
            size_bytes: None,
            boot_order: None,
            is_read_only: false,
        };
        let machine = Machine {
            disks: [Bus::Virtio, Bus::Sata, Bus::Virtio, Bus::VirtioScsi, Bus::Ide]
                .map(disk)
                .to_vec(),
            ..Machine::default()
        };
        assert_eq!(machine.targets(), ["vda", "sda", "vdb", "sdb", "hda"]);
        // A disk without a position of its own comes after those that have one.
        let at = |position| Disk {
            position,
            ..disk(Bus::Scsi)
        };
        let machine = Machine {
            disks: [0, 2, 16, 64].map(at).to_vec(),
            ..Machine::default()
        };
        assert_eq!(machine.targets(), ["sda", "sdc", "sdq", "sdr"]);
    }
}
