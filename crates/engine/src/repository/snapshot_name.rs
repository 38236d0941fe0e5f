//! Parses the names that users give to snapshots, without access to a repository.
//!
//! | text | means |
//! |---|---|
//! | `3fa2c1` | the snapshot whose id starts with these digits (at least 4), or the newest of the machine of this name |
//! | `latest` | the newest snapshot of all |
//! | `web1` | the newest snapshot of the machine |
//! | `web1@latest` | the same, also where the name alone could be read in another way |
//! | `web1@2026-11-20` | its newest snapshot up to the end of that day, local time |
//! | `web1@2026-11-20T10:00` | its newest snapshot at or before that local time |
//! | `web1@2026-11-20T10:00+01:00` | the same with an explicit offset; `Z` for UTC |
//!
//! Each may be followed by `:DISK`. After a time, digits that can be read as part of the time are part of the time: for
//! a disk called `30` write the seconds out (`web1@2026-11-20T10:00:00:30`).

use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::{Date, DateTime};

use crate::job::name::LATEST;
use crate::job::{DiskName, MachineName, NameError};

/// A snapshot as named by a user, optionally with one of its disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotName {
    /// Which snapshot.
    pub snapshot: SnapshotReference,
    /// Which of its disks, if one is named.
    pub disk: Option<DiskName>,
}

/// Which snapshot is meant; [`resolve`](crate::resolve()) finds it in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotReference {
    /// The newest of all.
    Latest,
    /// An id, the start of one, or the name of a machine: only the list of snapshots can tell.
    Word(String),
    /// One of a machine's snapshots.
    Machine {
        /// The machine.
        machine: MachineName,
        /// Which one.
        moment: SnapshotMoment,
    },
}

/// Which of a machine's snapshots is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotMoment {
    /// The newest.
    Latest,
    /// The newest up to the end of a day, local time.
    Day(Date),
    /// The newest at or before a local time.
    Local(DateTime),
    /// The newest at or before a time with an offset.
    Instant(Timestamp),
}

impl FromStr for SnapshotName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if let Some((machine, rest)) = text.split_once('@') {
            let machine = MachineName::new(machine)?;
            let (moment, disk) = moment_and_disk(rest)?;
            return Ok(Self {
                snapshot: SnapshotReference::Machine { machine, moment },
                disk,
            });
        }
        let (word, disk) = match text.split_once(':') {
            Some((word, disk)) => (word, Some(DiskName::new(disk)?)),
            None => (text, None),
        };
        let snapshot = if word == LATEST {
            SnapshotReference::Latest
        } else if is_snapshot_id(word) {
            SnapshotReference::Word(word.to_owned())
        } else {
            SnapshotReference::Word(MachineName::new(word)?.as_str().to_owned())
        };
        Ok(Self { snapshot, disk })
    }
}

/// Whether `word` is a whole snapshot id, which is not a valid machine name.
fn is_snapshot_id(word: &str) -> bool {
    word.len() == crate::job::name::SNAPSHOT_ID_DIGITS && word.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Splits the text after the `@`; the time takes as much as it can.
fn moment_and_disk(text: &str) -> Result<(SnapshotMoment, Option<DiskName>), NameError> {
    if let Some(moment) = parse_moment(text) {
        return Ok((moment, None));
    }
    if let Some((time, disk)) = text.rsplit_once(':')
        && let Some(moment) = parse_moment(time)
    {
        return Ok((moment, Some(DiskName::new(disk)?)));
    }
    Err(NameError::Time { text: text.to_owned() })
}

/// Parses `latest`, a date, or a time at least to the minute. Other forms of ISO 8601 are refused, since some of them
/// cannot be distinguished from a time and a disk (`T10:00` is also hour 10 and the disk `00`).
fn parse_moment(text: &str) -> Option<SnapshotMoment> {
    if text == LATEST {
        return Some(SnapshotMoment::Latest);
    }
    if has_shape(text, "dddd-dd-dd") {
        return text.parse().ok().map(SnapshotMoment::Day);
    }
    let (local, offset) = match text.strip_suffix('Z') {
        Some(local) => (local, "Z"),
        None => match text.get(16..).and_then(|tail| tail.find(['+', '-'])) {
            Some(at) => text.split_at(16 + at),
            None => (text, ""),
        },
    };
    let (seconds, fraction) = local.split_once('.').unwrap_or((local, "0"));
    let is_local_time =
        has_shape(seconds, "dddd-dd-ddTdd:dd:dd") || (has_shape(seconds, "dddd-dd-ddTdd:dd") && !local.contains('.'));
    let is_fraction = (1..=9).contains(&fraction.len()) && fraction.bytes().all(|byte| byte.is_ascii_digit());
    let is_offset = matches!(offset, "" | "Z") || has_shape(offset, "+dd:dd") || has_shape(offset, "-dd:dd");
    if !(is_local_time && is_fraction && is_offset) {
        return None;
    }
    if offset.is_empty() {
        local.parse().ok().map(SnapshotMoment::Local)
    } else {
        text.parse().ok().map(SnapshotMoment::Instant)
    }
}

/// Whether `text` matches `shape`, in which `d` stands for a digit.
fn has_shape(text: &str, shape: &str) -> bool {
    text.len() == shape.len()
        && text.bytes().zip(shape.bytes()).all(|(byte, wanted)| {
            if wanted == b'd' {
                byte.is_ascii_digit()
            } else {
                byte == wanted
            }
        })
}

#[cfg(test)]
mod tests {
    use jiff::civil::{date, time};
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{SnapshotMoment, SnapshotName, SnapshotReference};
    use crate::job::{DiskName, MachineName, NameError};

    fn parse(text: &str) -> SnapshotName {
        text.parse().unwrap()
    }

    fn machine(name: &str, moment: SnapshotMoment, disk: Option<&str>) -> SnapshotName {
        SnapshotName {
            snapshot: SnapshotReference::Machine {
                machine: MachineName::new(name).unwrap(),
                moment,
            },
            disk: disk.map(|disk| DiskName::new(disk).unwrap()),
        }
    }

    #[test]
    fn words_stay_words_until_a_list_is_there() {
        let word = |word: &str, disk: Option<&str>| SnapshotName {
            snapshot: SnapshotReference::Word(word.to_owned()),
            disk: disk.map(|disk| DiskName::new(disk).unwrap()),
        };
        assert_eq!(parse("3fa2"), word("3fa2", None));
        assert_eq!(parse("my server:vda"), word("my server", Some("vda")));
        let id = "0a".repeat(16);
        assert_eq!(parse(&format!("{id}:vda")), word(&id, Some("vda")));
        assert_eq!(parse("latest").snapshot, SnapshotReference::Latest);
        assert_eq!(parse("latest:vda").disk, Some(DiskName::new("vda").unwrap()));
    }

    #[test]
    fn a_machine_has_moments() {
        let ten = date(2026, 11, 20).to_datetime(time(10, 0, 0, 0));
        assert_eq!(parse("web1@latest"), machine("web1", SnapshotMoment::Latest, None));
        assert_eq!(
            parse("web1@latest:vda"),
            machine("web1", SnapshotMoment::Latest, Some("vda"))
        );
        assert_eq!(
            parse("web1@2026-11-20"),
            machine("web1", SnapshotMoment::Day(date(2026, 11, 20)), None)
        );
        assert_eq!(
            parse("web1@2026-11-20T10:00"),
            machine("web1", SnapshotMoment::Local(ten), None)
        );
        assert_eq!(
            parse("web1@2026-11-20T10:00:00"),
            machine("web1", SnapshotMoment::Local(ten), None)
        );
        let fraction = date(2026, 11, 20).to_datetime(time(10, 0, 0, 250_000_000));
        assert_eq!(
            parse("web1@2026-11-20T10:00:00.25"),
            machine("web1", SnapshotMoment::Local(fraction), None)
        );
    }

    #[test]
    fn an_offset_makes_an_instant() {
        let instant = SnapshotMoment::Instant("2026-11-20T09:00:00Z".parse().unwrap());
        for text in [
            "2026-11-20T09:00Z",
            "2026-11-20T10:00+01:00",
            "2026-11-20T05:30:00-03:30",
        ] {
            assert_eq!(parse(&format!("web1@{text}")), machine("web1", instant, None));
            assert_eq!(
                parse(&format!("web1@{text}:vda")),
                machine("web1", instant, Some("vda"))
            );
        }
    }

    #[test]
    fn the_time_takes_as_much_as_it_can() {
        let at = |second| SnapshotMoment::Local(date(2026, 11, 20).to_datetime(time(10, 0, second, 0)));
        assert_eq!(parse("web1@2026-11-20T10:00:vda"), machine("web1", at(0), Some("vda")));
        assert_eq!(parse("web1@2026-11-20T10:00:30"), machine("web1", at(30), None));
        assert_eq!(parse("web1@2026-11-20T10:00:00:30"), machine("web1", at(0), Some("30")));
        assert_eq!(
            parse("web1@2026-11-20:30"),
            machine("web1", SnapshotMoment::Day(date(2026, 11, 20)), Some("30"))
        );
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "web1@",
            "web1@yesterday",
            "web1@2026-02-30",
            "web1@2026-11-20T10",
            "web1@2026-11-20T25:00",
            "web1@2026-11-20T10:00.5",
            "web1@2026-11-20T10:00:00.:vda",
            "web1@2026-11-20T10:00+1",
            "web1@2026-11-20 10:00",
            "web1@2026-11-20T10:00:00+01:00[Europe/Berlin]",
            "web1@ä2026-11-20T10:0ä",
        ] {
            assert!(
                matches!(text.parse::<SnapshotName>(), Err(NameError::Time { .. })),
                "{text}"
            );
        }
        assert_eq!("".parse::<SnapshotName>(), Err(NameError::Empty));
        assert_eq!("web1:".parse::<SnapshotName>(), Err(NameError::Empty));
        assert_eq!("@latest".parse::<SnapshotName>(), Err(NameError::Empty));
        assert!(matches!(
            "a/b".parse::<SnapshotName>(),
            Err(NameError::Character { .. })
        ));
        assert!(matches!(
            "a:b:c".parse::<SnapshotName>(),
            Err(NameError::Character { .. })
        ));
    }

    proptest! {
        #[test]
        fn any_text_gets_an_answer_and_none_with_control_characters_passes(text in any::<String>(), tail in any::<String>()) {
            for text in [text, format!("m@2026-11-20{tail}")] {
                if text.parse::<SnapshotName>().is_ok() {
                    prop_assert!(!text.chars().any(char::is_control), "{:?}", text);
                }
            }
        }

        #[test]
        fn a_valid_machine_and_disk_come_back(name in "[a-zA-Z][a-z0-9 .#]{0,20}[a-z]", disk in "[a-z][a-z0-9]{0,6}") {
            let named = parse(&format!("{name}@latest:{disk}"));
            prop_assert_eq!(named, machine(&name, SnapshotMoment::Latest, Some(&disk)));
        }
    }
}
