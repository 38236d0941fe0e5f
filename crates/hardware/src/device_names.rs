//! The names of disks in a machine: `vda`, `sdb`, `hdc`.

use crate::bus_address::AddressAllocator;
use crate::machine::{Bus, Disk, Machine, PLACE_COUNT};

impl Machine {
    /// What its disks are called in a machine of this kind, one name for each: `vda`, `sdb`, `hdc`. Names that say which bus a disk hangs on, and by
    /// their letter its place there, as far as that is free: a guest may know its disks by it.
    pub fn targets(&self) -> Vec<String> {
        let naming = |disk: &Disk| {
            // A controller of IDE or of floppy drives has few places, and is the only one.
            match disk.bus {
                Bus::Virtio => ("vd", PLACE_COUNT),
                Bus::Ide => ("hd", 4),
                Bus::Floppy => ("fd", 2),
                Bus::Xen => ("xvd", PLACE_COUNT),
                Bus::Sata | Bus::Scsi | Bus::VirtioScsi | Bus::Nvme | Bus::Usb => ("sd", PLACE_COUNT),
            }
        };
        let wanted = |disk: &Disk| {
            let (prefix, place_count) = naming(disk);
            (disk.position < place_count).then_some((prefix, disk.position))
        };
        let mut seats = AddressAllocator::new(&self.disks, wanted, |_| 0..u32::MAX);
        let named = self.disks.iter().enumerate().map(|(number, disk)| {
            let (prefix, _) = naming(disk);
            // There are more of them than disks.
            let place = seats.seat(number, prefix, 0..u32::MAX).unwrap_or(u32::MAX);
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
    fn disks_are_called_by_their_buses() {
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
        // What has no place of its own stands behind those that have.
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
