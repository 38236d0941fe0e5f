//! Formatting of sizes, rates, counts and durations for users.
//!
//! The style is the same everywhere: sizes in powers of 1024 with IEC units and at most three or four digits (`1.5
//! GiB`, `345 MiB`), counts in full with commas (`1,234,567`), durations in their two largest units (`3 m 12 s`).
//! Scripts that need exact numbers use `--json`.

use std::time::Duration;

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// A size: `0 B`, `1023 B`, `1.5 GiB`, `345 MiB`; rounded to nearest, one decimal below 100.
pub fn bytes(bytes: u64) -> String {
    let mut unit = 0;
    let mut unit_bytes: u128 = 1;
    // A value that would round to 1024 becomes 1.0 of the next unit.
    while unit + 1 < UNITS.len() && rounded(bytes, unit_bytes, 1) >= 1024 {
        unit += 1;
        unit_bytes <<= 10;
    }
    let tenths = rounded(bytes, unit_bytes, 10);
    let name = UNITS[unit];
    if unit == 0 || tenths >= 1000 {
        format!("{} {name}", rounded(bytes, unit_bytes, 1))
    } else {
        format!("{}.{} {name}", tenths / 10, tenths % 10)
    }
}

/// `value * scale / unit`, rounded half up.
fn rounded(value: u64, unit: u128, scale: u128) -> u128 {
    (u128::from(value) * scale + unit / 2) / unit
}

/// A rate: `120 MiB/s`.
pub fn bytes_per_second(rate: u64) -> String {
    format!("{}/s", bytes(rate))
}

/// Bytes per second; `None` if the duration is zero.
pub fn rate(bytes: u64, duration: Duration) -> Option<u64> {
    let millis = duration.as_millis();
    (millis > 0).then(|| u64::try_from(u128::from(bytes) * 1000 / millis).unwrap_or(u64::MAX))
}

/// Whole milliseconds, for documents.
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A count: `1,234,567`.
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number with its noun: `1 disk`, `2 disks`.
pub fn counted(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// A percentage: `12.3%`; `100.0%` only for the whole, `0.0%` only for nearly nothing.
pub fn percent(part: u64, whole: u64) -> String {
    if part >= whole {
        return "100.0%".to_owned();
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    format!("{}.{}%", tenths / 10, tenths % 10)
}

/// A duration in its two largest units: `850 ms`, `12.3 s`, `3 m 12 s`, `2 h 5 m`, `3 d 4 h`.
pub fn duration(duration: Duration) -> String {
    let millis = duration.as_millis();
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{millis} ms"),
        1..60 => format!("{}.{} s", seconds, millis % 1000 / 100),
        60..3600 => format!("{} m {} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {} m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// It does not start with a number.
    #[error("{text:?} is no size; use a number with an optional unit, like 512, 64MiB or 1.5G")]
    NotANumber {
        /// The text as given.
        text: String,
    },
    /// The unit is unknown.
    #[error("{unit:?} is no unit of size; use B, K, M, G, T, P or E (powers of 1024; KiB, MiB... are the same)")]
    Unit {
        /// The text after the number.
        unit: String,
    },
    /// The result is not a whole number of bytes, or too large.
    #[error("{text:?} is not a whole number of bytes below 16 EiB")]
    Range {
        /// The text as given.
        text: String,
    },
}

/// Parses the size of a disk, and rounds it up to whole sectors.
///
/// # Errors
/// Those of [`parse_bytes`].
pub fn parse_disk_bytes(text: &str) -> Result<u64, SizeError> {
    let sectors = parse_bytes(text)?.checked_next_multiple_of(512);
    sectors.ok_or_else(|| SizeError::Range { text: text.to_owned() })
}

/// Parses a size: `4096`, `64K`, `64KiB`, `1.5 GiB`; letters in any case, always powers of 1024.
///
/// `KB`, `MB` and the like are rejected, since many users read them as powers of 1000, and a disk of the wrong size
/// does not start.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    let trimmed = text.trim();
    let end = trimmed
        .find(|character: char| !character.is_ascii_digit() && character != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let not_a_number = || SizeError::NotANumber { text: text.to_owned() };
    let out_of_range = || SizeError::Range { text: text.to_owned() };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Err(not_a_number());
    }
    let unit_bytes = unit_bytes(unit.trim())?;
    let whole: u128 = whole.parse().map_err(|_| out_of_range())?;
    let scale = u32::try_from(fraction.len())
        .ok()
        .and_then(|digits| 10_u128.checked_pow(digits))
        .ok_or_else(out_of_range)?;
    let fraction: u128 = fraction.parse().map_err(|_| out_of_range())?;
    let scaled = whole
        .checked_mul(scale)
        .and_then(|value| value.checked_add(fraction))
        .and_then(|value| value.checked_mul(unit_bytes))
        .ok_or_else(out_of_range)?;
    if !scaled.is_multiple_of(scale) {
        return Err(out_of_range());
    }
    u64::try_from(scaled / scale).map_err(|_| out_of_range())
}

/// Bytes in a unit given by its letter or IEC name.
fn unit_bytes(unit: &str) -> Result<u128, SizeError> {
    let lower = unit.to_ascii_lowercase();
    let letter = lower.strip_suffix("ib").unwrap_or(&lower);
    let power = match letter {
        "" | "b" if letter.len() == lower.len() => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        "e" => 6,
        _ => return Err(SizeError::Unit { unit: unit.to_owned() }),
    };
    Ok(1 << (10 * power))
}

/// Whole microseconds, for documents; saturates at the maximum.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::{SizeError, bytes, bytes_per_second, count, counted, duration, parse_bytes, percent};

    const KIB: u64 = 1 << 10;
    const GIB: u64 = 1 << 30;

    #[test]
    fn sizes_have_one_decimal_below_a_hundred() {
        for (size, text) in [
            (0, "0 B"),
            (1, "1 B"),
            (1023, "1023 B"),
            (KIB, "1.0 KiB"),
            (3 * GIB / 2, "1.5 GiB"),
            (99 * KIB + 972, "99.9 KiB"),
            (99 * KIB + 973, "100 KiB"),
            (345 * KIB, "345 KiB"),
            (1023 * KIB + 511, "1023 KiB"),
            (1023 * KIB + 512, "1.0 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(size), text, "{size}");
        }
        assert_eq!(bytes_per_second(120 * KIB * KIB), "120 MiB/s");
    }

    #[test]
    fn counts_are_written_in_full() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(counted(1, "disk", "disks"), "1 disk");
        assert_eq!(counted(1200, "disk", "disks"), "1,200 disks");
    }

    #[test]
    fn a_hundred_percent_means_all() {
        assert_eq!(percent(1, 3), "33.3%");
        assert_eq!(percent(9999, 10_000), "99.9%");
        assert_eq!(percent(10_000, 10_000), "100.0%");
        assert_eq!(percent(0, 0), "100.0%");
        assert_eq!(percent(u64::MAX - 1, u64::MAX), "99.9%");
    }

    #[test]
    fn durations_have_two_units() {
        for (millis, text) in [
            (0, "0 ms"),
            (850, "850 ms"),
            (12_399, "12.3 s"),
            (59_999, "59.9 s"),
            (192_000, "3 m 12 s"),
            (7_500_000, "2 h 5 m"),
            (273_600_000, "3 d 4 h"),
        ] {
            assert_eq!(duration(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn sizes_are_read_as_powers_of_1024() {
        for (text, size) in [
            ("0", 0),
            ("4096", 4096),
            ("512b", 512),
            ("64K", 64 * KIB),
            ("64kib", 64 * KIB),
            ("1.5G", 3 * GIB / 2),
            (" 1.5 GiB ", 3 * GIB / 2),
            ("15.5E", 31 << 59),
        ] {
            assert_eq!(parse_bytes(text), Ok(size), "{text}");
        }
    }

    #[test]
    fn what_could_mean_two_sizes_is_refused() {
        for text in ["10MB", "1kb", "1ib", "1bib", "1x", "1 G G", "1ä"] {
            assert!(matches!(parse_bytes(text), Err(SizeError::Unit { .. })), "{text}");
        }
        for text in ["", "G", "-1", "1.", ".5G", "1.2.3", "0x10"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        for text in [
            "0.3",
            "1.0001K",
            "16E",
            "99999999999999999999999999999999999999999999",
            "1.00000000000000000000000000000000000000001K",
        ] {
            assert!(matches!(parse_bytes(text), Err(SizeError::Range { .. })), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_size_is_short_and_reads_back_nearly(size in any::<u64>()) {
            let text = bytes(size);
            prop_assert!(text.len() <= 8, "{}", text);
            if let Ok(back) = parse_bytes(&text) {
                prop_assert!(back.abs_diff(size) <= size / 19, "{} {}", text, back);
            }
        }

        #[test]
        fn only_what_starts_with_a_number_is_a_size(text in any::<String>(), number in any::<u64>()) {
            if parse_bytes(&text).is_ok() {
                prop_assert!(text.trim().starts_with(|first: char| first.is_ascii_digit()), "{:?}", text);
            }
            prop_assert_eq!(parse_bytes(&number.to_string()), Ok(number));
        }
    }
}
