//! The default names of host snapshots: their series and their point in time.
//!
//! `holdfast_web1_2026-11-22_16:45:10Z` belongs to the series `holdfast_web1` of one machine;
//! `holdfast_2026-11-22_16:45:10Z` belongs to the series
//! `holdfast` of a dataset. Retention counts within a series.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Prefix of the names of all series.
const BEGINNING: &str = "holdfast";
/// The format of the time: each 0 is a digit.
const INSTANT: &[u8] = b"_0000-00-00_00:00:00Z";

/// The series of a machine's host snapshots, or of those of datasets.
pub fn series_name(machine: Option<&str>) -> String {
    let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || "_.:-".contains(letter);
    match machine {
        Some(machine) => {
            let safe = machine
                .chars()
                .map(|letter| if is_allowed(letter) { letter } else { '-' });
            format!("{BEGINNING}_{}", safe.collect::<String>())
        }
        None => BEGINNING.to_owned(),
    }
}

/// The name of a host snapshot of this time; in UTC, so that names can be sorted and read on other hosts.
pub fn name_of_instant(machine: Option<&str>, instant: Timestamp) -> String {
    let time = instant.to_zoned(TimeZone::UTC);
    format!("{}_{}", series_name(machine), time.strftime("%Y-%m-%d_%H:%M:%SZ"))
}

/// The series of a host snapshot; none if the user chose its name.
pub(super) fn series_of(name: &str) -> Option<&str> {
    let (series, instant) = name.split_at_checked(name.len().checked_sub(INSTANT.len())?)?;
    let is_instant = instant.bytes().zip(INSTANT).all(|(byte, shape)| match shape {
        b'0' => byte.is_ascii_digit(),
        _ => byte == *shape,
    });
    let machine = series.strip_prefix(BEGINNING)?;
    (is_instant && (machine.is_empty() || machine.starts_with('_'))).then_some(series)
}

#[cfg(test)]
mod tests {
    use super::{name_of_instant, series_name, series_of};

    #[test]
    fn a_series_is_found_in_the_names_that_are_given_and_in_no_other() {
        let instant = "2026-11-22T16:45:10.5Z".parse().unwrap();
        for machine in [None, Some("web1"), Some("a b/\u{fc}"), Some("x_2026-11-22_16:45:10Z")] {
            let name = name_of_instant(machine, instant);
            assert_eq!(series_of(&name), Some(&series_name(machine)[..]), "{name}");
        }
        assert_eq!(
            name_of_instant(Some("web1"), instant),
            "holdfast_web1_2026-11-22_16:45:10Z"
        );
        for name in [
            "",
            "before-update",
            "holdfast",
            "autosnap_2026-11-22_16:45:10_hourly",
            "holdfast_2026-11-22_16:45:10",
            "holdfast-backup-2026_2026-11-22_16:45:10Z",
            "holdfast_web1_2026-11-22_16:45:10Z_before-rollback-0a0b",
            "\u{fc}_2026-11-22_16:45:10Z",
        ] {
            assert_eq!(series_of(name), None, "{name}");
        }
    }
}
