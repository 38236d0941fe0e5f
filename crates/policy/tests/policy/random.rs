//! Random choices that can be replayed from a seed.

use holdfast_policy::{TimeZone, Timestamp};

/// SplitMix64, so that a seed repeats all choices.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn of<'t>(&mut self, choices: &[&'t str]) -> &'t str {
        choices[usize::try_from(self.below(choices.len() as u64)).unwrap()]
    }

    /// From 2024 to 2026; often within a day of a clock change.
    pub(crate) fn time(&mut self, zone: &TimeZone) -> Timestamp {
        let beginning: Timestamp = "2024-01-01T00:00:00Z".parse().unwrap();
        let time = |second| Timestamp::from_second(second).unwrap();
        let random_time = time(beginning.as_second() + i64::try_from(self.below(3 * 365 * 86_400)).unwrap());
        let change = zone.following(random_time).next();
        match change {
            Some(change) if self.chance(60) => {
                let offset = i64::try_from(self.below(2 * 86_400)).unwrap() - 86_400;
                time(change.timestamp().as_second() + offset)
            }
            _ => random_time,
        }
    }
}
