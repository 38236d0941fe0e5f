//! Days of the week: `Mon..Fri`, `Mon,Wed`.

use std::fmt;

use jiff::civil::Weekday;

/// Names from Monday on; their first three letters are the short form.
pub(super) const NAMES: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];
const SHORT_LENGTH: usize = 3;

/// A set of days of the week.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Weekdays {
    /// From Monday on.
    present: [bool; 7],
}

impl Weekdays {
    pub(super) const NONE: Self = Self { present: [false; 7] };
    pub(super) const ALL: Self = Self { present: [true; 7] };

    pub(super) fn insert(&mut self, monday_based: usize) {
        self.present[monday_based] = true;
    }

    pub(super) fn contains(self, weekday: Weekday) -> bool {
        usize::try_from(weekday.to_monday_zero_offset()).is_ok_and(|index| self.present[index])
    }
}

/// The number of a day, Monday being 0, by its full name or three letters, in any case.
pub(super) fn number_of(name: &str) -> Option<usize> {
    let is_meant = |known: &&str| name.eq_ignore_ascii_case(known) || name.eq_ignore_ascii_case(short(known));
    NAMES.iter().position(is_meant)
}

pub(super) fn short(name: &str) -> &str {
    &name[..SHORT_LENGTH]
}

/// Three or more consecutive days are a range.
impl fmt::Display for Weekdays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days: Vec<usize> = (0..NAMES.len()).filter(|day| self.present[*day]).collect();
        let mut comma = "";
        for run in days.chunk_by(|day, next| day + 1 == *next) {
            match run {
                [first, _, .., last] => write!(f, "{comma}{}..{}", short(NAMES[*first]), short(NAMES[*last]))?,
                few => {
                    let names: Vec<&str> = few.iter().map(|day| short(NAMES[*day])).collect();
                    write!(f, "{comma}{}", names.join(","))?;
                }
            }
            comma = ",";
        }
        Ok(())
    }
}
