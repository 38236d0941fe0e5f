//! Calendar expressions for recurring events: `Mon..Fri 02:30`, `*:0/15`, `daily`.
//!
//! The syntax is that of systemd's timers, `systemd.time(7)`, "Calendar events", so that an expression can be copied
//! from a timer: weekdays, a date, a time and a time zone, each of them optional. A [`Calendar`] is the set of instants
//! whose local time matches the expression; [`Calendar::next_after`] finds the first one after a given instant.
//!
//! When clocks change:
//! - A skipped time does not occur: `02:30` has no instant on a day on which the clock jumps from 02:00 to 03:00.
//!   systemd does the same.
//! - A repeated time counts once, the first time, if the expression names hours (`02:30`). It counts twice if every
//!   hour matches (`hourly`, `*:0/15`), so that a job that runs every 15 minutes has no gap of an hour. Whether an
//!   instant matches does not depend on the start of the search. systemd mostly skips the second time if its search
//!   starts before the first one, and does not if it starts in between: `hourly` has a gap of two hours, and `02:30`
//!   runs twice on a computer that was booted between the two.
//!
//! The only other differences from systemd are expressions that are refused: fractions of seconds, instants like
//! `@1700000000`, and abbreviations of time zones like `CEST`, whose meaning depends on the computer.

mod component;
mod error;
mod parse;
mod search;
mod weekdays;

use std::fmt;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use component::{Component, Part};
pub use error::ParseCalendarError;
use weekdays::Weekdays;

/// A set of instants, defined by local date and time.
///
/// Its text is a calendar expression; [`Display`](fmt::Display) writes the normalized form, as `systemd-analyze
/// calendar` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calendar {
    weekdays: Weekdays,
    year: Component,
    month: Component,
    day: Component,
    hour: Component,
    minute: Component,
    second: Component,
    zone: Option<TimeZone>,
}

impl Calendar {
    /// The time zone of the expression, if it names one.
    pub fn zone(&self) -> Option<&TimeZone> {
        self.zone.as_ref()
    }

    /// The instants after `after`, in order, as [`next_after`](Self::next_after) finds them.
    pub fn instants_after<'c>(&'c self, after: Timestamp, zone: &'c TimeZone) -> impl Iterator<Item = Timestamp> + 'c {
        std::iter::successors(self.next_after(after, zone), |last| self.next_after(*last, zone))
    }

    /// Whether every hour matches, so that a repeated time counts twice.
    fn means_every_hour(&self) -> bool {
        Part::Hour.values().all(|hour| self.hour.contains(hour))
    }
}

impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.weekdays != Weekdays::ALL {
            write!(f, "{} ", self.weekdays)?;
        }
        let before_day = match self.day.part() {
            Part::DayFromEnd => '~',
            _ => '-',
        };
        write!(f, "{}-{}{before_day}{}", self.year, self.month, self.day)?;
        write!(f, " {}:{}:{}", self.hour, self.minute, self.second)?;
        match self.zone.as_ref().and_then(TimeZone::iana_name) {
            Some(name) => write!(f, " {name}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;

    use super::{Calendar, ParseCalendarError};

    fn normalized(text: &str) -> String {
        text.parse::<Calendar>()
            .unwrap_or_else(|error| panic!("{text}: {error}"))
            .to_string()
    }

    fn error(text: &str) -> String {
        text.parse::<Calendar>().unwrap_err().to_string()
    }

    /// The next `count` instants after `after`, by the clock of `zone`.
    fn next(text: &str, after: &str, zone: &str, count: usize) -> Vec<String> {
        let calendar: Calendar = text.parse().unwrap();
        let zone = TimeZone::get(zone).unwrap();
        let instants = calendar.instants_after(after.parse().unwrap(), &zone).take(count);
        let shown = instants.map(|instant| {
            instant
                .to_zoned(zone.clone())
                .strftime("%m-%d %H:%M:%S%:::z")
                .to_string()
        });
        shown.collect()
    }

    /// The examples of systemd.time(7), except those with fractions of seconds.
    #[test]
    fn the_examples_of_the_manual_are_normalized_as_there() {
        for (text, expected) in [
            ("Sat,Thu,Mon..Wed,Sat..Sun", "Mon..Thu,Sat,Sun *-*-* 00:00:00"),
            ("Mon,Sun 12-*-* 2,1:23", "Mon,Sun 2012-*-* 01,02:23:00"),
            ("Wed *-1", "Wed *-*-01 00:00:00"),
            ("Wed..Wed,Wed *-1", "Wed *-*-01 00:00:00"),
            ("Wed, 17:48", "Wed *-*-* 17:48:00"),
            ("Wed..Sat,Tue 12-10-15 1:2:3", "Tue..Sat 2012-10-15 01:02:03"),
            ("*-*-7 0:0:0", "*-*-07 00:00:00"),
            ("10-15", "*-10-15 00:00:00"),
            ("monday *-12-* 17:00", "Mon *-12-* 17:00:00"),
            ("Mon,Fri *-*-3,1,2 *:30:45", "Mon,Fri *-*-01,02,03 *:30:45"),
            ("12,14,13,12:20,10,30", "*-*-* 12,13,14:10,20,30:00"),
            ("12..14:10,20,30", "*-*-* 12..14:10,20,30:00"),
            ("mon,fri *-1/2-1,3 *:30:45", "Mon,Fri *-01/2-01,03 *:30:45"),
            ("03-05 08:05:40", "*-03-05 08:05:40"),
            ("08:05:40", "*-*-* 08:05:40"),
            ("05:40", "*-*-* 05:40:00"),
            ("Sat,Sun 12-05 08:05:40", "Sat,Sun *-12-05 08:05:40"),
            ("Sat,Sun 08:05:40", "Sat,Sun *-*-* 08:05:40"),
            ("2003-03-05 05:40", "2003-03-05 05:40:00"),
            ("2003-02..04-05", "2003-02..04-05 00:00:00"),
            ("2003-03-05 05:40 UTC", "2003-03-05 05:40:00 UTC"),
            ("2003-03-05", "2003-03-05 00:00:00"),
            ("03-05", "*-03-05 00:00:00"),
            ("minutely", "*-*-* *:*:00"),
            ("hourly", "*-*-* *:00:00"),
            ("daily", "*-*-* 00:00:00"),
            ("daily UTC", "*-*-* 00:00:00 UTC"),
            ("monthly", "*-*-01 00:00:00"),
            ("weekly", "Mon *-*-* 00:00:00"),
            ("weekly Pacific/Auckland", "Mon *-*-* 00:00:00 Pacific/Auckland"),
            ("yearly", "*-01-01 00:00:00"),
            ("annually", "*-01-01 00:00:00"),
            ("quarterly", "*-01,04,07,10-01 00:00:00"),
            ("semiannually", "*-01,07-01 00:00:00"),
            ("*:2/3", "*-*-* *:02/3:00"),
            ("*-02~03", "*-02~03 00:00:00"),
            ("Mon *-05~07/1", "Mon *-05~07/1 00:00:00"),
        ] {
            assert_eq!(normalized(text), expected);
            assert_eq!(normalized(expected), expected);
        }
        assert_eq!(normalized("  DAILY   utc "), "*-*-* 00:00:00 UTC");
        assert_eq!(normalized("daily europe/berlin"), "*-*-* 00:00:00 Europe/Berlin");
    }

    #[test]
    fn errors_name_the_mistake_and_a_suggestion() {
        for (text, expected) in [
            (
                "  ",
                "a calendar expression is needed: write it like daily, Mon..Fri 02:30 or *:0/15",
            ),
            (
                "dayly",
                "\"dayly\" is neither a day of the week nor a word like hourly, daily or weekly; did you mean daily?",
            ),
            (
                "Mon,Wendesday 02:30",
                "\"Wendesday\" is neither a day of the week nor a word like hourly, daily or weekly; did you mean Wednesday?",
            ),
            (
                "Fri..Mon",
                "\"Fri..Mon\" ends before it begins; the week goes from Mon to Sun: write Fri..Sun,Mon for Fri..Mon",
            ),
            ("12", "\"12\" is not a date like *-*-01 or a time like 02:30"),
            (
                "@1700000000",
                "\"@1700000000\" is not a date like *-*-01 or a time like 02:30",
            ),
            ("1-2-3-4", "\"1-2-3-4\" is not a date like *-*-01, 12-24 or *-02~01"),
            ("1:2:3:4", "\"1:2:3:4\" is not a time like 02:30, 00/2:30 or 02:30:15"),
            ("24:00", "hour 24 is out of range: 0 to 23"),
            ("*-*~29", "day from the end of a month 29 is out of range: 1 to 28"),
            ("2200-01-01", "year 2200 is out of range: 1970 to 2199"),
            (
                "2:x",
                "minute \"x\" is not a number, a list (1,15), a range (1..5), a number with a step (0/15) or *",
            ),
            (
                "*:*/15",
                "minute \"*/15\" combines * with more; a step begins at a number: 0/2",
            ),
            (
                "17..9:00",
                "hour \"17..9\" ends before it begins: write the smaller number first, or two ranges with a comma between them",
            ),
            (
                "*:5/55",
                "minute \"5/55\" has a step that reaches nothing: it must be at least 1, and small enough to be taken once",
            ),
            (
                "*:0/0",
                "minute \"0/0\" has a step that reaches nothing: it must be at least 1, and small enough to be taken once",
            ),
            (
                "*:*:0.5",
                "\"0.5\" has a fraction of a second; whole seconds are the smallest unit here",
            ),
            (
                "02:30 Europe/Berln",
                "\"Europe/Berln\" is not a time zone of this system; write UTC or a name like Europe/Berlin; did you mean Europe/Berlin?",
            ),
            (
                "02:30 UTC Mon",
                "\"Mon\" is not part of the expression any more: it ends with the time zone",
            ),
            (
                "daily 02:30",
                "\"02:30\" is not a time zone, and a word like daily is followed by nothing else",
            ),
        ] {
            assert_eq!(error(text), expected, "{text}");
        }
        let long = format!("*:{}", vec!["1"; 241].join(","));
        assert!(matches!(
            long.parse::<Calendar>(),
            Err(ParseCalendarError::TooMany { .. })
        ));
    }

    #[test]
    fn the_last_days_of_months_are_counted_from_the_end() {
        let after = "2027-01-30T12:00:00Z";
        assert_eq!(
            next("*-*~01", after, "UTC", 3),
            ["01-31 00:00:00+00", "02-28 00:00:00+00", "03-31 00:00:00+00"]
        );
        assert_eq!(next("*-02~03", after, "UTC", 1), ["02-26 00:00:00+00"]);
        // 2028 is a leap year; the last Monday is among the last seven days.
        assert_eq!(next("*-02~03", "2028-01-01T00:00:00Z", "UTC", 1), ["02-27 00:00:00+00"]);
        assert_eq!(next("Mon *-05~07/1", after, "UTC", 1), ["05-31 00:00:00+00"]);
    }

    /// In Berlin the hour from 02:00 to 03:00 is skipped on 2026-03-29.
    #[test]
    fn a_time_that_is_left_out_does_not_happen() {
        let after = "2026-03-29T00:00:00+01:00";
        let daily = next("02:30", after, "Europe/Berlin", 2);
        assert_eq!(daily, ["03-30 02:30:00+02", "03-31 02:30:00+02"]);
        let hourly = next("hourly", after, "Europe/Berlin", 3);
        assert_eq!(hourly, ["03-29 01:00:00+01", "03-29 03:00:00+02", "03-29 04:00:00+02"]);
    }

    /// In Berlin the hour from 02:00 to 03:00 is repeated on 2026-10-25.
    #[test]
    fn a_time_that_happens_twice_counts_twice_where_no_hour_is_named() {
        let after = "2026-10-25T01:00:00+02:00";
        let hourly = next("hourly", after, "Europe/Berlin", 3);
        assert_eq!(hourly, ["10-25 02:00:00+02", "10-25 02:00:00+01", "10-25 03:00:00+01"]);
        let named = next("02:30", after, "Europe/Berlin", 2);
        assert_eq!(named, ["10-25 02:30:00+02", "10-26 02:30:00+01"]);
        // The same if the search starts between the two.
        let between = next("02:30", "2026-10-25T02:00:00+01:00", "Europe/Berlin", 1);
        assert_eq!(between, ["10-26 02:30:00+01"]);
        let other_hours = next("02,03:30", "2026-10-25T02:30:00+02:00", "Europe/Berlin", 1);
        assert_eq!(other_hours, ["10-25 03:30:00+01"]);
    }

    #[test]
    fn the_zone_of_the_expression_counts_before_any_other() {
        let after = "2026-07-01T00:00:00Z";
        assert_eq!(next("12:00 UTC", after, "Europe/Berlin", 1), ["07-01 14:00:00+02"]);
        assert_eq!(next("12:00 Europe/Berlin", after, "UTC", 1), ["07-01 10:00:00+00"]);
    }

    #[test]
    fn a_date_that_never_occurs_ends_the_search() {
        let after = "2026-01-01T00:00:00Z";
        for never in [
            "*-02-30",
            "2025-*-*",
            "Mon 2026-11-24",
            "*-04-31 *:*:*",
            "2026-03-29 02:30",
        ] {
            assert_eq!(next(never, after, "Europe/Berlin", 1), [""; 0], "{never}");
        }
        assert_eq!(next("*:*:*", "2199-12-31T23:59:58Z", "UTC", 9), ["12-31 23:59:59+00"]);
        assert_eq!(next("daily", "9999-01-01T00:00:00Z", "UTC", 1), [""; 0]);
        assert_eq!(next("daily", "-009999-06-01T00:00:00Z", "UTC", 1), [""; 0]);
        assert_eq!(next("daily", "1969-12-31T12:00:00.5Z", "UTC", 1), ["01-01 00:00:00+00"]);
        assert_eq!(next("*:*:*", "1969-12-31T12:00:00.5Z", "UTC", 1), ["12-31 12:00:01+00"]);
        // A rare date, far in the future.
        assert_eq!(next("Mon *-02-29", after, "UTC", 1), ["02-29 00:00:00+00"]);
    }
}
