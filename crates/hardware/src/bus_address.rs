//! Positions on buses: each disk gets its own if one is free, and disks that were on one bus keep their order.

use crate::{Bus, Disk, DiskKind};

/// Positions that disks occupy. `K` is the space that positions are numbered in: a bus, or a prefix of names.
pub(crate) struct AddressAllocator<K> {
    taken: Vec<(K, u32)>,
    /// For each disk, by its number, the position that it keeps.
    kept: Vec<Option<(K, u32)>>,
}

impl<K: Copy + PartialEq> AddressAllocator<K> {
    /// `wanted` gives the key and the previous position of a disk, whether that position exists or not; disks on one
    /// bus have the same key. Disks are served before drives, and buses in the order in which the list names them. A
    /// disk whose position is taken moves to the next free one of `places`, and the disks behind it on its bus move
    /// with it.
    pub(crate) fn new<P: Iterator<Item = u32>>(
        disks: &[Disk],
        wanted: impl Fn(&Disk) -> Option<(K, u32)>,
        places: impl Fn(K) -> P,
    ) -> Self {
        let mut addresses = Self {
            taken: Vec::new(),
            kept: vec![None; disks.len()],
        };
        for is_round_of_disks in [true, false] {
            let is_in_round = |disk: &Disk| (disk.kind == DiskKind::Disk) == is_round_of_disks;
            let mut buses: Vec<Bus> = Vec::new();
            for disk in disks.iter().filter(|disk| is_in_round(disk)) {
                if !buses.contains(&disk.bus) {
                    buses.push(disk.bus);
                }
            }
            for bus in buses {
                let of_bus = |number: &usize| disks[*number].bus == bus && is_in_round(&disks[*number]);
                let numbers = (0..disks.len()).filter(of_bus);
                let mut requests: Vec<(usize, (K, u32))> = numbers
                    .filter_map(|number| Some((number, wanted(&disks[number])?)))
                    .collect();
                requests.sort_by_key(|(_, (_, place))| *place);
                addresses.allocate_in_order(&requests, &places);
            }
        }
        addresses
    }

    /// The position that the disk `number` keeps, if any.
    pub(crate) fn kept(&self, number: usize) -> Option<u32> {
        self.kept[number].map(|(_, place)| place)
    }

    /// Assigns positions to the disks of one bus, in the order of the requested positions. If the last disks would find
    /// none, all disks move to lower positions as far as necessary.
    fn allocate_in_order<P: Iterator<Item = u32>>(&mut self, requests: &[(usize, (K, u32))], places: &impl Fn(K) -> P) {
        let Some((_, (key, _))) = requests.first() else { return };
        let last_request = requests.iter().map(|(_, (_, wanted))| *wanted).max().unwrap_or(0);
        // `places` may be unlimited: stop when there are enough for all disks.
        let mut behind_count = 0;
        let free: Vec<u32> = places(*key)
            .filter(|place| !self.taken.contains(&(*key, *place)))
            .take_while(|place| {
                behind_count += usize::from(*place >= last_request);
                behind_count <= requests.len()
            })
            .collect();
        let mut next = 0;
        for (rank, (number, (key, wanted))) in requests.iter().enumerate().take(free.len()) {
            // A position beyond the last one cannot be requested: take the next.
            let requested = free.iter().position(|place| place >= wanted).unwrap_or(next);
            let last = free.len() - requests.len().min(free.len()) + rank;
            let found = next.max(requested).min(last);
            self.kept[*number] = Some((*key, free[found]));
            next = found + 1;
        }
        for (number, _) in requests {
            self.taken.extend(self.kept[*number]);
        }
    }

    /// The position of the disk `number` in the space `key`, which has these `places` in ascending order: the position
    /// that the disk keeps, otherwise the first free one after all taken ones, otherwise the first free one.
    pub(crate) fn allocate(&mut self, number: usize, key: K, places: impl Iterator<Item = u32> + Clone) -> Option<u32> {
        if let Some((_, place)) = self.kept[number].filter(|(kept, _)| *kept == key) {
            return Some(place);
        }
        let last = self
            .taken
            .iter()
            .filter(|(taken, _)| *taken == key)
            .map(|(_, place)| *place);
        let last = last.max();
        let is_free = |place: &u32| !self.taken.contains(&(key, *place));
        let behind = places.clone().filter(|place| last.is_none_or(|last| *place > last));
        let found = behind
            .clone()
            .find(is_free)
            .or_else(|| places.into_iter().find(is_free))?;
        self.taken.push((key, found));
        Some(found)
    }
}

/// Moves the disk `first`, which the machine boots from, before the others, which keep their order. `places` are the
/// positions of the disks by their numbers. Returns whether anything changed.
pub(crate) fn move_first(places: &mut [u32], first: usize) -> bool {
    let mut sorted = places.to_vec();
    sorted.sort_unstable();
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by_key(|number| (*number != first, places[*number]));
    let before = places.to_vec();
    for (number, place) in order.into_iter().zip(sorted) {
        places[number] = place;
    }
    before != places
}

#[cfg(test)]
mod tests {
    use super::{AddressAllocator, move_first};
    use crate::{Bus, Disk, DiskKind};

    #[test]
    fn a_disk_whose_position_is_taken_moves_behind_the_others() {
        let disk = |(kind, bus, position): (DiskKind, Bus, u32)| Disk {
            key: String::new(),
            label: String::new(),
            kind,
            bus,
            position,
            size_bytes: None,
            boot_order: None,
            is_read_only: false,
        };
        let placed_kinds = |wanted: &[(DiskKind, Bus, u32)], count: u32| -> Vec<Option<u32>> {
            let disks: Vec<Disk> = wanted.iter().copied().map(disk).collect();
            let places = || (0..count).filter(|place| *place != 7);
            let mut addresses = AddressAllocator::new(&disks, |disk| Some(((), disk.position)), |()| places());
            (0..disks.len())
                .map(|number| addresses.allocate(number, (), places()))
                .collect()
        };
        let on = |bus: Bus, places: &[u32]| -> Vec<(DiskKind, Bus, u32)> {
            places.iter().map(|place| (DiskKind::Disk, bus, *place)).collect()
        };
        let placed = |wanted: &[u32], count: u32| placed_kinds(&on(Bus::Sata, wanted), count);
        // A usual layout of VMware: two on the first controller, one on the second.
        assert_eq!(placed(&[0, 2, 16], 16), [Some(0), Some(2), Some(3)]);
        assert_eq!(placed(&[1, 20], 16), [Some(1), Some(2)]);
        assert_eq!(placed(&[20, 1], 16), [Some(2), Some(1)]);
        assert_eq!(placed(&[0, 0, 1], 16), [Some(0), Some(1), Some(2)]);
        assert_eq!(placed(&[3, 3, 3, 3, 3], 4), [Some(0), Some(1), Some(2), Some(3), None]);
        // A position that does not exist, and fewer positions than before.
        assert_eq!(placed(&[0, 7, 8], 16), [Some(0), Some(8), Some(9)]);
        assert_eq!(placed(&[7, 6, 14, 15], 16), [Some(8), Some(6), Some(14), Some(15)]);
        assert_eq!(placed(&[0, 5, 7], 6), [Some(0), Some(4), Some(5)]);
        assert_eq!(placed(&[40, 41], 6), [Some(0), Some(1)]);
        // Disks of one bus keep their order, whatever is between them.
        let mixed = [on(Bus::Sata, &[1]), on(Bus::VirtioScsi, &[0, 1, 2])].concat();
        assert_eq!(placed_kinds(&mixed, 16), [Some(1), Some(0), Some(2), Some(3)]);
        let mixed = [on(Bus::Ide, &[0]), on(Bus::Sata, &[0, 1, 2])].concat();
        assert_eq!(placed_kinds(&mixed, 16), [Some(0), Some(1), Some(2), Some(3)]);
        // A drive that came from another bus takes no disk's position.
        let drive = (DiskKind::Cdrom, Bus::Sata, 0);
        let wanted = [vec![drive], on(Bus::Sata, &[0, 1])].concat();
        assert_eq!(placed_kinds(&wanted, 4), [Some(2), Some(0), Some(1)]);
    }

    #[test]
    fn the_boot_disk_moves_first_and_the_others_keep_their_order() {
        let mut places = [5, 0, 2];
        assert!(move_first(&mut places, 2));
        assert_eq!(places, [5, 2, 0]);
        assert!(!move_first(&mut places, 2));
        assert!(move_first(&mut places, 0));
        assert_eq!(places, [0, 5, 2]);
    }
}
