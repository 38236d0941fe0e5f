//! The rate at which the disks of a running machine are filled.

use std::num::NonZeroU64;
use std::time::Duration;

/// Bytes per second in the first minute, in which the guest boots and needs the processors and the repository most.
const FIRST_RATE: NonZeroU64 = NonZeroU64::new(64 << 20).expect("it is not zero");
/// The interval after which the rate doubles. Otherwise a guest that writes as fast as its disks are filled would keep
/// them from becoming complete.
const DOUBLING: Duration = Duration::from_secs(60);
const DOUBLING_COUNT_MAX: u32 = 10;

/// Bytes per second for all disks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FillRate {
    /// 64 MiB at first, doubled every minute.
    #[default]
    Rising,
    /// A constant rate.
    Fixed(NonZeroU64),
}

impl FillRate {
    /// A constant rate if a limit is given, else a rising one.
    pub fn at_most(limit: Option<NonZeroU64>) -> Self {
        limit.map_or_else(Self::default, Self::Fixed)
    }

    /// The rate of each of `disk_count` disks `elapsed` after the first byte.
    pub(super) fn of_each(self, disk_count: usize, elapsed: Duration) -> NonZeroU64 {
        let whole = match self {
            Self::Rising => {
                let minutes = elapsed.as_secs() / DOUBLING.as_secs();
                let doublings =
                    u32::try_from(minutes).map_or(DOUBLING_COUNT_MAX, |minutes| minutes.min(DOUBLING_COUNT_MAX));
                FIRST_RATE.get() << doublings
            }
            Self::Fixed(rate) => rate.get(),
        };
        NonZeroU64::new(whole / disk_count.max(1) as u64).unwrap_or(NonZeroU64::MIN)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::time::Duration;

    use super::FillRate;

    #[test]
    fn disks_share_a_rate_that_rises_unless_it_is_fixed() {
        let rate = |rate: FillRate, disk_count, seconds| rate.of_each(disk_count, Duration::from_secs(seconds)).get();
        assert_eq!(rate(FillRate::Rising, 1, 0), 64 << 20);
        assert_eq!(rate(FillRate::Rising, 2, 59), 32 << 20);
        assert_eq!(rate(FillRate::Rising, 2, 60), 64 << 20);
        assert_eq!(rate(FillRate::Rising, 0, u64::MAX), 64 << 30);
        let fixed = FillRate::Fixed(NonZeroU64::new(3).unwrap());
        assert_eq!(rate(fixed, 1, 0), 3);
        assert_eq!(rate(fixed, 4, 3600), 1);
    }
}
