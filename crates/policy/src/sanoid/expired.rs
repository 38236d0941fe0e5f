//! Which snapshots are expired.

use std::fmt;

use jiff::Timestamp;

use super::{DatasetPolicy, SnapshotType};

/// A snapshot taken by sanoid, or by Holdfast in its place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypedSnapshot {
    /// Creation time, from the file system.
    pub time: Timestamp,
    /// The name, without the dataset.
    pub name: String,
    /// The type, from the name.
    pub kind: SnapshotType,
}

impl TypedSnapshot {
    /// A snapshot with this name; `None` if it is not a name that sanoid gives.
    pub fn new(name: &str, time: Timestamp) -> Option<Self> {
        Some(Self {
            time,
            name: name.to_owned(),
            kind: SnapshotType::of(name)?,
        })
    }
}

/// An expired snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expired<'s> {
    /// The snapshot.
    pub snapshot: &'s TypedSnapshot,
    /// The reason.
    pub reason: ExpiryReason,
}

/// Why a snapshot is expired; its text is one line that a user can verify.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiryReason {
    /// The type of the snapshot.
    pub kind: SnapshotType,
    /// The number of snapshots of the type to keep.
    pub count: u32,
    /// The number of existing snapshots of the type.
    pub present: usize,
    /// The minimum age for removal, in seconds.
    pub age_seconds: i64,
}

impl fmt::Display for ExpiryReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            count,
            present,
            age_seconds,
        } = self;
        write!(f, "{kind}: there are {present}, {count} to keep, and it is older than ")?;
        let hours = age_seconds / 3600;
        match age_seconds {
            seconds if seconds % 86_400 == 0 => write!(f, "{} d", hours / 24),
            seconds if seconds % 3600 == 0 => write!(f, "{hours} h"),
            seconds => write!(f, "{} min", seconds / 60),
        }
    }
}

impl DatasetPolicy {
    /// The expired snapshots, oldest first within each type. `pool_used_percent` is the fill level of the pool.
    ///
    /// A snapshot expires if more snapshots of its type exist than `count`, and it is older than `count` periods of the
    /// type.
    pub fn expired<'s>(
        &self,
        snapshots: &'s [TypedSnapshot],
        pool_used_percent: u8,
        now: Timestamp,
    ) -> Vec<Expired<'s>> {
        let defer_until_percent = self.number("prune_defer");
        let is_deferred = defer_until_percent > 0 && u32::from(pool_used_percent) <= defer_until_percent;
        if !self.prunes() || is_deferred {
            return Vec::new();
        }
        let of_kind = |kind| self.expired_of(kind, snapshots, now);
        SnapshotType::ALL.into_iter().flat_map(of_kind).collect()
    }

    fn expired_of<'s>(&self, kind: SnapshotType, snapshots: &'s [TypedSnapshot], now: Timestamp) -> Vec<Expired<'s>> {
        let count = self.count(kind);
        let age_seconds = i64::from(count) * self.period_seconds(kind);
        let mut of_kind: Vec<&TypedSnapshot> = snapshots.iter().filter(|snapshot| snapshot.kind == kind).collect();
        of_kind.sort_unstable();
        let spare = of_kind
            .len()
            .saturating_sub(usize::try_from(count).unwrap_or(usize::MAX));
        let is_old = |snapshot: &&TypedSnapshot| now.as_second() - snapshot.time.as_second() > age_seconds;
        let reason = ExpiryReason {
            kind,
            count,
            present: of_kind.len(),
            age_seconds,
        };
        let old = of_kind.into_iter().filter(is_old).take(spare);
        old.map(|snapshot| Expired {
            snapshot,
            reason: reason.clone(),
        })
        .collect()
    }

    /// Seconds between snapshots of a type.
    fn period_seconds(&self, kind: SnapshotType) -> i64 {
        const DAY: i64 = 86_400;
        match kind {
            SnapshotType::Frequently => i64::from(self.number("frequent_period")) * 60,
            SnapshotType::Hourly => DAY / 24,
            SnapshotType::Daily => DAY,
            SnapshotType::Weekly => 7 * DAY,
            SnapshotType::Monthly => 31 * DAY,
            SnapshotType::Yearly => 36_525 * DAY / 100,
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::TypedSnapshot;
    use crate::sanoid::SanoidConfig;

    fn hourlies(ages_in_hours: &[i64]) -> Vec<TypedSnapshot> {
        let ages = ages_in_hours.iter();
        ages.map(|age| {
            let time = Timestamp::from_second(1_000_000_000 - age * 3600).unwrap();
            TypedSnapshot::new(&format!("autosnap_{age}_hourly"), time).unwrap()
        })
        .collect()
    }

    fn expired(text: &str, snapshots: &[TypedSnapshot], pool_used_percent: u8) -> Vec<String> {
        let config = SanoidConfig::parse(text).unwrap().resolve(&["tank".to_owned()]);
        let now = Timestamp::from_second(1_000_000_000).unwrap();
        let expired = config.datasets[0].expired(snapshots, pool_used_percent, now);
        expired.iter().map(|one| one.snapshot.name.clone()).collect()
    }

    #[test]
    fn old_ones_go_where_there_are_more_than_are_kept() {
        let snapshots = hourlies(&[1, 3, 5, 2, 4]);
        assert_eq!(
            expired("[tank]\nhourly=3", &snapshots, 0),
            ["autosnap_5_hourly", "autosnap_4_hourly"]
        );
        assert_eq!(expired("[tank]\nhourly=4", &snapshots, 0), ["autosnap_5_hourly"]);
        assert!(expired("[tank]\nhourly=5", &snapshots, 0).is_empty());
        // The third snapshot is old, but three are kept.
        let missed = hourlies(&[1, 30, 50]);
        assert!(expired("[tank]\nhourly=3", &missed, 0).is_empty());
        assert_eq!(expired("[tank]\nhourly=0", &snapshots, 0).len(), 5);
        assert!(expired("[tank]\nhourly=0\nautoprune=no", &snapshots, 0).is_empty());
    }

    #[test]
    fn a_pool_with_room_keeps_them() {
        let snapshots = hourlies(&[1, 2]);
        let text = "[tank]\nhourly=1\nprune_defer=60";
        assert!(expired(text, &snapshots, 60).is_empty());
        assert_eq!(expired(text, &snapshots, 61), ["autosnap_2_hourly"]);
    }

    #[test]
    fn the_reason_can_be_checked() {
        let config = SanoidConfig::parse("[tank]\nhourly=1").unwrap().resolve(&[]);
        let snapshots = hourlies(&[1, 2]);
        let now = Timestamp::from_second(1_000_000_000).unwrap();
        let expired = config.datasets[0].expired(&snapshots, 0, now);
        assert_eq!(
            expired[0].reason.to_string(),
            "hourly: there are 2, 1 to keep, and it is older than 1 h"
        );
    }
}
