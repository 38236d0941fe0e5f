//! Reads sanoid's configuration and makes sanoid's decisions.
//!
//! [`SanoidConfig::parse`] reads a `sanoid.conf`; [`SanoidConfig::resolve`] determines the settings of each dataset.
//! Which snapshots are due ([`DatasetPolicy::due`]) and expired ([`DatasetPolicy::expired`]) is decided exactly as by
//! sanoid, to the second. [`freshness`], [`health`] and [`capacity`] are sanoid's monitor checks. Intended differences
//! are in `docs/sanoid.md`.
//!
//! Source: the behaviour of sanoid 2.1.0 and 2.3.0, <https://github.com/jimsalterjrs/sanoid>. A test compares every
//! decision with sanoid itself.

mod check;
mod config;
mod due;
mod error;
mod expired;
mod freshness;
mod ini;
mod keys;
mod pools;
mod resolve;

pub use check::{Check, Level};
pub use config::{SanoidConfig, SanoidWarning};
pub use error::SanoidError;
pub use expired::{Expired, ExpiryReason, TypedSnapshot};
pub use freshness::freshness;
pub use pools::{CapacityLimits, PoolDevice, PoolFacts, PoolStatus, capacity, health, percent};
pub use resolve::{DatasetPolicy, Hooks, Origin, ResolvedDatasets, Setting};

use std::fmt;

use jiff::Zoned;

/// A type of snapshot: how long it is kept, and how often it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SnapshotType {
    /// Once a year.
    Yearly,
    /// Once a month.
    Monthly,
    /// Once a week.
    Weekly,
    /// Once a day.
    Daily,
    /// Once an hour.
    Hourly,
    /// Every quarter of an hour, or as set by the dataset's `frequent_period`.
    Frequently,
}

impl SnapshotType {
    /// All types, in the order in which they are taken.
    pub const ALL: [Self; 6] = [
        Self::Yearly,
        Self::Monthly,
        Self::Weekly,
        Self::Daily,
        Self::Hourly,
        Self::Frequently,
    ];

    /// Its name, in the configuration and in names of snapshots.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Yearly => "yearly",
            Self::Monthly => "monthly",
            Self::Weekly => "weekly",
            Self::Daily => "daily",
            Self::Hourly => "hourly",
            Self::Frequently => "frequently",
        }
    }

    /// The type of a snapshot, from its name; `None` if neither sanoid nor Holdfast in its place has taken the
    /// snapshot.
    pub fn of(snapshot: &str) -> Option<Self> {
        if !snapshot.starts_with("autosnap") || !snapshot.ends_with("ly") {
            return None;
        }
        let (_, last) = snapshot.rsplit_once('_')?;
        Self::ALL.into_iter().find(|kind| kind.name() == last)
    }
}

impl fmt::Display for SnapshotType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name of a snapshot taken now, in local time of `now`'s zone.
pub fn snapshot_name(now: &Zoned, kind: SnapshotType) -> String {
    format!("autosnap_{}_{kind}", now.strftime("%Y-%m-%d_%H:%M:%S"))
}

/// The name to use if [`snapshot_name`] already exists, in the hour that is repeated at the end of summer time.
pub fn repeated_hour_name(now: &Zoned, kind: SnapshotType) -> String {
    format!("autosnap_{}dst_{kind}", now.strftime("%Y-%m-%d_%H:%M:%S"))
}

#[cfg(test)]
mod tests {
    use super::{SnapshotType, repeated_hour_name, snapshot_name};

    #[test]
    fn names_tell_types() {
        let now = "2026-10-25T02:00:01+01:00[Europe/Berlin]".parse().unwrap();
        for kind in SnapshotType::ALL {
            for name in [snapshot_name(&now, kind), repeated_hour_name(&now, kind)] {
                assert_eq!(SnapshotType::of(&name), Some(kind), "{name}");
            }
        }
        assert_eq!(
            snapshot_name(&now, SnapshotType::Daily),
            "autosnap_2026-10-25_02:00:01_daily"
        );
        let repeated = repeated_hour_name(&now, SnapshotType::Hourly);
        assert_eq!(repeated, "autosnap_2026-10-25_02:00:01dst_hourly");
        for other in [
            "syncoid_host_2026-10-25_hourly",
            "autosnap_hourly_x",
            "autosnaphourly",
            "autosnap_x_fully",
            "hourly",
        ] {
            assert_eq!(SnapshotType::of(other), None, "{other}");
        }
    }
}
