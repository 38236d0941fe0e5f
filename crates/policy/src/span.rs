//! Calendar spans: "7d", "12h", "1y6m".

use std::fmt;
use std::str::FromStr;

use jiff::{Timestamp, Zoned};

/// A length of calendar time, never 0: years, months, weeks, days and hours.
///
/// Text form: numbers with a unit each, the largest unit first: `2y`, `6m` (months), `4w`, `7d`, `12h`, `1y6m`. A day
/// is a calendar day, even if it has 23 or 25 hours; an hour is 60 minutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// In the order of [`UNITS`].
    amounts: [u16; UNITS.len()],
}

const UNITS: [char; 5] = ['y', 'm', 'w', 'd', 'h'];
/// Longer than any archive exists, and small enough that no sum overflows.
const AMOUNT_MAX: u16 = 9999;

impl Span {
    /// The instant this span before `end`, by the calendar of `end`'s zone; not before the earliest timestamp.
    pub fn before(&self, end: &Zoned) -> Timestamp {
        let [years, months, weeks, days, hours] = self.amounts.map(i64::from);
        let span = jiff::Span::new()
            .years(years)
            .months(months)
            .weeks(weeks)
            .days(days)
            .hours(hours);
        end.checked_sub(span).map_or(Timestamp::MIN, |start| start.timestamp())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (amount, unit) in self.amounts.iter().zip(UNITS).filter(|(amount, _)| **amount > 0) {
            write!(f, "{amount}{unit}")?;
        }
        Ok(())
    }
}

/// Why a text is not a [`Span`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseSpanError {
    /// Empty, or every amount is 0.
    #[error("a span must not be zero: write it like 7d, 12h, 4w, 6m or 2y")]
    Nothing,
    /// A unit without a number before it, or a number without a unit.
    #[error("{text:?} is not a number with a unit: write it like 7d, 12h, 4w, 6m or 2y")]
    NotANumberWithUnit {
        /// The invalid part.
        text: String,
    },
    /// An unknown unit.
    #[error("{unit:?} is not a unit: there are y (years), m (months), w (weeks), d (days) and h (hours)")]
    UnknownUnit {
        /// The letter.
        unit: char,
    },
    /// A unit that is not smaller than the unit before it.
    #[error("{unit:?} is out of order: write each unit once, the largest first, like 1y6m")]
    Order {
        /// The letter.
        unit: char,
    },
    /// A number above 9999.
    #[error("{number} is too large: at most 9999 of a unit")]
    TooLarge {
        /// The text.
        number: String,
    },
}

impl FromStr for Span {
    type Err = ParseSpanError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut amounts = [0; UNITS.len()];
        let mut units_left = 0;
        let mut rest = text.trim();
        while !rest.is_empty() {
            let digit_count = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (number, after) = rest.split_at(digit_count);
            let Some(unit) = after.chars().next().filter(|_| digit_count > 0) else {
                return Err(ParseSpanError::NotANumberWithUnit { text: rest.to_owned() });
            };
            let position = UNITS.iter().position(|known| *known == unit);
            let position = position.ok_or(ParseSpanError::UnknownUnit { unit })?;
            if position < units_left {
                return Err(ParseSpanError::Order { unit });
            }
            units_left = position + 1;
            // The text has only digits, so the number can only be too large.
            amounts[position] = number
                .parse()
                .ok()
                .filter(|amount| *amount <= AMOUNT_MAX)
                .ok_or_else(|| ParseSpanError::TooLarge {
                    number: number.to_owned(),
                })?;
            rest = &after[unit.len_utf8()..];
        }
        if amounts.iter().all(|amount| *amount == 0) {
            return Err(ParseSpanError::Nothing);
        }
        Ok(Self { amounts })
    }
}

#[cfg(test)]
mod tests {
    use super::{ParseSpanError, Span};

    #[test]
    fn parsed_durations_print_unchanged() {
        for text in ["7d", "12h", "4w", "6m", "2y", "1y6m", "9999y9999m9999w9999d9999h"] {
            assert_eq!(text.parse::<Span>().unwrap().to_string(), text);
        }
        assert_eq!(" 007d ".parse::<Span>().unwrap().to_string(), "7d");
    }

    #[test]
    fn invalid_spans_have_a_reason() {
        let error = |text: &str| text.parse::<Span>().unwrap_err();
        let no_number = |text: &str| ParseSpanError::NotANumberWithUnit { text: text.to_owned() };
        assert_eq!(error(""), ParseSpanError::Nothing);
        assert_eq!(error("0d"), ParseSpanError::Nothing);
        assert_eq!(error("7"), no_number("7"));
        assert_eq!(error("d"), no_number("d"));
        assert_eq!(error("1y-3d"), no_number("-3d"));
        assert_eq!(error("7 d"), ParseSpanError::UnknownUnit { unit: ' ' });
        assert_eq!(error("7D"), ParseSpanError::UnknownUnit { unit: 'D' });
        assert_eq!(error("7é"), ParseSpanError::UnknownUnit { unit: 'é' });
        assert_eq!(error("7d1y"), ParseSpanError::Order { unit: 'y' });
        assert_eq!(error("7d7d"), ParseSpanError::Order { unit: 'd' });
        for number in ["10000", "65536", "99999999999999999999"] {
            let expected = ParseSpanError::TooLarge {
                number: number.to_owned(),
            };
            assert_eq!(error(&format!("{number}h")), expected);
        }
    }

    #[test]
    fn a_day_is_a_calendar_day_and_an_hour_is_an_hour() {
        let before = |span: &str, end: &str| {
            let end: jiff::Zoned = end.parse().unwrap();
            span.parse::<Span>().unwrap().before(&end).to_string()
        };
        // In the night before, the clock went from 02:00 to 03:00: the day has 23 hours.
        let after_change = "2026-03-29T12:00[Europe/Berlin]";
        assert_eq!(before("1d", after_change), "2026-03-28T11:00:00Z");
        assert_eq!(before("24h", after_change), "2026-03-28T10:00:00Z");
        assert_eq!(before("1m", "2026-03-31T12:00[UTC]"), "2026-02-28T12:00:00Z");
        let beginning = jiff::Timestamp::MIN.to_string();
        assert_eq!(before("9999y", "-005000-01-01T00:00[UTC]"), beginning);
    }
}
