//! The keys of the configuration and their defaults.
//!
//! Source: `sanoid.defaults.conf` of sanoid 2.3.0, version 2 of that file.

#[derive(Debug)]
pub(super) struct SanoidKey {
    pub(super) name: &'static str,
    pub(super) form: SanoidForm,
    pub(super) default: &'static str,
}

/// The form of a key's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SanoidForm {
    /// Yes or no.
    Toggle,
    /// Yes, no, or "zfs".
    Recursion,
    /// A whole number in these bounds.
    Number(u32, u32),
    /// A duration with a unit, or a number in the default unit of the key.
    Duration,
    /// Any text.
    Text,
}

const fn key(name: &'static str, form: SanoidForm, default: &'static str) -> SanoidKey {
    SanoidKey { name, form, default }
}

/// More snapshots than any file system supports.
const COUNT_MAX: u32 = 1_000_000;
const COUNT: SanoidForm = SanoidForm::Number(0, COUNT_MAX);
const MINUTE: SanoidForm = SanoidForm::Number(0, 59);
const HOUR: SanoidForm = SanoidForm::Number(0, 23);
const DAY_OF_MONTH: SanoidForm = SanoidForm::Number(1, 31);
const PERCENT: SanoidForm = SanoidForm::Number(0, 100);

pub(super) const KEYS: [SanoidKey; 52] = [
    key("path", SanoidForm::Text, ""),
    key("recursive", SanoidForm::Recursion, "no"),
    key("use_template", SanoidForm::Text, ""),
    key("process_children_only", SanoidForm::Toggle, "no"),
    key("skip_children", SanoidForm::Toggle, "no"),
    key("pre_snapshot_script", SanoidForm::Text, ""),
    key("post_snapshot_script", SanoidForm::Text, ""),
    key("pre_pruning_script", SanoidForm::Text, ""),
    key("pruning_script", SanoidForm::Text, ""),
    key("script_timeout", SanoidForm::Number(0, 86_400), "5"),
    key("no_inconsistent_snapshot", SanoidForm::Toggle, "no"),
    key("force_post_snapshot_script", SanoidForm::Toggle, "no"),
    key("frequent_period", SanoidForm::Number(1, 1440), "15"),
    key("autoprune", SanoidForm::Toggle, "yes"),
    key("frequently", COUNT, "0"),
    key("hourly", COUNT, "48"),
    key("daily", COUNT, "90"),
    key("weekly", COUNT, "0"),
    key("monthly", COUNT, "6"),
    key("yearly", COUNT, "0"),
    key("prune_defer", PERCENT, "0"),
    key("autosnap", SanoidForm::Toggle, "yes"),
    key("hourly_min", MINUTE, "0"),
    key("daily_hour", HOUR, "23"),
    key("daily_min", MINUTE, "59"),
    key("weekly_wday", SanoidForm::Number(0, 7), "1"),
    key("weekly_hour", HOUR, "23"),
    key("weekly_min", MINUTE, "30"),
    key("monthly_mday", DAY_OF_MONTH, "1"),
    key("monthly_hour", HOUR, "0"),
    key("monthly_min", MINUTE, "0"),
    key("yearly_mon", SanoidForm::Number(1, 12), "1"),
    key("yearly_mday", DAY_OF_MONTH, "1"),
    key("yearly_hour", HOUR, "0"),
    key("yearly_min", MINUTE, "0"),
    key("monitor", SanoidForm::Toggle, "yes"),
    key("monitor_dont_warn", SanoidForm::Toggle, "no"),
    key("monitor_dont_crit", SanoidForm::Toggle, "no"),
    key("frequently_warn", SanoidForm::Duration, "0"),
    key("frequently_crit", SanoidForm::Duration, "0"),
    key("hourly_warn", SanoidForm::Duration, "90m"),
    key("hourly_crit", SanoidForm::Duration, "360m"),
    key("daily_warn", SanoidForm::Duration, "28h"),
    key("daily_crit", SanoidForm::Duration, "32h"),
    key("weekly_warn", SanoidForm::Duration, "0"),
    key("weekly_crit", SanoidForm::Duration, "0"),
    key("monthly_warn", SanoidForm::Duration, "32d"),
    key("monthly_crit", SanoidForm::Duration, "40d"),
    key("yearly_warn", SanoidForm::Duration, "0"),
    key("yearly_crit", SanoidForm::Duration, "0"),
    // Limits of a pool: if the root dataset of the pool has a section, its limits count.
    key("capacity_warn", PERCENT, "80"),
    key("capacity_crit", PERCENT, "95"),
];

pub(super) fn find(name: &str) -> Option<&'static SanoidKey> {
    KEYS.iter().find(|key| key.name == name)
}

/// Parses sanoid's words for yes and no.
pub(super) fn toggle(value: &str) -> Option<bool> {
    match value {
        "1" | "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Some(true),
        "" | "0" | "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Some(false),
        _ => None,
    }
}

/// Parses a time like "90m" to seconds. A number without a unit counts in units of `unit_seconds`.
pub(super) fn parse_seconds(value: &str, unit_seconds: u64) -> Option<u64> {
    let (number, seconds) = match value.char_indices().last()? {
        (_, '0'..='9') => (value, unit_seconds),
        (place, letter) => {
            let seconds = match letter.to_ascii_lowercase() {
                // sanoid 2.3.0 counts 365 months of 31 days here.
                'y' => 31 * 365 * 86_400,
                'w' => 7 * 86_400,
                'd' => 86_400,
                'h' => 3600,
                'm' => 60,
                's' => 1,
                _ => return None,
            };
            (&value[..place], seconds)
        }
    };
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = number.parse().ok().filter(|_| is_number)?;
    number.checked_mul(seconds)
}

impl SanoidForm {
    /// Whether a value is valid.
    pub(super) fn has(self, value: &str) -> bool {
        match self {
            Self::Toggle => toggle(value).is_some(),
            Self::Recursion => toggle(value).is_some() || value.eq_ignore_ascii_case("zfs"),
            Self::Number(min, max) => number(value).is_some_and(|number| (min..=max).contains(&number)),
            Self::Duration => parse_seconds(value, 1).is_some(),
            Self::Text => true,
        }
    }

    /// Describes a valid value.
    pub(super) fn wanted(self) -> String {
        match self {
            Self::Toggle => "yes or no".to_owned(),
            Self::Recursion => "yes, no or zfs".to_owned(),
            Self::Number(min, max) => format!("a number from {min} to {max}"),
            Self::Duration => "a number, or one with a unit: 90m, 28h, 32d, 2w".to_owned(),
            Self::Text => "a text".to_owned(),
        }
    }
}

/// Parses a number of plain digits.
pub(super) fn number(value: &str) -> Option<u32> {
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    value.parse().ok().filter(|_| is_number)
}

#[cfg(test)]
mod tests {
    use super::{KEYS, find, parse_seconds};

    #[test]
    fn defaults_are_values_of_their_keys() {
        for key in &KEYS {
            assert!(key.form.has(key.default), "{}", key.name);
            assert_eq!(find(key.name).unwrap().name, key.name);
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(parse_seconds("0", 60), Some(0));
        assert_eq!(parse_seconds("90", 60), Some(5400));
        assert_eq!(parse_seconds("90m", 1), Some(5400));
        assert_eq!(parse_seconds("32D", 1), Some(32 * 86_400));
        assert_eq!(parse_seconds("2w", 1), Some(14 * 86_400));
        for nonsense in [
            "",
            "m",
            "-1",
            "+1",
            "1 h",
            "1.5h",
            "1\u{e9}",
            "99999999999999999999",
            "9999999999999999y",
        ] {
            assert_eq!(parse_seconds(nonsense, 1), None, "{nonsense}");
        }
    }
}
