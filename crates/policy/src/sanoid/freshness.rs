//! Whether datasets have fresh snapshots, with the output and exit codes of the Nagios check `sanoid
//! --monitor-snapshots`.

use jiff::Timestamp;

use super::check::{Check, Level};
use super::{DatasetPolicy, SnapshotType};

/// Checks all datasets; `newest` returns the time of the newest snapshot of a dataset and a type.
pub fn freshness(
    datasets: &[DatasetPolicy],
    newest: impl Fn(&str, SnapshotType) -> Option<Timestamp>,
    now: Timestamp,
) -> Check {
    let mut level = Level::Ok;
    let (mut findings, mut names) = (Vec::new(), Vec::new());
    for dataset in datasets.iter().filter(|dataset| dataset.is_monitored()) {
        names.push(&dataset.dataset[..]);
        for kind in SnapshotType::ALL {
            let newest = newest(&dataset.dataset, kind);
            let age_seconds = newest.map(|newest| now.as_second() - newest.as_second());
            let Some((finding_level, finding)) = dataset.finding(kind, age_seconds) else {
                continue;
            };
            findings.push(finding);
            level = level.max(finding_level);
        }
    }
    let line = if findings.is_empty() {
        format!(
            "OK: all monitored datasets ({}) have fresh snapshots",
            sorted(names).join(", ")
        )
    } else {
        sorted(findings).join(", ")
    };
    Check { level, line }
}

fn sorted<T: AsRef<str>>(mut words: Vec<T>) -> Vec<T> {
    words.sort_by_key(|word| word.as_ref().to_lowercase());
    words
}

impl DatasetPolicy {
    /// Whether the newest snapshot of a type is fresh, or the type is not monitored.
    pub fn is_fresh(&self, kind: SnapshotType, newest: Option<Timestamp>, now: Timestamp) -> bool {
        let age_seconds = newest.map(|newest| now.as_second() - newest.as_second());
        self.finding(kind, age_seconds).is_none()
    }

    /// The problem with the age of the newest snapshot of a type, and its level.
    fn finding(&self, kind: SnapshotType, age_seconds: Option<i64>) -> Option<(Level, String)> {
        if self.count(kind) == 0 {
            return None;
        }
        let limit = |which: &str| self.duration_seconds(&format!("{kind}_{which}"), unit_seconds(kind));
        let (warning, critical) = (limit("warn"), limit("crit"));
        let counts = |key, level| if self.is_on(key) { Level::Ok } else { level };
        let is_above = |limit: u64| age_seconds.is_none_or(|age| u64::try_from(age).unwrap_or(0) > limit);
        let dataset = &self.dataset;
        let too_old = |limit| {
            let age = format_age(age_seconds.and_then(|age| u64::try_from(age).ok()).unwrap_or(0));
            let limit = format_age(limit);
            format!("{dataset} newest {kind} snapshot is {age} old (should be < {limit})")
        };
        if is_above(critical) {
            // A critical limit of 0 disables the check, including its warning limit.
            return (critical > 0).then(|| {
                let words = match age_seconds {
                    None => format!("{dataset} has no {kind} snapshots at all!"),
                    Some(_) => too_old(critical),
                };
                (counts("monitor_dont_crit", Level::Critical), format!("CRIT: {words}"))
            });
        }
        let is_late = warning > 0 && is_above(warning);
        is_late.then(|| {
            let words = too_old(warning);
            (counts("monitor_dont_warn", Level::Warning), format!("WARN: {words}"))
        })
    }
}

/// The unit of a limit without a unit, in seconds: the next smaller unit of the type.
fn unit_seconds(kind: SnapshotType) -> u64 {
    match kind {
        SnapshotType::Frequently => 1,
        SnapshotType::Hourly => 60,
        SnapshotType::Daily => 3600,
        SnapshotType::Weekly => 86_400,
        SnapshotType::Monthly => 7 * 86_400,
        SnapshotType::Yearly => 31 * 86_400,
    }
}

/// Formats an age like "1d 2h 3m 4s".
fn format_age(seconds: u64) -> String {
    let parts = [
        (seconds / 86_400, 'd'),
        (seconds / 3600 % 24, 'h'),
        (seconds / 60 % 60, 'm'),
        (seconds % 60, 's'),
    ];
    let first = parts
        .iter()
        .position(|(number, _)| *number > 0)
        .unwrap_or(parts.len() - 1);
    let words = parts[first..].iter().map(|(number, unit)| format!("{number}{unit}"));
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::format_age;

    #[test]
    fn times_begin_with_their_largest_unit() {
        assert_eq!(format_age(0), "0s");
        assert_eq!(format_age(61), "1m 1s");
        assert_eq!(format_age(3600), "1h 0m 0s");
        assert_eq!(format_age(86_400 * 2 + 5), "2d 0h 0m 5s");
    }
}
