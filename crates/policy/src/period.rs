//! Calendar periods.

use jiff::Zoned;

/// A kind of calendar period; a rule keeps one snapshot of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Period {
    /// An hour of the clock. An hour that is repeated when clocks are set back counts as two.
    Hour,
    /// A calendar day, even if it has 23 or 25 hours.
    Day,
    /// An ISO 8601 week: Monday to Sunday, in the year of its Thursday.
    Week,
    /// A calendar month.
    Month,
    /// A calendar year.
    Year,
}

impl Period {
    /// All kinds, shortest first.
    pub const ALL: [Self; 5] = [Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// The adverb of its rule: "daily".
    pub fn adverb(self) -> &'static str {
        match self {
            Self::Hour => "hourly",
            Self::Day => "daily",
            Self::Week => "weekly",
            Self::Month => "monthly",
            Self::Year => "yearly",
        }
    }

    /// The name of the period of `time`, in the zone of `time`: "2026-11-20", "2026-W47".
    ///
    /// Two instants are in the same period exactly if the names are equal. The name of an hour includes the offset from
    /// UTC, because an hour is repeated when a clock is set back.
    pub(crate) fn name_at(self, time: &Zoned) -> String {
        match self {
            Self::Hour => time.strftime("%Y-%m-%d %H:00%:z").to_string(),
            Self::Day => time.strftime("%Y-%m-%d").to_string(),
            Self::Week => time.strftime("%G-W%V").to_string(),
            Self::Month => time.strftime("%Y-%m").to_string(),
            Self::Year => time.strftime("%Y").to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Period;

    fn names(time: &str) -> [String; 5] {
        let time: jiff::Zoned = time.parse().unwrap();
        Period::ALL.map(|period| period.name_at(&time))
    }

    #[test]
    fn names_are_those_of_the_calendar() {
        assert_eq!(
            names("2026-11-20T23:59:59[Europe/Berlin]"),
            ["2026-11-20 23:00+01:00", "2026-11-20", "2026-W47", "2026-11", "2026"]
        );
    }

    #[test]
    fn a_week_belongs_to_the_year_of_its_thursday() {
        assert_eq!(names("2027-01-03T12:00[UTC]")[2], "2026-W53");
        assert_eq!(names("2027-01-04T00:00[UTC]")[2], "2027-W01");
        assert_eq!(names("2024-12-30T00:00[UTC]")[2], "2025-W01");
    }

    #[test]
    fn a_repeated_hour_is_two_and_its_day_is_one() {
        let first = names("2026-10-25T02:30+02:00[Europe/Berlin]");
        let second = names("2026-10-25T02:30+01:00[Europe/Berlin]");
        assert_ne!(first[0], second[0]);
        assert_eq!(first[1..], second[1..]);
    }
}
