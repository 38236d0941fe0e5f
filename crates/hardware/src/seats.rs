//! Places on buses: each disk gets its own where there is one, and nobody comes before whom he stood behind.

use crate::{Disk, DiskKind};

/// Places that disks take, by what has numbers of its own: a bus, a letter before names.
pub(crate) struct Seats<K> {
    taken: Vec<(K, u32)>,
    /// For each disk, by its number, the place that it had and keeps.
    kept: Vec<Option<(K, u32)>>,
}

impl<K: Copy + PartialEq> Seats<K> {
    /// `wanted` gives for each disk where it was, if there is such a place: the first that wants one keeps it, and disks come before drives.
    pub(crate) fn new(disks: &[Disk], wanted: impl Fn(&Disk) -> Option<(K, u32)>) -> Self {
        let mut seats = Self {
            taken: Vec::new(),
            kept: vec![None; disks.len()],
        };
        for is_round_of_disks in [true, false] {
            for (disk, kept) in disks.iter().zip(&mut seats.kept) {
                if (disk.kind == DiskKind::Disk) == is_round_of_disks {
                    *kept = wanted(disk).filter(|place| !seats.taken.contains(place));
                    seats.taken.extend(*kept);
                }
            }
        }
        seats
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
    use super::{Seats, put_first};
    use crate::{Bus, Disk, DiskKind};

    #[test]
    fn who_cannot_have_his_place_stands_behind_the_others() {
        let disk = |(kind, position): (DiskKind, u32)| Disk {
            key: String::new(),
            label: String::new(),
            kind,
            bus: Bus::Sata,
            position,
            size_bytes: None,
            boot_order: None,
            is_read_only: false,
        };
        let placed_kinds = |wanted: &[(DiskKind, u32)], count: u32| -> Vec<Option<u32>> {
            let disks: Vec<Disk> = wanted.iter().copied().map(disk).collect();
            let wanted = |disk: &Disk| (disk.position < count).then_some(((), disk.position));
            let mut seats = Seats::new(&disks, wanted);
            (0..disks.len())
                .map(|number| seats.seat(number, (), 0..count))
                .collect()
        };
        let placed = |wanted: &[u32], count: u32| {
            let disks: Vec<(DiskKind, u32)> = wanted.iter().map(|place| (DiskKind::Disk, *place)).collect();
            placed_kinds(&disks, count)
        };
        // An everyday layout of VMware: two on the first controller, one on the second.
        assert_eq!(placed(&[0, 2, 16], 16), [Some(0), Some(2), Some(3)]);
        assert_eq!(placed(&[1, 20], 16), [Some(1), Some(2)]);
        assert_eq!(placed(&[20, 1], 16), [Some(2), Some(1)]);
        assert_eq!(placed(&[0, 0, 1], 16), [Some(0), Some(2), Some(1)]);
        assert_eq!(placed(&[3, 3, 3, 3, 3], 4), [Some(3), Some(0), Some(1), Some(2), None]);
        // A drive that came from another bus takes nobody's place.
        let wanted = [(DiskKind::Cdrom, 0), (DiskKind::Disk, 0), (DiskKind::Disk, 1)];
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
