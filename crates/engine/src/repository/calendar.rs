//! Times of snapshots, compared with the clock of this host.
//!
//! A clock that was once wrong leaves snapshots in the future, which would be the newest ones for years. A search for
//! the newest snapshot therefore skips them and warns, as prune does. If a machine has only such snapshots, they are
//! used.

use holdfast_repo::{Manifest, Repository};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::job::Progress;

/// The point in time of a snapshot.
pub fn time_of(manifest: &Manifest) -> Timestamp {
    // A time outside jiff's range (up to the year 9999) was not written by this program.
    Timestamp::from_millisecond(manifest.time_ms).unwrap_or(Timestamp::MIN)
}

/// Largest clock difference between hosts that share a repository; a later snapshot counts as a snapshot of the future.
pub const SKEW_MS: i64 = 10 * 60 * 1000;

/// Current time and time zone: how times in names are read, and which snapshots are in the future.
#[derive(Clone, Copy)]
pub(crate) struct Calendar<'c> {
    pub(crate) zone: &'c TimeZone,
    now_ms: i64,
    progress: &'c dyn Progress,
}

impl<'c> Calendar<'c> {
    pub(crate) fn new(repository: &Repository, zone: &'c TimeZone, progress: &'c dyn Progress) -> Self {
        Self {
            zone,
            now_ms: repository.now_ms(),
            progress,
        }
    }

    #[cfg(test)]
    pub(crate) fn at(now_ms: i64, zone: &'c TimeZone, progress: &'c dyn Progress) -> Self {
        Self { zone, now_ms, progress }
    }

    /// Whether the snapshot is in the future: the clock was wrong when it was made, or is wrong now.
    pub(crate) fn is_future(&self, manifest: &Manifest) -> bool {
        manifest.time_ms > self.now_ms.saturating_add(SKEW_MS)
    }

    /// The snapshot to use: the newest one that is not in the future, or else the newest.
    pub(crate) fn choose<'m>(&self, newest: &'m Manifest, past: Option<&'m Manifest>) -> &'m Manifest {
        let is_future = self.is_future(newest);
        match past {
            Some(past) if is_future => {
                self.progress.warning(&format!(
                    "snapshot {} of {} is passed over: its time, {}, is in the future; the newest before now is of {}",
                    newest.id.short(),
                    newest.machine,
                    time_of(newest),
                    time_of(past)
                ));
                past
            }
            None if is_future => {
                self.progress.warning(&format!(
                    "snapshot {} of {} is of {}, which is in the future: the clock of this host is wrong, or was when it was made",
                    newest.id.short(),
                    newest.machine,
                    time_of(newest)
                ));
                newest
            }
            _ => newest,
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_repo::Manifest;
    use jiff::tz::TimeZone;

    use super::{Calendar, SKEW_MS};
    use crate::job::NoProgress;
    use crate::repository::name_conflict::GrantedName;
    use crate::repository::open::find_in;

    const NOW_MS: i64 = 1_700_000_000_000;
    const YEAR_MS: i64 = 365 * 24 * 3600 * 1000;

    fn manifest(number: u8, machine: &str, time_ms: i64) -> Manifest {
        let id = format!("{number:02x}").repeat(16);
        let value = serde_json::json!({ "format": 1, "id": id, "machine": machine, "time_ms": time_ms, "disks": [], "copy": id });
        serde_json::from_value(value).unwrap()
    }

    fn found(manifests: &[Manifest], text: &str) -> usize {
        let name: crate::SnapshotName = text.parse().unwrap();
        let zone = TimeZone::UTC;
        let calendar = Calendar::at(NOW_MS, &zone, &NoProgress);
        find_in(manifests, &name.snapshot, calendar).unwrap()
    }

    #[test]
    fn the_newest_is_not_one_of_the_future() {
        let all = [
            manifest(0xa1, "web", NOW_MS - 5000),
            manifest(0xa2, "web", NOW_MS + 10 * YEAR_MS),
            manifest(0xa3, "web", NOW_MS - 1000),
            manifest(0xb1, "other", NOW_MS + YEAR_MS),
        ];
        for text in ["latest", "web", "web@latest"] {
            assert_eq!(found(&all, text), 2, "{text}");
        }
        // A snapshot of the future is found by its id or time, and if it is the only one of its machine.
        assert_eq!(found(&all, "a2a2a2a2"), 1);
        assert_eq!(found(&all, "web@2033-12-01"), 1);
        assert_eq!(found(&all, "other@latest"), 3);
        let zone = TimeZone::UTC;
        let calendar = Calendar::at(NOW_MS, &zone, &NoProgress);
        let granted = GrantedName {
            own: all.iter().filter(|manifest| manifest.machine == "web").collect(),
            note: None,
        };
        assert_eq!(granted.newest(calendar).unwrap().id, all[2].id);
    }

    #[test]
    fn clocks_may_differ_by_minutes() {
        let all = [manifest(0xa1, "web", NOW_MS), manifest(0xa2, "web", NOW_MS + SKEW_MS)];
        assert_eq!(found(&all, "web"), 1);
    }
}
