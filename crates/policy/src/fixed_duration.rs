//! Durations: "90s", "5min", "1h30min", "2d".

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A duration in whole seconds, which may be 0.
///
/// Text form: numbers with a unit each, the largest unit first: `90s`, `5min`, `1h30min`, `2d`. A day is 24 hours.
/// Unlike a [`Span`](crate::Span), it does not depend on the calendar. `m` alone, which means months in a `Span`, is
/// refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FixedDuration(Duration);

const UNITS: [(&str, u64); 5] = [("w", 604_800), ("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)];
/// Longer than any sensible wait, and small enough that no sum overflows.
const SECONDS_MAX: u64 = 10 * 366 * 86_400;

impl FixedDuration {
    /// A number of seconds.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// The duration.
    pub const fn duration(self) -> Duration {
        self.0
    }
}

impl fmt::Display for FixedDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_secs();
        if rest == 0 {
            return f.write_str("0s");
        }
        // Weeks are accepted but not written: 14d is clearer.
        for (unit, seconds) in &UNITS[1..] {
            if rest >= *seconds {
                write!(f, "{}{unit}", rest / seconds)?;
                rest %= seconds;
            }
        }
        Ok(())
    }
}

/// Why a text is not a [`FixedDuration`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseFixedDurationError {
    /// The text does not consist of numbers with units.
    #[error("{text:?} is not a duration: write it like 90s, 5min, 1h30min or 2d")]
    Form {
        /// The text.
        text: String,
    },
    /// `m` alone, which means months in a [`Span`](crate::Span).
    #[error("{text:?}: m could be minutes or months: write min for minutes")]
    Month {
        /// The text.
        text: String,
    },
    /// More than ten years.
    #[error("{text:?} is longer than ten years")]
    TooLong {
        /// The text.
        text: String,
    },
}

impl FromStr for FixedDuration {
    type Err = ParseFixedDurationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || ParseFixedDurationError::Form { text: text.to_owned() };
        let too_long = || ParseFixedDurationError::TooLong { text: text.to_owned() };
        let (mut rest, mut units_left, mut seconds) = (text.trim(), 0, 0_u64);
        if rest.is_empty() {
            return Err(form());
        }
        while !rest.is_empty() {
            let digit_count = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(form)?;
            let (number, after) = rest.split_at(digit_count);
            let unit_length = after.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(after.len());
            let (unit, after) = after.split_at(unit_length);
            if unit == "m" {
                return Err(ParseFixedDurationError::Month { text: text.to_owned() });
            }
            let position = UNITS.iter().position(|(name, _)| *name == unit).ok_or_else(form)?;
            if number.is_empty() || position < units_left {
                return Err(form());
            }
            units_left = position + 1;
            // The text has only digits, so the number can only be too large.
            let number: u64 = number.parse().map_err(|_| too_long())?;
            let part = number.checked_mul(UNITS[position].1).ok_or_else(too_long)?;
            seconds = seconds
                .checked_add(part)
                .filter(|sum| *sum <= SECONDS_MAX)
                .ok_or_else(too_long)?;
            rest = after;
        }
        Ok(Self::from_secs(seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::{FixedDuration, ParseFixedDurationError};

    #[test]
    fn parsed_durations_print_unchanged() {
        for text in ["0s", "90s", "5min", "1h30min", "2d", "1d2h3min4s"] {
            let duration: FixedDuration = text.parse().unwrap();
            assert_eq!(
                duration.to_string().parse::<FixedDuration>().unwrap(),
                duration,
                "{text}"
            );
        }
        assert_eq!("90s".parse::<FixedDuration>().unwrap().to_string(), "1min30s");
        assert_eq!("2w".parse::<FixedDuration>().unwrap().to_string(), "14d");
        assert_eq!(
            "1h30min".parse::<FixedDuration>().unwrap(),
            FixedDuration::from_secs(5400)
        );
    }

    #[test]
    fn ambiguous_durations_are_refused() {
        let error = |text: &str| text.parse::<FixedDuration>().unwrap_err();
        for text in ["", "5", "min", "5x", "1min1h", "1h1h", "-1s", "1.5h", "5 min"] {
            assert!(matches!(error(text), ParseFixedDurationError::Form { .. }), "{text}");
        }
        assert!(matches!(error("5m"), ParseFixedDurationError::Month { .. }));
        for text in ["3661d", "99999999999999999999s", "9999999999999999999w"] {
            assert!(matches!(error(text), ParseFixedDurationError::TooLong { .. }), "{text}");
        }
    }
}
