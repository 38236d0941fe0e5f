//! Finds the snapshot that a user named among the existing ones.
//!
//! A wrong guess restores the wrong machine. So a name that matches several snapshots is an error that lists them, and
//! the error for a name without a match suggests similar names.

use std::collections::BTreeSet;

use jiff::tz::{Disambiguation, TimeZone};
use jiff::{SignedDuration, Timestamp};

use crate::job::error::{PREFIX_DIGITS_MIN, ResolveError};
use crate::job::name::LATEST;
use crate::{SnapshotMoment, SnapshotReference};

/// Most candidates that an error lists.
const LISTED_MAX: usize = 10;
/// Digits of an id in an error if the user gave none.
const LISTED_DIGITS: usize = 12;
/// Most machine names that an error suggests.
const SUGGESTED_MAX: usize = 5;

/// An existing snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// All digits of its id, lower case.
    pub id: &'a str,
    /// Name of its machine.
    pub machine: &'a str,
    /// Its point in time.
    pub time: Timestamp,
    /// Distinguishes its machine from others of the same name.
    pub distinction: Option<&'a str>,
}

/// Finds the snapshot that `reference` names; returns its index in `candidates`.
///
/// Local times are those of `zone`. If a clock is set back and a local time occurs twice, the later one counts; if it
/// is set forward, a skipped time counts as the moment after the change. A time without a fraction of a second includes
/// its whole second, so that a time copied from a list finds its snapshot. Of several snapshots of the same time the
/// one with the greatest id is the newest.
pub fn resolve(
    reference: &SnapshotReference,
    candidates: &[Candidate<'_>],
    zone: &TimeZone,
) -> Result<usize, ResolveError> {
    match reference {
        SnapshotReference::Latest => newest(candidates, |_| true).ok_or(ResolveError::NoSnapshots),
        SnapshotReference::Word(word) => resolve_word(word, candidates),
        SnapshotReference::Machine { machine, moment } => {
            let machine = machine.as_str();
            let limit = last_instant(*moment, zone).map_err(|_| ResolveError::TimeOutOfRange {
                machine: machine.to_owned(),
            })?;
            let in_time = |candidate: &Candidate<'_>| limit.is_none_or(|limit| candidate.time <= limit);
            let meant = |candidate: &Candidate<'_>| candidate.machine == machine && in_time(candidate);
            match newest_of_machine(machine, candidates, meant)? {
                Some(index) => Ok(index),
                None => Err(nothing_found(machine, limit, candidates)),
            }
        }
    }
}

/// Finds a snapshot by the start of its id or the name of its machine.
fn resolve_word(word: &str, candidates: &[Candidate<'_>]) -> Result<usize, ResolveError> {
    if candidates.is_empty() {
        return Err(ResolveError::NoSnapshots);
    }
    let is_hex = word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let prefix = word.to_ascii_lowercase();
    let mut by_id: Vec<usize> = if is_hex && word.len() >= PREFIX_DIGITS_MIN {
        (0..candidates.len())
            .filter(|&index| candidates[index].id.starts_with(&prefix))
            .collect()
    } else {
        Vec::new()
    };
    let by_machine = newest(candidates, |candidate| candidate.machine == word);
    match (by_id.as_slice(), by_machine) {
        ([index], None) => Ok(*index),
        ([], Some(index)) => {
            let meant = |candidate: &Candidate<'_>| candidate.machine == word;
            Ok(newest_of_machine(word, candidates, meant)?.unwrap_or(index))
        }
        ([], None) if is_hex && word.len() < PREFIX_DIGITS_MIN => {
            Err(ResolveError::PrefixTooShort { word: word.to_owned() })
        }
        ([], None) => Err(ResolveError::Unknown {
            word: word.to_owned(),
            nearest: nearest_machines(word, candidates),
        }),
        (_, by_machine) => {
            by_id.sort_by_key(|&index| std::cmp::Reverse((candidates[index].time, candidates[index].id)));
            let of_machine = by_machine.map(|_| format!("the machine {word:?} (write {word}@{LATEST})"));
            let digits = word.len() + 8;
            let of_ids = by_id.iter().map(|&index| described(&candidates[index], digits));
            let match_count = by_id.len() + usize::from(of_machine.is_some());
            Err(ResolveError::Ambiguous {
                word: word.to_owned(),
                matches: of_machine.into_iter().chain(of_ids).take(LISTED_MAX).collect(),
                match_count,
            })
        }
    }
}

/// Index of the newest candidate that fulfils `wanted`.
fn newest(candidates: &[Candidate<'_>], wanted: impl Fn(&Candidate<'_>) -> bool) -> Option<usize> {
    (0..candidates.len())
        .filter(|&index| wanted(&candidates[index]))
        .max_by_key(|&index| (candidates[index].time, candidates[index].id))
}

/// Index of the newest candidate that fulfils `meant`; all such candidates must be of one machine.
fn newest_of_machine(
    machine: &str,
    candidates: &[Candidate<'_>],
    meant: impl Fn(&Candidate<'_>) -> bool,
) -> Result<Option<usize>, ResolveError> {
    let machines: BTreeSet<Option<&str>> = candidates
        .iter()
        .filter(|candidate| meant(candidate))
        .map(|candidate| candidate.distinction)
        .collect();
    let newest_of = |distinction: Option<&str>| {
        newest(candidates, |candidate| {
            meant(candidate) && candidate.distinction == distinction
        })
    };
    let mut found: Vec<usize> = machines.into_iter().filter_map(newest_of).collect();
    if found.len() < 2 {
        return Ok(found.pop());
    }
    found.sort_by_key(|&index| std::cmp::Reverse((candidates[index].time, candidates[index].id)));
    let matches = found.iter().map(|&index| described(&candidates[index], LISTED_DIGITS));
    Err(ResolveError::SeveralMachines {
        machine: machine.to_owned(),
        matches: matches.take(LISTED_MAX).collect(),
        match_count: found.len(),
    })
}

/// The last timestamp that belongs to `moment`; none if there is no limit.
fn last_instant(moment: SnapshotMoment, zone: &TimeZone) -> Result<Option<Timestamp>, jiff::Error> {
    let nanosecond = SignedDuration::from_nanos(1);
    Ok(Some(match moment {
        SnapshotMoment::Latest => return Ok(None),
        SnapshotMoment::Instant(time) => end_of_second(time)?,
        SnapshotMoment::Local(time) => {
            let zoned = zone.to_ambiguous_zoned(time).disambiguate(Disambiguation::Later)?;
            end_of_second(zoned.timestamp())?
        }
        SnapshotMoment::Day(day) => day
            .tomorrow()?
            .to_zoned(zone.clone())?
            .timestamp()
            .checked_sub(nanosecond)?,
    }))
}

/// The last timestamp of the second that starts at `time`; `time` itself if it has a fraction.
fn end_of_second(time: Timestamp) -> Result<Timestamp, jiff::Error> {
    if time.subsec_nanosecond() == 0 {
        time.checked_add(SignedDuration::from_nanos(999_999_999))
    } else {
        Ok(time)
    }
}

/// The error for a `machine` without a snapshot up to `limit`.
fn nothing_found(machine: &str, limit: Option<Timestamp>, candidates: &[Candidate<'_>]) -> ResolveError {
    let oldest = candidates
        .iter()
        .filter(|candidate| candidate.machine == machine)
        .min_by_key(|candidate| (candidate.time, candidate.id));
    match (oldest, limit) {
        (Some(oldest), Some(limit)) => ResolveError::NothingBefore {
            machine: machine.to_owned(),
            limit,
            oldest_id: oldest.id.chars().take(12).collect(),
            oldest_time: oldest.time,
        },
        _ if candidates.is_empty() => ResolveError::NoSnapshots,
        _ => ResolveError::UnknownMachine {
            machine: machine.to_owned(),
            nearest: nearest_machines(machine, candidates),
        },
    }
}

/// A description of a candidate, with the first `digits` of its id.
fn described(candidate: &Candidate<'_>, digits: usize) -> String {
    let id: String = candidate.id.chars().take(digits).collect();
    let distinction = candidate.distinction.map(|text| format!(", {text}"));
    format!(
        "{id} ({}, {}{})",
        candidate.machine,
        candidate.time,
        distinction.unwrap_or_default()
    )
}

/// The machines with the most similar names, best first.
fn nearest_machines(word: &str, candidates: &[Candidate<'_>]) -> Vec<String> {
    nearest_names(word, candidates.iter().map(|candidate| candidate.machine))
}

/// The most similar of `names`, best first, without duplicates.
pub(crate) fn nearest_names<'n>(word: &str, names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let wanted: Vec<char> = word.to_lowercase().chars().collect();
    let distance_max = (wanted.len() / 3).max(1);
    let names: BTreeSet<&str> = names.collect();
    let mut near: Vec<(usize, &str)> = names
        .into_iter()
        .filter_map(|name| {
            let lower = name.to_lowercase();
            let is_part = wanted.len() >= 3 && lower.contains(&word.to_lowercase());
            let distance = edit_distance(&wanted, &lower.chars().collect::<Vec<_>>());
            (distance <= distance_max || is_part).then_some((distance, name))
        })
        .collect();
    near.sort_unstable();
    near.into_iter()
        .take(SUGGESTED_MAX)
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// Number of insertions, deletions, replacements and swaps of neighbours that turn `left` into `right` (optimal string alignment).
fn edit_distance(left: &[char], right: &[char]) -> usize {
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=right.len()).collect();
    for (row, &left_char) in left.iter().enumerate() {
        let mut current = vec![row + 1];
        for (column, &right_char) in right.iter().enumerate() {
            let replaced = last[column] + usize::from(left_char != right_char);
            let mut best = replaced.min(last[column + 1] + 1).min(current[column] + 1);
            if row > 0 && column > 0 && left_char == right[column - 1] && left[row - 1] == right_char {
                best = best.min(before_last[column - 1] + 1);
            }
            current.push(best);
        }
        before_last = std::mem::replace(&mut last, current);
    }
    last[right.len()]
}

#[cfg(test)]
mod tests {
    use jiff::tz::{Offset, TimeZone};

    use super::{Candidate, ResolveError, edit_distance, resolve};
    use crate::{SnapshotName, SnapshotReference};

    const A1: &str = "aaaa100000000000000000000000000000000000000000000000000000000000";
    const A2: &str = "aaaa200000000000000000000000000000000000000000000000000000000000";
    const B1: &str = "beef100000000000000000000000000000000000000000000000000000000000";
    const C1: &str = "c0de100000000000000000000000000000000000000000000000000000000000";

    fn candidates() -> Vec<Candidate<'static>> {
        [
            (A1, "web1", "2026-11-19T09:00:00Z"),
            (A2, "web1", "2026-11-20T09:00:00.4Z"),
            (B1, "web2", "2026-11-21T09:00:00Z"),
            (C1, "beef", "2026-11-18T09:00:00Z"),
        ]
        .map(|(id, machine, time)| Candidate {
            id,
            machine,
            time: time.parse().unwrap(),
            distinction: None,
        })
        .to_vec()
    }

    fn find_in(zone: &TimeZone, text: &str) -> Result<&'static str, ResolveError> {
        let name: SnapshotName = text.parse().unwrap();
        let candidates = candidates();
        resolve(&name.snapshot, &candidates, zone).map(|index| candidates[index].id)
    }

    fn find(text: &str) -> Result<&'static str, ResolveError> {
        find_in(&TimeZone::UTC, text)
    }

    #[test]
    fn names_find_their_snapshot() {
        assert_eq!(find("latest"), Ok(B1));
        assert_eq!(find("aaaa1"), Ok(A1));
        assert_eq!(find("AAAA2"), Ok(A2));
        assert_eq!(find(A1), Ok(A1));
        assert_eq!(find("c0de"), Ok(C1));
        assert_eq!(find("web1"), Ok(A2));
        assert_eq!(find("web1@latest"), Ok(A2));
        assert_eq!(find("beef@latest"), Ok(C1));
        assert_eq!(find("beef1"), Ok(B1));
    }

    #[test]
    fn a_moment_includes_all_of_its_day_and_its_second() {
        assert_eq!(find("web1@2026-11-19"), Ok(A1));
        assert_eq!(find("web1@2026-11-20"), Ok(A2));
        assert_eq!(find("web1@2026-11-20T08:59:59"), Ok(A1));
        assert_eq!(find("web1@2026-11-20T09:00:00"), Ok(A2));
        assert_eq!(find("web1@2026-11-20T09:00:00.3"), Ok(A1));
        assert_eq!(find("web1@2026-11-20T09:00:00.4"), Ok(A2));
        assert_eq!(find("web1@2026-11-20T10:00+01:00"), Ok(A2));
        assert_eq!(find("web1@2026-11-20T10:00+01:01"), Ok(A1));
    }

    #[test]
    fn times_and_days_are_local() {
        let zone = TimeZone::fixed(Offset::constant(10));
        assert_eq!(find_in(&zone, "web1@2026-11-20T18:59"), Ok(A1));
        assert_eq!(find_in(&zone, "web1@2026-11-20T19:00"), Ok(A2));
        let behind = TimeZone::fixed(Offset::constant(-10));
        assert_eq!(find_in(&behind, "web1@2026-11-19"), Ok(A2));
        assert_eq!(find_in(&behind, "web1@2026-11-18"), Ok(A1));
    }

    /// Berlin sets its clock back on 2026-10-25: 02:30 occurs at 00:30Z and again at 01:30Z.
    #[test]
    fn a_local_time_that_comes_twice_is_the_later_one() {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        let candidates =
            ["2026-10-25T00:29:00Z", "2026-10-25T01:29:00Z", "2026-10-25T01:31:00Z"].map(|time| Candidate {
                id: A1,
                machine: "m",
                time: time.parse().unwrap(),
                distinction: None,
            });
        let name: SnapshotName = "m@2026-10-25T02:30".parse().unwrap();
        assert_eq!(resolve(&name.snapshot, &candidates, &zone), Ok(1));
    }

    #[test]
    fn of_one_instant_the_greatest_id_is_the_newest() {
        let time = "2026-11-20T09:00:00Z".parse().unwrap();
        let same = [A2, A1].map(|id| Candidate {
            id,
            machine: "m",
            time,
            distinction: None,
        });
        assert_eq!(resolve(&SnapshotReference::Latest, &same, &TimeZone::UTC), Ok(0));
    }

    #[test]
    fn an_ambiguous_word_lists_what_it_could_be() {
        assert_eq!(
            find("aaaa").unwrap_err().to_string(),
            "\"aaaa\" is ambiguous: it could be aaaa20000000 (web1, 2026-11-20T09:00:00.4Z) or aaaa10000000 (web1, 2026-11-19T09:00:00Z)"
        );
        assert_eq!(
            find("beef").unwrap_err().to_string(),
            "\"beef\" is ambiguous: it could be the machine \"beef\" (write beef@latest) or beef10000000 (web2, 2026-11-21T09:00:00Z)"
        );
    }

    /// Two machines of the same name: a guess could restore the wrong one.
    #[test]
    fn a_name_of_two_machines_means_a_snapshot_only_where_one_has_it() {
        let mut candidates = candidates();
        candidates[0].distinction = Some("UUID 1");
        candidates[1].distinction = Some("UUID 2");
        let find = |text: &str| {
            let name: SnapshotName = text.parse().unwrap();
            resolve(&name.snapshot, &candidates, &TimeZone::UTC).map(|index| candidates[index].id)
        };
        for text in ["web1", "web1@latest", "web1@2026-11-20"] {
            let error = find(text).unwrap_err();
            assert_eq!(
                error.to_string(),
                "\"web1\" is the name of several machines: it could be aaaa20000000 (web1, 2026-11-20T09:00:00.4Z, UUID 2) or \
                 aaaa10000000 (web1, 2026-11-19T09:00:00Z, UUID 1)",
                "{text}"
            );
        }
        assert_eq!(find("web1@2026-11-19"), Ok(A1), "the other one was not there yet");
        assert_eq!(find("aaaa2"), Ok(A2));
        assert_eq!(find("web2"), Ok(B1));
    }

    #[test]
    fn a_long_list_of_matches_is_cut() {
        let ids: Vec<String> = (0..30).map(|number| format!("ffff{number:060x}")).collect();
        let time = "2026-11-20T09:00:00Z".parse().unwrap();
        let many: Vec<Candidate<'_>> = ids
            .iter()
            .map(|id| Candidate {
                id,
                machine: "m",
                time,
                distinction: None,
            })
            .collect();
        let error = resolve(&SnapshotReference::Word("ffff".to_owned()), &many, &TimeZone::UTC).unwrap_err();
        assert!(matches!(&error, ResolveError::Ambiguous { matches, match_count: 30, .. } if matches.len() == 10));
        assert!(error.to_string().ends_with(" or 20 more"), "{error}");
    }

    #[test]
    fn an_unknown_name_suggests_the_nearest() {
        assert_eq!(
            find("wbe1@latest").unwrap_err().to_string(),
            "no machine is called \"wbe1\"; similar names: \"web1\""
        );
        assert_eq!(
            find("WEB3").unwrap_err().to_string(),
            "no snapshot and no machine is called \"WEB3\"; similar names: \"web1\", \"web2\""
        );
        assert_eq!(
            find("mail").unwrap_err().to_string(),
            "no snapshot and no machine is called \"mail\""
        );
        assert_eq!(
            find("aaa"),
            Err(ResolveError::PrefixTooShort { word: "aaa".to_owned() })
        );
        assert!(matches!(find("aaaa3"), Err(ResolveError::Unknown { .. })));
    }

    #[test]
    fn nothing_that_old_says_the_oldest() {
        assert_eq!(
            find("web1@2026-11-18").unwrap_err().to_string(),
            "\"web1\" has no snapshot at or before 2026-11-18T23:59:59.999999999Z; its oldest is aaaa10000000 of 2026-11-19T09:00:00Z"
        );
    }

    #[test]
    fn an_empty_list_has_an_error_of_its_own() {
        for text in ["latest", "aaaa", "web1@latest"] {
            let name: SnapshotName = text.parse().unwrap();
            assert_eq!(
                resolve(&name.snapshot, &[], &TimeZone::UTC),
                Err(ResolveError::NoSnapshots),
                "{text}"
            );
        }
    }

    #[test]
    fn distance_counts_swaps_as_one() {
        let distance = |left: &str, right: &str| {
            edit_distance(&left.chars().collect::<Vec<_>>(), &right.chars().collect::<Vec<_>>())
        };
        assert_eq!(distance("web1", "web1"), 0);
        assert_eq!(distance("wbe1", "web1"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
