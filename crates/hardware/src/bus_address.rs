//! Places on buses: each disk gets its own where there is one, and nobody of a bus comes before whom he stood behind.

use crate::{Bus, Disk, DiskKind};

/// Places that disks take, by what has numbers of its own: a bus, a letter before names.
pub(crate) struct AddressAllocator<K> {
    taken: Vec<(K, u32)>,
    /// For each disk, by its number, the place that it had and keeps.
    kept: Vec<Option<(K, u32)>>,
}

impl<K: Copy + PartialEq> AddressAllocator<K> {
    /// `wanted` gives for each disk, of those on one bus with the same key, where it was, whether there is such a place or not. Disks come before drives, and
    /// those of one bus before those of the next one that has a disk in the list. Who finds his place taken moves on to the next one of `places`
    /// that is free, and those who stood behind him on his bus with him.
    pub(crate) fn new<P: Iterator<Item = u32>>(
        disks: &[Disk],
        wanted: impl Fn(&Disk) -> Option<(K, u32)>,
        places: impl Fn(K) -> P,
    ) -> Self {
        let mut seats = Self {
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
                let mut wishes: Vec<(usize, (K, u32))> = numbers
                    .filter_map(|number| Some((number, wanted(&disks[number])?)))
                    .collect();
                wishes.sort_by_key(|(_, (_, place))| *place);
                seats.seat_in_order(&wishes, &places);
            }
        }
        seats
    }

    /// The place that the disk `number` has without asking for more.
    pub(crate) fn kept(&self, number: usize) -> Option<u32> {
        self.kept[number].map(|(_, place)| place)
    }

    /// Seats those of one bus, in the order of the places that they want. Where the last ones would find none, all of them move up as far as that needs.
    fn seat_in_order<P: Iterator<Item = u32>>(&mut self, wishes: &[(usize, (K, u32))], places: &impl Fn(K) -> P) {
        let Some((_, (key, _))) = wishes.first() else { return };
        let last_wish = wishes.iter().map(|(_, (_, wanted))| *wanted).max().unwrap_or(0);
        // So many are enough for all of them, wherever places go on for ever.
        let mut behind_count = 0;
        let free: Vec<u32> = places(*key)
            .filter(|place| !self.taken.contains(&(*key, *place)))
            .take_while(|place| {
                behind_count += usize::from(*place >= last_wish);
                behind_count <= wishes.len()
            })
            .collect();
        let mut next = 0;
        for (rank, (number, (key, wanted))) in wishes.iter().enumerate().take(free.len()) {
            // A place that there is not is no wish.
            let wish = free.iter().position(|place| place >= wanted).unwrap_or(next);
            let last = free.len() - wishes.len().min(free.len()) + rank;
            let found = next.max(wish).min(last);
            self.kept[*number] = Some((*key, free[found]));
            next = found + 1;
        }
        for (number, _) in wishes {
            self.taken.extend(self.kept[*number]);
        }
    }

    /// The place of the disk `number` on `key`, which has those `places`, the lowest first: its own; or the first behind all that are taken, and
    /// where that is none, any that is free.
    pub(crate) fn seat(&mut self, number: usize, key: K, places: impl Iterator<Item = u32> + Clone) -> Option<u32> {
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

/// Puts the one that a machine is started from before the others: `places` are those of its disks, and `first` is the number of that one. The
/// others keep their order. Whether anything has changed.
pub(crate) fn put_first(places: &mut [u32], first: usize) -> bool {
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
    use super::{AddressAllocator, put_first};
    use crate::{Bus, Disk, DiskKind};

    #[test]
    fn who_cannot_have_his_place_stands_behind_the_others() {
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
            let mut seats = AddressAllocator::new(&disks, |disk| Some(((), disk.position)), |()| places());
            (0..disks.len())
                .map(|number| seats.seat(number, (), places()))
                .collect()
        };
        let on = |bus: Bus, places: &[u32]| -> Vec<(DiskKind, Bus, u32)> {
            places.iter().map(|place| (DiskKind::Disk, bus, *place)).collect()
        };
        let placed = |wanted: &[u32], count: u32| placed_kinds(&on(Bus::Sata, wanted), count);
        // An everyday layout of VMware: two on the first controller, one on the second.
        assert_eq!(placed(&[0, 2, 16], 16), [Some(0), Some(2), Some(3)]);
        assert_eq!(placed(&[1, 20], 16), [Some(1), Some(2)]);
        assert_eq!(placed(&[20, 1], 16), [Some(2), Some(1)]);
        assert_eq!(placed(&[0, 0, 1], 16), [Some(0), Some(1), Some(2)]);
        assert_eq!(placed(&[3, 3, 3, 3, 3], 4), [Some(0), Some(1), Some(2), Some(3), None]);
        // A place that nobody can have, and fewer places than there were.
        assert_eq!(placed(&[0, 7, 8], 16), [Some(0), Some(8), Some(9)]);
        assert_eq!(placed(&[7, 6, 14, 15], 16), [Some(8), Some(6), Some(14), Some(15)]);
        assert_eq!(placed(&[0, 5, 7], 6), [Some(0), Some(4), Some(5)]);
        assert_eq!(placed(&[40, 41], 6), [Some(0), Some(1)]);
        // Those of one bus stay in their order, whoever stands between them.
        let mixed = [on(Bus::Sata, &[1]), on(Bus::VirtioScsi, &[0, 1, 2])].concat();
        assert_eq!(placed_kinds(&mixed, 16), [Some(1), Some(0), Some(2), Some(3)]);
        let mixed = [on(Bus::Ide, &[0]), on(Bus::Sata, &[0, 1, 2])].concat();
        assert_eq!(placed_kinds(&mixed, 16), [Some(0), Some(1), Some(2), Some(3)]);
        // A drive that came from another bus takes nobody's place.
        let drive = (DiskKind::Cdrom, Bus::Sata, 0);
        let wanted = [vec![drive], on(Bus::Sata, &[0, 1])].concat();
        assert_eq!(placed_kinds(&wanted, 4), [Some(2), Some(0), Some(1)]);
    }

    #[test]
    fn the_first_one_comes_first_and_the_others_keep_their_order() {
        let mut places = [5, 0, 2];
        assert!(put_first(&mut places, 2));
        assert_eq!(places, [5, 2, 0]);
        assert!(!put_first(&mut places, 2));
        assert!(put_first(&mut places, 0));
        assert_eq!(places, [0, 5, 2]);
    }
}
