//! One component of an expression, such as the hours of `00/2:30`.

use std::fmt;
use std::ops::RangeInclusive;

/// A component of a date or a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Part {
    Year,
    Month,
    Day,
    /// Counted from the end of the month, whose last day is 1.
    DayFromEnd,
    Hour,
    Minute,
    Second,
}

impl Part {
    /// The valid values. The bounds of years, and of days from the end (a day that every month has), are those of
    /// systemd.
    pub(super) const fn values(self) -> RangeInclusive<u16> {
        match self {
            Self::Year => 1970..=2199,
            Self::Month => 1..=12,
            Self::Day => 1..=31,
            Self::DayFromEnd => 1..=28,
            Self::Hour => 0..=23,
            Self::Minute | Self::Second => 0..=59,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Year => "year",
            Self::Month => "month",
            Self::Day => "day",
            Self::DayFromEnd => "day from the end of a month",
            Self::Hour => "hour",
            Self::Minute => "minute",
            Self::Second => "second",
        }
    }

    const fn digit_count(self) -> usize {
        match self {
            Self::Year => 4,
            _ => 2,
        }
    }
}

/// A list element of an expression: `5`, `1..5`, `0/15`, `9..17/2`.
///
/// The order is that of the normalized form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Item {
    pub(super) first: u16,
    /// The last number of a range, inclusive.
    pub(super) last: Option<u16>,
    /// The step: 1 in a range without `/`, `None` for a single number, and never 0.
    pub(super) step: Option<u16>,
}

impl Item {
    fn contains(self, part: Part, value: u16) -> bool {
        let Self { first, last, step } = self;
        let Some(step) = step else { return value == first };
        let (from, to) = match (last, part) {
            (Some(last), _) => (first, last),
            // `~07/1`, the last seven days: time advances towards the end of the month, and the count decreases.
            (None, Part::DayFromEnd) => (1, first),
            (None, _) => (first, *part.values().end()),
        };
        (from..=to).contains(&value) && value.abs_diff(first).is_multiple_of(step)
    }
}

/// Which values of a [`Part`] match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Component {
    part: Part,
    /// Sorted and without duplicates; empty for `*`.
    items: Vec<Item>,
}

impl Component {
    /// `*`.
    pub(super) const fn every(part: Part) -> Self {
        Self {
            part,
            items: Vec::new(),
        }
    }

    /// The union of `items`.
    pub(super) fn of(part: Part, mut items: Vec<Item>) -> Self {
        items.sort_unstable();
        items.dedup();
        Self { part, items }
    }

    pub(super) fn part(&self) -> Part {
        self.part
    }

    pub(super) fn contains(&self, value: u16) -> bool {
        self.items.is_empty() || self.items.iter().any(|item| item.contains(self.part, value))
    }

    /// The first matching value that is at least `from`.
    pub(super) fn first_from(&self, from: u16) -> Option<u16> {
        (from..=*self.part.values().end()).find(|value| self.contains(*value))
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.items.is_empty() {
            return f.write_str("*");
        }
        let digit_count = self.part.digit_count();
        for (index, Item { first, last, step }) in self.items.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{first:0digit_count$}")?;
            match (last, step) {
                (Some(last), Some(1)) => write!(f, "..{last:0digit_count$}")?,
                (Some(last), Some(step)) => write!(f, "..{last:0digit_count$}/{step}")?,
                (_, Some(step)) => write!(f, "/{step}")?,
                (_, None) => {}
            }
        }
        Ok(())
    }
}
