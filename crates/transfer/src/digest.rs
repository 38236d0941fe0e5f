//! Digests of what was sent, per unit and for the whole disk.
//!
//! Both sides compute the digests from the frames alone, while they send or receive them, so equal digests cost no
//! read of the disk. They prove that the receiver applied what the sender sent, and in the same order of passes:
//!
//! - a frame that covers a whole unit replaces the digest of the unit by the BLAKE3 hash of the content;
//! - the other frames of a pass extend it. Frames of one pass do not overlap and may arrive in any order, so their
//!   hashes are added up (XOR). At the end of the pass, the new digest is the hash of the old one and the sum.
//!
//! A unit without a digest has an unknown content. The digest of the disk is a tree of two levels: units, and groups
//! of 1024 units. Only groups with changes are hashed again, so its cost does not depend on the size of the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use crate::layout::UnitLayout;

/// Number of units of a group.
const GROUP_UNIT_COUNT: usize = 1024;

/// A BLAKE3 hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The hash of `content`.
    pub fn of(content: &[u8]) -> Self {
        Self(*blake3::hash(content).as_bytes())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut prefix = self.0.iter().take(8);
        prefix.try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The content of a frame with data.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FrameContent<'a> {
    /// Bytes, as many as the range has.
    Data(&'a [u8]),
    /// The range reads as zero.
    Zero,
}

/// The digest of a unit, or that it is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitState {
    /// The number of the unit.
    pub unit: u64,
    /// Its digest; `None` if its content is unknown.
    pub digest: Option<Digest>,
}

/// The digests of all units of a disk.
#[derive(Debug)]
pub(crate) struct UnitDigests {
    layout: UnitLayout,
    digests: Vec<Option<Digest>>,
    /// The sums of units with partial frames in the current pass.
    open: BTreeMap<u64, [u8; 32]>,
    /// Units whose digest changed, or is about to change at the end of the pass.
    changed: BTreeSet<u64>,
    /// Digests of groups; `None` if a unit of the group changed.
    groups: Vec<Option<Digest>>,
    /// The hash of a whole unit of zeroes.
    zero: Digest,
}

impl UnitDigests {
    /// All units are unknown.
    pub(crate) fn new(layout: UnitLayout) -> Self {
        let unit_count = holdfast_block::to_usize(layout.unit_count());
        Self {
            layout,
            digests: vec![None; unit_count],
            open: BTreeMap::new(),
            changed: BTreeSet::new(),
            groups: vec![None; unit_count.div_ceil(GROUP_UNIT_COUNT)],
            zero: Digest::of(&vec![0; holdfast_block::to_usize(u64::from(layout.unit_bytes()))]),
        }
    }

    pub(crate) fn layout(&self) -> UnitLayout {
        self.layout
    }

    pub(crate) fn get(&self, unit: u64) -> Option<Digest> {
        self.digests.get(holdfast_block::to_usize(unit)).copied().flatten()
    }

    /// Records a frame of the current pass. `range` lies on the disk, and data has its length.
    pub(crate) fn add(&mut self, range: &Range<u64>, content: FrameContent<'_>) {
        for unit in self.layout.units_of(range) {
            let whole = self.layout.bytes_of(unit);
            let part = range.start.max(whole.start)..range.end.min(whole.end);
            let part_content = match content {
                FrameContent::Zero => FrameContent::Zero,
                FrameContent::Data(bytes) => {
                    let from = holdfast_block::to_usize(part.start - range.start);
                    let to = holdfast_block::to_usize(part.end - range.start);
                    FrameContent::Data(bytes.get(from..to).expect("data has the length of its range"))
                }
            };
            self.changed.insert(unit);
            if part == whole {
                self.open.remove(&unit);
                let digest = self.content_digest(&whole, part_content);
                self.store(unit, Some(digest));
            } else {
                let hash = part_digest(&part, part_content);
                let sum = self.open.entry(unit).or_default();
                sum.iter_mut().zip(hash.0).for_each(|(sum, byte)| *sum ^= byte);
            }
        }
    }

    /// Ends the pass: later frames may overlap the earlier ones.
    pub(crate) fn end_pass(&mut self) {
        for (unit, sum) in std::mem::take(&mut self.open) {
            let extended = self.get(unit).map(|digest| {
                let mut hasher = blake3::Hasher::new();
                hasher.update(&digest.0).update(&sum);
                Digest(*hasher.finalize().as_bytes())
            });
            self.store(unit, extended);
        }
    }

    /// Sets the digest of a unit, whatever the current pass has recorded.
    pub(crate) fn set(&mut self, state: UnitState) {
        self.open.remove(&state.unit);
        self.changed.insert(state.unit);
        self.store(state.unit, state.digest);
    }

    /// The units that changed since the last call. It is called at the end of a pass.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<u64> {
        assert!(self.open.is_empty(), "changes are taken between passes");
        std::mem::take(&mut self.changed)
    }

    /// The units that changed since [`take_changed`](Self::take_changed).
    pub(crate) fn changed(&self) -> &BTreeSet<u64> {
        &self.changed
    }

    /// The digest of the disk; or the first unit that is unknown.
    pub(crate) fn tree(&mut self) -> Result<Digest, u64> {
        let mut root = blake3::Hasher::new();
        root.update(&self.layout.size_bytes().to_le_bytes());
        root.update(&self.layout.unit_bytes().to_le_bytes());
        for (number, (group, units)) in (0_u64..).zip(self.groups.iter_mut().zip(self.digests.chunks(GROUP_UNIT_COUNT)))
        {
            if group.is_none() {
                let mut hasher = blake3::Hasher::new();
                for (unit, digest) in (number * GROUP_UNIT_COUNT as u64..).zip(units) {
                    hasher.update(&digest.ok_or(unit)?.0);
                }
                *group = Some(Digest(*hasher.finalize().as_bytes()));
            }
            root.update(&group.expect("it was just computed").0);
        }
        Ok(Digest(*root.finalize().as_bytes()))
    }

    fn content_digest(&self, whole: &Range<u64>, content: FrameContent<'_>) -> Digest {
        match content {
            FrameContent::Data(bytes) => Digest::of(bytes),
            FrameContent::Zero => self.zero_digest(whole),
        }
    }

    /// The digest of a whole unit of zeroes.
    pub(crate) fn zero_digest(&self, whole: &Range<u64>) -> Digest {
        let length = whole.end - whole.start;
        if length == u64::from(self.layout.unit_bytes()) {
            self.zero
        } else {
            Digest::of(&vec![0; holdfast_block::to_usize(length)])
        }
    }

    fn store(&mut self, unit: u64, digest: Option<Digest>) {
        let index = holdfast_block::to_usize(unit);
        if let Some(place) = self.digests.get_mut(index) {
            *place = digest;
        }
        if let Some(group) = self.groups.get_mut(index / GROUP_UNIT_COUNT) {
            *group = None;
        }
    }
}

/// The hash of a frame that covers a part of a unit.
fn part_digest(part: &Range<u64>, content: FrameContent<'_>) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&part.start.to_le_bytes()).update(&part.end.to_le_bytes());
    match content {
        FrameContent::Data(bytes) => hasher.update(&[0]).update(bytes),
        FrameContent::Zero => hasher.update(&[1]),
    };
    Digest(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::{Digest, FrameContent, UnitDigests};
    use crate::layout::UnitLayout;

    fn digests() -> UnitDigests {
        UnitDigests::new(UnitLayout::new(3 * 4096 + 100, 4096).unwrap())
    }

    #[test]
    fn a_whole_unit_has_the_hash_of_its_content_and_zeroes_count_as_data() {
        let mut data = digests();
        data.add(&(0..3 * 4096 + 100), FrameContent::Data(&vec![0; 3 * 4096 + 100]));
        let mut zero = digests();
        assert_eq!(zero.tree(), Err(0));
        zero.add(&(0..3 * 4096 + 100), FrameContent::Zero);
        assert_eq!(zero.tree(), data.tree());
        assert_eq!(zero.get(3), Some(Digest::of(&[0; 100])));
    }

    #[test]
    fn the_order_counts_between_passes_and_not_within_one() {
        let frames = [(0..512, [1; 512]), (512..1024, [2; 512])];
        let after = |order: [usize; 2], ends: usize| {
            let mut digests = digests();
            digests.add(&(0..3 * 4096 + 100), FrameContent::Zero);
            digests.end_pass();
            for index in order {
                digests.add(&frames[index].0, FrameContent::Data(&frames[index].1));
                (1..ends).for_each(|_| digests.end_pass());
            }
            digests.end_pass();
            digests.tree().unwrap()
        };
        assert_eq!(after([0, 1], 1), after([1, 0], 1));
        assert_ne!(after([0, 1], 2), after([1, 0], 2));
        assert_ne!(after([0, 1], 1), after([0, 1], 2));
    }

    #[test]
    fn an_unknown_unit_stays_unknown_until_it_is_whole() {
        let mut digests = digests();
        digests.add(&(0..8192), FrameContent::Zero);
        digests.add(&(3 * 4096..3 * 4096 + 100), FrameContent::Zero);
        digests.add(&(8192..8193), FrameContent::Data(&[1]));
        digests.end_pass();
        assert_eq!(digests.tree(), Err(2));
        digests.add(&(8192..12_288), FrameContent::Data(&[1; 4096]));
        assert!(digests.tree().is_ok());
        assert_eq!(digests.changed().len(), 4);
    }
}
