//! How a disk is divided into units.
//!
//! A *unit* is an aligned piece of the disk of fixed size, 1 MiB by default. Units are what is hashed, journalled, and
//! compared after an interruption. The last unit may be shorter.

use std::ops::Range;

use crate::{Error, Result};

/// Smallest size of a unit, in bytes.
const UNIT_BYTES_MIN: u32 = 4 << 10;
/// Largest size of a unit, in bytes: a unit must fit into one frame.
const UNIT_BYTES_MAX: u32 = 1 << 20;
/// Smallest size of a unit of a copy with a seed, in bytes, and largest number of such units.
const SEEDED_UNIT_BYTES_MIN: u32 = 64 << 10;
const SEEDED_UNIT_COUNT_MAX: u64 = 1 << 20;
/// Largest number of units: their map fits into one frame with one bit each. 32 TiB with units of 1 MiB.
const UNIT_COUNT_MAX: u64 = 1 << 25;

/// The size of a disk, and of its units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitLayout {
    size_bytes: u64,
    unit_bytes: u32,
}

/// What a target held before a copy began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PriorContent {
    /// Nothing of the disk.
    Unrelated,
    /// An earlier or similar content of the disk: every unit is compared by hash before it is sent.
    Similar,
}

impl PriorContent {
    /// Of a target that is filled from a seed, if there is one.
    pub fn of_seed<T>(seed: Option<&T>) -> Self {
        match seed {
            Some(_) => Self::Similar,
            None => Self::Unrelated,
        }
    }
}

impl UnitLayout {
    /// A disk of `size_bytes`, at least 1, in units of `unit_bytes`: a power of two from 4 KiB to 1 MiB, such that
    /// there are at most 2^25 units.
    pub fn new(size_bytes: u64, unit_bytes: u32) -> Result<Self> {
        let is_supported = size_bytes > 0
            && unit_bytes.is_power_of_two()
            && (UNIT_BYTES_MIN..=UNIT_BYTES_MAX).contains(&unit_bytes)
            && size_bytes.div_ceil(u64::from(unit_bytes)) <= UNIT_COUNT_MAX;
        if is_supported {
            Ok(Self { size_bytes, unit_bytes })
        } else {
            Err(Error::Layout { size_bytes, unit_bytes })
        }
    }

    /// The layout for a disk that is copied by a sender: units of 1 MiB. With a seed, all units are compared, and one byte that
    /// differs costs a whole unit, so they are smaller: from 64 KiB on, as long as there are at most 2^20, for the memory of both
    /// sides.
    pub fn of_copy(size_bytes: u64, prior: PriorContent) -> Result<Self> {
        let unit_bytes = match prior {
            PriorContent::Unrelated => UNIT_BYTES_MAX,
            PriorContent::Similar => {
                let wanted = size_bytes.div_ceil(SEEDED_UNIT_COUNT_MAX).next_power_of_two();
                u32::try_from(wanted).map_or(UNIT_BYTES_MAX, |wanted| {
                    wanted.clamp(SEEDED_UNIT_BYTES_MIN, UNIT_BYTES_MAX)
                })
            }
        };
        Self::new(size_bytes, unit_bytes)
    }

    /// Size of the disk, in bytes.
    pub fn size_bytes(self) -> u64 {
        self.size_bytes
    }

    /// Size of a unit, in bytes.
    pub fn unit_bytes(self) -> u32 {
        self.unit_bytes
    }

    /// Number of units.
    pub fn unit_count(self) -> u64 {
        self.size_bytes.div_ceil(u64::from(self.unit_bytes))
    }

    /// The bytes of `unit`, which must exist.
    pub fn bytes_of(self, unit: u64) -> Range<u64> {
        assert!(unit < self.unit_count(), "unit {unit} does not exist");
        let start = unit * u64::from(self.unit_bytes);
        start..(start + u64::from(self.unit_bytes)).min(self.size_bytes)
    }

    /// The units that have bytes of `range`.
    pub fn units_of(self, range: &Range<u64>) -> Range<u64> {
        let unit_bytes = u64::from(self.unit_bytes);
        range.start / unit_bytes..range.end.div_ceil(unit_bytes).min(self.unit_count())
    }

    /// Whether a range is not empty, and lies on the disk.
    pub fn contains(self, range: &Range<u64>) -> bool {
        range.start < range.end && range.end <= self.size_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::{PriorContent, UnitLayout};

    #[test]
    fn the_last_unit_may_be_short() {
        let layout = UnitLayout::new(10_000, 4096).unwrap();
        assert_eq!(layout.unit_count(), 3);
        assert_eq!(layout.bytes_of(2), 8192..10_000);
        assert_eq!(layout.units_of(&(4095..4097)), 0..2);
        assert_eq!(layout.units_of(&(4096..8192)), 1..2);
        assert!(layout.contains(&(9999..10_000)) && !layout.contains(&(9999..10_001)) && !layout.contains(&(5..5)));
    }

    #[test]
    fn units_of_a_copy_with_a_seed_are_small_and_not_too_many() {
        let unit_bytes = |size_bytes, prior| UnitLayout::of_copy(size_bytes, prior).unwrap().unit_bytes();
        assert_eq!(unit_bytes(1, PriorContent::Unrelated), 1 << 20);
        for (size_bytes, expected) in [
            (1, 64 << 10),
            (1 << 36, 64 << 10),
            ((1 << 36) + 1, 128 << 10),
            (1 << 40, 1 << 20),
            (1 << 45, 1 << 20),
        ] {
            assert_eq!(unit_bytes(size_bytes, PriorContent::Similar), expected, "{size_bytes}");
        }
    }

    #[test]
    fn unsupported_dimensions_are_refused() {
        assert!(UnitLayout::new(0, 4096).is_err());
        assert!(UnitLayout::new(4096, 5000).is_err());
        assert!(UnitLayout::new(4096, 2048).is_err());
        assert!(UnitLayout::new(4096, 2 << 20).is_err());
        assert!(UnitLayout::new(1 << 45, 1 << 20).is_ok());
        assert!(UnitLayout::new((1 << 45) + 1, 1 << 20).is_err());
    }
}
