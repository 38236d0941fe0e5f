//! Parsing and printing of times: RFC 3339 with the local offset.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// A time in whole seconds with the offset of `zone`: `2026-11-20T10:00:00+01:00`.
///
/// The output can be used as input: `restore web1@2026-11-20T10:00:00+01:00` finds the snapshot of that
/// second.
pub fn local(time: Timestamp, zone: &TimeZone) -> String {
    time.to_zoned(zone.clone()).strftime("%Y-%m-%dT%H:%M:%S%:z").to_string()
}

/// The present time.
pub fn now() -> Timestamp {
    Timestamp::now()
}

/// A text that is not a time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no time with an offset; write it like 2026-11-20T10:00:00+01:00 or 2026-11-20T09:00:00Z")]
pub struct TimeError {
    /// The text as given.
    pub text: String,
}

/// Parses an RFC 3339 time with an offset.
pub fn parse(text: &str) -> Result<Timestamp, TimeError> {
    text.parse().map_err(|_| TimeError { text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use jiff::tz::{Offset, TimeZone};

    use super::{local, parse};

    #[test]
    fn times_carry_their_offset() {
        let time = "2026-11-20T09:00:00.75Z".parse().unwrap();
        let berlin = TimeZone::fixed(Offset::constant(1));
        let india = TimeZone::fixed(Offset::from_seconds(19_800).unwrap());
        assert_eq!(local(time, &berlin), "2026-11-20T10:00:00+01:00");
        assert_eq!(local(time, &india), "2026-11-20T14:30:00+05:30");
        assert_eq!(local(time, &TimeZone::UTC), "2026-11-20T09:00:00+00:00");
    }

    #[test]
    fn what_is_shown_reads_back() {
        let time = "2026-11-20T09:00:00Z".parse().unwrap();
        assert_eq!(parse(&local(time, &TimeZone::fixed(Offset::constant(-10)))), Ok(time));
    }

    #[test]
    fn a_time_without_an_offset_is_refused() {
        assert_eq!(
            parse("2026-11-20T10:00:00").unwrap_err().to_string(),
            "\"2026-11-20T10:00:00\" is no time with an offset; write it like 2026-11-20T10:00:00+01:00 or 2026-11-20T09:00:00Z"
        );
        assert!(parse("yesterday").is_err());
    }
}
